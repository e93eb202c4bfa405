"""The run directory: everything that a training run writes to disk. It can be read during the run and afterwards.

    config.json                         the settings in effect
    recipe.py                           the recipe it was started from, if any
    metrics.jsonl                       one line per step
    evals.jsonl                         one line per evaluation; step 0 is before training
    alarms.jsonl                        one line per alarm
    trajectories/step-000012.jsonl.gz   the chains of a step, each with a summary and its advantages
    trajectories/eval-000012.jsonl.gz   the chains of the evaluation after it
    trajectories/learner-000012.npz     the learner's log-probabilities of the tokens that the step trained
    images/0f3c….png                    the images of all chains, each once, named by a hash of them
    checkpoints/                        the state needed to resume
    rollout.jsonl                       asynchronous training: chains that finished since the newest checkpoint
    reward.png, report.html             written at the end

A killed run leaves at most one incomplete line at the end of each file. Reading skips it, resuming removes it. One
process at a time writes a run; it holds a lock on the directory.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from agentfly.errors import ConfigError, DataError, RecordError, describe
from agentfly.runs.files import (
    PARTIAL_FILES,
    acquire_lock,
    append_lines,
    encode_line,
    explain_write_error,
    open_atomic,
    read_lines,
    replace_non_finite,
    unlock_file,
    write_atomic,
)
from agentfly.runs.record import Alarm, EvalFigures, StepRecord
from agentfly.runs.summary import ChainSummary
from agentfly.segment import Floats
from agentfly.trajectory import TrainingTreatment, Trajectory


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A chain as stored in the run directory."""

    trajectory: Trajectory
    advantages: tuple[Floats, ...] = ()
    """One array [tokens] per segment: zeros in a group that was left out; empty for a chain that carries no loss, and
    in an evaluation."""
    trained: bool = False
    """Whether the chain was part of the update."""


def recipe_name(path: str | Path) -> str:
    """The name of a recipe's file, or of its folder if the file is `recipe.py`, as those of environments are."""
    path = Path(path)
    return path.parent.name if path.stem == "recipe" and path.parent.name else path.stem


