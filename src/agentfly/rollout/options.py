"""What a run may be told, in the forms people write it, and what the rollout makes of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypedDict

from agentfly.errors import ConfigError
from agentfly.rollout.chain import Settings
from agentfly.rollout.events import Observer
from agentfly.rollout.folding import Folding, Steps
from agentfly.rollout.policy import FailurePolicy, Limits
from agentfly.types import Message, Sampling, Task


class RunOptions(TypedDict, total=False):
    """What a run may be told beside the tasks, the turns and the chains."""

    sampling: Sampling | Mapping[str, Any]
    """Temperature, tokens a turn and so on."""
    max_chain_tokens: int | None
    """Sampled tokens of a whole chain; None: no limit."""
    context_length: int | None
    """Tokens of prompt and reply together; the backend's own limit holds besides."""
    chain_seconds: float | None
    """Wall-clock seconds of a chain; None: no limit."""
    max_calls_per_turn: int
    """Tool calls of one reply that are run; the model is told of the limit when a reply has more."""
    max_concurrent_chains: int | None
    """None: all at once."""
    failures: FailurePolicy | Mapping[str, Any]
    """What becomes of a chain that failed."""
    strategy: Literal["chain", "step"]
    """One growing history, or each step its own segment with a bounded history."""
    folding: Folding
    """How the history is shortened; absent: it only grows."""
    seed: int | None
    """The same seed repeats a run, as far as the backend repeats itself; None draws anew."""
    observer: Observer
    """Called with every event."""


def tasks_of(messages: Any) -> list[Task]:
    """The tasks in whatever was given: one question, conversation or row, or a list of them."""
    if isinstance(messages, str | Mapping | Task):
        return [Task.of(messages, "0")]
    if not isinstance(messages, Iterable):
        kind = type(messages).__name__
        raise ConfigError(f"{messages!r:.80} ({kind}) is nothing to run; give a question, messages, or a list of rows")
    given = list(messages)
    if not given:
        raise ConfigError("there is nothing to run: no messages were given")
    if all(isinstance(m, Message) or (isinstance(m, Mapping) and "role" in m and not _ROW & set(m)) for m in given):
        return [Task.of(given, "0")]
    return [Task.of(each, "" if isinstance(each, Mapping) and "id" in each else str(i)) for i, each in enumerate(given)]


_ROW = {"question", "messages"}
"""What a row has and a message has not."""


def settings_of(max_turns: int, options: RunOptions) -> Settings:
    """The settings of a run; what does not exist or has no effect is refused by name."""
    for name in options:
        if name not in RunOptions.__annotations__:
            raise ConfigError(_no_such_option(name))
    sampling, seed = sampling_of(options.get("sampling")), options.get("seed")
    if sampling.seed is not None:
        if seed is not None:
            raise ConfigError("seed= and the sampling's seed are two names for one thing; give one")
        seed = sampling.seed
    observer = options.get("observer")
    if not (seed is None or (isinstance(seed, int) and not isinstance(seed, bool))):
        raise ConfigError(f"seed is a whole number or None, not {seed!r}")
    if observer is not None and not callable(observer):
        raise ConfigError(f"observer is called with every event, and {observer!r} cannot be called")
    return Settings(
        sampling=sampling,
        limits=Limits(max_turns, **{name: options[name] for name in _LIMITS if name in options}),  # type: ignore[literal-required]
        failures=FailurePolicy.of(options.get("failures")),
        folding=_folding(options.get("strategy", "chain"), options.get("folding")),
        seed=seed,
        observer=observer,
    )


_LIMITS = ("max_chain_tokens", "context_length", "chain_seconds", "max_calls_per_turn")


def _no_such_option(name: str) -> str:
    if name in _SAMPLING:
        return f"a run has no option {name!r}; write sampling={{{name!r}: …}}"
    close = difflib.get_close_matches(name, [*RunOptions.__annotations__, "max_turns", "num_chains"], 3)
    return f"a run has no option {name!r}; close ones: {', '.join(close) or 'none'}"


_SAMPLING = [field.name for field in fields(Sampling)]


def sampling_of(given: Sampling | Mapping[str, Any] | None) -> Sampling:
    """Sampling, or its fields; one that does not exist is refused by name."""
    if given is None or isinstance(given, Sampling):
        return given or Sampling()
    if not isinstance(given, Mapping):
        raise ConfigError(f"sampling is a Sampling or its fields, not {given!r:.80}")
    for name in given:
        if name not in _SAMPLING:
            close = difflib.get_close_matches(name, _SAMPLING, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"sampling has no field {name!r}; it has {', '.join(_SAMPLING)}.{hint}")
    return Sampling(**given)


def _folding(strategy: str, folding: Folding | None) -> Folding | None:
    if strategy not in ("chain", "step"):
        raise ConfigError(f"there is no rollout strategy {strategy!r}; there are 'chain' and 'step'")
    if isinstance(folding, type) or (
        folding is not None and not (hasattr(folding, "asks") and hasattr(folding, "fold"))
    ):
        raise ConfigError(f"{folding!r} is no folding rule; agentfly.rollout has some, such as Summarise")
    if strategy == "chain":
        return folding
    if folding is not None and not isinstance(folding, Steps):
        raise ConfigError(f"strategy='step' has its own rule of history, so folding={folding!r} does nothing; drop one")
    return folding or Steps()
