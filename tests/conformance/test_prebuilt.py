"""Every prebuilt world keeps the contract, as far as this machine can run it."""

from __future__ import annotations

from typing import Any

import pytest

from agentfly import environments
from agentfly.conformance import check_environment
from agentfly.environment import Environment
from agentfly.environments import ModelServer, OpenEnvWorld, ScienceWorld
from agentfly.errors import ConfigError
from tests.backends.openai_server import OpenAIServer, says

TASKS: dict[str, list[dict[str, Any]]] = {
    "CodeInterpreter": [
        {"question": "Add up the numbers.", "files": {"numbers.txt": "1 2 3"}},
        {"question": "Count the words.", "files": {"words.txt": "one two"}},
    ],
}
"""For those that draw none of their own."""


class Findable(ScienceWorld):
    """Tasks that are short and always go alike: in others, the simulator itself is left to chance."""

    deterministic = True

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0, **_: Any) -> list[dict[str, Any]]:
        found = ["find-living-thing", "find-non-living-thing"]
        return super().draw_tasks(split, count, seed=seed, tasks=found)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", environments.__all__)
def test_it_keeps_the_contract(name: str, openai_server: OpenAIServer) -> None:
    kind: type[Environment] = getattr(environments, name)
    openai_server.answers("/models", says({"data": [{"id": "tiny"}]}))
    if issubclass(kind, ModelServer):
        kind = type(name, (kind,), {"base_url": openai_server.url})
    if issubclass(kind, ScienceWorld):
        kind = Findable
    if issubclass(kind, OpenEnvWorld):
        pytest.skip("OpenEnvWorld is a client: its own tests run it against a server")
    try:
        report = check_environment(kind, tasks=TASKS.get(name, ()), instances=2, seconds=120)
    except ConfigError as missing:
        pytest.skip(str(missing))
    print(report)
    assert report.passed, report