class RunDirectory:
    """Read access to a run directory; `RunWriter` writes."""

    def __init__(self, path: str | Path, *, must_exist: bool = True) -> None:
        """`must_exist`: raise DataError where there is no run; else reading does."""
        self.path = Path(path).absolute()
        self._config = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.evals_file = self.path / "evals.jsonl"
        self.alarms_file = self.path / "alarms.jsonl"
        self.checkpoints = self.path / "checkpoints"
        """The folder of checkpoints, written by the trainer."""
        self.curve = self.path / "reward.png"
        self.report = self.path / "report.html"
        if must_exist and not self._config.is_file():
            if not self.path.is_dir():
                raise DataError(f"there is no run directory {self.path}")
            raise DataError(f"{self.path} is not a run directory: it has no {self._config.name}")

    @property
    def config(self) -> dict[str, Any]:
        """The settings in effect."""
        try:
            value = json.loads(self._config.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{self._config} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{self._config} must be a JSON object, not a {type(value).__name__}")
        return value

    @property
    def name(self) -> str:
        """The name of the recipe, or of the folder."""
        recipe = self.config.get("recipe")
        return self.path.resolve().stem if not recipe else recipe_name(recipe)

    def records(self) -> list[StepRecord]:
        """The completed steps in order, each with its evaluation and alarms."""
        metrics = {_step(line): line for line in read_lines(self.metrics_file)}
        evals = {_step(line): line for line in read_lines(self.evals_file)}
        alarms = self.alarms()
        records = []
        try:
            for step in sorted(metrics.keys() | evals.keys()):
                line = metrics.get(step, {})
                held_out = evals.get(step)
                numbers = _numbers(line)
                evaluation = None
                if held_out is not None:
                    held_out_numbers = _numbers(held_out)
                    reward, low, high = (held_out_numbers.get(name, math.nan) for name in ("reward", "low", "high"))
                    details = _numbers(held_out.get("metrics", {}))
                    evaluation = EvalFigures(reward, low, high, int(held_out_numbers.get("tasks", 0)), details)
                record = StepRecord(
                    step,
                    steps=int((held_out or line)["steps"]),
                    metrics={n: value for n, value in numbers.items() if n.partition("/")[0] not in _OTHER_FIELDS},
                    seconds={n[5:]: value for n, value in numbers.items() if n.startswith("time/")},
                    eval=evaluation,
                    leased=int(numbers.get("environments/leased", 0)),
                    waiting=int(numbers.get("environments/waiting", 0)),
                    alarms=tuple(alarm for alarm in alarms if alarm.step == step),
                )
                records.append(record)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(f"the metrics of the run in {self.path} have a damaged line: {describe(error)}") from error
        return records

    def alarms(self) -> list[Alarm]:
        """All alarms of the run, in the order they were raised."""
        lines = read_lines(self.alarms_file)
        try:
            return [Alarm(line["kind"], line["message"], tuple(line["chains"]), _step(line)) for line in lines]
        except (KeyError, TypeError) as error:
            raise DataError(f"{self.alarms_file} has a damaged line: {describe(error)}") from error

    def trajectories(self, step: int, *, held_out: bool = False) -> list[StoredTrajectory]:
        """The chains of a step, or of the evaluation after it; empty if none were stored."""
        path = self.trajectory_file(step, held_out=held_out)
        if not path.is_file():
            return []
        try:
            stored = []
            with gzip.open(path) as lines:  # line by line: the JSON of a step with long chains takes gigabytes
                for line in lines:
                    value = json.loads(line)
                    advantages = tuple(np.array(segment, np.float32) for segment in value["advantages"])
                    chain = value["trajectory"]
                    if _IMAGE_REFERENCE.encode() in line:
                        chain = _map_text(chain, self.load_image)
                    stored.append(StoredTrajectory(Trajectory.from_json(chain), advantages, value["trained"]))
            return stored
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def learner_logprobs(self, step: int) -> dict[str, Floats]:
        """The learner's log-probabilities of sampled tokens before the update of a step, by GROUP/CHAIN#SEGMENT.

        Empty if none were stored.
        """
        path = self._learner_file(step)
        if not path.is_file():
            return {}
        try:
            with np.load(path) as stored:
                ends = np.cumsum(stored["counts"])
                parts = np.split(stored["logprobs"], ends[:-1]) if len(ends) else []
                return dict(zip(stored["names"].tolist(), parts, strict=True))
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def _learner_file(self, step: int) -> Path:
        return self.path / "trajectories" / f"learner-{step:06}.npz"

    def trajectory_file(self, step: int, *, held_out: bool = False) -> Path:
        """File with the trajectories of a step, or of its evaluation (`held_out`)."""
        return self.path / "trajectories" / f"{'eval' if held_out else 'step'}-{step:06}.jsonl.gz"

    @property
    def images(self) -> Path:
        """Folder with the images of all chains."""
        return self.path / "images"

    def load_image(self, text: str) -> str:
        """Return the `data:` URI of a stored image; other text unchanged.

        Raises ValueError if the text names no file of the run's images, and OSError if the file is missing.
        """
        if not text.startswith(_IMAGE_REFERENCE):
            return text
        name = text.removeprefix(_IMAGE_REFERENCE)
        if not re.fullmatch(r"[0-9a-f]{32}\.[a-z]{3,4}", name):
            raise ValueError(f"{text!r:.80} names no stored image")
        path = self.images / name
        if path.is_symlink() or not path.is_file():  # a link could name any file of the reader's machine
            raise FileNotFoundError(f"{path} is not a file of the run")
        data = base64.b64encode(path.read_bytes()).decode()
        return f"data:image/{name.partition('.')[2]};base64,{data}"


def _step(line: Mapping[str, Any]) -> int:
    step = line.get("step")
    if not isinstance(step, int):
        raise DataError(f"a line of the run has no step: {line!r:.120}")
    return step


_IMAGE_REFERENCE = "run-image:"
"""Precedes the file name of an image in a stored trajectory."""


def _map_text(value: Any, convert: Callable[[str], str]) -> Any:
    """Copy a JSON value with every text converted."""
    if isinstance(value, str):
        return convert(value)
    if isinstance(value, dict):
        return {name: _map_text(element, convert) for name, element in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], int | float):  # not the tokens of a chain
        return [_map_text(element, convert) for element in value]
    return value


