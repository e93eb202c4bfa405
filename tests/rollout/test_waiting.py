"""A run that waits for its chains reports it; training, which has its own progress, does not."""

import asyncio
import re

import pytest

from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.rollout import waiting
from tests.fakes import byte_agent


@pytest.fixture
def slow_agent(monkeypatch: pytest.MonkeyPatch) -> HFAgent:
    """Chains that take ten times as long as the first report."""
    monkeypatch.setattr(waiting, "FIRST_REPORT_S", 0.05)
    return byte_agent(ScriptedBackend("slow", latency=0.5))


def test_waiting_run_is_reported_on_stderr(slow_agent: HFAgent, capsys: pytest.CaptureFixture[str]) -> None:
    slow_agent.run_sync("Hi", num_chains=2)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 4  # after 0.05, 0.1, 0.2 and 0.4 seconds
    report = re.compile(r"0 of 2 chains \(at most 10 turns of 1024 tokens\) finished after \d+ s")
    assert all(report.fullmatch(line) for line in lines)
    slow_agent.run_sync("Hi", max_turns=1, sampling={"max_tokens": None})
    assert "0 of 1 chains (at most 1 turn of any number of tokens) finished" in capsys.readouterr().err


async def test_observed_and_iterated_runs_report_nothing(
    slow_agent: HFAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    await slow_agent.run("Hi", observer=lambda event: None)
    assert [chain.prediction async for chain in slow_agent.iterate("Hi")] == ["slow"]
    assert not capsys.readouterr().err


async def test_reports_end_with_a_cancelled_run(slow_agent: HFAgent) -> None:
    earlier_tasks = asyncio.all_tasks()
    run = asyncio.create_task(slow_agent.run("Hi"))
    await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert asyncio.all_tasks() == earlier_tasks
