"""Loggers of a training run: console, TensorBoard, Weights & Biases, MLflow, or a class by reference.

The JSONL files are always written. After an evaluation, the last three also get a few of its chains, read from the run
directory.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
import os
import pkgutil
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, cast

from agentfly.errors import ConfigError, describe, install_command
from agentfly.runs.console import ConsoleLogger
from agentfly.runs.directory import RunDirectory
from agentfly.runs.files import write_atomic
from agentfly.runs.record import Progress, StepRecord
from agentfly.runs.thumbnails import try_open_image
from agentfly.segment import Author
from agentfly.trajectory import Trajectory

if TYPE_CHECKING:
    import wandb
    from mlflow import MlflowClient
    from tensorboardX import SummaryWriter

_LOG = logging.getLogger(__name__)
LOGGED_CHAINS = 4
"""Number of chains of an evaluation that loggers get."""
MAX_TEXT = 20_000
"""Maximum number of characters of such a chain."""


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


def sample_chains(directory: RunDirectory, step: int) -> list[Trajectory]:
    """A few chains of the evaluation after a step, of different tasks: from the lowest reward to the highest."""
    stored = [chain.trajectory for chain in directory.trajectories(step, held_out=True)]
    one_per_task = list({chain.group: chain for chain in reversed(stored)}.values())
    ranked = sorted(one_per_task, key=lambda chain: (chain.reward or 0.0, chain.group))
    count = min(LOGGED_CHAINS, len(ranked))
    return [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]


def _clip_parts(chain: Trajectory) -> Iterator[tuple[Author | None, str]]:
    """The author and the text of each part of a chain, up to `MAX_TEXT` characters in all."""
    left = MAX_TEXT
    for author, _, text, _ in chain.parts():
        if left > 0:
            yield author, text[:left]
        left -= len(text)
    if left < 0:
        yield None, f"… ({-left} more characters)"


def format_chain_html(chain: Trajectory) -> str:
    """A chain as HTML, colored by author; everything the model and the tools wrote is escaped."""
    spans = (
        f'<span title="{author.value if author else ""}" style="color: {_HTML_COLORS.get(author, "#64748b")}">'
        f"{escape(text)}</span>"
        for author, text in _clip_parts(chain)
    )
    return f'<pre style="white-space: pre-wrap">{"".join(spans)}</pre>'


def format_chain_markdown(chain: Trajectory) -> str:
    """A chain as Markdown: the author in bold, the text below it as an indented block, in which nothing is markup."""
    parts = []
    for author, text in _clip_parts(chain):
        if not text.strip():
            continue
        block = "\n".join(f"    {line}" for line in text.splitlines())
        parts.append(f"**{author.value}**\n\n{block}" if author else block)
    return "\n\n".join(parts)


_HTML_COLORS: dict[Author | None, str] = {
    Author.TASK: "#0e7490",
    Author.MODEL: "#15803d",
    Author.TOOL: "#a16207",
    Author.USER: "#a21caf",
}


class TensorBoardLogger(RunLogger):
    """Writes metrics as scalars, alarms and a few evaluated chains as text to `RUN/tensorboard`."""

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
        if record.eval is not None:
            for number, chain in enumerate(sample_chains(self._directory, record.step)):
                self._writer.add_text(f"chains/{number}", format_chain_markdown(chain), record.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbLogger(RunLogger):
    """Logs to one W&B run per run directory, also after a resume.

    W&B's own settings apply, such as WANDB_PROJECT, WANDB_ENTITY and WANDB_NAME. With `WANDB_MODE=offline` the data
    stays in the run directory for `wandb sync`.
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
                # wandb reads the environment only once per process.
                entity=os.environ.get("WANDB_ENTITY"),
                project=os.environ.get("WANDB_PROJECT", "agentfly"),
                name=os.environ.get("WANDB_NAME", path.resolve().name),
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
            values: dict[str, Any] = {"step": record.step, **record.flat(), **alarms}
            if record.eval is not None and (chains := sample_chains(self._directory, record.step)):
                import wandb

                # Text, not wandb.Html: media of a table are artifacts, which are not in the run directory when offline.
                rows = [
                    [chain.id, chain.task.question, chain.reward, chain.stop.value, format_chain_markdown(chain)]
                    for chain in chains
                ]
                values["chains"] = wandb.Table(["chain", "task", "reward", "stop", "text"], rows)
                last_images = []
                for chain in chains:
                    images = [image for message in chain.messages for image in message.images]
                    if images and (picture := try_open_image(images[-1])) is not None:
                        caption = f"{chain.task.question[:200]} → {chain.prediction[:200]}"
                        last_images.append(wandb.Image(picture, caption=caption))
                if last_images:
                    values["eval/images"] = last_images
            self._run.log(values)

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


