"""The log of an evaluation, which makes it resumable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from agentfly.errors import ConfigError, DataError, RecordError
from agentfly.evaluation.summary import ChainResult
from agentfly.runs.files import append_lines, explain_write_error, lock_file
from agentfly.runs.summary import ChainSummary
from agentfly.trajectory import Trajectory


class EvalLog:
    """The finished chains of an evaluation on disk, one JSON line each, so that a killed evaluation can resume.

    The first line holds the settings, which must be the same on resume: chains of two settings have no common mean.
    One process at a time holds the file; close it, or use `with`.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Create the file, or open an existing one that has the same settings."""
        self.path = path
        with explain_write_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        try:
            try:
                lock_file(self._file)
            except OSError as error:
                raise ConfigError(f"{path} is being written by another evaluation; let it end first") from error
            self.results = self._read(settings)
        except BaseException:
            self._file.close()
            raise

    def add(self, result: ChainResult, trajectory: Trajectory) -> None:
        """Append a finished chain; where JSON cannot hold its trajectory, the figures and the reason."""
        line: dict[str, Any] = {"result": asdict(result)}
        try:
            line |= {"summary": ChainSummary.of(trajectory).to_json(), "trajectory": trajectory.to_json()}
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

    def _read(self, settings: Mapping[str, Any]) -> dict[tuple[int, int], ChainResult]:
        """Read the finished chains; the last result counts where a chain was run more than once.

        The file is read line by line, since it may exceed memory. A line that a kill left incomplete at the end is cut
        off: the next line must not be appended to it.
        """
        results: dict[tuple[int, int], ChainResult] = {}
        self._file.seek(0)
        complete = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                self._file.truncate(complete)
                break
            complete += len(line)
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(f"line {number} of {self.path} is not JSON ({error}); remove it") from error
            value = value if isinstance(value, dict) else {}
            if number == 1:
                before = value.get("settings")
                if not isinstance(before, dict):
                    raise ConfigError(f"{self.path} is not an evaluation; give another file or folder")
                for name in {**before, **settings}:
                    if before.get(name) != settings.get(name):
                        raise ConfigError(
                            f"{self.path} was started with {name}={before.get(name)!r:.80}, not "
                            f"{settings.get(name)!r:.80}; give the same settings to resume it, or another file to "
                            "start a new one"
                        )
                continue
            try:
                result = ChainResult(**value["result"])
            except (KeyError, TypeError) as error:
                raise DataError(f"line {number} of {self.path} is not a finished chain: {error!r}") from error
            results[result.key] = result
        if not complete:
            append_lines(self.path, [{"settings": settings}])
        return results
