"""`agentfly doctor --on verl` on two Ray nodes: every check works, or the one that fails says why."""

import subprocess
import sys

import pytest

from tests.verl.conftest import cluster_environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def diagnose(address: str, *cluster: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentfly.cli", "doctor", "--on", "verl", *cluster]
    environment = {**cluster_environment(address), "COLUMNS": "400"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_every_check_works_on_two_nodes(ray_address: str) -> None:
    done = diagnose(ray_address, "nodes=2", "gpus=1", "workers=1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok", "FAILS"))]
    names = ["ok    versions", "ok    resources", "ok    plugins", "ok    training", "ok    weight sync"]
    assert [line.partition(":")[0] for line in lines] == names
    assert "2 steps of 2 chains" in done.stdout


def test_missing_resources_are_named(ray_address: str) -> None:
    done = diagnose(ray_address, "nodes=2", "gpus=8")
    assert done.returncode == 1
    assert "8 GPU" in done.stdout.partition("FAILS resources")[2]
