"""What a chain is run with: an agent, and the options of a run as users write them, converted to ChainSettings."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypedDict

from pydantic import StrictInt

from agentfly.backends.base import Backend, Request
from agentfly.data.tasks import MAX_ITERATED_TASKS
from agentfly.errors import ConfigError
from agentfly.rollout.events import Observer
from agentfly.rollout.history import Branching, Folding, StepHistory
from agentfly.rollout.limits import ChainLimits, FailurePolicy, LoopControl
from agentfly.scoring import Scorer
from agentfly.templates.template import Template
from agentfly.tooling import Toolbox, ToolResult
from agentfly.types import Completion, Message, Reply, Sampling, Task, ToolCall
from agentfly.validation import validate


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

    async def sample(
        self, request: Request, messages: Sequence[Message], replace_history: Callable[[Sequence[Message]], Request]
    ) -> tuple[Request, Completion]:
        """Sample one turn; returns the request that was sampled, too: the agent may replace the history."""

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

    def describe_limits(self) -> str:
        """The limits of a chain's length in words."""
        tokens = self.sampling.max_tokens
        turns = f"{self.limits.max_turns} turn{'' if self.limits.max_turns == 1 else 's'}"
        return f"at most {turns} of {'any number of' if tokens is None else tokens} tokens"


class RunOptions(TypedDict, total=False):
    """Options of a run besides tasks, max_turns and num_chains."""

    sampling: Sampling | Mapping[str, Any]
    """Temperature, tokens per turn (1,024 by default) and so on."""
    max_chain_tokens: int | None
    """Maximum sampled tokens per chain; None: no limit."""
    context_length: int | None
    """Tokens of prompt and reply together; the backend's own limit applies as well."""
    chain_seconds: float | None
    """Maximum wall-clock seconds per chain; None: no limit."""
    max_calls_per_turn: int
    """Maximum tool calls per reply; the model is shown an error when a reply has more."""
    max_concurrent_chains: int | None
    """None: all chains run concurrently."""
    failures: FailurePolicy | Mapping[str, Any]
    """Retries, and how training treats failed chains."""
    strategy: Literal["chain", "step"]
    """`chain`: one growing history. `step`: each step is its own segment with a bounded history."""
    folding: Folding
    """How the history is shortened; absent: it is not."""
    branching: Branching | Mapping[str, Any] | None
    """Tree sampling: `{"turn": 1, "branches": 4}` continues each chain four times after its first turn; None: not."""
    seed: int | None
    """The same seed repeats a run if the backend is deterministic; None: a random seed."""
    observer: Observer
    """Called with every event."""


def parse_tasks(messages: Any) -> list[Task]:
    """Convert one question, conversation or row, or a list of them, to tasks."""
    if isinstance(messages, str | Mapping | Task):
        return [Task.of(messages, "0")]
    if not isinstance(messages, Iterable):
        raise ConfigError(
            f"nothing to run in {messages!r:.80} ({type(messages).__name__}); "
            "give a question, messages, or a list of rows"
        )
    # An endless generator would fill the memory; what has a length is in memory or ends.
    rows = list(messages if isinstance(messages, Sized) else itertools.islice(messages, MAX_ITERATED_TASKS + 1))
    if len(rows) > MAX_ITERATED_TASKS and not isinstance(messages, Sized):
        raise ConfigError(
            f"the tasks are a {type(messages).__name__} that goes on after {MAX_ITERATED_TASKS:,} of them; if it ends, "
            "pass list(…), else the number of tasks to use: itertools.islice(…, 1000)"
        )
    if not rows:
        raise ConfigError("there is nothing to run: no messages were given")
    if all(isinstance(m, Message) or (isinstance(m, Mapping) and "role" in m and not _ROW & set(m)) for m in rows):
        return [Task.of(rows, "0")]
    return [Task.of(row, "" if isinstance(row, Mapping) and "id" in row else str(i)) for i, row in enumerate(rows)]


_ROW = {"question", "messages"}
"""Keys of a row that a message does not have."""


