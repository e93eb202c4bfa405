"""The backend contract: token ids in, token ids and log-probabilities out.

A backend knows requests, not chains; any number of requests may run at once. Cancelling the task that awaits `generate`
aborts the request. The exceptions a backend raises on purpose are BackendFault, ConfigError and NonFiniteError.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentfly.errors import BackendFault, ConfigError
from agentfly.templates.template import Template
from agentfly.types import Completion, Image, Message, Sampling

Tokens = npt.NDArray[np.int32]
CLOSED = "the engine is closed"
"""Message of the BackendFault for requests that a backend has not finished when it closes, and for later ones."""


class PromptFormat(enum.Enum):
    """What a backend takes as the prompt."""

    TOKENS = "tokens"
    """Token ids, rendered by our template."""
    MESSAGES = "messages"
    """Messages, which the server renders. Trainable only if the server returns the ids of the prompt and the reply."""


class OnUpdate(enum.Enum):
    """What happens to running requests when the weights change."""

    CONTINUE = "continue"
    """They continue with the new weights; their keys and values are recomputed."""
    FINISH = "finish"
    """The update waits until they have finished; requests that arrive meanwhile are queued."""
    ABORT = "abort"
    """They end with the tokens sampled so far."""

    @classmethod
    def of(cls, value: str | OnUpdate) -> OnUpdate:
        """Parse a setting; raises ConfigError with the possible values."""
        try:
            return cls(value)
        except ValueError:
            raise ConfigError(f"on_update is one of {', '.join(x.value for x in cls)}, not {value!r}") from None


@dataclass(slots=True)  # not frozen, which would triple the time to create one in every turn
class Request:
    """One turn to sample."""

    prompt: Sequence[int]
    """All token ids of the segment so far; empty for PromptFormat.MESSAGES."""
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the turn; the sampled one is part of the completion."""
    messages: tuple[Message, ...] = ()
    """The prompt as messages; empty for PromptFormat.TOKENS."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas in OpenAI format; empty for PromptFormat.TOKENS."""
    images: tuple[Image, ...] = ()
    """The images of the prompt, in order."""
    image_positions: Sequence[int] | Tokens = ()
    """Positions of the tokens that the features of the images replace, in order."""
    chain: str = ""
    """Id of the chain; a prefix cache uses it to follow the chain from turn to turn."""
    turn: int = 0
    """Number of turns the chain has completed; a backend with a queue may prefer chains with few."""
    priority: int = 0
    """A backend with a queue may prefer requests with low values."""
    on_tokens: Callable[[Sequence[int]], None] | None = None
    """Called with the new token ids whenever some have been sampled."""
    on_text: Callable[[str], None] | None = None
    """Called with the whole text of the turn so far; only for PromptFormat.MESSAGES."""


class Backend(ABC):
    """Samples turns."""

    prompt_format: PromptFormat = PromptFormat.TOKENS
    context_length: int | None = None
    """Maximum number of tokens of prompt and completion together; None if unknown."""
    supports_images: bool = False
    """Whether requests may have images. If not, images are replaced by a note before they enter the prompt."""
    can_sleep: bool = False
    """Whether `sleep` frees GPU memory, which the learner then has for its update."""
    members: Sequence[Backend] = ()
    """The backends that a fleet consists of; empty for a single one."""

    @classmethod
    def share_gpu(cls, settings: Mapping[str, Any], model: Any, ranks: int) -> dict[str, Any]:
        """Complete the settings of a backend that shares its GPU with a learner of `model` in `ranks` processes."""
        return dict(settings)

    @property
    def weights(self) -> Mapping[str, Any]:
        """The weights it samples from, by name, if they are in this process: a learner that trains these tensors has
        nothing to send. Empty if they are in another process."""
        return {}

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """The version of the weights that a request started now would be sampled with."""

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Sample one turn."""

    def attach(self, template: Template) -> None:  # noqa: B027
        """Receive the template that the agent prompts with. Most backends do not need it."""

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Load new weights, given by name, as `version`; return when every later request is sampled with them."""
        raise ConfigError(f"{type(self).__name__} cannot take new weights, so nothing can be trained through it")

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free GPU memory until the next `update_weights`, which brings all weights unless they are kept."""
        raise ConfigError(f"{type(self).__name__} cannot free its GPU memory")

    async def close(self) -> None:  # noqa: B027
        """Release all resources. May be called twice."""


def validate_prompt(prompt: Sequence[int], vocab_size: int, context_length: int) -> Tokens:
    """Return the prompt as an array. Raises BackendFault if the model cannot take it.

    A token id outside the embedding would crash the process on a GPU.
    """
    if not len(prompt):
        raise BackendFault("empty prompt: it must have at least one token")
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BackendFault(f"a prompt is a sequence of token ids, not of {type(prompt[0]).__name__}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        token_id = next(token for token in prompt if not 0 <= token < vocab_size)
        raise BackendFault(
            f"the prompt has the token {token_id}, the model knows 0 to {vocab_size - 1}: "
            "is this the model's own tokenizer?"
        )
    if len(ids) >= context_length:
        raise BackendFault(f"the prompt has {len(ids)} tokens, the context {context_length}: no room left")
    return ids.astype(np.int32)
