"""The conformance check finds each broken property, and no other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agentfly.conformance import PROPERTIES, PropertyStatus, check, check_environment, class_properties, clock
from agentfly.conformance.subject import ConformanceReport
from agentfly.environment import Environment
from agentfly.errors import ConfigError, require_extra
from agentfly.types import Task
from tests.conformance import environments


@pytest.fixture(autouse=True)
def clean_up(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Undo what broken environments do; start another process only where the test needs it (it takes a second)."""
    if "another_process" not in request.node.name:
        monkeypatch.setattr(class_properties, "_draw_in_new_process", lambda subject: "")
    yield
    environments.OVER.set()
    for descriptor in environments.HELD.descriptors:
        os.close(descriptor)
    environments.HELD.descriptors.clear()
    environments.LOG.clear()
    environments.LOCK.taken = False
    os.environ.pop("CORRIDOR_DOOR", None)
    environments.OVER.clear()


def statuses(report: ConformanceReport) -> dict[str, PropertyStatus]:
    return {result.name: result.status for result in report.results}


def test_sound_environment_passes_all_properties_also_in_another_process() -> None:
    received = []
    report = check_environment(environments.Corridor, on_result=received.append)
    assert report.ok, report
    assert statuses(report) == dict.fromkeys(PROPERTIES, PropertyStatus.PASS)
    assert list(report.results) == received
    assert "in another process too" in str(report)


def test_dependence_on_hashes_is_found_in_another_process() -> None:
    report = check_environment(environments.Hashed)
    assert list(report.failures) == ["tasks by seed"]
    assert "another process draws other tasks" in report.failures["tasks by seed"]


@pytest.mark.parametrize(
    ("env_class", "name", "detail"),
    [
        (environments.Slow, "constructor", "slow work goes into start"),
        (environments.Undocumented, "tools documented", "the argument 'mood' has no description"),
        (environments.Unseeded, "tasks by seed", "other tasks the second time"),
        (environments.Overlapping, "splits disjoint", "is in train and in validation"),
        (environments.AnySplit, "splits disjoint", "an unknown split is not rejected"),
        (environments.Tuples, "rows are JSON", "changes when it is written to a file and read"),
        (environments.Unstartable, "starts", "no such disk"),
        (environments.Dice, "determinism", "The wind blows from"),
        (environments.Remembering, "reset isolation", "after another chain, the attribute walked was"),
        (environments.Shared, "concurrent instances", "concurrently with 3 others"),
        (environments.Touchy, "bad actions", "was not answered, but raised"),
        (environments.Halfway, "bad tasks", "an instance whose reset failed could not be closed"),
        (environments.Grasping, "cancellation", "the next chain waited more than"),
        (environments.Jammed, "cancellation", "could not be closed"),
        (environments.Deaf, "cancellation", "after it was cancelled"),
        (environments.Leaking, "close releases", "file descriptors are left of 4 instances"),
        (environments.Spawning, "close releases", "threads are left of 4 instances: left behind"),
        (environments.Loud, "no global state", "a chain changed tests.conformance.environments.LOG"),
        (environments.Meddling, "no global state", "a chain changed os.environ['CORRIDOR_DOOR']"),
        (environments.Lost, "expert solves", "are not solved"),
        (environments.Generous, "reward bounds", "a chain without calls earns 1 in train"),
    ],
)
def test_broken_property_is_the_only_failure(
    env_class: type[Environment], name: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each limit is lowered only for the environments that exceed it: the others pass on any busy machine.
    if env_class is environments.Slow:
        monkeypatch.setattr("agentfly.conformance.class_properties.CONSTRUCTOR_SECONDS", 0.05)
        monkeypatch.setattr(clock, "WALL", 1e9)
    if name == "cancellation":
        monkeypatch.setattr("agentfly.conformance.chain_properties.CANCEL_TIMEOUT", 0.4)
    if name == "close releases":
        monkeypatch.setattr("agentfly.conformance.outcome_properties.RELEASE_TIMEOUT", 0.5)
    report = check_environment(env_class)
    assert list(report.failures) == [name], report
    assert detail in report.failures[name]
    for result in report.results:
        assert result.detail


def test_blocked_event_loop_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "GRACE", 0.5)
    report = check_environment(environments.Blocking, seconds=0.5)
    assert "it blocks the event loop" in report.failures["starts"]


def test_missing_tasks_are_reported_with_a_hint() -> None:
    report = check_environment(environments.Doorless)
    assert "use --tasks FILE for real ones" in report.failures["starts"]
    report = check_environment(environments.Doorless, tasks=environments.Corridor.draw_tasks("train", 3))
    assert report.ok, report
    assert statuses(report)["splits disjoint"] is PropertyStatus.NOT_APPLICABLE
    assert statuses(report)["expert solves"] is PropertyStatus.PASS


def test_expert_without_a_reward_is_not_reported_as_solving() -> None:
    report = check_environment(environments.Unscored)
    assert report.ok, report
    assert statuses(report)["expert solves"] is PropertyStatus.NOT_APPLICABLE


def test_environment_in_its_own_processes() -> None:
    report = check_environment(environments.Elsewhere)
    assert report.ok, report
    assert "concurrent instances  2 concurrent instances behaved as each alone" in str(report)


def test_global_environment_is_not_reset() -> None:
    report = check_environment(environments.Everybodys, tasks=environments.Corridor.draw_tasks("train", 1))
    assert statuses(report)["reset isolation"] is PropertyStatus.NOT_APPLICABLE


def test_missing_extra_is_a_config_error() -> None:
    class Needy(environments.Corridor):
        async def start(self) -> None:
            with require_extra("the corridor", "corridor"):
                import no_such_package  # noqa: F401

    with pytest.raises(ConfigError, match=r"pip install 'agentfly-rl\[corridor\]'"):
        check_environment(Needy)


def test_nondeterministic_simulator_is_checked_for_the_other_properties() -> None:
    class Windy(environments.Dice):
        deterministic = False

    report = check_environment(Windy)
    assert report.ok, report
    left_out = [name for name, status in statuses(report).items() if status is PropertyStatus.NOT_APPLICABLE]
    assert left_out == ["determinism", "reset isolation", "concurrent instances"]
    assert "its simulator varies between runs" in str(report)


def test_loaded_machine_does_not_fail_a_sound_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little CPU time passes, regardless of wall-clock time."""
    monkeypatch.setattr(clock, "cpu_seconds", lambda: 0.0)
    monkeypatch.setattr(clock, "WALL", 1e9)
    monkeypatch.setattr("agentfly.conformance.class_properties.CONSTRUCTOR_SECONDS", 1e-9)
    monkeypatch.setattr(check, "GRACE", 0.0)
    report = check_environment(environments.Corridor, seconds=1e-4)
    assert report.ok, report


def test_environment_over_its_cpu_limit_fails() -> None:
    class Busy(environments.Corridor):
        async def reset(self, task: Task) -> None:
            started_at = time.thread_time()
            while time.thread_time() - started_at < 0.5:
                await asyncio.sleep(0)
            await super().reset(task)

    report = check_environment(Busy, seconds=0.4)
    assert "it takes longer than 0.4 s" in report.failures["starts"]


async def test_time_limit_counts_cpu_time_and_detects_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_cpu_time_includes_children() -> None:
    seconds_before = clock.cpu_seconds()
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert clock.cpu_seconds() - seconds_before >= 0.45
        child.communicate(b"\n")
    assert clock.cpu_seconds() - seconds_before >= 0.45
