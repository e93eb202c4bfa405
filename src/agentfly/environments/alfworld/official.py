"""The official games, read from the folder `alfworld` of AGENTFLY_DATA.

Either as ALFWorld downloads them (`json_2.1.1/SPLIT/TASK/TRIAL/game.tw-pddl`), or packed into `games.jsonl.xz`, one
line per game with `id`, `task`, `problem` and `walkthrough`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.environments.alfworld.game import ALFWorldGame
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.pddl import read_problem
from agentfly.environments.data import DatasetSource, read_json, read_rows
from agentfly.errors import DataError

SPLITS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
"""Our names for the official splits; the official names, `valid_train` included, are accepted too."""
PACKED = "games.jsonl.xz"
FOLDER = "json_2.1.1"
ALFWORLD = DatasetSource(
    "the set of ALFWorld's games",
    "https://github.com/alfworld/alfworld (pip install alfworld; alfworld-download --data-dir FOLDER/alfworld)",
    "alfworld",
)
_TASK = re.compile(r"Your task is to: (.*?)\"")


@dataclass(frozen=True, slots=True)
class OfficialGame:
    """One official game file."""

    id: str
    task: str
    problem: str
    """The PDDL problem."""
    walkthrough: tuple[str, ...]
    """Commands that win the game."""

    def parse(self) -> ALFWorldGame:
        """The game as `Household` plays it."""
        try:
            return read_problem(self.problem, self.task)
        except DataError as error:
            raise DataError(f"official game {self.id}: {error}") from error


def official_tasks(split: str, *, count: int | None = None) -> list[dict[str, Any]]:
    """The first `count` tasks of a split (None: all), in file order: rows with `id`, `question`, `kind` and `game`."""
    return [{"id": each.id, **make_row(each.parse())} for each in itertools.islice(official_games(split), count)]


def make_row(game: ALFWorldGame) -> dict[str, Any]:
    """The task columns of a game."""
    question = Household(game).introduction()
    return {"question": question, "kind": game.goal.kind.value, "game": game.to_json()}


def official_games(split: str) -> Iterator[OfficialGame]:
    """The games of a split."""
    official = SPLITS.get(split, split)
    known = {*SPLITS.values(), "valid_train"}
    if official not in known:
        raise DataError(f"there is no split {split!r}; there are {', '.join(SPLITS)} and {', '.join(sorted(known))}")
    folder = ALFWORLD.path()
    packed, unpacked = folder / PACKED, folder / FOLDER / official
    if not packed.is_file() and not unpacked.is_dir():
        raise DataError(f"there is neither {packed} nor {unpacked}; they come from {ALFWORLD.address}")
    games = _read_archive(packed, official) if packed.is_file() else _read_folder(unpacked, official)
    first = next(games, None)
    if first is None:
        raise DataError(
            f"{packed if packed.is_file() else unpacked} has no game of {official}; they come from {ALFWORLD.address}"
        )
    return itertools.chain([first], games)


def _read_archive(path: Path, split: str) -> Iterator[OfficialGame]:
    # `only` skips lines of other splits unparsed: parsing them all takes long.
    for place, row in read_rows(path, only=f'"{split}/'):
        if str(row.get("id")).startswith(f"{split}/"):
            yield _make_game(row["id"], row, task=row.get("task"), problem=row.get("problem"), place=place)


def _read_folder(folder: Path, split: str) -> Iterator[OfficialGame]:
    for path in sorted(folder.glob("*/*/game.tw-pddl")):
        row = read_json(path)
        if not isinstance(row, dict):
            raise DataError(f"{path} is not a game: {row!r:.60}")
        if row.get("solvable") is False:
            continue  # upstream skips these too
        grammar = str(row.get("grammar"))
        if "move {o} to {r}" not in grammar:
            raise DataError(
                f"{path} has the commands of ALFWorld before 0.4 (`put … in/on …`); "
                f"download it again: {ALFWORLD.address}"
            )
        task = _TASK.search(grammar)
        id_ = "/".join((split, *path.parts[-3:-1]))
        yield _make_game(id_, row, task=task and task[1], problem=row.get("pddl_problem"), place=str(path))


def _make_game(id: str, row: dict[str, Any], *, task: object, problem: object, place: str) -> OfficialGame:
    walkthrough = row.get("walkthrough") or []
    if not isinstance(task, str) or not isinstance(problem, str) or not isinstance(walkthrough, list):
        raise DataError(f"{place} is not a game: it needs a task, a problem and a walkthrough; it has {', '.join(row)}")
    return OfficialGame(id, task, problem, tuple(map(str, walkthrough)))
