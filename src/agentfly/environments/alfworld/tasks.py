"""Tasks: the official games, read from the folder `alfworld` of AGENTFLY_DATA, and generated ones of all six types.

The official games are read as ALFWorld downloads them (`json_2.1.1/SPLIT/TASK/TRIAL/game.tw-pddl`), or packed into
`games.jsonl.xz`, one line per game with `id`, `task`, `problem` and `walkthrough`.

Generated games are drawn from a seed. `rooms.toml` has the vocabulary. Every game is winnable: an expert that knows
where everything is wins it before it is returned. The split of a game is a hash of its content, so no game is in two
splits, whatever the seeds.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agentfly.environments.alfworld.game import APPLIANCES, ALFWorldGame, ALFWorldGoal, Receptacle, TaskType, Thing
from agentfly.environments.alfworld.household import Household, next_command
from agentfly.environments.alfworld.pddl import make_identifier, read_problem
from agentfly.environments.data import DatasetSource, load_toml, read_json, read_rows, sample_tasks
from agentfly.errors import ConfigError, DataError

SPLITS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
"""Our names for the official splits. The official names, `valid_train` included, are accepted too."""
PACKED = "games.jsonl.xz"
FOLDER = "json_2.1.1"
ALFWORLD = DatasetSource(
    "the set of ALFWorld's games",
    "https://github.com/alfworld/alfworld (pip install alfworld; alfworld-download --data-dir FOLDER/alfworld)",
    "alfworld",
)
_TASK = re.compile(r"Your task is to: (.*?)\"")
MAX_STEPS = 40


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
    return [{"id": game.id, **make_row(game.parse())} for game in itertools.islice(official_games(split), count)]


def make_row(game: ALFWorldGame) -> dict[str, Any]:
    """The task columns of a game."""
    question = Household(game).introduction()
    return {"question": question, "kind": game.goal.kind.value, "game": game.to_json()}


def official_games(split: str) -> Iterator[OfficialGame]:
    """The games of a split."""
    official = SPLITS.get(split, split)
    splits = {*SPLITS.values(), "valid_train"}
    if official not in splits:
        raise DataError(f"there is no split {split!r}; there are {', '.join(SPLITS)} and {', '.join(sorted(splits))}")
    folder = ALFWORLD.path()
    packed, unpacked = folder / PACKED, folder / FOLDER / official
    if not packed.is_file() and not unpacked.is_dir():
        raise DataError(f"there is neither {packed} nor {unpacked}; they come from {ALFWORLD.address}")
    if packed.is_file():
        rows = read_rows(packed, only=f'"{official}/')  # skips lines of other splits unparsed, which would take long
        games: Iterator[OfficialGame] = (
            _make_game(row["id"], row, task=row.get("task"), problem=row.get("problem"), source=source)
            for source, row in rows
            if str(row.get("id")).startswith(f"{official}/")
        )
    else:
        games = _read_folder(unpacked, official)
    first = next(games, None)
    if first is None:
        raise DataError(
            f"{packed if packed.is_file() else unpacked} has no game of {official}; they come from {ALFWORLD.address}"
        )
    return itertools.chain([first], games)


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
        yield _make_game(id_, row, task=task and task[1], problem=row.get("pddl_problem"), source=str(path))


def _make_game(id: str, row: dict[str, Any], *, task: object, problem: object, source: str) -> OfficialGame:
    walkthrough = row.get("walkthrough") or []
    if not isinstance(task, str) or not isinstance(problem, str) or not isinstance(walkthrough, list):
        raise DataError(
            f"{source} is not a game: it needs a task, a problem and a walkthrough; it has {', '.join(row)}"
        )
    return OfficialGame(id, task, problem, tuple(map(str, walkthrough)))


@dataclass(frozen=True, slots=True)
class RoomType:
    """What a generated room contains."""

    receptacles: Mapping[str, Sequence[int]]
    """By type: the minimum and maximum number."""
    things: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoomVocabulary:
    """The contents of `rooms.toml`, with the groups of types written out."""

    rooms: Mapping[str, RoomType]
    openable: frozenset[str]
    lamps: frozenset[str]
    traits: Mapping[str, frozenset[str]]
    """By type of thing: its initial traits."""
    fits: Mapping[str, frozenset[str]]
    """By receptacle type: the types of things that may be put there."""
    instructions: Mapping[str, Sequence[str]]
    """By task type: templates of the task with `{thing}` and `{target}`."""


@functools.cache
def load_vocabulary() -> RoomVocabulary:
    """Read `rooms.toml`."""
    table = load_toml(__package__, "rooms.toml")
    groups: dict[str, list[str]] = {}

    def expand(types: str) -> list[str]:
        return [name for word in types.split() for name in groups.get(word, [word])]

    for group, types in table["groups"].items():
        groups[group] = expand(types)
    rooms = {
        name: RoomType(room["receptacles"], tuple(expand(room["things"]))) for name, room in table["rooms"].items()
    }
    with_trait = {trait: expand(types) for trait, types in table["traits"].items()}
    with_trait["pickupable"] = [
        type_ for room in rooms.values() for type_ in room.things if type_ not in table["fixed"].split()
    ]
    return RoomVocabulary(
        rooms=rooms,
        openable=frozenset(expand(table["openable"])),
        lamps=frozenset(expand(table["lamps"])),
        traits={
            type_: frozenset(trait for trait, types in with_trait.items() if type_ in types)
            for room in rooms.values()
            for type_ in room.things
        },
        fits={name: frozenset(expand(types)) for name, types in table["fits"].items()},
        instructions=table["instructions"],
    )


def draw_tasks(
    split: str = "train",
    count: int = 100,
    *,
    seed: int = 0,
    kinds: Sequence[str] | None = None,
    rooms: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Generated, winnable games, round-robin over the task types `kinds` (None: all six) in the given `rooms`.

    Rows have `id`, `question`, `kind` and `game`.
    """
    all_rooms = load_vocabulary().rooms
    if unknown := [room for room in rooms or () if room not in all_rooms]:
        raise ConfigError(f"there is no room {unknown[0]!r:.40}; there are {', '.join(all_rooms)}")
    room_types = [all_rooms[room] for room in rooms or all_rooms]
    possible = [kind for kind in TaskType if any(_draw_goal(Random(0), room, kind) for room in room_types)]
    try:
        chosen = [TaskType(kind) for kind in kinds] if kinds else possible
    except ValueError as error:
        raise ConfigError(f"{error}; there are {', '.join(kind.value for kind in TaskType)}") from None
    if impossible := [kind.value for kind in chosen if kind not in possible]:
        raise ConfigError(
            f"{impossible[0]} cannot be done in {' or '.join(rooms or all_rooms)}; give other rooms or kinds"
        )

    def draw(random: Random, number: int) -> tuple[str, dict[str, Any]]:
        game = draw_game(random, chosen[number % len(chosen)], room_types)
        return content_key(game), make_row(game)

    return sample_tasks("alfworld", split, count, seed, draw)


