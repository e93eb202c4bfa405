"""ScienceWorld as an environment: one action at a time, until the task is done or can no longer be done.

What ended has ended: a wrong choice cannot be taken back, nor can anything that is still sent undo a success.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agentfly.environment import Environment, Pool
from agentfly.environments.scienceworld import tasks as official
from agentfly.environments.scienceworld.simulator import Simulator
from agentfly.threads import call
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

LONGEST_ACTION = 1000
"""Characters; the simulator's own actions have less than a hundred."""
LONGEST_LIST = 100
"""Actions that are listed at once."""
NOT_UNDERSTOOD = "No known action matches that input."
"""What the simulator says of such an action."""


class ScienceWorld(Environment):
    """Elementary science in a house with a workshop and a greenhouse: boil, grow, measure, wire up, find out."""

    pool = Pool(memory=64 << 20, start_timeout=600.0, reset_timeout=300.0)  # those of a process wait for one another
    scored_by = "scienceworld_score"
    deterministic = False  # in some tasks the simulator draws numbers of its own: a score of 30, then of 31
    share_process: ClassVar[int] = 16
    """How many may share a Java process; their actions take turns."""
    _simulator: Simulator | None = None

    @classmethod
    def draw_tasks(
        cls,
        split: str = "train",
        count: int = 100,
        *,
        seed: int = 0,
        tasks: Sequence[str] | None = None,
        simplification: str = "easy",
    ) -> list[dict[str, Any]]:
        """Variations of all thirty tasks, which take turns, or of the `tasks` that are named; splits are official."""
        return official.draw_tasks(split, count, seed, tasks, simplification)

    async def start(self) -> None:
        """Get a simulator."""
        self._simulator = Simulator(self.share_process)  # at once, so that `close` knows of it whatever happens here
        await call(self._simulator.open)

    async def reset(self, task: Task) -> None:
        """Begin the variation that the columns `task_name`, `variation_idx` and `simplification` name."""
        self._variation = official.variation_of(task)
        self._gold: list[str] | None = None
        self._actions: list[str] = []
        self.score = 0
        """0 to 100; -100 where the task can no longer be done."""
        self.ended = False
        self.in_vain = 0
        """How many actions were not understood."""
        await call(self._world.load, self._variation)

    @property
    def steps(self) -> int:
        """Actions so far."""
        return len(self._actions)

    @property
    def _world(self) -> Simulator:
        assert self._simulator is not None
        return self._simulator

    @tool
    async def scienceworld_step(self, action: str) -> dict[str, Any]:
        """Do one thing. Some actions: look around; inventory; task; look at OBJ; look in OBJ; open OBJ; close OBJ;
        go to PLACE; teleport to PLACE; pick up OBJ; put down OBJ; move OBJ to OBJ; pour OBJ into OBJ; dunk OBJ into
        OBJ; mix OBJ; use OBJ on OBJ; activate OBJ; deactivate OBJ; connect OBJ to OBJ; disconnect OBJ; read OBJ; eat
        OBJ; flush OBJ; focus on OBJ; wait; wait1. Focusing says "this is it": on the wrong thing it ends the task.

        Args:
            action: One action, such as "move metal pot to stove"; or a number, when asked which one was meant.
        """
        if not self.ended:
            return await self._step(action)
        return {"observation": "The task has ended.", "score": self.score, "ends_chain": True}

    async def _step(self, action: str) -> dict[str, Any]:
        self._actions.append(action)
        if len(action) > LONGEST_ACTION:
            observation = NOT_UNDERSTOOD
        else:
            stepped = await call(self._world.step, action.encode("utf-8", "replace").decode())
            observation, self.score = stepped.observation, stepped.score
            self.ended = stepped.completed or self.score < 0
        self.in_vain += observation == NOT_UNDERSTOOD
        return {"observation": observation, "score": self.score, "ends_chain": self.ended}

    @tool
    async def scienceworld_valid_actions(self, about: str = "") -> str:
        """List what can be done here and now, which takes no time in the world: the forms that actions have, and the
        things to put into them. With a word, the actions that name it.

        Args:
            about: A word, such as "pot".
        """
        if not about.strip():
            forms, things = await call(self._world.forms)
            return f"Actions: {'; '.join(forms)}.\nOBJ may be: {', '.join(things)}."
        found = [each for each in await call(self._world.valid_actions) if about.strip().lower() in each.lower()]
        left = len(found) - LONGEST_LIST
        more = [f"… and {left} more. Use a longer word."] if left > 0 else []
        return "\n".join([*found[:LONGEST_LIST], *more]) or f"Nothing can be done with {about.strip()!r:.80}."

    async def expert(self) -> ToolCall | str:
        """The next action of the simulator's own solution that has not been done.

        It leads to the end from the beginning; after actions of another's choice it may not.
        """
        if self.ended:
            return "Done."
        if self._gold is None:
            self._gold = await call(self._world.gold_path, self._variation)
        done = 0
        for action in self._actions:
            done += done < len(self._gold) and action == self._gold[done]
        return ToolCall("scienceworld_step", {"action": self._gold[done]}) if done < len(self._gold) else "Done."

    async def check(self) -> None:
        await call(self._world.check)

    async def close(self) -> None:
        if self._simulator is not None:
            await call(self._simulator.close)