_OTHER_FIELDS = ("step", "steps", "time", "environments")
"""First parts of the names that a record stores outside its metrics."""


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line; null is NaN."""
    values = {name: math.nan if value is None else value for name, value in line.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


class RunWriter(RunDirectory):
    """Write access to a run directory. Holds a lock that excludes other writers; close it, or use `with`."""

    def __init__(self, path: Path, lock: IO[str], existing: frozenset[str] | None = None) -> None:
        """existing: what the folder had before this run was created in it; None for a run that is continued."""
        super().__init__(path)
        self._lock = lock
        self._existing = existing

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], recipe: Path | None = None) -> Self:
        """Create a run in a folder without one. Settings that JSON cannot hold are stored as text."""
        path = Path(path).absolute()
        text = _encode_config(config)
        source = None if recipe is None else recipe.read_bytes()
        with explain_write_error(path):
            existing = frozenset(os.listdir(path)) if path.exists() else frozenset()
            for folder in (path / "trajectories", path / "checkpoints"):
                folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(acquire_lock(path))
            if (path / "config.json").exists():
                run = RunDirectory(path)
                if run.metrics_file.exists() or run.evals_file.exists() or any(run.checkpoints.glob("step-*")):
                    raise ConfigError(f"{path} has a run already; resume it, or use another folder")
            if source is not None:
                write_atomic(path / "recipe.py", source)
            # Last: this file makes the folder a run.
            write_atomic(path / "config.json", text)
            undo.pop_all()
        return cls(path, lock, existing)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Write access to a run as it is."""
        path = RunDirectory(path).path
        return cls(path, acquire_lock(path))

    @classmethod
    def resume(cls, path: str | Path, step: int) -> Self:
        """Continue a run after `step`; removes everything later and all incomplete files."""
        writer = cls.open(path)
        with contextlib.ExitStack() as undo:
            undo.callback(writer.close)
            writer.truncate_after(step)
            undo.pop_all()
        return writer

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """Replace settings of the run; those that JSON cannot hold are stored as text."""
        self._require_open()
        write_atomic(self._config, _encode_config({**self.config, **settings}))

    def append(self, record: StepRecord) -> None:
        """Append a step. Its metrics line is written last: a step with one is complete."""
        self._require_open()
        if record.alarms:
            lines = [
                {"step": record.step, "kind": a.kind, "message": a.message, "chains": a.chains} for a in record.alarms
            ]
            append_lines(self.alarms_file, lines)
        position = {"step": record.step, "steps": record.steps}
        if record.eval is not None:
            bounds = {name: float(getattr(record.eval, name)) for name in ("reward", "low", "high", "tasks")}
            others = {name: float(value) for name, value in record.eval.metrics.items()}
            append_lines(self.evals_file, [{**position, **bounds, "metrics": others}])
        if record.metrics or record.seconds:
            append_lines(self.metrics_file, [{**position, **dataclasses.replace(record, eval=None).flat(), **position}])

    def write_trajectories(
        self,
        step: int,
        trajectories: Iterable[Trajectory],
        advantages: Mapping[str, Sequence[Floats]] | None = None,
        *,
        held_out: bool = False,
    ) -> list[str]:
        """Store the chains of a step with their advantages by chain id.

        Returns one message for each chain that JSON cannot hold.
        """
        self._require_open()
        problems: list[str] = []
        with (
            open_atomic(self.trajectory_file(step, held_out=held_out)) as file,
            gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as compressed,
        ):
            for trajectory in trajectories:
                # Six decimals halve the file size.
                segments = (advantages or {}).get(trajectory.id, ())
                trained = bool(segments)
                if advantages is not None and not trained and trajectory.treatment is TrainingTreatment.TRAIN:
                    segments = [np.zeros(len(segment), np.float32) for segment in trajectory.segments]
                rounded = [np.round(np.asarray(segment, np.float64), 6).tolist() for segment in segments]
                if not all(np.isfinite(segment).all() for segment in segments):
                    rounded = replace_non_finite(rounded)
                try:
                    chain = trajectory.to_json()
                    messages = (message for segment in trajectory.segments for message in segment.messages)
                    if any(message.images for message in (*trajectory.task.messages, *messages)):
                        chain = _map_text(chain, self._store_image)
                    summary = dataclasses.asdict(ChainSummary.of(trajectory))
                    values = {"summary": summary, "trajectory": chain, "advantages": rounded, "trained": trained}
                    line = encode_line(values)
                except (RecordError, ValueError, RecursionError) as error:
                    problems.append(f"chain {trajectory.id} is not stored: {error}")
                else:
                    compressed.write(line)  # not collected: the lines of a step with long chains take gigabytes
        return problems

    def write_learner_logprobs(self, step: int, logprobs: Mapping[str, Floats]) -> None:
        """Store what `learner_logprobs` returns; nothing if there are none."""
        self._require_open()
        if not logprobs:
            return
        file = io.BytesIO()
        arrays = list(logprobs.values())
        counts = np.array([len(array) for array in arrays])
        np.savez_compressed(file, names=np.array(list(logprobs)), counts=counts, logprobs=np.concatenate(arrays))
        write_atomic(self._learner_file(step), file.getvalue())

    def _store_image(self, text: str) -> str:
        """Write an image that is given as a `data:` URI, unless it is there; return a reference to its file."""
        match = re.match(r"data:image/([a-z]{3,4});base64,", text)
        if match is None:
            return text
        try:
            data = base64.b64decode(text[match.end() :], validate=True)
        except binascii.Error:
            return text
        if base64.b64encode(data).decode() != text[match.end() :]:  # it could not be restored exactly
            return text
        path = self.images / f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.{match[1]}"
        if not path.exists():
            with explain_write_error(path):
                path.parent.mkdir(exist_ok=True)
            write_atomic(path, data)
        return _IMAGE_REFERENCE + path.name

    def truncate_after(self, step: int) -> None:
        """Remove everything later than a step. Idempotent: if interrupted, call it again."""
        self._require_open()
        for path in (self.metrics_file, self.evals_file, self.alarms_file):
            if path.exists():
                remaining = (line for line in read_lines(path) if line["step"] <= step)
                write_atomic(path, b"".join(map(encode_line, remaining)))
        chains = self.path / "trajectories"
        with explain_write_error(self.path):
            for path in (*self.path.glob(PARTIAL_FILES), *chains.glob(PARTIAL_FILES), self.report, self.curve):
                path.unlink(missing_ok=True)
            for path in chains.glob("*-*"):
                number = path.name.partition("-")[2].partition(".")[0]
                if number.isdecimal() and int(number) > step:
                    path.unlink()

    def discard_if_empty(self) -> None:
        """Close the run. If `create` made it and it has no results, remove it, and its folder if that was empty.

        A run that fails at its start would leave a directory that looks like a run.
        """
        results = (self.metrics_file, self.evals_file, *self.checkpoints.glob("*"), *self.path.glob("trajectories/*"))
        if self._existing is not None and not self._lock.closed and not any(path.exists() for path in results):
            for path in self.path.iterdir():
                if path.name in self._existing:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            if not self._existing:
                with contextlib.suppress(OSError):  # a file that another process wrote in the meantime
                    self.path.rmdir()
        self.close()

    def close(self) -> None:
        """Release the run directory for other writers. May be called twice."""
        if not self._lock.closed:
            unlock_file(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._lock.closed:
            raise DataError(f"the run in {self.path} is closed; resume it to continue writing")


def _encode_config(config: Mapping[str, Any]) -> bytes:
    text = json.dumps(replace_non_finite(config), indent=2, ensure_ascii=False, default=str) + "\n"
    return text.encode("utf-8", "backslashreplace")
