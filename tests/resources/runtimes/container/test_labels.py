"""Labels that name the owner of a container."""

import subprocess
import sys

import pytest

from agentfly.sandbox.owner import process_name

pytest.importorskip("docker", reason="docker is not installed: pip install 'agentfly-rl[container]'")
from agentfly.resources.runtimes.container import engine


@pytest.fixture
def dead() -> dict[str, str]:
    """The labels of a process that is gone."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        return {**engine.owner_labels(), engine.OWNER_LABEL: process_name(process.pid) or ""}


def test_containers_of_a_live_process_are_kept() -> None:
    assert not engine.is_orphan(engine.owner_labels(), stopped=False)
    assert not engine.is_orphan(engine.owner_labels(), stopped=True), "it will want to know how one ended"


def test_containers_of_a_dead_process_are_abandoned(dead: dict[str, str]) -> None:
    assert engine.is_orphan(dead, stopped=False)


@pytest.mark.parametrize(
    "other", [{engine.BOOT_LABEL: "another"}, {engine.OWNER_LABEL: "agentfly-1-1-1"}, {engine.OWNER_LABEL: ""}]
)
def test_unknown_owners_count_as_alive_until_stopped(dead: dict[str, str], other: dict[str, str]) -> None:
    assert not engine.is_orphan({**dead, **other}, stopped=False)
    assert engine.is_orphan({**dead, **other}, stopped=True)
