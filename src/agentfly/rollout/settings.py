"""What a chain is run with: an agent, and the settings of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentfly.backends.base import Backend, Request
from agentfly.rollout.branching import Branching
from agentfly.rollout.events import Observer
from agentfly.rollout.history import Folding
from agentfly.rollout.limits import ChainLimits, FailurePolicy, LoopControl
from agentfly.scoring import Scorer
from agentfly.templates.template import Template
from agentfly.tooling import Toolbox, ToolResult
from agentfly.types import Completion, Message, Reply, Sampling, Task, ToolCall


class ChainAgent(Protocol):
    """What a chain needs of an agent."""

    backend: Backend
    template: Template | None
    """None if the server renders the prompt."""
    toolbox: Toolbox
    scorer: Scorer | None
    control: LoopControl

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools in OpenAI function format."""

    def initial_messages(self, task: Task) -> Sequence[Message]:
        """The conversation a chain starts with."""

    async def generate_async(self, request: Request) -> Completion:
        """Sample one turn."""

    def read(self, request: Request, completion: Completion) -> Reply:
        """Parse a sampled turn."""

    def history_message(self, message: Message) -> Message:
        """The message of a turn as it is rendered when the history is rewritten."""

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> Sequence[Message]:
        """The messages that show tool results to the model."""


@dataclass(frozen=True, slots=True)
class ChainSettings:
    """Settings shared by the chains of a run."""

    sampling: Sampling = field(default_factory=Sampling)
    limits: ChainLimits = field(default_factory=ChainLimits)
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    folding: Folding | None = None
    """None: the history only grows."""
    branching: Branching | None = None
    """None: every chain begins with its task."""
    seed: int | None = None
    """Seeds the sampling of each chain and turn independently of scheduling order; None uses a random seed."""
    observer: Observer | None = None
    priority: int = 0
    """Backends with a queue may prefer chains with low values."""
