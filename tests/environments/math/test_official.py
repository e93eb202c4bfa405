"""GSM8K and MATH, read from the authors' files, which are not shipped."""

import json
import os
from pathlib import Path

import pytest

from agentfly.environments.math import gsm8k_tasks, math_tasks
from agentfly.environments.math.tasks import extract_box
from agentfly.errors import DataError

HAS_DATA = (Path(os.environ.get("AGENTFLY_DATA", "/nowhere")) / "math").is_dir()
needs_data = pytest.mark.skipif(not HAS_DATA, reason="AGENTFLY_DATA names no folder with the folder math")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    (tmp_path / "math").mkdir()
    return tmp_path / "math"


def write(path: Path, *rows: object) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_gsm8k_answer_follows_its_mark(folder: Path) -> None:
    rows = [
        {"question": f"How many {number}?", "answer": f"It is 1 #### no\n#### 1,0{number:02}"} for number in range(60)
    ]
    write(folder / "gsm8k_train.jsonl", *rows)
    train, validation = gsm8k_tasks("train"), gsm8k_tasks("validation")
    assert len(train) + len(validation) == 60
    assert validation
    assert {row["answer"] for row in train + validation} == {f"10{number:02}" for number in range(60)}
    assert all(set(row) == {"id", "question", "answer"} for row in train)  # the way to it would tell the answer
    write(folder / "gsm8k_test.jsonl", rows[0])
    assert gsm8k_tasks("test") == [{"id": "gsm8k/0", "question": "How many 0?", "answer": "1000"}]


def test_math_takes_answers_and_solutions(folder: Path) -> None:
    solution = r"So $x = \boxed{1}$, and it is $\boxed{\frac{1}{\sqrt{2}}}$."
    write(folder / "math_train.jsonl", {"problem": "P?", "solution": solution, "level": "Level 5"})
    rows = math_tasks("train") + math_tasks("validation")
    assert rows == [{"id": "math/0", "question": "P?", "answer": r"\frac{1}{\sqrt{2}}", "level": "Level 5"}]
    question = "P?\nPlease reason step by step, and put your final answer within \\boxed{}."
    write(folder / "math500.jsonl", {"problem": question, "answer": "p - q"})
    assert math_tasks("test") == [{"id": "math/0", "question": "P?", "answer": "p - q"}]


@pytest.mark.parametrize(
    ("text", "box"),
    [(r"\boxed{a}", "a"), (r"\boxed{\{1\}} .", r"\{1\}"), (r"\boxed{a", None), ("a", None), (r"\boxed{}", "")],
)
def test_extract_box(text: str, box: str | None) -> None:
    assert extract_box(text) == box


@pytest.mark.parametrize(
    "row", [{"question": "Q"}, {"question": "Q", "answer": "72"}, {"question": 1, "answer": "#### 1"}, [1]]
)
def test_corrupt_row_error_names_its_place(folder: Path, row: object) -> None:
    write(folder / "gsm8k_train.jsonl", {"question": "Q", "answer": "#### 1"}, row)
    with pytest.raises(DataError, match=r"gsm8k_train\.jsonl, line 2"):
        gsm8k_tasks("train")


def test_missing_file_error_names_its_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"gsm8k_test\.jsonl.*grade-school-math"):
        gsm8k_tasks("test")
    with pytest.raises(DataError, match=r"math500\.jsonl.*hendrycks"):
        math_tasks("test")
    with pytest.raises(DataError, match=r"'dev'.*train, validation, test"):
        gsm8k_tasks("dev")
    monkeypatch.delenv("AGENTFLY_DATA")
    with pytest.raises(DataError, match="GSM8K is not shipped"):
        gsm8k_tasks("train")


@needs_data
def test_official_files() -> None:
    train, validation = gsm8k_tasks("train"), gsm8k_tasks("validation")
    assert len(train) + len(validation) == 7473
    assert 300 < len(validation) < 450
    assert not {row["question"] for row in train} & {row["question"] for row in validation}
    assert all(row["answer"].lstrip("-").replace(".", "").isdigit() for row in train)
    problems = math_tasks("test")
    assert len(problems) == 500
    assert not any("boxed" in row["question"] for row in problems)
