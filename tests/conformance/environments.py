"""A small environment that keeps the contract, and others that each break one property."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import zlib
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

from agentfly import Environment, Task, reward, tool
from agentfly.environment import Pool
from agentfly.environments.data import validate_split
from agentfly.types import ToolCall

LOG: list[str] = []


class Corridor(Environment):
    """A corridor with a door somewhere in it."""

    scored_by = "corridor_reward"

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """Doors to be found."""
        validate_split(split)
        random, rows = Random(f"{split} {seed}"), list[dict[str, Any]]()
        while len(rows) < count:
            at, door = random.randrange(10_000), random.randrange(1, 9)
            if ("train", "validation", "test")[zlib.crc32(f"{at} {door}".encode()) % 3] == split:
                question = f"You are at {at}. Walk to {at + door}."
                rows.append({"id": f"{split}-{seed}-{len(rows)}", "question": question, "at": at, "door": at + door})
        return rows

    async def reset(self, task: Task) -> None:
        """Stand where the task says."""
        self.at: int = task.columns["at"]
        self.door: int = task.columns["door"]

    @tool
    async def walk(self, steps: int, mood: str = "calm") -> dict[str, Any]:
        """Walk along the corridor.

        Args:
            steps: How far; backwards where it is below 0.
            mood: How you feel about it.
        """
        return await self._walk(steps, mood)

    async def _walk(self, steps: int, mood: str) -> dict[str, Any]:
        self.at += max(-10, min(steps, 10))
        return {"observation": f"You are at {self.at}, {mood[:20]}.", "ends_chain": self.at == self.door}

    def expert(self) -> ToolCall | str:
        """One step toward the door."""
        return ToolCall("walk", {"steps": 1}) if self.at < self.door else "Here."


@reward
def corridor_reward(env: Corridor) -> float:
    """One at the door."""
    return float(env.at == env.door)


@reward
def generous_reward(env: Corridor) -> float:
    """One for every chain."""
    return 1.0


# ── each breaks one ──


class Slow(Corridor):
    def __init__(self) -> None:
        started_at = time.thread_time()
        while time.thread_time() - started_at < 0.06:
            pass


class Undocumented(Corridor):
    @tool
    async def walk(self, steps: int, mood: str = "calm") -> dict[str, Any]:
        """Walk along the corridor.

        Args:
            steps: How far.
        """
        return await self._walk(steps, mood)


class Unseeded(Corridor):
    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        return super().draw_tasks(split, count, seed=seed + Random().randrange(1 << 30))


class Hashed(Corridor):
    """The same twice in a process, and something else in the next."""

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        return super().draw_tasks(split, count, seed=seed + hash("corridor"))


class Overlapping(Corridor):
    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        validate_split(split)
        return super().draw_tasks("train", count, seed=seed)


class AnySplit(Corridor):
    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        drawn_split = split if split in ("train", "validation", "test") else "train"
        return super().draw_tasks(drawn_split, count, seed=seed)


class Tuples(Corridor):
    """Its rows are JSON only after a fashion."""

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        return [{**row, "walls": (0, 1)} for row in super().draw_tasks(split, count, seed=seed)]


class Unstartable(Corridor):
    async def start(self) -> None:
        raise OSError("no such disk")


class Dice(Corridor):
    """What is said depends on chance that no seed decides."""

    async def _walk(self, steps: int, mood: str) -> dict[str, Any]:
        answer = await super()._walk(steps, mood)
        return {**answer, "observation": f"{answer['observation']} The wind blows from {os.urandom(4).hex()}."}


class Remembering(Corridor):
    """It keeps what the last chain did."""

    async def start(self) -> None:
        self.walked: list[int] = []

    async def _walk(self, steps: int, mood: str) -> dict[str, Any]:
        self.walked.append(self.at)
        return await super()._walk(steps, mood)


@cache
def _shared_state() -> dict[str, int]:
    return {}


class Shared(Corridor):
    """Alone it is as it should be; beside others it shows their door."""

    async def reset(self, task: Task) -> None:
        await super().reset(task)
        _shared_state()["door"] = self.door

    async def _walk(self, steps: int, mood: str) -> dict[str, Any]:
        answer = await super()._walk(steps, mood)
        return {**answer, "observation": f"{answer['observation']} The door is at {_shared_state()['door']}."}


class Touchy(Corridor):
    """It cannot take every text."""

    async def _walk(self, steps: int, mood: str) -> dict[str, Any]:
        mood.encode()
        return await super()._walk(steps, mood.split()[0])


LOCK = SimpleNamespace(taken=False)


class Grasping(Corridor):
    """Takes a shared lock and keeps it when it is cancelled, until another chain has waited for it in vain."""

    async def reset(self, task: Task) -> None:
        try:
            while LOCK.taken:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            LOCK.taken = False
            raise
        await super().reset(task)

    async def _walk(self, steps: int, mood: str) -> dict[str, Any]:
        LOCK.taken = True
        await asyncio.sleep(0.02)
        LOCK.taken = False
        return await super()._walk(steps, mood)


class Jammed(Corridor):
    """What is cancelled in the middle can no longer be closed."""

    busy = False

    async def _walk(self, steps: int, mood: str) -> dict[str, Any]:
        self.busy = True
        await asyncio.sleep(0.001)
        self.busy = False
        return await super()._walk(steps, mood)

    async def close(self) -> None:
        if self.busy:
            raise RuntimeError("it is still in use")


class Halfway(Corridor):
    """What a reset did not come to cannot be closed."""

    async def reset(self, task: Task) -> None:
        self.name = ""
        await super().reset(task)
        self.name = f"{self.at + 0}"

    async def close(self) -> None:
        if not self.name:
            raise RuntimeError("it has no name")


class Deaf(Corridor):
    """It goes on when it is cancelled."""

    async def _walk(self, steps: int, mood: str) -> dict[str, Any]:
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            await asyncio.sleep(30)
        return await super()._walk(steps, mood)


HELD = SimpleNamespace(descriptors=list[int]())
"""Descriptors that a leaking environment left, for the test to close."""
OVER = threading.Event()
"""Ends the threads that a leaking environment left."""


class Leaking(Corridor):
    async def start(self) -> None:
        HELD.descriptors.extend(os.pipe())


class Spawning(Corridor):
    async def start(self) -> None:
        threading.Thread(target=OVER.wait, name="left behind").start()


class Loud(Corridor):
    """It writes into a list of its module."""

    async def reset(self, task: Task) -> None:
        await super().reset(task)
        LOG.append(task.question)


class Meddling(Corridor):
    """It changes what the whole process has."""

    async def reset(self, task: Task) -> None:
        await super().reset(task)
        os.environ["CORRIDOR_DOOR"] = str(self.door)


class Lost(Corridor):
    """Its expert walks the wrong way."""

    def expert(self) -> ToolCall | str:
        return ToolCall("walk", {"steps": -1}) if self.at > 0 else "Lost."


class Generous(Corridor):
    scored_by = "generous_reward"


class Blocking(Corridor):
    """Blocks the event loop."""

    async def reset(self, task: Task) -> None:
        OVER.wait(60)


class Elsewhere(Corridor):
    """It lives in a process of its own, at most two of it."""

    pool = Pool(runtime="process", max_instances=2)


class Doorless(Corridor):
    """It has no tasks of its own."""

    draw_tasks = Environment.draw_tasks


class Everybodys(Corridor):
    pool = Pool(scope="global")  # type: ignore[arg-type]

    async def start(self) -> None:
        self.at, self.door = 0, 5


class Unscored(Corridor):
    """No reward says whether its expert is right."""

    scored_by = ""
