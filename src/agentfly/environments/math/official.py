r"""GSM8K and MATH, from the files that their authors publish, in the folder `math` of AGENTFLY_DATA.

Rows have `id`, `question` and `answer`, without the way to it. Every twentieth problem for training, chosen by its
letters, is for validation. Of MATH, the test is the five hundred problems that everybody reports (MATH-500).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

from agentfly.environments.data import Source, checked_split, read_rows
from agentfly.errors import DataError

GSM8K = Source("GSM8K", "https://github.com/openai/grade-school-math (train.jsonl and test.jsonl)", "math")
MATH = Source("MATH", "https://github.com/hendrycks/math, MATH-500 https://github.com/openai/prm800k", "math")
_WISH = re.compile(r"\s*Please reason step by step, and put your final answer within \\boxed\{\}\.?\s*$")
"""What some copies of the problems end with: how to answer is the prompt's to say."""


def gsm8k_tasks(split: str) -> list[dict[str, Any]]:
    """The word problems of GSM8K: whole numbers, two to eight steps."""
    file = "test.jsonl" if split == "test" else "train.jsonl"
    return _tasks(GSM8K, "gsm8k", split, (f"gsm8k_{file}", f"gsm8k/{file}"), _gsm8k_answer)


def math_tasks(split: str) -> list[dict[str, Any]]:
    """The competition problems of MATH; `level` and `subject` where the file has them."""
    files = ("math500.jsonl", "math_test.jsonl") if split == "test" else ("math_train.jsonl",)
    return _tasks(MATH, "math", split, files, _math_answer)


def _tasks(
    source: Source, name: str, split: str, files: tuple[str, ...], answer_of: Callable[[dict[str, Any]], str | None]
) -> list[dict[str, Any]]:
    checked_split(split)
    out = []
    for number, (place, row) in enumerate(read_rows(source.file(*files))):
        question, answer = row.get("question", row.get("problem")), answer_of(row)
        if not isinstance(question, str) or not answer:
            raise DataError(f"{place}: a problem of {source.name} has a question and its answer, not {row!r:.80}")
        if split == "test" or (zlib.crc32(question.encode()) % 20 == 0) == (split == "validation"):
            kept: dict[str, Any] = {key: row[key] for key in ("level", "subject") if key in row}
            out.append({"id": f"{name}/{number}", "question": _WISH.sub("", question), "answer": answer, **kept})
    return out


def _gsm8k_answer(row: dict[str, Any]) -> str | None:
    _, marked, answer = str(row.get("answer", "")).rpartition("#### ")
    return answer.strip().replace(",", "") if marked else None


def _math_answer(row: dict[str, Any]) -> str | None:
    if isinstance(row.get("answer"), str):
        return str(row["answer"])
    return boxed_in(str(row.get("solution", "")))


def boxed_in(text: str) -> str | None:
    r"""What the last \boxed{…} of a text holds, braces within it included; None where none is closed."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for at in range(start + len(r"\boxed"), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : at]
    return None