class MlflowLogger(RunLogger):
    """Logs to one MLflow run per run directory, also after a resume.

    Where it is stored follows from MLflow's own settings, such as MLFLOW_TRACKING_URI; without one, `mlflow.db` and
    `mlruns` in the current folder.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._client: MlflowClient | None = None
        self._run_id = ""

    def start(self, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        path = self._directory.path
        id_file = path / "mlflow.id"
        try:
            client = MlflowClient()
            if id_file.is_file():
                self._run_id = id_file.read_text()
                client.update_run(self._run_id, status="RUNNING")
            else:
                experiment = client.get_experiment_by_name("agentfly")
                number = client.create_experiment("agentfly") if experiment is None else experiment.experiment_id
                self._run_id = client.create_run(number, run_name=path.resolve().name).info.run_id
                texts = {
                    name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
                    for name, value in config.items()
                }
                params = [Param(name, text[:500]) for name, text in texts.items()]  # what every tracking server takes
                client.log_batch(self._run_id, params=params)
                write_atomic(id_file, self._run_id.encode())
        except Exception as error:
            raise ConfigError(
                f"MLflow could not be started ({describe(error)}). mlflow-skinny alone stores nothing: "
                f"{install_command('mlflow')}, or set MLFLOW_TRACKING_URI to the address of a server, or remove "
                "'mlflow' from the loggers"
            ) from error
        self._client = client

    def step(self, record: StepRecord) -> None:
        if self._client is None:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = {**record.flat(), **{f"alarm/{alarm.kind}": 1.0 for alarm in record.alarms}}
        # MLflow refuses other characters in names.
        metrics = [Metric(re.sub(r"[^\w./ -]", "_", name), value, now, record.step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
        if record.eval is not None:
            page = "\n<hr>\n".join(map(format_chain_html, sample_chains(self._directory, record.step)))
            if page:
                self._client.log_text(self._run_id, page, f"chains/step-{record.step:06}.html")

    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._run_id)


def open_loggers(names: Iterable[str], directory: RunDirectory) -> RunLoggers:
    """Create the loggers by name, not started yet. Raises ConfigError for one that is unknown or not installed."""
    # The console starts last: other loggers may prompt the user first.
    ordered = sorted(validate_loggers(names), key=lambda name: name == "console")
    loggers: dict[str, RunLogger] = {}
    for name in ordered:
        make_logger = _LOGGERS[name][1] if name in _LOGGERS else _resolve_class(name)
        try:
            loggers[name] = make_logger(directory)
        except (Exception, SystemExit) as error:
            text = f"logger {name!r} could not be created from the run directory: {describe(error)}"
            raise ConfigError(text) from error
    return RunLoggers(loggers)


def _resolve_class(reference: str) -> Callable[[RunDirectory], RunLogger]:
    """The class that `module:Class` names. Raises ConfigError if there is none or it lacks a method of a logger."""
    try:
        logger_class = pkgutil.resolve_name(reference)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"logger {reference!r} cannot be imported: {describe(error)}") from error
    methods = ("start", "progress", "step", "close")
    if missing := [name for name in methods if not callable(getattr(logger_class, name, None))]:
        raise ConfigError(f"logger {reference!r} has no {', '.join(missing)}; a logger has {', '.join(methods)}")
    return cast("Callable[[RunDirectory], RunLogger]", logger_class)


def validate_loggers(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names, a list or text with commas, as a tuple.

    Raises ConfigError for a logger that is unknown or not installed.
    """
    listed = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
    for name in listed:
        if ":" in str(name):
            _resolve_class(name)
            continue
        if name not in _LOGGERS:
            close = difflib.get_close_matches(str(name), _LOGGERS, 1)
            suggestion = f", did you mean {close[0]!r}?" if close else ";"
            available = ", ".join(_LOGGERS)
            raise ConfigError(
                f"there is no logger {name!r}{suggestion} there are {available}, or a class as 'module:Class'; "
                "metrics.jsonl is always written"
            )
        package = _LOGGERS[name][0]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"logger {name!r} needs {package}, which is not installed: {install_command(name)}")
    return listed


_LOGGERS: dict[str, tuple[str, Callable[[RunDirectory], RunLogger]]] = {
    "console": ("rich", ConsoleLogger),
    "tensorboard": ("tensorboardX", TensorBoardLogger),
    "wandb": ("wandb", WandbLogger),
    "mlflow": ("mlflow", MlflowLogger),
}
"""The package that each logger needs (imported when it starts) and its class."""
