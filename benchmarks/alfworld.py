"""ALFWorld: our engine compared with the official one, and many instances with the resource manager.

    python -m benchmarks.alfworld [--quick]

Both engines play the same generated games with the same commands. Times are CPU time in one process. The official
engine needs the extra `alfworld`; if it is not installed, only ours is measured. A turn of a rollout is everything but
the model: template, parser, tool call, environment and records; replies are there at once.
"""

import argparse
import asyncio
import importlib.util
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentfly.agents import HFAgent
from agentfly.backends.base import Backend, Request
from agentfly.environments.alfworld import ALFWorld
from agentfly.environments.alfworld.game import ALFWorldGame
from agentfly.environments.alfworld.household import Household, next_command
from agentfly.resources import ResourceManager
from agentfly.rewards import alfworld_won
from agentfly.types import Completion, FinishReason, Task
from benchmarks.table import print_table
from tests.environments.alfworld.official import ALFWorldEngine, OfficialEngine

INSTANCES = (1, 16, 64)
TOKENIZER = Path(__file__).resolve().parents[1] / ".cache" / "tokenizers" / "smollm2"


def solution(game: ALFWorldGame) -> list[str]:
    """The commands of the expert that explores."""
    house, commands = Household(game), []
    while (command := next_command(house, explores=True)) is not None:
        commands.append(command)
        house.step(command)
    return commands


def play(make: Callable[[ALFWorldGame], ALFWorldEngine], games: list[ALFWorldGame]) -> tuple[float, float, int]:
    """Milliseconds per reset and per step, including observation, commands and win signal; and the number of steps."""
    resetting = stepping = 0.0
    steps = 0
    for game in games:
        commands = solution(game)
        started = time.process_time()
        engine = make(game)
        assert engine.introduction()
        assert engine.commands
        reset = time.process_time()
        for command in commands:
            assert engine.step(command)
            assert engine.commands
            won = engine.won
        stepping += time.process_time() - reset
        resetting += reset - started
        steps += len(commands)
        assert won
        if isinstance(engine, OfficialEngine):
            engine.close()
    return 1000 * resetting / len(games), 1000 * stepping / steps, steps


def compare_engines(quick: bool) -> list[list[str]]:
    """One row per engine."""
    games = [ALFWorldGame.from_json(row["game"]) for row in ALFWorld.draw_tasks("test", 60 if quick else 600)]
    reset, step, steps = play(Household, games)
    rows = [["ours", f"{reset:.3f}", f"{step:.4f}", f"{1000 / step:.0f}", str(steps), "1×"]]
    if importlib.util.find_spec("textworld") is None:
        return [*rows, ["official: not installed"]]
    slow_reset, slow_step, played_steps = play(OfficialEngine, games[: 1 if quick else 6])
    ratio = f"{slow_step / step:.0f}× per step, {slow_reset / reset:.0f}× per reset"
    figures = [f"{slow_reset:.0f}", f"{slow_step:.1f}", f"{1000 / slow_step:.1f}", str(played_steps), ratio]
    return [*rows, ["official", *figures]]


async def measure_managed(instances: int, episodes: int) -> list[str]:
    """Play whole games with leased instances."""
    tasks = [Task.of(row) for row in ALFWorld.draw_tasks("test", min(episodes, 64))]
    manager, steps = ResourceManager(), 0

    async def episode(task: Task) -> None:
        nonlocal steps
        async with manager.leases(task, [ALFWorld]) as leases:
            world = await leases.get(ALFWorld)
            assert isinstance(world, ALFWorld)
            while not world.won:
                call = world.expert()
                assert not isinstance(call, str)
                await world.alfworld_step(str(call.arguments["action"]))
                steps += 1
                await asyncio.sleep(0)

    async def worker(number: int) -> None:
        for position in range(number, episodes, instances):
            await episode(tasks[position % len(tasks)])

    started = time.process_time()
    await asyncio.gather(*map(worker, range(instances)))
    spent = time.process_time() - started
    await manager.close()
    return [str(instances), f"{episodes / spent:.0f}", f"{steps / spent:.0f}", f"{memory(instances):.0f}"]


class InstantBackend(Backend):
    """Replies with the same few turns, without any computation."""

    weight_version = 0
    context_length = 8192
    replies: Sequence[list[int]] = ()

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        ids = self.replies[request.turn % len(self.replies)]
        for token in ids if request.on_tokens is not None else ():
            request.on_tokens([token])
        return Completion(ids, [-0.1] * len(ids), [0] * len(ids), FinishReason.STOP)


async def measure_turns(chains: int, *, observed: bool) -> list[str]:
    """CPU time per turn of a rollout of 23 turns; `observed`: with an observer, which receives every sampled token."""
    backend = InstantBackend()
    agent = HFAgent(
        str(TOKENIZER), template="smollm2", backend=backend, tools=[ALFWorld.alfworld_step], reward=alfworld_won
    )
    assert agent.template is not None
    commands = ("go to countertop 1", "look", "go to toilet 1", "inventory", "go to sinkbasin 1")
    call = '<tool_call>\n{{"name": "alfworld_step", "arguments": {{"action": "{}"}}}}\n</tool_call><|im_end|>'
    backend.replies = [agent.template.codec.encode(call.format(command)) for command in commands]
    tasks = ALFWorld.draw_tasks("train", 8, kinds=["pick_and_place_simple"], rooms=["bathroom"])
    options: dict[str, Any] = {"observer": lambda _: None} if observed else {}
    await agent.run(tasks, 23, 2, seed=1, **options)
    started = time.process_time()
    result = await agent.run(tasks, 23, chains // 8, seed=1, **options)
    spent = time.process_time() - started
    turns = sum(len(chain.turns) for chain in result)
    await agent.close()
    return ["with an observer" if observed else "as in training", str(turns), f"{1e6 * spent / turns:.0f}"]


def memory(instances: int) -> float:
    """Kilobytes per game."""
    rows = ALFWorld.draw_tasks("test", instances)
    tracemalloc.start()
    held = [Household(ALFWorldGame.from_json(row["game"])) for row in rows]
    for house in held:
        assert house.commands
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(held) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    header = ["engine", "ms per reset", "ms per step", "steps/s", "steps measured", "official / ours"]
    print_table("ALFWorld engines, CPU time in one process", header, compare_engines(quick))
    rows = [asyncio.run(measure_managed(instances, 64 if quick else 640)) for instances in INSTANCES]
    title = "Games of the exploring expert with the resource manager, CPU time in one process"
    print_table(title, ["instances", "games/s", "steps/s", "KB per instance"], rows)
    if not TOKENIZER.exists():
        print(f"no {TOKENIZER}, which tests/tokenizers/fetch.py smollm2 fetches: turns of a rollout are left out")
        return
    rows = [asyncio.run(measure_turns(16 if quick else 256, observed=observed)) for observed in (False, True)]
    print_table("Turns of a rollout, CPU time of everything but the model", ["", "turns", "µs per turn"], rows)


if __name__ == "__main__":
    main()
