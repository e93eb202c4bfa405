"""The chains of an evaluation on disk, a line each, so that one that was killed goes on where it stopped.

The first line holds the settings. Whoever goes on must have the same, since chains of two settings have no common mean.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from agentfly.errors import ConfigError, DataError, RecordError
from agentfly.runs.files import append_lines, unwritable
from agentfly.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Result:
    """What an evaluation keeps in mind of one chain."""

    group: int
    chain: int
    greedy: bool
    reward: float | None
    """None where the chain could not be scored."""
    stop: str
    turns: int
    calls: int
    tokens: int
    failure: str | None = None
    """What broke last, where the chain ended in a failure or has no reward; else None."""

    @classmethod
    def of(cls, trajectory: Trajectory, *, greedy: bool) -> Result:
        broken = trajectory.stop.failure is not None or trajectory.reward is None
        return cls(
            trajectory.group,
            trajectory.chain,
            greedy,
            trajectory.reward,
            trajectory.stop.value,
            len(trajectory.turns),
            sum(1 for _ in trajectory.calls),
            trajectory.sampled_tokens,
            trajectory.failures[-1].message if broken and trajectory.failures else None,
        )

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.chain


class EvalLog:
    """A file of finished chains. One process at a time has it; close it, or use `with`."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Begin the file, or go on with it if it was begun with the same settings."""
        self.path = path
        with unwritable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        try:
            self._lock()
            self.results = self._read(settings)
        except BaseException:
            self._file.close()
            raise

    def add(self, result: Result, trajectory: Trajectory) -> None:
        """Keep a finished chain; of one that JSON cannot hold, the figures and why."""
        line: dict[str, Any] = {"result": asdict(result)}
        try:
            line["trajectory"] = trajectory.to_json()
        except RecordError as error:
            line["lost"] = str(error)
        append_lines(self.path, [line])
        self.results[result.key] = result

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{self.path} is being written by another evaluation; let it end first") from error

    def _read(self, settings: Mapping[str, Any]) -> dict[tuple[int, int], Result]:
        """The chains that are there. Of those that were run more than once, the last."""
        found, lines = {}, self._lines()
        first = next(lines, None)
        if first is None:
            append_lines(self.path, [{"settings": settings}])
            return {}
        if not isinstance(first.get("settings"), dict):
            raise ConfigError(f"{self.path} is no evaluation; give another file or folder")
        self._refuse_other(first["settings"], settings)
        for number, line in enumerate(lines, 2):
            try:
                result = Result(**line["result"])
            except (KeyError, TypeError) as error:
                raise DataError(f"line {number} of {self.path} is no finished chain: {error!r}") from error
            found[result.key] = result
        return found

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Line by line, since the whole may be more than fits into memory.

        What a kill left half written at the end is cut off: it must not become the beginning of the next line.
        """
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                self._file.truncate(whole)
                return
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(f"line {number} of {self.path} is not JSON ({error}); cut it out") from error
            yield value if isinstance(value, dict) else {}
            whole += len(line)

    def _refuse_other(self, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        for name in {**before, **settings}:
            if before.get(name) != settings.get(name):
                raise ConfigError(
                    f"{self.path} was begun with {name}={before.get(name)!r:.80}, not {settings.get(name)!r:.80}; "
                    "give the same settings to go on with it, or another file to begin anew"
                )
