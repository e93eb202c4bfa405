"""Where a run is watched, by choice: the console, TensorBoard, Weights & Biases. Its files are written in any case."""

from __future__ import annotations

import difflib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from agentfly.errors import ConfigError, describe
from agentfly.runs.directory import RunDirectory
from agentfly.runs.record import Progress, StepRecord
from agentfly.runs.sinks.console import ConsoleSink
from agentfly.runs.sinks.tensorboard import TensorBoardSink
from agentfly.runs.sinks.wandb import WandbSink

_LOG = logging.getLogger(__name__)


class Sink(Protocol):
    """Somebody who watches a run."""

    def start(self, config: Mapping[str, Any]) -> None:
        """The run begins, or goes on."""

    def progress(self, progress: Progress) -> None:
        """Something happened within a step."""

    def step(self, record: StepRecord) -> None:
        """A step is over."""

    def close(self) -> None:
        """The run is over, well or not. May be called twice."""


class Sinks:
    """Several sinks as one. One that fails while the run goes on is logged and let go; the run goes on without it."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sinks)

    def start(self, config: Mapping[str, Any]) -> None:
        """Start all of them, or none: one that cannot start is an error."""
        try:
            for sink in self._sinks.values():
                sink.start(config)
        except BaseException:
            self.close()
            raise

    def progress(self, progress: Progress) -> None:
        self._each(lambda sink: sink.progress(progress))

    def step(self, record: StepRecord) -> None:
        self._each(lambda sink: sink.step(record))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = {}

    def _each(self, act: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                act(sink)
            except Exception as error:
                del self._sinks[name]
                _LOG.warning("sink %r failed and is let go: %s", name, describe(error))
                self._let_go(sink)

    @staticmethod
    def _let_go(sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:
            _LOG.warning("it could not even be closed: %s", describe(error))


def open_sinks(names: Iterable[str], directory: RunDirectory) -> Sinks:
    """The sinks by name, not started yet; what is unknown or not installed is refused."""
    listed = sorted(checked_sinks(names), key=lambda name: name == "console")  # others may have a question to ask first
    return Sinks({name: _KINDS[name][1](directory) for name in listed})


def checked_sinks(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names of sinks that can be opened here; another is refused."""
    listed = (names,) if isinstance(names, str) else tuple(names)
    for name in listed:
        _refuse_unknown(name)
    return listed


def _refuse_unknown(name: str) -> None:
    if name not in _KINDS:
        close = difflib.get_close_matches(str(name), _KINDS, 1)
        meant = f", did you mean {close[0]!r}?" if close else ";"
        raise ConfigError(
            f"there is no sink {name!r}{meant} there are {', '.join(_KINDS)}; metrics.jsonl is always written"
        )
    package = _KINDS[name][0]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"sink {name!r} needs {package}, which is not installed: pip install 'agentfly[{name}]'")


_KINDS: dict[str, tuple[str, Callable[[RunDirectory], Sink]]] = {
    "console": ("rich", ConsoleSink),
    "tensorboard": ("tensorboardX", TensorBoardSink),
    "wandb": ("wandb", WandbSink),
}
"""What each sink needs, imported when it starts, and what opens it."""
