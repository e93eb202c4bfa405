"""Every prebuilt world keeps the contract, as far as this machine can run it."""

from __future__ import annotations

from typing import Any

import pytest

from agentfly import environments
from agentfly.conformance import check_environment
from agentfly.environment import Environment
from agentfly.environments import ModelServer
from agentfly.errors import ConfigError
from tests.backends.openai_server import OpenAIServer, says

TASKS: dict[str, list[dict[str, Any]]] = {
    "CodeInterpreter": [
        {"question": "Add up the numbers.", "files": {"numbers.txt": "1 2 3"}},
        {"question": "Count the words.", "files": {"words.txt": "one two"}},
    ],
}
"""For those that draw none of their own."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", environments.__all__)
def test_it_keeps_the_contract(name: str, openai_server: OpenAIServer) -> None:
    kind: type[Environment] = getattr(environments, name)
    openai_server.answers("/models", says({"data": [{"id": "tiny"}]}))
    if issubclass(kind, ModelServer):
        kind = type(name, (kind,), {"base_url": openai_server.url})
    try:
        report = check_environment(kind, tasks=TASKS.get(name, ()), instances=2, seconds=120)
    except ConfigError as missing:
        pytest.skip(str(missing))
    print(report)
    assert report.passed, report
