"""Every prebuilt environment that this machine can run keeps the contract."""

from __future__ import annotations

from typing import Any

import pytest

from agentfly import environments
from agentfly.conformance import check_environment
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
        found = ["find-living-thing", "find-non-living-thing"]
        return super().draw_tasks(split, count, seed=seed, tasks=found)


SLOW = dict.fromkeys(("MiniWoB", "VisualWebShop"), browser_full)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in environments.__all__])
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
