"""Two Ray nodes on this machine for all tests of the folder, and runs of the command line on them."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentfly.runs import RunDirectory

RECIPE = Path(__file__).with_name("recipe_deaths.py")
START_SECONDS = 300
"""Limit for the start of a Ray node on a busy machine."""
SESSIONS = Path(f"/tmp/af{os.getpid()}")
"""Ray's folder; short, because the path of a Unix socket has a limit of 107 characters."""
_ENVIRONMENT = {
    # Ray's own limits are too short for a busy machine: a node would end because its agent starts slowly.
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # 15 by default: actors would starve beside other work
    "RAY_AUTH_MODE": "disabled",  # else a token is written to the home of the user
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

Train = Callable[..., RunDirectory]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("verl") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="verl is not installed here: make verl"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a cluster of two nodes, each with one logical GPU, and a function that starts one more."""
    folder = tmp_path_factory.mktemp("ray")
    port = 6500 + os.getpid() % 3000
    address = f"127.0.0.1:{port}"
    head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={SESSIONS}"]
    nodes: list[subprocess.Popen[bytes]] = []

    def start(arguments: list[str]) -> None:
        nodes.append(start_node(folder / f"node-{len(nodes)}.log", arguments))

    try:
        start(head)
        start([f"--address={address}"])
        yield address, partial(start, [f"--address={address}"])
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)  # the node's own processes, not those of other clusters: no `ray stop`
        for node in nodes:
            node.wait(60)
        shutil.rmtree(SESSIONS, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_address(cluster: tuple[str, Callable[[], None]]) -> str:
    return cluster[0]


@pytest.fixture
def another_node(cluster: tuple[str, Callable[[], None]]) -> None:
    """One more node, for a test that kills one."""
    cluster[1]()


def start_node(log: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start a node that ends with its process; returns when it is up."""
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=16", "--num-gpus=1",
        "--object-store-memory=300000000", *arguments,
    ]  # fmt: skip
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with log.open("wb") as file:
            node = subprocess.Popen(command, env={**os.environ, **_ENVIRONMENT}, stdout=file, stderr=subprocess.STDOUT)
        while node.poll() is None and time.monotonic() < end:
            if b"Ray runtime started" in log.read_bytes():
                return node
            time.sleep(0.2)
        node.kill()  # Ray gives up after 30 seconds, a limit that cannot be set: once more
    pytest.fail(f"a Ray node did not start: {log.read_text()}")


@pytest.fixture(scope="session")
def train(ray_address: str) -> Train:
    """Runs `agentfly train` on the cluster, and returns the run directory; the output is written to FOLDER.log."""

    def run(folder: Path, *arguments: str, recipe: str = str(RECIPE), succeeds: bool = True) -> RunDirectory:
        start = ["--resume", str(folder)] if (folder / "config.json").exists() else [recipe, "--run", str(folder)]
        on = [] if start[0] == "--resume" else ["--on", "verl", "nodes=2", "gpus=1", "workers=1"]
        command = [sys.executable, "-m", "agentfly.cli", "train", *start, *on, *arguments]
        environment = cluster_environment(ray_address)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        folder.with_suffix(".log").write_text(done.stdout + done.stderr)
        assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
        return RunDirectory(folder)

    return run


def cluster_environment(address: str) -> dict[str, str]:
    """Environment variables of a process that trains on the cluster."""
    return {**os.environ, **_ENVIRONMENT, "RAY_ADDRESS": address}


def read_metrics(run: RunDirectory) -> list[dict[str, Any]]:
    """The lines of the metrics file, without figures that depend on the clock or the machine."""
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    timed = ("time/", "throughput/", "verl/", "chain/seconds", "environments/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]
