"""The environment through agents, tools and the resource manager, in real sandbox sessions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.environments import Repair
from agentfly.errors import ConfigError, DataError
from agentfly.rewards import repair_success
from agentfly.rewards import tests_pass as pass_fraction
from agentfly.sandbox import SandboxUnavailable, open_sandbox
from agentfly.sft.demonstrations import demonstrate
from agentfly.trajectory import Trajectory
from agentfly.types import Task
from tests.fakes import call

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="session")
async def _needs_a_sandbox() -> None:
    try:
        await (await open_sandbox()).close()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")


@asynccontextmanager
async def repairer(*replies: str, reward: Any = None) -> AsyncIterator[HFAgent]:
    """An agent that says this, closed afterwards."""
    agent = HFAgent(tools=[Repair], reward=reward, template="chatml", backend=ScriptedBackend([*replies]))
    try:
        yield agent
    finally:
        await agent.close()


async def run_chain(row: dict[str, Any], *calls: str, reward: Any = repair_success) -> Trajectory:
    async with repairer(*calls, "Done.", reward=reward) as agent:
        (chain,) = await agent.run(row, max_turns=len(calls) + 1)
    return chain


def answers(chain: Trajectory) -> list[str]:
    return [message.text for message in chain.messages if message.role == "tool"]


def bug(package: str = "roman", **properties: Any) -> dict[str, Any]:
    """A task of a package, with a mutation that has these properties."""
    for split in ("train", "validation", "test"):
        count = size(split, package)
        for row in Repair.draw_tasks(split, count, packages=[package]):
            if all(row["mutation"][name] == value for name, value in properties.items()):
                return row
    raise AssertionError(f"no bug in {package} is {properties}")


def size(split: str, *packages: str) -> int:
    with pytest.raises(DataError) as error:
        Repair.draw_tasks(split, 10**9, packages=packages or None)
    return int(str(error.value).split()[2])


async def test_expert_repairs_all_packages() -> None:
    rows = [Repair.draw_tasks("train", 1, seed=7, packages=[name])[0] for name in ("calc", "lru", "matrix", "trie")]
    rows += Repair.draw_tasks("test", 4, seed=3)
    async with repairer("-", reward=repair_success) as agent:
        demonstrations = await demonstrate(agent, rows, max_concurrent_chains=4)
    assert demonstrations.reasons == {}
    assert len(demonstrations.accepted) == 8
    assert all("OK" in answers(chain)[-1] for chain in demonstrations.accepted)  # the visible tests pass as well


async def test_doing_nothing_or_breaking_more_earns_nothing() -> None:
    row = bug("roman")
    for reward in (repair_success, pass_fraction):
        chain = await run_chain(row, reward=reward)
        assert chain.reward == 0.0
        assert chain.score.metrics == {"fail_to_pass": 0.0, "pass_to_pass": 1.0}
    broken = row["files"]["roman/numerals.py"].replace(row["mutation"]["after"], row["mutation"]["before"])
    broken = broken.replace("def is_roman(text):", "def is_roman(text):\n    return True\n\ndef unused(text):")
    chain = await run_chain(row, call("write_file", path="roman/numerals.py", content=broken), reward=pass_fraction)
    assert chain.reward == 0.0
    assert chain.score.metrics["fail_to_pass"] == 1.0
    assert chain.score.metrics["pass_to_pass"] < 1.0


async def test_correct_edit_earns_full_reward() -> None:
    row = bug("roman", before="    if not 1 <= number <= LARGEST:")
    fixed = row["mutation"]["before"]
    chain = await run_chain(row, call("edit_file", path="roman/numerals.py", old=row["mutation"]["after"], new=fixed))
    assert chain.reward == 1.0


async def test_undo_edit_reverts_changes_one_by_one() -> None:
    row = bug("roman")
    original = row["files"]["roman/__init__.py"]
    chain = await run_chain(
        row,
        call("edit_file", path="roman/__init__.py", old="Roman numerals", new="One"),
        call("edit_file", path="./roman/../roman/__init__.py", old="One", new="Two"),
        call("write_file", path="made/new.py", content="x = 1"),
        call("undo_edit", path="roman/__init__.py"),
        call("read_file", path="roman/__init__.py", first=1, last=1),
        call("undo_edit", path="roman/__init__.py"),
        call("read_file", path="roman/__init__.py"),
        call("undo_edit", path="roman/__init__.py"),
        call("undo_edit", path="made/new.py"),
        call("list_files", path="made"),
    )
    observations = answers(chain)
    assert observations[4] == '"""One, both ways."""\n'
    assert observations[6] == original
    assert observations[7] == "Error: there is no change of roman/__init__.py to undo."
    assert observations[8] == "made/new.py is gone again."
    assert observations[9] == "(empty)"


async def test_read_file_selects_lines() -> None:
    row = bug("roman")
    ranges = [{"first": 3, "last": 4}, {"first": 900}, {"last": 1}, {"first": 0, "last": 0}, {"first": -3}]
    chain = await run_chain(row, *(call("read_file", path="test_roman.py", **lines) for lines in ranges))
    lines = row["files"]["test_roman.py"].splitlines(keepends=True)
    observations = answers(chain)
    assert observations[0] == "".join(lines[2:4])
    assert observations[1] == f"test_roman.py has {len(lines)} lines; none of them is in this range."
    assert observations[2] == lines[0]
    assert "none of them" in observations[3]
    assert observations[4] == "".join(lines)


async def test_concurrent_and_successive_chains_share_nothing() -> None:
    row = bug("roman")
    async with repairer(
        call("run_shell", command="ls; echo spoiled > roman/numerals.py; touch left"), "Done."
    ) as agent:
        result = await agent.run(row, num_chains=3, max_turns=2)
        again = await agent.run(row, max_turns=2)
    for chain in (*result, *again):
        assert answers(chain)[0].split() == ["roman", "test_roman.py"]


async def test_reset_instance_has_nothing_of_the_last_chain() -> None:
    first, second = bug("roman"), bug("trie")
    world = Repair()
    await world.start()
    try:
        await world.reset(Task.of(first))
        await world.write_file("trie/words.py", "spoiled")
        await world.reset(Task.of(second))
        assert set(await world.sources()) == {"trie/__init__.py", "trie/words.py"}
        assert (await world.sources())["trie/words.py"].decode() == second["files"]["trie/words.py"]
        assert "no change" in await world.undo_edit("trie/words.py")
    finally:
        await world.close()


async def test_expert_continues_after_other_actions() -> None:
    row = bug("roman")
    world = Repair()
    await world.start()
    try:
        await world.reset(Task.of(row))
        first = await world.expert()
        assert first == await world.expert()  # asking changes nothing
        await world.run_shell("echo hello")
        await world.read_file("roman/numerals.py")
        fix = await world.expert()
        assert fix.name == "edit_file"
        await world.edit_file(**fix.arguments)
        assert isinstance(await world.expert(), str)
    finally:
        await world.close()


async def test_malformed_calls_are_answered() -> None:
    row = bug("roman")
    chain = await run_chain(
        row,
        call("read_file", path={"a": 1}),
        call("edit_file", path="roman/numerals.py", old="", new="x"),
        call("edit_file", path="roman/numerals.py", old="return", new="x"),
        call("edit_file", path="roman", old="a", new="b"),
        call("write_file", path="../../etc/passwd", content="x"),
        call("run_shell", command="x" * (1 << 20)),
        call("search_files", pattern="def add"),
    )
    observations = answers(chain)
    assert len(observations) == 7
    assert "path" in observations[0]
    assert "occurs 0 times" in observations[1]
    assert "must occur exactly once" in observations[2]
    assert "Is a directory" in observations[3]
    assert "outside" in observations[4]
    assert "characters" in observations[5]
    assert observations[6].startswith("./roman/numerals.py:")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "package"),
        ({"question": "?", "package": "x", "files": ["x"]}, "files"),
        ({"question": "?", "package": "x", "files": {"x.py": 3}}, "must map paths"),
    ],
)
async def test_incomplete_tasks_are_rejected(row: dict[str, Any], message: str) -> None:
    world = Repair()
    await world.start()
    try:
        with pytest.raises(DataError, match=message):
            await world.reset(Task.of(row))
    finally:
        await world.close()


async def test_invalid_columns_are_rejected() -> None:
    row = bug("roman")
    chain = await run_chain({**row, "tests": 3})
    assert chain.reward is None
    assert "the column 'tests'" in chain.failures[-1].message
    chain = await run_chain({**row, "fail_to_pass": []})
    assert "nothing to repair" in chain.failures[-1].message
    chain = await run_chain({**row, "fail_to_pass": '["test_x"]'})
    assert "must be lists" in chain.failures[-1].message
    without = {name: value for name, value in row.items() if name != "mutation"}
    async with repairer("-") as agent:
        with pytest.raises(ConfigError, match=r"Repair\.draw_tasks"):
            await demonstrate(agent, [without])


async def test_rows_are_plain() -> None:
    (row,) = Repair.draw_tasks("train", 1)
    assert json.loads(json.dumps(row)) == row
