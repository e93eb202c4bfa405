"""The backend contract: tokens in, tokens and log-probabilities out.

A backend never sees a chain, only requests; any number may be under way at once. Cancelling the task that awaits
`generate` aborts the request. Everything a backend raises on purpose is a `BackendFault` or a `ConfigError`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.errors import ConfigError
from agentfly.templates.template import Template
from agentfly.types import Completion, Image, Message, Sampling

CLOSED = "the engine is closed"
"""What is said to those who still wait for a backend that was closed, and to those who come after."""


class PromptFormat(enum.Enum):
    """What a backend is prompted with."""

    TOKENS = "tokens"
    """Our template renders; the prompt is the buffer."""
    MESSAGES = "messages"
    """The server renders. Trainable only where the server returns the ids of what it showed and sampled."""


class OnUpdate(enum.Enum):
    """What becomes of turns that are being sampled when the weights change."""

    CONTINUE = "continue"
    """They go on with the weights that came, on a past that is computed anew with them."""
    FINISH = "finish"
    """The weights change when they have ended; turns that were asked for meanwhile wait."""
    ABORT = "abort"
    """They end as they are."""

    @classmethod
    def of(cls, asked: str | OnUpdate) -> OnUpdate:
        """The one of that name."""
        try:
            return cls(asked)
        except ValueError:
            there = ", ".join(each.value for each in cls)
            raise ConfigError(f"on_update is one of {there}, not {asked!r}") from None


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to sample."""

    prompt: Sequence[int]
    """All of the segment so far; empty for a backend that speaks messages."""
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the turn; the one sampled is part of the completion."""
    messages: tuple[Message, ...] = ()
    """The same prompt as messages; empty for a backend that speaks tokens."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas in OpenAI form; empty for a backend that speaks tokens."""
    images: tuple[Image, ...] = ()
    chain: str = ""
    """Requests of one chain share it, so that a cache can follow the chain from turn to turn."""
    turn: int = 0
    """Turns the chain has done; a backend that queues may serve the least advanced chain first."""
    on_tokens: Callable[[Sequence[int]], None] | None = None
    """Called with each stretch of new ids as it is sampled; None: nobody watches."""
    on_text: Callable[[str], None] | None = None
    """Called with all of the turn's text so far, by a backend that speaks messages; None: nobody watches."""


class Backend(ABC):
    """Where tokens come from."""

    prompt_format: PromptFormat = PromptFormat.TOKENS
    context_length: int | None = None
    """Most tokens of prompt and completion together; None: not known."""

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """The version that a request started now would be sampled with."""

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Sample one turn."""

    def attach(self, template: Template) -> None:  # noqa: B027
        """Learn the chat format the agent prompts with. Few backends care: tokens in, tokens out."""

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Take new weights, by name, as `version`; return once every later request is sampled with them."""
        raise ConfigError(f"{type(self).__name__} cannot take new weights, so nothing can be trained through it")

    async def close(self) -> None:  # noqa: B027
        """Release what the backend holds. Safe to call twice."""
