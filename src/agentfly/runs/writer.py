"""The one process that writes a run."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gzip
import json
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from agentfly.errors import ConfigError, DataError, RecordError
from agentfly.runs.directory import RunDirectory
from agentfly.runs.files import PARTS, append_lines, finite, read_lines, replace, to_line, unwritable
from agentfly.runs.record import StepRecord
from agentfly.segment import Floats
from agentfly.trajectory import Trajectory


class RunWriter(RunDirectory):
    """A run's folder, held for writing: while one process has it, every other is refused. Close it, or use `with`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        super().__init__(path)
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], recipe: Path | None = None) -> Self:
        """Begin a run in a folder that has none yet. What JSON cannot hold of the settings is kept as text."""
        path = Path(path).absolute()
        text = json.dumps(finite(config), indent=2, ensure_ascii=False, default=str) + "\n"
        source = None if recipe is None else recipe.read_bytes()
        with unwritable(path):
            for folder in (path / "trajectories", path / "checkpoints"):
                folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(_locked(path))
            if (path / "config.json").exists() and _has_begun(RunDirectory(path)):
                raise ConfigError(f"{path} has a run already; resume it, or give another folder")
            if source is not None:
                replace(path / "recipe.py", source)
            replace(path / "config.json", text.encode("utf-8", "backslashreplace"))  # last: it makes the folder a run
            undo.pop_all()
        return cls(path, lock)

    @classmethod
    def resume(cls, path: str | Path, step: int) -> Self:
        """Go on with a run after `step`: whatever came later is dropped, and so is what a kill left half written."""
        path = RunDirectory(path).path
        with contextlib.ExitStack() as undo:
            writer = cls(path, undo.enter_context(_locked(path)))
            writer.truncate_after(step)
            undo.pop_all()
        return writer

    def append(self, record: StepRecord) -> None:
        """Add a step. Its own line comes last: a step that has one has all of it."""
        self._check()
        if record.alarms:
            lines = [
                {"step": record.step, "kind": a.kind, "message": a.message, "chains": a.chains} for a in record.alarms
            ]
            append_lines(self.alarms_file, lines)
        place = {"step": record.step, "steps": record.steps}
        if record.eval is not None:
            known = {name: float(getattr(record.eval, name)) for name in ("reward", "low", "high", "tasks")}
            others = {name: float(value) for name, value in record.eval.metrics.items()}
            append_lines(self.evals_file, [{**place, **known, "metrics": others}])
        if record.metrics or record.seconds:
            append_lines(self.metrics_file, [{**place, **dataclasses.replace(record, eval=None).flat(), **place}])

    def write_trajectories(
        self,
        step: int,
        trajectories: Iterable[Trajectory],
        advantages: Mapping[str, Sequence[Floats]] | None = None,
        *,
        held_out: bool = False,
    ) -> list[str]:
        """Keep the chains of a step with their advantages by chain id; say of each that JSON cannot hold, why."""
        self._check()
        lines, lost = [], []
        for each in trajectories:
            worth = [_rounded(segment) for segment in (advantages or {}).get(each.id, ())]
            try:
                lines.append(to_line({"trajectory": each.to_json(), "advantages": worth}))
            except (RecordError, ValueError) as error:
                lost.append(f"chain {each.id} is not kept: {error}")
        replace(self.trajectory_file(step, held_out=held_out), gzip.compress(b"".join(lines), 1, mtime=0))
        return lost

    def truncate_after(self, step: int) -> None:
        """Drop everything later than a step. Killed halfway, it is finished by doing it again."""
        self._check()
        for path in (self.metrics_file, self.evals_file, self.alarms_file):
            if path.exists():
                kept = (line for line in read_lines(path) if line["step"] <= step)
                replace(path, b"".join(map(to_line, kept)))
        chains = self.path / "trajectories"
        with unwritable(self.path):
            for path in (*self.path.glob(PARTS), *chains.glob(PARTS), self.report, self.curve):
                path.unlink(missing_ok=True)
            for path in chains.glob("*.jsonl.gz"):
                number = path.name.partition("-")[2].partition(".")[0]
                if number.isdecimal() and int(number) > step:
                    path.unlink()

    def close(self) -> None:
        if not self._lock.closed:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # for children, too, that were forked this very moment
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._lock.closed:
            raise DataError(f"the run in {self.path} is closed; resume it to write on")


def _rounded(advantages: Floats) -> list[float | None]:
    """To six digits after the point: more tell nothing, and take twice the room."""
    out: list[float | None] = np.round(np.asarray(advantages, np.float64), 6).tolist()
    return out if np.isfinite(advantages).all() else finite(out)


_HELD: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child shares the lock: one that outlives the writer would keep the run locked."""
    for lock in list(_HELD):
        lock.close()


os.register_at_fork(after_in_child=_release_in_child)


def _has_begun(run: RunDirectory) -> bool:
    """Whether anything would be lost."""
    return any(each.exists() for each in (run.metrics_file, run.evals_file)) or any(run.checkpoints.glob("step-*"))


def _locked(path: Path) -> IO[str]:
    with unwritable(path):
        lock = (path / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(f"the run in {path} is being written by process {holder}; let it end first") from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    _HELD.add(lock)
    return lock
