"""The official games, read from the files that ALFWorld's own download brings.

They lie in the folder `alfworld` of AGENTFLY_DATA: as downloaded (`json_2.1.1/SPLIT/TASK/TRIAL/game.tw-pddl`), or
packed into `games.jsonl.xz`, a line for each game with `id`, `task`, `problem` and `walkthrough`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.environments.alfworld.game import Game
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.pddl import read_problem
from agentfly.environments.data import Source, read_json, read_rows
from agentfly.errors import DataError

SPLITS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
"""Our names for the official splits. The official names do as well, `valid_train` among them."""
PACKED = "games.jsonl.xz"
FOLDER = "json_2.1.1"
ALFWORLD = Source(
    "the set of ALFWorld's games",
    "https://github.com/alfworld/alfworld (pip install alfworld; alfworld-download --data-dir FOLDER/alfworld)",
    "alfworld",
)
_TASK = re.compile(r"Your task is to: (.*?)\"")


@dataclass(frozen=True, slots=True)
class OfficialGame:
    """One of the official files."""

    id: str
    task: str
    problem: str
    """The planning problem."""
    walkthrough: tuple[str, ...]
    """Commands that win."""

    def game(self) -> Game:
        """The game, as the household plays it."""
        try:
            return read_problem(self.problem, self.task)
        except DataError as error:
            raise DataError(f"official game {self.id}: {error}") from error


def official_tasks(split: str, *, count: int | None = None) -> list[dict[str, Any]]:
    """The tasks of a split, in the order of the files: rows with `id`, `question`, `kind` and `game`.

    `count` takes the first so many; None takes all.
    """
    return [{"id": each.id, **task_row(each.game())} for each in itertools.islice(official_games(split), count)]


def task_row(game: Game) -> dict[str, Any]:
    """A game as the columns of a task."""
    question = Household(game).introduction()
    return {"question": question, "kind": game.goal.kind.value, "game": game.to_json()}


def official_games(split: str) -> Iterator[OfficialGame]:
    """The games of a split."""
    official = SPLITS.get(split, split)
    there = {*SPLITS.values(), "valid_train"}
    if official not in there:
        raise DataError(f"there is no split {split!r}; there are {', '.join(SPLITS)} and {', '.join(sorted(there))}")
    folder = ALFWORLD.path()
    packed, unpacked = folder / PACKED, folder / FOLDER / official
    if not packed.is_file() and not unpacked.is_dir():
        raise DataError(f"there is neither {packed} nor {unpacked}; they come from {ALFWORLD.address}")
    found = _packed(packed, official) if packed.is_file() else _downloaded(unpacked, official)
    first = next(found, None)
    if first is None:
        raise DataError(
            f"{packed if packed.is_file() else unpacked} has no game of {official}; they come from {ALFWORLD.address}"
        )
    return itertools.chain([first], found)


def _packed(path: Path, split: str) -> Iterator[OfficialGame]:
    # Most lines are of other splits, and parsing them all takes long.
    for place, row in read_rows(path, only=f'"{split}/'):
        if str(row.get("id")).startswith(f"{split}/"):
            yield _game(row["id"], row, row.get("task"), row.get("problem"), place)


def _downloaded(folder: Path, split: str) -> Iterator[OfficialGame]:
    for path in sorted(folder.glob("*/*/game.tw-pddl")):
        row = read_json(path)
        if not isinstance(row, dict):
            raise DataError(f"{path} is no game: {row!r:.60}")
        if row.get("solvable") is False:
            continue  # upstream leaves these out too
        grammar = str(row.get("grammar"))
        if "move {o} to {r}" not in grammar:
            old = "has the words of an ALFWorld before 0.4 (`put … in/on …`)"
            raise DataError(f"{path} {old}; download it anew: {ALFWORLD.address}")
        task = _TASK.search(grammar)
        id_ = "/".join((split, *path.parts[-3:-1]))
        yield _game(id_, row, task and task[1], row.get("pddl_problem"), str(path))


def _game(id: str, row: dict[str, Any], task: object, problem: object, place: str) -> OfficialGame:
    walkthrough = row.get("walkthrough") or []
    if not isinstance(task, str) or not isinstance(problem, str) or not isinstance(walkthrough, list):
        raise DataError(f"{place} is no game: it needs a task, a problem and a walkthrough; it has {', '.join(row)}")
    return OfficialGame(id, task, problem, tuple(map(str, walkthrough)))
