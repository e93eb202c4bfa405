"""Records the output of the official engine, which `test_conformance.py` compares with ours.

    AGENTFLY_DATA=... python -m tests.environments.alfworld.record

It needs the extra `alfworld`. What is kept of an official game are the commands, ours, and a short digest of what came
back after each: the observation, the admissible commands and whether it was won. Generated games are kept whole.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from agentfly.environments.alfworld import ALFWorld
from agentfly.environments.alfworld.game import ALFWorldGame, ALFWorldGoal, TaskType
from agentfly.environments.alfworld.household import Household, next_command
from agentfly.environments.alfworld.tasks import ALFWORLD, OfficialGame, official_games
from tests.environments.alfworld.official import ALFWorldEngine, OfficialEngine

TRACES = Path(__file__).with_name("traces.json.xz")
LENGTH = 40
JUNK = (
    "", "  ", "look around", "Look", "  look ", "\tinventory\n", "go to", "go to cabinet 99", "take apple 1", "open",
    "examine agent1", "examine loc 1", "héllo ☃", "help me", "go  to drawer 1", "GO TO FRIDGE 1", "use", "x" * 5000,
)  # fmt: skip
WEIGHTS = {"go": 6, "take": 8, "move": 4, "open": 6, "close": 1, "clean": 12, "heat": 12, "cool": 12, "slice": 14,
           "use": 6, "examine": 3, "look": 1, "inventory": 1, "help": 0.2}  # fmt: skip


ALREADY_COOL = (
    "train/pick_and_place_simple-Lettuce-None-CounterTop-25/trial_T20190907_000052_389529",
    "train/pick_clean_then_place_in_recep-Bowl-None-Cabinet-13/trial_T20190909_022903_509427",
    "train/pick_and_place_simple-Pan-None-CounterTop-8/trial_T20190908_105534_786184",
    "train/pick_and_place_simple-Tomato-None-DiningTable-26/trial_T20190908_010907_122466",
)
"""Games where something is cool from the start, which decides whether the planner lets one cool it."""


def digest(engine: ALFWorldEngine, observation: str) -> str:
    """What came back, in eight characters."""
    text = json.dumps([observation, engine.commands, engine.won])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def wander(game: ALFWorldGame, seed: int) -> list[str]:
    """Commands of a player who wins now and then, and otherwise tries everything, sense and nonsense."""
    random, house, tried = Random(seed), Household(game), {"look"}
    commands = cooling(game)
    for command in commands:
        house.step(command)
    for _ in range(LENGTH):
        commands.append(_next(random, house, sorted(tried)))
        tried.update(house.commands)
        house.step(commands[-1])
    return commands


def cooling(game: ALFWorldGame) -> list[str]:
    """Commands that cool what is cool already, twice, and look at it."""
    cool = next((thing for thing in game.things if {"isCool", "pickupable"} <= thing.traits), None)
    if cool is None:
        return []
    house, commands = Household(replace(game, goal=ALFWorldGoal(TaskType.PLACE, cool.type, "Microwave"))), []
    while (held := house.held) is None and (command := next_command(house, explores=False)):
        commands.append(command)
        house.step(command)
    return (
        [*commands, "go to fridge 1", *[f"cool {held.name} with fridge 1", f"examine {held.name}"] * 2] if held else []
    )


def _next(random: Random, house: Household, tried: list[str]) -> str:
    chance = random.random()
    if chance < 0.06:
        return random.choice(JUNK)
    if chance < 0.12:
        return random.choice(tried)  # possible once, perhaps not now
    if chance < 0.3 and (command := next_command(house, explores=chance < 0.2)):
        return command
    verbs = sorted({command.split()[0] for command in house.commands})
    verb = random.choices(verbs, [WEIGHTS[verb] for verb in verbs])[0]
    fitting = [command for command in house.commands if command.split()[0] == verb]
    return random.choice(_promising(house, fitting) if verb == "go" and random.random() < 0.8 else fitting)


def _promising(house: Household, ways: list[str]) -> list[str]:
    """The ways to where something can be done: what is held can be treated or sliced, or there is something to take."""
    held, commands = house.held, []
    for receptacle in house.game.receptacles:
        inside = house.contents(receptacle)
        treats = held and receptacle.type in ("SinkBasin", "Microwave", "Fridge")
        slices = held and "nife" in held.type and any("sliceable" in thing.traits for thing in inside)
        knives = not held and any("nife" in thing.type for thing in inside)
        if (treats or slices or knives or (not held and inside)) and f"go to {receptacle.name}" in ways:
            commands += [f"go to {receptacle.name}"] * (5 if slices or knives else 1)
    return commands or ways


def replay(engine: ALFWorldEngine, commands: list[str]) -> Iterator[str]:
    """The digests of a game: of its beginning, then after each command."""
    yield digest(engine, engine.introduction())
    for command in commands:
        yield digest(engine, engine.step(command))


def official_texts(official: OfficialGame) -> dict[str, str]:
    """The very files of an official game."""
    grammar = (ALFWORLD.path() / "grammar_template.twl2").read_text().replace("@@TASK@@", official.task)
    domain = (ALFWORLD.path() / "domain.pddl").read_text()
    return {"pddl_problem": official.problem, "pddl_domain": domain, "grammar": grammar}


def sample() -> Iterator[tuple[str, dict[str, Any], ALFWorldGame, dict[str, str]]]:
    """The games to record, each with what is kept of it beside the trace, and the texts to play it from."""
    for number, row in enumerate(ALFWorld.draw_tasks("validation", 18, seed=7)):
        yield f"generated {number}", {"game": row["game"]}, ALFWorldGame.from_json(row["game"]), {}
    for split, every in (("train", 150), ("valid_train", 40), ("valid_seen", 20)):
        for number, official in enumerate(official_games(split)):
            if number % every == 0 or official.id in ALREADY_COOL:
                yield official.id, {}, official.parse(), official_texts(official)


def main() -> None:
    """Write the file, or add to it what it does not have yet."""
    traces: dict[str, Any] = json.loads(lzma.decompress(TRACES.read_bytes())) if TRACES.exists() else {}
    for number, (name, kept, game, texts) in enumerate(sample()):
        if name in traces:
            continue
        commands = wander(game, number)
        engine = OfficialEngine(game, **texts)
        recorded = "".join(replay(engine, commands))
        transcript = "".join(replay(Household(game), commands))
        engine.close()
        print(number, name, "same" if recorded == transcript else "DIFFERENT", flush=True)
        traces[name] = {**kept, "commands": commands, "digests": recorded}
        TRACES.write_bytes(lzma.compress(json.dumps(traces).encode(), preset=9))


if __name__ == "__main__":
    main()
