"""Fakes of the backend, the one interface that tests fake; and helpers that tests of chains share."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from agentfly.agents import HFAgent
from agentfly.backends.base import Backend, PromptFormat, Request
from agentfly.backends.scripted import Script, ScriptedBackend
from agentfly.trajectory import Trajectory
from agentfly.types import Completion, FinishReason, Message

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""One red pixel, in base64."""


class Recording(ScriptedBackend):
    """A scripted backend that keeps every request it was sent."""

    def __init__(self, script: Script, **settings: Any) -> None:
        super().__init__(script, **settings)
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        return await super().generate(request)


class Computed(Backend):
    """A backend whose completions a function makes, token by token; it keeps every request and completion."""

    def __init__(self, complete: Callable[[Request], Completion], context_length: int | None = None) -> None:
        self._complete, self.context_length = complete, context_length
        self.requests: list[Request] = []
        self.completions: list[Completion] = []

    @property
    def weight_version(self) -> int:
        return 0

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        self.completions.append(self._complete(request))
        return self.completions[-1]


class Server(Computed):
    """A backend that is sent messages and renders for itself."""

    prompt_format = PromptFormat.MESSAGES


def complete_with(*completions: Completion | str) -> Callable[[Request], Completion]:
    """Completions by turn; text stands for a server's message without token ids."""

    def complete(request: Request) -> Completion:
        it = completions[request.turn]
        return (
            Completion((), (), (), FinishReason.STOP, message=Message("assistant", it)) if isinstance(it, str) else it
        )

    return complete


def completion_of(ids: Sequence[int], finish: FinishReason = FinishReason.STOP, **fields: Any) -> Completion:
    return Completion(list(ids), [-0.5] * len(ids), [0] * len(ids), finish, **fields)


def call(name: str, /, **arguments: Any) -> str:
    """A call as a ChatML model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def byte_agent(script: Script | Backend, **settings: Any) -> HFAgent:
    """A function-calling agent over the tokenizer that needs no files."""
    backend = script if isinstance(script, Backend) else ScriptedBackend(script)
    return HFAgent("bytes", template="chatml", backend=backend, **settings)


def texts(agent: HFAgent, trajectory: Trajectory, segment: int = 0) -> list[tuple[str, str]]:
    """Who wrote what in a segment."""
    assert agent.template is not None
    decode = agent.template.codec.decode
    return [(span.author.value, decode(span.ids.tolist())) for span in trajectory.segments[segment].spans]


def random_from(*parts: object) -> random.Random:
    return random.Random(repr(parts))
