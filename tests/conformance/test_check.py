"""The examination finds what is broken, and nothing else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agentfly.conformance import PROPERTIES, Verdict, check, check_environment, clock, drawing
from agentfly.conformance.report import Report
from agentfly.environment import Environment
from agentfly.errors import ConfigError
from agentfly.extras import needed
from agentfly.types import Task
from tests.conformance import worlds


@pytest.fixture(autouse=True)
def cleared(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Undo what broken worlds do; and draw in another process only where that is the point, since it takes a second."""
    if "elsewhere" not in request.node.name:
        monkeypatch.setattr(drawing, "_drawn_elsewhere", lambda subject: "")
    yield
    worlds.OVER.set()
    for descriptor in worlds.HELD.descriptors:
        os.close(descriptor)
    worlds.HELD.descriptors.clear()
    worlds.LOG.clear()
    worlds.LOCK.taken = False
    os.environ.pop("CORRIDOR_DOOR", None)
    worlds.OVER.clear()


def verdicts(report: Report) -> dict[str, Verdict]:
    return {each.name: each.verdict for each in report.findings}


def test_a_good_world_has_every_property_also_elsewhere() -> None:
    told = []
    report = check_environment(worlds.Corridor, told=told.append)
    assert report.passed, report
    assert verdicts(report) == dict.fromkeys(PROPERTIES, Verdict.PASS)
    assert list(report.findings) == told
    assert "in another process too" in str(report)


def test_what_follows_hashes_is_found_elsewhere() -> None:
    report = check_environment(worlds.Hashed)
    assert list(report.failures) == ["tasks by seed"]
    assert "another process draws other tasks" in report.failures["tasks by seed"]


@pytest.mark.parametrize(
    ("kind", "name", "seen"),
    [
        (worlds.Slow, "constructor", "slow work goes into start"),
        (worlds.Undocumented, "tools documented", "nothing is said of 'mood'"),
        (worlds.Unseeded, "tasks by seed", "other tasks the second time"),
        (worlds.Overlapping, "splits disjoint", "is in train and in validation"),
        (worlds.AnySplit, "splits disjoint", "a split that is not there is not refused"),
        (worlds.Tuples, "rows are JSON", "comes back from a file as something else"),
        (worlds.Unstartable, "starts", "no such disk"),
        (worlds.Dice, "determinism", "The wind blows from"),
        (worlds.Remembering, "reset isolation", "after another chain, walked was"),
        (worlds.Shared, "concurrent instances", "beside 3 others"),
        (worlds.Touchy, "bad actions", "was not answered, but raised"),
        (worlds.Halfway, "bad tasks", "an instance whose reset failed could not be closed"),
        (worlds.Grasping, "cancellation", "the next chain waited more than"),
        (worlds.Jammed, "cancellation", "could not be closed"),
        (worlds.Deaf, "cancellation", "after it was cancelled"),
        (worlds.Leaking, "close releases", "8 file descriptors are left of 4 instances"),
        (worlds.Spawning, "close releases", "4 threads are left of 4 instances"),
        (worlds.Loud, "no global state", "a chain changed tests.conformance.worlds.LOG"),
        (worlds.Meddling, "no global state", "a chain changed os.environ['CORRIDOR_DOOR']"),
        (worlds.Lost, "expert solves", "are not solved"),
        (worlds.Generous, "reward bounds", "doing nothing earns 1 in train"),
    ],
)
def test_what_is_broken_is_found_and_nothing_else(
    kind: type[Environment], name: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfly.conformance.making.QUICK", 0.05)
    monkeypatch.setattr("agentfly.conformance.acting.PATIENCE", 1.0)
    monkeypatch.setattr("agentfly.conformance.leaving.PATIENCE", 0.5)
    report = check_environment(kind)
    assert list(report.failures) == [name], report
    assert seen in report.failures[name]
    for each in report.findings:
        assert each.seen


def test_a_world_that_holds_up_the_event_loop_does_not_hold_up_the_examination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "GRACE", 0.5)
    report = check_environment(worlds.Blocking, seconds=0.5)
    assert "it holds up the event loop" in report.failures["starts"]


def test_without_tasks_it_says_how_to_give_some() -> None:
    report = check_environment(worlds.Doorless)
    assert "--tasks FILE gives it real ones" in report.failures["starts"]
    given = check_environment(worlds.Doorless, tasks=worlds.Corridor.draw_tasks("train", 3))
    assert given.passed, given
    assert verdicts(given)["splits disjoint"] is Verdict.NOT_APPLICABLE
    assert verdicts(given)["expert solves"] is Verdict.PASS


def test_a_world_in_processes_of_its_own() -> None:
    report = check_environment(worlds.Elsewhere)
    assert report.passed, report
    assert "concurrent instances  2 at once as each alone" in str(report)


def test_what_is_everybodys_is_not_reset() -> None:
    report = check_environment(worlds.Everybodys, tasks=worlds.Corridor.draw_tasks("train", 1))
    assert verdicts(report)["reset isolation"] is Verdict.NOT_APPLICABLE


def test_a_missing_extra_is_the_users_to_mend() -> None:
    class Needy(worlds.Corridor):
        async def start(self) -> None:
            with needed("the corridor", "corridor"):
                import no_such_package  # noqa: F401

    with pytest.raises(ConfigError, match=r"pip install 'agentfly\[corridor\]'"):
        check_environment(Needy)


def test_a_simulator_that_varies_keeps_the_other_properties() -> None:
    class Windy(worlds.Dice):
        deterministic = False

    report = check_environment(Windy)
    assert report.passed, report
    left_out = [name for name, verdict in verdicts(report).items() if verdict is Verdict.NOT_APPLICABLE]
    assert left_out == ["determinism", "reset isolation", "concurrent instances"]
    assert "its simulator varies between runs" in str(report)


def test_a_loaded_machine_fails_no_sound_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little CPU time passes, however long everything takes by the clock."""
    monkeypatch.setattr(clock, "cpu_seconds", lambda: 0.0)
    monkeypatch.setattr(clock, "WALL", 1e9)
    monkeypatch.setattr("agentfly.conformance.making.QUICK", 1e-9)
    monkeypatch.setattr(check, "GRACE", 0.0)
    report = check_environment(worlds.Corridor, seconds=1e-4)
    assert report.passed, report


def test_an_environment_that_computes_too_long_fails() -> None:
    class Busy(worlds.Corridor):
        async def reset(self, task: Task) -> None:
            begun = time.process_time()
            while time.process_time() - begun < 0.5:
                await asyncio.sleep(0)
            await super().reset(task)

    report = check_environment(Busy, seconds=0.4)
    assert "it takes longer than 0.4 s" in report.failures["starts"]


async def test_time_limits_count_cpu_time_and_find_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0.0
    monkeypatch.setattr(clock, "cpu_seconds", lambda: used)
    monkeypatch.setattr(clock, "WALL", 1e9)
    async with clock.time_limit(0.001):
        await asyncio.sleep(0.1)

    async def hang(cpu: float) -> None:
        nonlocal used
        async with clock.time_limit(0.001):
            used += cpu
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await hang(cpu=1.0)
    monkeypatch.setattr(clock, "WALL", 2.0)
    with pytest.raises(TimeoutError):
        await hang(cpu=0.0)


def test_cpu_time_of_children_counts() -> None:
    before = clock.cpu_seconds()
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert clock.cpu_seconds() - before >= 0.45
        child.communicate(b"\n")
    assert clock.cpu_seconds() - before >= 0.45
