"""The shell, in a real sandbox, through agents and their tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentfly.agents import HFAgent
from agentfly.environments.shell import Shell
from agentfly.environments.shell.tasks import KINDS
from agentfly.errors import DataError
from agentfly.rewards import shell_match, shell_similarity
from agentfly.sandbox import Limits, SandboxUnavailable, open_sandbox
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task
from tests.fakes import call

TRIED: list[str] = []
"""The reason why no sandbox works; empty if one does."""
FILES = {"docs/a.txt": "one\ntwo\n", "docs/b.txt": "two\n", "logs/c.log": "three\n"}


@pytest.fixture(autouse=True)
async def _needs_a_sandbox() -> None:
    if not TRIED:  # once is enough
        try:
            await (await open_sandbox()).close()
            TRIED.append("")
        except SandboxUnavailable as error:
            TRIED.append(str(error))
    if TRIED[0]:
        pytest.skip(f"no sandbox works here: {TRIED[0]}")


def row(gold: str | None, **columns: Any) -> dict[str, Any]:
    return {"question": "?", "gold": gold, "files": FILES, **columns}


def agent_of(script: object = "-", kind: type[Shell] = Shell, reward: Any = shell_match) -> HFAgent:
    return HFAgent(
        tools=[kind], reward=reward, template="chatml", backend="scripted", backend_config={"script": script}
    )


async def evaluate(
    gold: str | None, *commands: str, answer: str = "Done.", kind: type[Shell] = Shell, **columns: Any
) -> dict[str, Any]:
    """Scores after running these commands."""
    env = kind()
    await env.start()
    try:
        await env.reset(Task.of(row(gold, **columns)))
        for command in commands:
            await env.run_shell(command)
        return await env.evaluate(answer)
    finally:
        await env.close()


async def test_expert_solves_every_kind_of_task() -> None:
    rows = Shell.draw_tasks("train", 2 * len(KINDS))
    demonstrations = await demonstrate(agent_of(), rows)
    assert (len(demonstrations.accepted), demonstrations.reasons) == (len(rows), {})
    assert {chain.task.columns["kind"] for chain in demonstrations.accepted} == set(KINDS)
    observations = [
        message.text for chain in demonstrations.accepted for message in chain.messages if message.role == "tool"
    ]
    assert not [text for text in observations if "status" in text]  # what is asked for can be done


async def test_doing_nothing_gets_no_reward() -> None:
    rows = Shell.draw_tasks("train", 2 * len(KINDS), seed=3)
    result = await agent_of(["Done."]).run(rows)
    assert set(result.rewards) == {0.0}
    result = await agent_of([call("shell", command="ls"), "It is all done."]).run(rows[: len(KINDS)])
    assert set(result.rewards) == {0.0}


WAYS: list[tuple[str, str, bool]] = [
    ("find . -name '*.txt'", "ls docs/*.txt | sort -r", True),  # another way, another order, without ./
    ("find . -name '*.txt'", "find . -name '*.log'", False),
    ("find . -name '*.txt' | sort", "ls -r docs/*.txt", False),  # here the order is asked for
    ("grep -c two docs/a.txt", "printf '  1  \\n'", True),
    ("mv docs/a.txt docs/z.txt", "cp docs/a.txt docs/z.txt; rm docs/a.txt; ls", True),
    ("mv docs/a.txt docs/z.txt", "cp docs/a.txt docs/z.txt", False),
    ("sort -r docs/a.txt > s.txt", "printf 'two\\none\\n' > s.txt", True),
    ("sort -r docs/a.txt > s.txt", "printf 'one\\ntwo\\n' > s.txt", False),
    ("chmod 600 docs/a.txt", "chmod go-rwx docs/a.txt", True),
    ("chmod 600 docs/a.txt", "true", False),
    ("tar -czf d.tar.gz docs", "touch -d 2001-01-01 docs/a.txt; tar -cf - ./docs | gzip -9 > d.tar.gz", True),
    ("tar -czf d.tar.gz docs", "tar -czf d.tar.gz logs", False),
    ("tar -czf d.tar.gz docs", "echo docs > d.tar.gz", False),
    ("ln -s docs/a.txt l", "ln -s docs/a.txt l", True),
    ("ln -s docs/a.txt l", "cp docs/a.txt l", False),
    ("mkdir x", "mkdir x && mkdir y", False),
    ("find . -name '*.txt'", "find . -name '*.txt'; rm logs/c.log", False),  # printed well, and broken something
    ("mkdir x", "mkdir x; for n in $(seq 1500); do : > x/$n; done", False),
    ("mkdir x", "mkdir x; chmod 000 x docs", False),
]


async def test_equivalent_commands_match() -> None:
    scores = [(gold, command, (await evaluate(gold, command))["match"]) for gold, command, _ in WAYS]
    assert scores == WAYS


async def test_final_answer_counts_as_output() -> None:
    assert (await evaluate("wc -l < docs/a.txt", "cat docs/a.txt", answer="2"))["match"]
    assert not (await evaluate("wc -l < docs/a.txt", "cat docs/a.txt", answer="3"))["match"]


async def test_partial_result_gets_partial_similarity() -> None:
    assert (await evaluate("sort -r docs/a.txt > s.txt", "sort -r docs/a.txt > s.txt"))["similarity"] == pytest.approx(
        1
    )
    wrong_text = await evaluate("sort -r docs/a.txt > s.txt", "sort docs/a.txt > s.txt")
    assert wrong_text["similarity"] == pytest.approx(2 / 3)
    wrong_file = await evaluate("sort -r docs/a.txt > s.txt", "sort -r docs/a.txt > t.txt")
    assert wrong_file["similarity"] == pytest.approx(2 / 3, abs=0.01)  # two files too many: 1 - erf(2) is next to none
    nothing_printed = await evaluate("cat docs/a.txt", "true")
    assert nothing_printed["similarity"] == pytest.approx(2 / 3)
    (chain,) = await agent_of([call("shell", command="cat docs/b.txt"), "-"], reward=shell_similarity).run(
        row("cat docs/a.txt")
    )
    assert 2 / 3 < (chain.reward or 0) < 1


async def test_files_persist_within_a_chain_only() -> None:
    script = [
        call("shell", command="cat note 2> /dev/null; echo mine >> note; ls /tmp; touch /tmp/left"),
        call("shell", command="cat note"),
        "Done.",
    ]
    result = await agent_of(script).run(row("true"), num_chains=3)
    for chain in result:
        assert [message.text for message in chain.messages if message.role == "tool"] == ["(no output)", "mine"]
    again = Shell()
    await again.start()
    for _ in range(2):
        await again.reset(Task.of(row("true")))
        assert (again.commands, again.printed) == (0, "")
        assert (await again.run_shell("ls; touch more"))["observation"] == "docs\nlogs"
    await again.close()


async def test_gold_command_is_not_visible_in_the_session() -> None:
    env = Shell()
    await env.start()
    await env.reset(Task.of(row("cat docs/a.txt # secret-mark")))
    await env.evaluate()
    result = await env.run_shell(
        "grep -rl secret-mark . /tmp /proc/*/cmdline /proc/*/environ 2> /dev/null | grep -v self"
    )
    await env.close()
    assert "secret" not in result["observation"].replace("grep", "")


class Tight(Shell):
    limits = Limits(seconds=2, memory=64 << 20, processes=16, inodes=2000)


async def test_failed_commands_are_reported_and_the_chain_continues() -> None:
    script = [
        '<tool_call>{"name": "shell", "arguments": {"command": 7}}</tool_call>',
        f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': 'x' * 1_000_000}})}</tool_call>",
        call("shell", command="sleep 30"),
        call("shell", command="seq 100000"),
        call("shell", command="seq 3000"),
        call("shell", command="kill -9 -1; kill -9 1"),
        call("shell", command="wc -l < docs/a.txt"),
        "Done.",
    ]
    (chain,) = await agent_of(script, Tight).run(row("wc -l < docs/a.txt"), max_turns=8)
    observations = [message.text for message in chain.messages if message.role == "tool"]
    assert "7: command not found" in observations[0]
    assert "100000 characters" in observations[1]
    assert "2 seconds" in observations[2]
    assert len(observations[3]) < Tight.longest + 100
    assert observations[4].startswith("1\n2\n")
    assert observations[4].endswith("\n3000")  # a test runner reports the failures last
    assert observations[6] == "2"
    assert chain.reward == 1.0


async def test_invalid_rows_are_rejected() -> None:
    for command, observations in (
        ({"files": ["a"]}, "must map paths"),
        ({"files": None}, r"Shell\.draw_tasks"),
        ({"files": {"../x": "a"}}, "cannot be written"),
        ({"setup": 7}, "needs the column"),
    ):
        env = Shell()
        await env.start()
        with pytest.raises(DataError, match=observations):
            await env.reset(Task.of(row("true", **command)))
        await env.close()
    with pytest.raises(DataError, match="column 'gold'"):
        await evaluate(None)
    with pytest.raises(DataError, match="'gold' fails"):
        await evaluate("kill -9 1; kill -9 -1; sleep 30", "true", kind=Tight, setup="true")
