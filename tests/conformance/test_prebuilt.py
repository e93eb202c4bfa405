"""Every prebuilt environment that this machine can run keeps the contract."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly import environments
from agentfly.conformance import check_environment, class_properties
from agentfly.environment import Environment
from agentfly.environments import ModelServer, OpenEnvEnvironment, ScienceWorld
from agentfly.environments.scienceworld import jvm
from agentfly.errors import ConfigError
from tests.backends.openai_server import OpenAIServer, says
from tests.environments.browsers import browser_full

TASKS: dict[str, list[dict[str, Any]]] = {
    "CodeInterpreter": [
        {"question": "Add up the numbers.", "files": {"numbers.txt": "1 2 3"}},
        {"question": "Count the words.", "files": {"words.txt": "one two"}},
    ],
}
"""Tasks of environments that draw none."""


class Findable(ScienceWorld):
    """Short deterministic tasks: in others, the simulator itself is random."""

    deterministic = True

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0, **_: Any) -> list[dict[str, Any]]:
        task_names = ["find-living-thing", "find-non-living-thing"]
        return super().draw_tasks(split, count, seed=seed, tasks=task_names)


DRAW = f"""
import os, sys
import agentfly.environments.lookup
for line in sys.stdin:
    if not os.fork():
        sys.argv[1:] = [line]
        exec({class_properties._NEW_PROCESS!r}, {{}})
        sys.stdout.flush()
        os._exit(0)
    print("status", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def drawing_process() -> Iterator[None]:
    """One new interpreter that draws the tasks of all environments: it imports what they share once."""
    running: list[subprocess.Popen[str]] = []

    def draw(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        if not running:
            line = [sys.executable, "-c", DRAW]
            running.append(subprocess.Popen(line, stdin=-1, stdout=-1, stderr=subprocess.STDOUT, text=True, env=env))
        (process,) = running
        assert process.stdin is not None
        assert process.stdout is not None
        print(command[-1], file=process.stdin, flush=True)
        printed = [process.stdout.readline()]
        while not printed[-1].startswith("status "):
            assert printed[-1], f"the process has ended: {printed}"
            printed.append(process.stdout.readline())
        text = "".join(printed[:-1])
        return subprocess.CompletedProcess(command, int(printed[-1].split()[1]), stdout=text, stderr=text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(class_properties, "subprocess", SimpleNamespace(run=draw))
        yield
    for process in running:
        process.communicate()


SLOW = dict.fromkeys(("MiniWoB", "VisualWebShop"), browser_full)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("drawing_process")
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in dir(environments)])
def test_prebuilt_environment_keeps_the_contract(
    name: str, openai_server: OpenAIServer, request: pytest.FixtureRequest
) -> None:
    env_class: type[Environment] = getattr(environments, name)
    openai_server.answers("/models", says({"data": [{"id": "tiny"}]}))
    if issubclass(env_class, ModelServer):
        env_class = type(name, (env_class,), {"base_url": openai_server.url})
    if issubclass(env_class, ScienceWorld):
        env_class = Findable
        held = jvm.reserve()  # one Java process for all properties: it ends with its last slot
        request.addfinalizer(lambda: jvm.release(held))
    if issubclass(env_class, OpenEnvEnvironment):
        pytest.skip("OpenEnvEnvironment is a client: its own tests run it against a server")
    try:
        report = check_environment(env_class, tasks=TASKS.get(name, ()), instances=2, seconds=120)
    except ConfigError as missing:
        pytest.skip(str(missing))
    print(report)
    assert report.ok, report
