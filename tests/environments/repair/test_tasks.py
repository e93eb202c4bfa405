"""Sources of tasks: the shipped packages and their index, and packages with their own tests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random

import pytest

from agentfly.environments.repair import Repair, RepairJudge, package_tasks
from agentfly.environments.repair.build_index import index_mutation, run_examples
from agentfly.environments.repair.tasks import NAMES, load_index, load_package, mutations, read_mutation
from agentfly.errors import ConfigError, DataError
from agentfly.sandbox import SandboxUnavailable
from tests.environments.repair.test_environment import size

SPLITS = ("train", "validation", "test")


async def judge_here() -> RepairJudge:
    judge = RepairJudge()
    try:
        await judge.start()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")
    return judge


def test_index_fits_the_packages() -> None:
    """Else the packages were changed: python -m agentfly.environments.repair.build_index."""
    bugs = load_index()
    drawn = {
        mutation
        for name in NAMES
        for path, text in load_package(name).sources.items()
        for mutation in mutations(path, text)
    }
    for bug in bugs:
        assert read_mutation(bug) in drawn
        assert bug["example"] in load_package(bug["package"]).examples
    assert {bug["package"] for bug in bugs} == set(NAMES)
    assert len({(bug["package"], bug["path"], bug["line"], bug["after"]) for bug in bugs}) == len(bugs)


async def test_sample_of_the_index_is_reproduced() -> None:
    judge = await judge_here()
    for bug in Random(11).sample(load_index(), 4):
        package = load_package(bug["package"])
        expected = await run_examples(judge, package)
        assert await index_mutation(judge, package, read_mutation(bug), expected) == bug


async def test_all_hidden_tests_pass_without_a_bug() -> None:
    judge = await judge_here()
    for name in NAMES:
        package = load_package(name)
        columns = {"package": name, "tests": package.hidden}
        passed = await judge.passing_tests(columns, {path: text.encode() for path, text in package.sources.items()})
        assert len(passed) == package.hidden.count("\ndef test_") >= 15


def test_mutation_changes_one_line() -> None:
    for name in NAMES:
        for path, text in load_package(name).sources.items():
            for mutation in mutations(path, text):
                old, new = text.split("\n"), mutation.apply(text).split("\n")
                assert [(a, b) for a, b in zip(old, new, strict=True) if a != b] == [(mutation.before, mutation.after)]


@pytest.mark.parametrize(
    ("line", "kind", "expected"),
    [
        ("x = a < b", "comparison", ["x = a <= b", "x = a > b"]),
        ("x = a is not b", "comparison", ["x = a is b"]),
        ("x = (a) - (b)", "arithmetic", ["x = (a) + (b)"]),
        ("x = a and b and c", "boolean", ["x = a or b and c"]),
        ("x = y[10]", "constant", ["x = y[11]", "x = y[9]"]),
        ("x = 1 if not y else z", "condition", ["x = 1 if y else z"]),
        ("x = 1 if a == b else z", "condition", ["x = 1 if not (a == b) else z"]),
        ("f(a, g(b), c)", "arguments", ["f(g(b), a, c)"]),
        ("x = max(y)", "function", ["x = min(y)"]),
        ("x[0] = 1", "missing", ["pass"]),
        ("x = 'ä' + y", "arithmetic", []),
    ],
)
def test_kinds_of_bugs(line: str, kind: str, expected: list[str]) -> None:
    assert sorted(mutation.after for mutation in mutations("m.py", line) if mutation.kind == kind) == sorted(expected)


def test_splits_share_no_line() -> None:
    lines: dict[str, set[tuple[str, str]]] = {}
    for split in SPLITS:
        rows = Repair.draw_tasks(split, size(split), seed=4)
        lines[split] = {(row["package"], row["mutation"]["before"].strip()) for row in rows}
        assert len({row["id"] for row in rows}) == len(rows) >= 100
        assert {row["package"] for row in rows} == set(NAMES)
    assert not lines["train"] & lines["validation"]
    assert not lines["train"] & lines["test"]
    assert not lines["validation"] & lines["test"]


DIGESTS = {
    "train": "a5a030e3981f8a90ae4a0a9ea08cc77c87db769c6231fbfc14d425e50e41700f",
    "validation": "aa37a4ebda16b29919887da17c270898cc98058cf316ca2cc71a709aaa8cd0be",
    "test": "58e3032e91a32fa588b2d0087da48560b37aaa0dd4c18eda6b142e789504579c",
}
"""SHA-256 of all tasks of a split as JSON. They were taken while the packages were folders of Python files;
a change of a package or of the index replaces them."""


@pytest.mark.parametrize("split", SPLITS)
def test_all_tasks_are_byte_identical(split: str) -> None:
    rows = Repair.draw_tasks(split, size(split))
    assert hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest() == DIGESTS[split]


def test_rows_are_deterministic_and_larger_counts_extend_smaller() -> None:
    rows = Repair.draw_tasks("train", 20, seed=5)
    assert rows == Repair.draw_tasks("train", 40, seed=5)[:20]
    assert rows != Repair.draw_tasks("train", 20, seed=6)


def test_question_shows_the_error_but_not_the_line() -> None:
    for row in Repair.draw_tasks("train", 60):
        assert row["mutation"]["before"].strip() not in row["question"]
        assert ">>> " in row["question"]
        assert "hidden" not in "".join(row["files"])


def test_unknown_names_and_counts_are_rejected() -> None:
    with pytest.raises(DataError, match="calc, intervals"):
        Repair.draw_tasks("train", 1, packages=["numpy"])
    with pytest.raises(DataError, match="train, validation, test"):
        Repair.draw_tasks("dev", 1)
    with pytest.raises(DataError, match=r"train has \d+ tasks .* not 5000; package_tasks makes more"):
        Repair.draw_tasks("train", 5000)
    with pytest.raises(DataError, match="not -1"):
        Repair.draw_tasks("train", -1)


SOURCE = '''\
"""Temperatures."""


def fahrenheit(celsius):
    return celsius * 9 / 5 + 32


def is_warm(celsius):
    return celsius > 20
'''
TESTS = """\
from warmth import fahrenheit