def content_key(game: ALFWorldGame) -> str:
    """Identifies household and goal, independent of the wording of the task."""
    return json.dumps({**game.to_json(), "task": ""}, sort_keys=True)


def draw_game(random: Random, kind: TaskType, rooms: Sequence[RoomType]) -> ALFWorldGame:
    """A game of a task type in one of the rooms; draws that are won at the start or not winnable are rejected."""
    while True:
        room = random.choice(rooms)
        goal = _draw_goal(random, room, kind)
        game = goal and _furnish(random, room, goal)
        if not game:
            continue
        house = Household(game)
        if house.won:
            continue
        for _ in range(MAX_STEPS):
            command = next_command(house, explores=False)
            if command is None:
                break
            house.step(command)
        if house.won:
            return game


def _draw_goal(random: Random, room: RoomType, kind: TaskType) -> ALFWorldGoal | None:
    """A goal that is possible in the room. None if the task type is impossible there."""
    vocabulary = load_vocabulary()
    if kind is TaskType.LOOK:
        lamps = [thing for thing in room.things if thing in vocabulary.lamps]
        things = [thing for thing in room.things if "pickupable" in vocabulary.traits[thing]]
        return ALFWorldGoal(kind, random.choice(things), random.choice(lamps)) if lamps else None
    trait = kind.needs[0] if kind.needs else "pickupable"
    if kind.needs and not any(
        maximum for type_, (_, maximum) in room.receptacles.items() if type_ in APPLIANCES[trait]
    ):
        return None
    things = [thing for thing in room.things if {trait, "pickupable"} <= vocabulary.traits[thing]]
    pairs = [(thing, target) for thing in things for target in room.receptacles if thing in vocabulary.fits[target]]
    return ALFWorldGoal(kind, *random.choice(pairs)) if pairs else None


def _furnish(random: Random, room: RoomType, goal: ALFWorldGoal) -> ALFWorldGame | None:
    """Draw the receptacles and things of a game with this goal. None if a thing fits nowhere."""
    vocabulary = load_vocabulary()
    receptacle_types: list[str] = []
    for type_, (fewest, maximum) in room.receptacles.items():
        receptacle_types += [type_] * max(random.randint(fewest, maximum), int(type_ == goal.target))
    receptacles: list[Receptacle] = []
    for name, type_ in _name_entities(receptacle_types):
        # A fifth of the receptacles share the location of the previous one of their type.
        shares_place = receptacles and receptacles[-1].type == type_ and random.random() < 0.2
        location = receptacles[-1].at if shares_place else len(receptacles) + 1
        receptacles.append(Receptacle(name, type_, location, openable=type_ in vocabulary.openable))

    thing_types = [goal.thing] * (2 if goal.kind is TaskType.PLACE_TWO else 1)
    thing_types += [goal.target] * (goal.kind is TaskType.LOOK)
    thing_types += random.choices(room.things, k=random.randint(8, 20))
    things: list[Thing] = []
    for name, type_ in _name_entities(thing_types):
        fitting = [receptacle for receptacle in receptacles if type_ in vocabulary.fits[receptacle.type]]
        if goal.kind.needs is None and type_ == goal.thing:  # things to be moved must not be at the target already
            fitting = [receptacle for receptacle in fitting if receptacle.type != goal.target]
        if not fitting:
            return None
        receptacle = random.choice(fitting)
        assert receptacle.at is not None
        traits = vocabulary.traits[type_]
        things.append(Thing(name, type_, (receptacle.name,), at=(receptacle.at,), traits=traits))
    instruction = random.choice(vocabulary.instructions[goal.kind.value])
    return ALFWorldGame(
        task=instruction.format(thing=goal.thing.lower(), target=goal.target.lower()),
        goal=goal,
        start=0,
        receptacles=tuple(receptacles),
        things=tuple(things),
        fits={receptacle.type: vocabulary.fits[receptacle.type] for receptacle in receptacles},
    )


def _name_entities(types: Sequence[str]) -> list[tuple[str, str]]:
    """Player-visible names with their types, in the order of the official games, counted down within each type:
    `drawer 2`, `drawer 1`."""
    left = Counter(types)
    names = []
    for type_ in sorted(types, key=lambda type_: make_identifier(f"{type_.lower()} 0", 0)):
        names.append((f"{type_.lower()} {left[type_]}", type_))
        left[type_] -= 1
    return names
