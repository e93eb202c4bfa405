"""WebShop with 1, 16 and 64 instances: steps and resets per second, memory; and the scores of simple policies.

Every instance follows the expert through generated tasks (search, look, choose, buy), one step each in turn, in one
process. For comparison, pages are rendered to HTML and parsed back to text. Then the scores of the expert and of two
policies that buy the first result; on the official goals too if AGENTFLY_DATA is set.

    python -m benchmarks.webshop [--quick]
"""

import argparse
import asyncio
import html.parser
import itertools
import os
import time
import tracemalloc
from functools import partial
from typing import Any

from agentfly import Task
from agentfly.environments.webshop import WebShop, official_tasks
from agentfly.environments.webshop.environment import next_informed_action
from agentfly.environments.webshop.pages import BUY, render_html, render_text
from agentfly.environments.webshop.product import ShopGoal
from agentfly.environments.webshop.session import ShopSession
from agentfly.environments.webshop.shop import Shop, open_shop
from agentfly.environments.webshop.tasks import SPLITS
from agentfly.types import ToolCall
from benchmarks.table import print_table


async def measure_speed(instances: int, seconds: float, tasks: list[Task]) -> tuple[float, float]:
    """Steps and resets per CPU second."""
    queue = itertools.cycle(tasks)
    environments = [WebShop() for _ in range(instances)]
    steps = resets = 0
    spent = {"step": 0.0, "reset": 0.0}
    for environment in environments:
        await environment.start()
        await environment.reset(next(queue))
    while sum(spent.values()) < seconds:
        for environment in environments:
            action = environment.expert()
            started = time.process_time()
            if isinstance(action, ToolCall):
                await getattr(environment, action.name)(**action.arguments)
                spent["step"] += time.process_time() - started
                steps += 1
            if environment.score is not None or isinstance(action, str):
                started = time.process_time()
                await environment.reset(next(queue))
                spent["reset"] += time.process_time() - started
                resets += 1
    return steps / spent["step"], resets / max(spent["reset"], 1e-9)


async def measure_memory(instances: int, tasks: list[Task]) -> float:
    """Kilobytes per instance in the middle of an episode."""
    queue = itertools.cycle(tasks)
    await WebShop().reset(tasks[0])  # loads the shop
    tracemalloc.start()
    environments = [WebShop() for _ in range(instances)]
    for environment in environments:
        await environment.reset(next(queue))
        await environment.search(environment.session.goal.name)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / instances / 1024


class _Text(html.parser.HTMLParser):
    """The visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def pages(shop: Shop, goal: ShopGoal, rounds: int) -> list[list[str]]:
    """Microseconds to render a page as text, directly and through HTML."""
    rows = []
    for name, actions in (("results", ()), ("item", ("click",))):
        session = ShopSession(shop, goal)
        session.search(goal.name)
        for _ in actions:
            session.click(goal.asin)

        def ours(session: ShopSession = session) -> None:
            render_text(session.page)

        def through_html(session: ShopSession = session) -> None:
            _Text().feed(render_html(session.page))

        times = []
        for make in (ours, through_html):
            make()
            started = time.process_time()
            for _ in range(rounds):
                make()
            times.append((time.process_time() - started) / rounds * 1e6)
        rows.append([name, f"{times[0]:.0f}", f"{times[1]:.0f}", f"{times[1] / times[0]:.0f} ×"])
    return rows


def opening(sizes: list[int]) -> list[list[str]]:
    """Seconds to open a generated shop, and microseconds per search."""
    rows = []
    for size in sizes:
        started = time.process_time()
        shop = open_shop(f"generated/{size}/1")
        opened = time.process_time() - started
        started = time.process_time()
        for _ in range(200):
            shop.search("machine washable slim fit men's pants")
        rows.append([f"{size:,}", f"{opened:.2f}", f"{(time.process_time() - started) / 200 * 1e6:.0f}"])
    return rows


def policies(shop: Shop, goals: list[ShopGoal]) -> list[list[str]]:
    """Scores of the expert, and of policies that search for the instruction and buy the first result."""

    def expert(session: ShopSession) -> None:
        while action := next_informed_action(session):
            session.act(f"{action[0]}[{action[1]}]")

    def first(session: ShopSession, *, choosing: bool) -> None:
        session.search(session.goal.instruction)
        if session.found:
            session.click(session.found[0].asin)
            for value in session.goal.options if choosing else ():
                session.click(value)
            session.click(BUY)

    rows = []
    policies_by_name = {"expert": expert, "first found, with options": partial(first, choosing=True)}
    for name, policy in {**policies_by_name, "first found": partial(first, choosing=False)}.items():
        sessions = [ShopSession(shop, goal) for goal in goals]
        started = time.process_time()
        for session in sessions:
            policy(session)
        spent = (time.process_time() - started) / len(goals)
        scores = [session.score.reward if session.score else 0.0 for session in sessions]
        ones = sum(reward == 1.0 for reward in scores)
        rows.append([name, f"{ones / len(goals):.1%}", f"{sum(scores) / len(goals):.3f}", f"{spent * 1e3:.2f}"])
    return rows


def print_policies(title: str, rows: list[dict[str, Any]]) -> None:
    shop = open_shop(rows[0]["shop"])
    goals = [ShopGoal.from_json(row["goal"]) for row in rows]
    header = ["policy", "score 1.0", "mean score", "ms per episode"]
    print_table(f"{title}: {len(goals):,} goals", header, policies(shop, goals))


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost and scores of WebShop.")
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures are not meaningful")
    quick = parser.parse_args().quick
    tasks = [Task.of(row) for row in WebShop.draw_tasks("train", 50 if quick else 500)]
    rows = []
    for instances in (1, 16, 64):
        steps, resets = asyncio.run(measure_speed(instances, 0.2 if quick else 3.0, tasks))
        held = asyncio.run(measure_memory(instances, tasks))
        rows.append([str(instances), f"{steps:,.0f}", f"{resets:,.0f}", f"{held:.1f}"])
    print_table("A shop of 1,000 products", ["instances", "steps/s", "resets/s", "KB per instance"], rows)
    shop = open_shop(tasks[0].columns["shop"])
    environment = WebShop()
    asyncio.run(environment.reset(tasks[0]))
    header = ["page", "text, µs", "HTML and back, µs", "ratio"]
    print_table("The text of a page", header, pages(shop, environment.session.goal, 50 if quick else 1000))
    print_policies("Generated, test", WebShop.draw_tasks("test", 50 if quick else 500))
    if os.environ.get("AGENTFLY_DATA"):
        rows = [row for split in SPLITS for row in official_tasks(split)]
        print_policies("Official, all splits", rows[:: 100 if quick else 1])
    sizes = [100, 1000] if quick else [1000, 10_000, 100_000]
    print_table("Opening a generated shop", ["products", "opening, s", "search, µs"], opening(sizes))


if __name__ == "__main__":
    main()
