"""MBPP, mostly basic Python problems, from the file that its authors publish, in the folder `code` of AGENTFLY_DATA.

The splits are the authors', by the number of the task. A question shows the first of its tests, from which the name of
the function is learned; the others are hidden, and they decide.
"""

from __future__ import annotations

from typing import Any

from agentfly.environments.data import Source, checked_split, read_rows
from agentfly.errors import DataError

MBPP = Source("MBPP", "https://github.com/google-research/google-research/tree/master/mbpp (mbpp.jsonl)", "code")
SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
"""The numbers of the tasks; `prompt` are those to be shown as examples."""
_COLUMNS = {"question": ("query", "text", "prompt"), "solution": ("gold", "code"), "tests": ("tests", "test_list")}
"""What the columns are called in InterCode's file, and in the authors' own."""


def mbpp_tasks(split: str, *, shown: int = 1) -> list[dict[str, Any]]:
    """The tasks of a split. `shown` is how many tests the question shows; where that is all, all are judged."""
    numbers = SPLITS[checked_split(split, tuple(SPLITS))]
    if shown < 1:
        raise DataError(f"shown={shown}: at least one test must be shown, else nobody knows the function's name")
    tasks = {
        place: row for place, row in read_rows(MBPP.file("mbpp.json", "mbpp.jsonl")) if _number(row, place) in numbers
    }
    return [_task(row, place, shown) for place, row in tasks.items()]


def _number(row: dict[str, Any], place: str) -> int:
    if not isinstance(row.get("task_id"), int):
        raise DataError(
            f"{place}: a task of MBPP has its number as task_id, by which it is in a split, not {row!r:.80}"
        )
    return int(row["task_id"])


def _task(row: dict[str, Any], place: str, shown: int) -> dict[str, Any]:
    read = {name: next((row[each] for each in names if each in row), None) for name, names in _COLUMNS.items()}
    tests = read["tests"]
    texts = [read["question"], read["solution"], *(tests if isinstance(tests, list) else [None])]
    if not tests or not all(isinstance(each, str) for each in texts):
        raise DataError(f"{place}: a task of MBPP has a question, a solution and a list of tests, not {row!r:.80}")
    said, code, *tests = (each.replace("\r\n", "\n").strip() for each in texts)
    examples = "\n".join(tests[:shown])
    return {
        "id": f"mbpp/{row['task_id']}",
        "question": f"{said}\nIt must pass tests such as:\n{examples}",
        "tests": tests[shown:] or tests,
        "setup": str(row.get("test_setup_code") or "").replace("\r\n", "\n"),
        "solution": code,
        "example": tests[0],
    }