def parse_settings(max_turns: int, options: RunOptions) -> ChainSettings:
    """Validate the options of a run; an unknown option or one without effect is a ConfigError."""
    for name in options:
        if name not in RunOptions.__annotations__:
            if meant := find_option(name):
                raise ConfigError(f"a run has no option {name!r}; write {meant}")
            close = difflib.get_close_matches(name, [*RunOptions.__annotations__, "max_turns", "num_chains"], 3)
            raise ConfigError(f"a run has no option {name!r}; close ones: {', '.join(close) or 'none'}")
    sampling = parse_sampling(options.get("sampling"))
    seed = options.get("seed")
    if sampling.seed is not None:
        if seed is not None:
            raise ConfigError("seed= and the sampling's seed are two names for one thing; give one")
        seed = sampling.seed
    validate("seed", seed, StrictInt | None, " or None")
    observer = options.get("observer")
    if observer is not None and not callable(observer):
        raise ConfigError(f"observer must be a function of an event, not {observer!r}")
    strategy = options.get("strategy", "chain")
    folding = options.get("folding")
    if strategy not in ("chain", "step"):
        raise ConfigError(f"unknown rollout strategy {strategy!r}; strategies are 'chain' and 'step'")
    if isinstance(folding, type) or (
        folding is not None and not (hasattr(folding, "summary_request") and hasattr(folding, "fold"))
    ):
        raise ConfigError(f"{folding!r} is not a folding rule; agentfly.rollout has some, such as Summarize")
    if strategy == "step" and folding is not None and not isinstance(folding, StepHistory):
        raise ConfigError(f"strategy='step' has its own folding rule, so folding={folding!r} has no effect; remove one")
    return ChainSettings(
        sampling=sampling,
        limits=ChainLimits(max_turns, **{name: options[name] for name in _LIMITS if name in options}),  # type: ignore[literal-required]
        failures=FailurePolicy.of(options.get("failures")),
        folding=folding or StepHistory() if strategy == "step" else folding,
        branching=Branching.of(options.get("branching"), max_turns),
        seed=seed,
        observer=observer,
    )


def find_option(name: str) -> str:
    """The option of a run, as it is written, for a name of an option, of a sampling field or of another library; empty
    if there is none."""
    if name in ("max_turns", "num_chains", *RunOptions.__annotations__):
        return f"{name}=…"
    return f"sampling={{{name!r}: …}}" if name in _SAMPLING else _FOREIGN_OPTIONS.get(name, "")


_FOREIGN_OPTIONS = {
    **dict.fromkeys(("generation_config", "generation_kwargs", "sampling_params"), "sampling={…}"),
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_length", "max_response_length", "response_length"),
        "sampling={'max_tokens': …}",
    ),
    **dict.fromkeys(("max_prompt_length", "prompt_length", "max_model_len", "max_length"), "context_length=…"),
    **dict.fromkeys(("n", "num_generations", "num_return_sequences"), "num_chains=…"),
    "do_sample": "sampling={'temperature': …} (0 is greedy)",
}
"""Names of the original AgentFly, transformers, vLLM, TRL and verl → the option of a run."""
_LIMITS = ("max_chain_tokens", "context_length", "chain_seconds", "max_calls_per_turn")
_SAMPLING = [field.name for field in fields(Sampling)]


def parse_sampling(sampling: Sampling | Mapping[str, Any] | None) -> Sampling:
    """Convert a mapping of sampling fields; an unknown field is a ConfigError that names it."""
    if sampling is None or isinstance(sampling, Sampling):
        return sampling or Sampling()
    if not isinstance(sampling, Mapping):
        raise ConfigError(f"sampling must be a Sampling or a mapping of its fields, not {sampling!r:.80}")
    for name in sampling:
        if name not in _SAMPLING:
            close = difflib.get_close_matches(name, _SAMPLING, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"sampling has no field {name!r}; it has {', '.join(_SAMPLING)}.{hint}")
    return Sampling(**sampling)
