"""Loggers of a training run: console, TensorBoard, Weights & Biases. The JSONL files are always written."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from agentfly.errors import ConfigError, describe
from agentfly.extras import install_command
from agentfly.runs.console import MAX_IMAGES, ConsoleLogger
from agentfly.runs.directory import RunDirectory
from agentfly.runs.files import write_atomic
from agentfly.runs.record import Progress, StepRecord
from agentfly.runs.thumbnails import try_open_image

if TYPE_CHECKING:
    import wandb
    from tensorboardX import SummaryWriter

_LOG = logging.getLogger(__name__)


class RunLogger(Protocol):
    """Receives the progress and the steps of a run."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Called when the run starts or resumes."""

    def progress(self, progress: Progress) -> None:
        """Called on progress within a step."""

    def step(self, record: StepRecord) -> None:
        """Called after every step."""

    def close(self) -> None:
        """Called when the run ends, successfully or not. May be called twice."""


class RunLoggers:
    """Several loggers as one. A logger that fails during the run is reported and removed; the run continues."""

    def __init__(self, loggers: Mapping[str, RunLogger]) -> None:
        self._loggers = dict(loggers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loggers)

    def start(self, config: Mapping[str, Any]) -> None:
        """Start all loggers; if one cannot start, close all of them and raise."""
        try:
            for logger in self._loggers.values():
                logger.start(config)
        except BaseException:
            self.close()
            raise

    def progress(self, progress: Progress) -> None:
        """Pass progress within a step to every logger."""
        self._call_each(lambda logger: logger.progress(progress))

    def step(self, record: StepRecord) -> None:
        """Pass the record of a step to every logger."""
        self._call_each(lambda logger: logger.step(record))

    def close(self) -> None:
        """Close every logger."""
        self._call_each(lambda logger: logger.close())
        self._loggers = {}

    def _call_each(self, call: Callable[[RunLogger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                call(logger)
            except Exception as error:
                del self._loggers[name]
                _LOG.warning("logger %r failed and is removed: %s", name, describe(error))
                try:
                    logger.close()
                except Exception as close_error:
                    _LOG.warning("logger %r could not be closed either: %s", name, describe(close_error))


class TensorBoardLogger(RunLogger):
    """Writes metrics as scalars and alarms as text to `RUN/tensorboard`, one point per step."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter  # imports torch if it is installed

        done = [record.step for record in self._directory.records()]
        # Hide what an earlier process wrote after the step from which the run resumes.
        purge = done[-1] + 1 if done else None
        self._writer = SummaryWriter(str(self._directory.path / "tensorboard"), purge_step=purge, flush_secs=10)

    def step(self, record: StepRecord) -> None:
        if self._writer is None:
            return
        for name, value in record.flat().items():
            self._writer.add_scalar(name, value, record.step)
        for alarm in record.alarms:
            chains = f" (chains {', '.join(alarm.chains)})" if alarm.chains else ""
            self._writer.add_text(f"alarm/{alarm.kind}", alarm.message + chains, record.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbLogger(RunLogger):
    """Logs to one W&B run per run directory, also after a resume.

    With `WANDB_MODE=offline` the data stays in the run directory for `wandb sync`.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._run: wandb.Run | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        import wandb

        path = self._directory.path
        id_file = path / "wandb.id"
        run_id = id_file.read_text() if id_file.is_file() else uuid.uuid4().hex[:8]
        write_atomic(id_file, run_id.encode())
        settings = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(
                project="agentfly",
                name=path.resolve().name,
                id=run_id,
                resume="allow",
                dir=str(path),
                config=dict(config),
                settings=settings,
            )
        except Exception as error:
            raise ConfigError(
                f"Weights & Biases could not be started ({describe(error)}); `wandb login` first, or set "
                "WANDB_MODE=offline, or remove 'wandb' from the loggers"
            ) from error
        # W&B's own step counter cannot decrease, but a resumed run goes back to its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def step(self, record: StepRecord) -> None:
        if self._run is not None:
            alarms = {f"alarm/{alarm.kind}": 1 for alarm in record.alarms}
            images = self._eval_images(record.step) if record.eval is not None else {}
            self._run.log({"step": record.step, **record.flat(), **alarms, **images})

    def _eval_images(self, step: int) -> dict[str, Any]:
        """The last image of one evaluation chain per task, with question, answer and reward; empty without images."""
        if not self._directory.images.is_dir():
            return {}
        import wandb

        shown: dict[int, Any] = {}
        for stored in self._directory.trajectories(step, held_out=True):
            chain = stored.trajectory
            images = [image for message in chain.messages for image in message.images]
            pixels = try_open_image(images[-1]) if images and chain.group not in shown else None
            if pixels is not None and len(shown) < MAX_IMAGES:
                reward = "" if chain.reward is None else f", reward {chain.reward:g}"
                caption = f"{chain.task.question[:200]} → {chain.prediction[:200]}{reward}"
                shown[chain.group] = wandb.Image(pixels, caption=caption)
        return {"eval/images": list(shown.values())} if shown else {}

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def open_loggers(names: Iterable[str], directory: RunDirectory) -> RunLoggers:
    """Create the loggers by name, not started yet. Raises ConfigError for one that is unknown or not installed."""
    # The console starts last: other loggers may prompt the user first.
    ordered = sorted(validate_loggers(names), key=lambda name: name == "console")
    return RunLoggers({name: _LOGGERS[name][1](directory) for name in ordered})


def validate_loggers(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names as a tuple. Raises ConfigError for a logger that is unknown or not installed."""
    listed = (names,) if isinstance(names, str) else tuple(names)
    for name in listed:
        if name not in _LOGGERS:
            close = difflib.get_close_matches(str(name), _LOGGERS, 1)
            suggestion = f", did you mean {close[0]!r}?" if close else ";"
            available = ", ".join(_LOGGERS)
            raise ConfigError(
                f"there is no logger {name!r}{suggestion} there are {available}; metrics.jsonl is always written"
            )
        package = _LOGGERS[name][0]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"logger {name!r} needs {package}, which is not installed: {install_command(name)}")
    return listed


_LOGGERS: dict[str, tuple[str, Callable[[RunDirectory], RunLogger]]] = {
    "console": ("rich", ConsoleLogger),
    "tensorboard": ("tensorboardX", TensorBoardLogger),
    "wandb": ("wandb", WandbLogger),
}
"""The package that each logger needs (imported when it starts) and its class."""
