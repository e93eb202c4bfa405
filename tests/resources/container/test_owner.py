"""Whose a container is."""

import subprocess
import sys

import pytest

from agentfly.resources.container import owner
from agentfly.resources.owner import process_name


@pytest.fixture
def dead() -> dict[str, str]:
    """The labels of a process that is gone."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        return {**owner.labels(), owner.PROCESS: process_name(process.pid) or ""}


def test_a_living_process_keeps_its_containers() -> None:
    assert not owner.is_gone(owner.labels(), stopped=False)
    assert not owner.is_gone(owner.labels(), stopped=True), "it will want to know how one ended"


def test_a_dead_process_is_gone(dead: dict[str, str]) -> None:
    assert owner.is_gone(dead, stopped=False)


@pytest.mark.parametrize("other", [{owner.BOOT: "another"}, {owner.PROCESS: "agentfly-1-1-1"}, {owner.PROCESS: ""}])
def test_of_strangers_nothing_is_known(dead: dict[str, str], other: dict[str, str]) -> None:
    assert not owner.is_gone({**dead, **other}, stopped=False)
    assert owner.is_gone({**dead, **other}, stopped=True)
