"""Tasks from the shipped packages: each has one wrong line, and the report of something that therefore goes wrong.

Which bugs are worth a task was found ahead, by running the hidden tests (see `indexing`): a bug counts where at least
one of them fails, and at most half. So a task is drawn without running anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from agentfly.environments.data import checked_split
from agentfly.environments.repair.judge import names_of_tests
from agentfly.environments.repair.mutation import Mutation
from agentfly.environments.repair.package import NAMES, shipped
from agentfly.errors import DataError

INDEX = Path(__file__).parent / "index.json"
TEST_COMMAND = "python3 -m unittest -q"


def draw_tasks(split: str, count: int, seed: int, packages: Sequence[str] | None) -> list[dict[str, Any]]:
    """So many tasks of a split, in an order that the seed decides."""
    checked_split(split)
    chosen = tuple(packages) if packages is not None else NAMES
    if unknown := [name for name in chosen if name not in NAMES]:
        raise DataError(f"there is no package {unknown[0]!r:.80}; there are {', '.join(NAMES)}")
    bugs = [bug for bug in _index() if bug["package"] in chosen and _mutation(bug).is_in(split, bug["package"])]
    if not 0 <= count <= len(bugs):
        raise DataError(f"{split} has {len(bugs)} tasks of {', '.join(chosen)}, not {count}; package_tasks makes more")
    return [_row(bug, split) for bug in Random(f"{split}/{seed}").sample(bugs, len(bugs))[:count]]


@cache
def _index() -> list[dict[str, Any]]:
    bugs: list[dict[str, Any]] = json.loads(INDEX.read_text())
    return bugs


def _mutation(bug: Mapping[str, Any]) -> Mutation:
    return Mutation(**{name: bug[name] for name in Mutation.__slots__})


def _row(bug: Mapping[str, Any], split: str) -> dict[str, Any]:
    package, mutation = shipped(bug["package"]), _mutation(bug)
    files = {**package.files, mutation.path: mutation.applied(package.files[mutation.path])}
    fails = list(bug["fails"])
    return {
        "id": mutation.name,
        "question": _question(bug),
        "package": package.name,
        "kind": mutation.kind,
        "files": files,
        "tests": package.hidden,
        "fail_to_pass": fails,
        "pass_to_pass": [name for name in names_of_tests(package.hidden) if name not in fails],
        "mutation": mutation.to_json(),
        "test_command": TEST_COMMAND,
    }


def _question(bug: Mapping[str, Any]) -> str:
    typed = "\n".join(f">>> {each}" for each in bug["example"].split("; "))
    return (
        f"The package `{bug['package']}` in this folder has a bug in {bug['path']}:\n\n{typed}\n{bug['came']}\n\n"
        f"It should be: {bug['expected']}\n\nFind the bug and repair the package. `{TEST_COMMAND}` runs some tests; "
        "others, which you cannot see, decide."
    )
