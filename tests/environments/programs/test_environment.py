"""Program synthesis: generated tasks, MBPP, and chains that hidden tests score."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents import HFAgent
from agentfly.environments import CodeJudge, data
from agentfly.environments.programs import ProgramSynthesis, mbpp_tasks
from agentfly.environments.programs.environment import MBPP_SPLITS
from agentfly.errors import ConfigError, DataError
from agentfly.rewards import unit_tests
from agentfly.sandbox import SandboxUnavailable, open_sandbox
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task
from tests.fakes import call

HAS_DATA = (Path(os.environ.get("AGENTFLY_DATA", "/nowhere")) / "code").is_dir()
needs_data = pytest.mark.skipif(not HAS_DATA, reason="AGENTFLY_DATA names no folder with the folder code")


@pytest.fixture
async def _sandbox() -> None:
    try:
        await (await open_sandbox()).close()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")


def agent_of(script: Any = "-") -> HFAgent:
    return HFAgent(
        tools=[ProgramSynthesis], reward=unit_tests, template="chatml", backend="scripted",
        backend_config={"script": script},
    )  # fmt: skip


async def rewards_of(rows: list[dict[str, Any]], *script: str) -> list[float | None]:
    agent = agent_of(list(script))
    result = await agent.run(rows, max_turns=8)
    await agent.close()
    return result.rewards


# ── tasks ──


def test_rows_are_deterministic_and_larger_counts_extend_smaller() -> None:
    rows = ProgramSynthesis.draw_tasks("train", 30, seed=3)
    assert rows == ProgramSynthesis.draw_tasks("train", 60, seed=3)[:30]
    assert json.loads(json.dumps(rows)) == rows
    assert [row["kind"] for row in rows] == ["numbers", "strings", "lists"] * 10


def test_no_function_is_in_two_splits() -> None:
    def functions(split: str) -> set[str]:
        rows = [row for seed in (0, 1) for row in ProgramSynthesis.draw_tasks(split, 210, seed=seed)]
        return {row["solution"].partition("\n")[2] for row in rows}  # without its name

    train, validation, test = map(functions, ("train", "validation", "test"))
    assert not train & validation
    assert not train & test
    assert not validation & test


def test_hidden_tests_are_not_in_the_question_and_the_solution_passes() -> None:
    for row in ProgramSynthesis.draw_tasks("test", 300):
        assert row["example"] in row["question"]
        assert len(set(row["tests"])) == 5
        assert not any(test.partition(" == ")[0] in row["question"] for test in row["tests"])
        names: dict[str, Any] = {}
        exec("\n".join([row["solution"], row["example"], *row["tests"]]), names)


def test_too_large_count_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_MAX_REJECTED", 300)
    with pytest.raises(DataError, match="validation tasks of programs or little more"):
        ProgramSynthesis.draw_tasks("validation", 10**6, kinds=["strings"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"split": "dev"}, "train, validation, test"), ({"kinds": ["sets"]}, "numbers, strings, lists"),
     ({"kinds": "lists"}, "give a list"), ({"kinds": []}, "numbers, strings, lists")],
)  # fmt: skip
def test_unknown_arguments_are_rejected(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        ProgramSynthesis.draw_tasks(**arguments)


# ── chains ──


@pytest.mark.usefixtures("_sandbox")
async def test_concurrent_experts_pass_every_test() -> None:
    agent = agent_of()
    demonstrations = await demonstrate(agent, ProgramSynthesis.draw_tasks("train", 24))
    await agent.close()
    assert (len(demonstrations.accepted), demonstrations.reasons) == (24, {})
    assert demonstrations.accepted[0].messages[-2].text == "(no output)"  # the example holds


@pytest.mark.usefixtures("_sandbox")
async def test_trivial_functions_earn_nothing() -> None:
    judge = CodeJudge()
    await judge.start()
    for row in ProgramSynthesis.draw_tasks("train", 6, seed=5):
        name, _, arguments = row["example"].removeprefix("assert ").partition("(")
        constant = f"def {name}(*_):\n    return {arguments.partition(' == ')[2]}"
        echo = f"def {name}(*given):\n    return given[0]"
        for code in (constant, echo):
            assert (await unit_tests(f"```python\n{code}\n```", row["tests"], judge))["reward"] == 0.0, (row, code)


@pytest.mark.usefixtures("_sandbox")
async def test_answer_without_code_earns_nothing() -> None:
    rows = ProgramSynthesis.draw_tasks("train", 2)
    assert await rewards_of(rows, "I cannot.") == [0.0, 0.0]


@pytest.mark.usefixtures("_sandbox")
async def test_session_has_neither_tests_nor_solution() -> None:
    (row,) = ProgramSynthesis.draw_tasks("train", 1)
    agent = agent_of([
        call("run_shell", command="find . -type f; env"), call("code_interpreter", code="sorted(globals())"),
        call("code_interpreter", code="import os; os.environ, os.listdir('/tmp'), os.listdir('.')"), "Done.",
    ])  # fmt: skip
    (chain,) = await agent.run(row)
    await agent.close()
    observations = "".join(message.text for message in chain.messages if message.role == "tool")
    assert row["solution"] not in observations
    assert not any(test in observations for test in row["tests"])


@pytest.mark.usefixtures("_sandbox")
async def test_files_of_the_session_do_not_help_the_answer() -> None:
    (row,) = ProgramSynthesis.draw_tasks("train", 1)
    (earned,) = await rewards_of(
        [row],
        call("write_file", path="solution.py", content=row["solution"]),
        call("code_interpreter", code=row["solution"]),
        "```python\nfrom solution import *\n```",
    )
    assert earned == 0.0


@pytest.mark.usefixtures("_sandbox")
async def test_task_without_solution_has_no_expert() -> None:
    world = ProgramSynthesis()
    await world.start()
    try:
        await world.reset(Task.of({"question": "Write f.", "tests": ["assert f()"]}))
        with pytest.raises(ConfigError, match="solution"):
            world.expert()
    finally:
        await world.close()


# ── MBPP ──


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    (tmp_path / "code").mkdir()
    return tmp_path / "code" / "mbpp.jsonl"


OFFICIAL = {
    "task_id": 11, "text": "Double it.", "code": "def f(x):\r\n  return 2 * x", "test_setup_code": "",
    "test_list": ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 6"],
}  # fmt: skip


def test_question_shows_one_test_and_the_others_decide(file: Path) -> None:
    file.write_text(json.dumps(OFFICIAL))
    (row,) = mbpp_tasks("test")
    assert row["question"] == "Double it.\nIt must pass tests such as:\nassert f(1) == 2"
    assert row["tests"] == ["assert f(2) == 4", "assert f(3) == 6"]
    assert row["solution"] == "def f(x):\n  return 2 * x"
    (row,) = mbpp_tasks("test", shown=3)
    assert row["tests"] == OFFICIAL["test_list"]
    assert mbpp_tasks("train") == []
    with pytest.raises(DataError, match="at least one"):
        mbpp_tasks("test", shown=0)


@pytest.mark.parametrize(
    "broken", [{"test_list": []}, {"test_list": "assert"}, {"test_list": [1]}, {"code": None}, {"text": 7}]
)
def test_corrupt_row_error_names_its_place(file: Path, broken: dict[str, Any]) -> None:
    file.write_text(json.dumps({**OFFICIAL, **broken}))
    with pytest.raises(DataError, match=r"mbpp\.jsonl, line 1"):
        mbpp_tasks("test")


def test_missing_file_error_names_its_source(file: Path) -> None:
    with pytest.raises(DataError, match=r"mbpp\.json.*google-research"):
        mbpp_tasks("test")
    with pytest.raises(DataError, match=r"'dev'.*prompt, test, validation, train"):
        mbpp_tasks("dev")


@needs_data
def test_official_splits() -> None:
    ids = {split: [row["id"] for row in mbpp_tasks(split)] for split in MBPP_SPLITS}
    assert {split: len(split_ids) for split, split_ids in ids.items()} == {
        "prompt": 10, "test": 500, "validation": 90, "train": 374,
    }  # fmt: skip
    assert len({task_id for split in ids.values() for task_id in split}) == 974


@needs_data
@pytest.mark.usefixtures("_sandbox")
async def test_solutions_of_mbpp_pass() -> None:
    judge = CodeJudge()
    await judge.start()
    for row in mbpp_tasks("prompt"):
        verdict = await judge.unit_tests(row["solution"], row["tests"], setup=row["setup"])
        assert not verdict.failures
