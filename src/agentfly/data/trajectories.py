"""Write trajectories to a file and read them: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from agentfly.errors import DataError, describe
from agentfly.trajectory import Trajectory


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write trajectories to a file, one JSON object per line; `load_trajectories` reads them.

    Raises DataError if the file cannot be written.
    """
    path = Path(path)
    try:
        # A lone surrogate has no UTF-8 encoding; it is written as a JSON escape.
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(trajectory.to_json(), ensure_ascii=False) + "\n" for trajectory in trajectories)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error


def load_trajectories(path: str | Path) -> list[Trajectory]:
    """Read the trajectories of a file that `save_trajectories` or `agentfly run --save` wrote.

    Raises DataError, with the line, if the file cannot be read.
    """
    path = Path(path)
    trajectories = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    trajectories.append(Trajectory.from_json(json.loads(line)))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise DataError(f"{path}, line {number}: not a trajectory: {describe(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return trajectories