def test_freezing():
    assert fahrenheit(0) == 32

def test_boiling():
    assert fahrenheit(100) == 212
"""
OTHER_TESTS = "from warmth import is_warm\n\ndef test_warm():\n    assert is_warm(30)\n    assert not is_warm(20)\n"


def write_package(folder: Path) -> Path:
    (folder / "tests").mkdir()
    (folder / "warmth.py").write_text(SOURCE)
    (folder / "setup.py").write_text("raise SystemExit('never run')")
    (folder / "tests" / "test_scale.py").write_text(TESTS)
    (folder / "tests" / "test_warm.py").write_text(OTHER_TESTS)
    return folder


def test_package_tasks(tmp_path: Path) -> None:
    try:
        rows = package_tasks(write_package(tmp_path), split="train", count=2, most_failing=0.7)
    except (SandboxUnavailable, ConfigError) as error:
        pytest.skip(f"no sandbox with pytest works here: {error}")
    assert rows
    for row in rows:
        assert row["package"] == "warmth"
        assert row["files"]["warmth.py"] != SOURCE
        assert not set(row["tests"]) & set(row["files"])
        assert {test.partition("::")[0] for test in row["fail_to_pass"]} == set(row["tests"])
        assert len(row["fail_to_pass"]) + len(row["pass_to_pass"]) == 3
        assert row["fail_to_pass"][0] in row["question"]


def test_invalid_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pip download"):
        package_tasks(tmp_path / "nowhere")
    with pytest.raises(DataError, match="none; say package="):
        package_tasks(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    with pytest.raises(DataError, match="one, two; say package="):
        package_tasks(tmp_path)
    with pytest.raises(DataError, match="no test files"):
        package_tasks(tmp_path, "one")
    with pytest.raises(DataError, match="split"):
        package_tasks(tmp_path, split="dev")
