r"""Mathematics tasks: generated problems, and GSM8K and MATH from their authors' files.

Generated problems are drawn from the kinds in `problems.toml`. The program of a problem, numbers included, decides its
split: no problem is in two splits, whatever the seeds and the names in the text.

GSM8K and MATH are read from the folder `math` of AGENTFLY_DATA. Rows have the final answer without the solution. A
twentieth of the training problems, chosen by a checksum of the question, is the validation split. The test split of
MATH is MATH-500.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from agentfly.environments.data import (
    DatasetSource,
    in_dataset_split,
    load_toml,
    read_rows,
    sample_tasks,
    validate_split,
)
from agentfly.errors import DataError

LEVELS = (1, 2, 3)
GSM8K = DatasetSource("GSM8K", "https://github.com/openai/grade-school-math (train.jsonl and test.jsonl)", "math")
MATH = DatasetSource("MATH", "https://github.com/hendrycks/math, MATH-500 https://github.com/openai/prm800k", "math")
_INSTRUCTION = re.compile(r"\s*Please reason step by step, and put your final answer within \\boxed\{\}\.?\s*$")
"""An instruction at the end of the question in some copies of the files. It is removed."""


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """A kind of generated problem."""

    level: int
    question: str
    program: str
    ranges: Mapping[str, Sequence[int]]
    """Smallest and largest value of each number."""

    def draw(self, random: Random) -> tuple[str, str]:
        """Draw a question and the program that computes its answer."""
        numbers = {name: random.randint(*limits) for name, limits in self.ranges.items()}
        words = load_toml(__package__, "problems.toml")["words"]
        chosen = {"who": random.choice(words["names"]), "thing": random.choice(words["things"])}
        months = {f"month_{name}": words["months"][number - 1] for name, number in numbers.items() if number <= 12}
        return self.question.format(**numbers, **chosen, **months), self.program.format(**numbers)


@cache
def load_kinds(level: int) -> tuple[ProblemKind, ...]:
    """Load the problem kinds of a level."""
    kinds = load_toml(__package__, "problems.toml")["kinds"]
    return tuple(ProblemKind(**kind) for kind in kinds if kind["level"] == level)


def draw_tasks(
    split: str = "train", count: int = 100, *, seed: int = 0, levels: Sequence[int] = LEVELS
) -> list[dict[str, Any]]:
    """Draw problems whose `levels` take turns: 1 arithmetic, 2 a word problem, 3 a problem that needs a loop.

    Rows have `id`, `question`, `answer`, `level`, and `program` for the expert.
    """
    if isinstance(levels, int) or not levels or any(level not in LEVELS for level in levels):
        raise DataError(
            f"problems have the levels {', '.join(map(str, LEVELS))}, not {levels!r:.80}; give a list of these"
        )

    def draw(random: Random, number: int) -> tuple[str, dict[str, Any]]:
        level = levels[number % len(levels)]
        question, program = random.choice(load_kinds(level)).draw(random)
        return program, {"question": question, "answer": run_program(program), "level": level, "program": program}

    return sample_tasks("math", split, count, seed, draw)


def run_program(program: str) -> str:
    """Run a program of `problems.toml` and return the value of its last line."""
    tree = ast.parse(program)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    exec(compile(tree, "<program>", "exec"), names)
    return str(eval(compile(ast.Expression(last.value), "<program>", "eval"), names))


def gsm8k_tasks(split: str) -> list[dict[str, Any]]:
    """Load the word problems of GSM8K: integers, two to eight steps."""
    file = "test.jsonl" if split == "test" else "train.jsonl"
    return _load_tasks(GSM8K, "gsm8k", split, files=(f"gsm8k_{file}", f"gsm8k/{file}"))


def math_tasks(split: str) -> list[dict[str, Any]]:
    """Load the competition problems of MATH, with `level` and `subject` if the file has them."""
    files = ("math500.jsonl", "math_test.jsonl") if split == "test" else ("math_train.jsonl",)
    return _load_tasks(MATH, "math", split, files=files)


def _load_tasks(source: DatasetSource, name: str, split: str, *, files: tuple[str, ...]) -> list[dict[str, Any]]:
    validate_split(split)
    tasks = []
    for number, (source_line, row) in enumerate(read_rows(source.file(*files))):
        question = row.get("question", row.get("problem"))
        answer: str | None
        if source is GSM8K:  # the answer is at the end of the solution
            _, mark, result = str(row.get("answer", "")).rpartition("#### ")
            answer = result.strip().replace(",", "") if mark else None
        elif isinstance(row.get("answer"), str):
            answer = row["answer"]
        else:
            answer = extract_box(str(row.get("solution", "")))
        if not isinstance(question, str) or not answer:
            raise DataError(f"{source_line}: a problem of {source.name} has a question and its answer, not {row!r:.80}")
        if in_dataset_split(question, split):
            extra: dict[str, Any] = {key: row[key] for key in ("level", "subject") if key in row}
            question = _INSTRUCTION.sub("", question)
            tasks.append({"id": f"{name}/{number}", "question": question, "answer": answer, **extra})
    return tasks


def extract_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{…} of a text, braces included. None if none is closed."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for index in range(start + len(r"\boxed"), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : index]
    return None
