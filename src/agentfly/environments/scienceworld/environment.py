"""ScienceWorld as an environment: one action at a time until the task is completed or has failed for good.

Once it has ended, neither success nor failure can be changed by further actions. The simulator scores a task that has
failed for good as -100. The rewards count it as 0: progress made before is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from agentfly import threads
from agentfly.environment import Environment, Pool
from agentfly.environments.scienceworld import jvm
from agentfly.environments.scienceworld import tasks as official
from agentfly.errors import EnvironmentFault
from agentfly.scoring import reward
from agentfly.tooling import tool
from agentfly.trajectory import Trajectory
from agentfly.types import Task, ToolCall

if TYPE_CHECKING:
    from agentfly.environments.scienceworld.java_process import JavaProcess

T = TypeVar("T")
MAX_ACTION_LENGTH = 1000
"""Characters. The simulator's own actions have fewer than a hundred."""
MAX_LISTED_ACTIONS = 100
NOT_UNDERSTOOD = "No known action matches that input."
"""The simulator's answer to an action it cannot parse."""


class ScienceWorld(Environment):
    """Elementary science in a house with a workshop and a greenhouse: boil, grow, measure, wire up, find out."""

    # Instances of one Java process wait for one another, hence the long timeouts.
    pool = Pool(memory=64 << 20, start_timeout=600.0, reset_timeout=300.0)
    scored_by = "scienceworld_score"
    deterministic = False  # in some tasks the simulator draws unseeded random numbers: a score of 30, then of 31
    share_process: ClassVar[int] = 16
    """Maximum number of instances per Java process; their actions are serialized."""
    _jvm: JavaProcess | None = None
    """The Java process in which this instance has a slot."""

    draw_tasks = staticmethod(official.draw_tasks)

    async def start(self) -> None:
        """Create a simulator."""
        self._jvm = jvm.reserve(self.share_process)  # assigned first, so that `close` releases it after a failure
        self._interface = await threads.call(self._jvm.create_simulator)

    async def reset(self, task: Task) -> None:
        """Load the variation given by the columns `task_name`, `variation_idx` and `simplification`."""
        self._variation = official.read_variation(task)
        self._gold: list[str] | None = None
        self._actions: list[str] = []
        self.score = 0
        """0 to 100; -100 if the task has failed for good."""
        self.ended = False
        self.invalid_actions = 0
        """Number of actions that the simulator could not parse."""
        await self._call(self._variation.load)

    @property
    def steps(self) -> int:
        """Number of actions so far."""
        return len(self._actions)

    @property
    def _process(self) -> JavaProcess:
        if self._jvm is None:
            raise EnvironmentFault("this ScienceWorld is closed")
        return self._jvm

    async def _call(self, function: Callable[[Any], T]) -> T:
        """Run `function` with the simulator, in a thread, when the process is free."""
        result: T = await threads.call(self._process.call, lambda: function(self._interface))
        return result

    @tool
    async def scienceworld_step(self, action: str) -> dict[str, Any]:
        """Do one thing. Some actions: look around; inventory; task; look at OBJ; look in OBJ; open OBJ; close OBJ;
        go to PLACE; teleport to PLACE; pick up OBJ; put down OBJ; move OBJ to OBJ; pour OBJ into OBJ; dunk OBJ into
        OBJ; mix OBJ; use OBJ on OBJ; activate OBJ; deactivate OBJ; connect OBJ to OBJ; disconnect OBJ; read OBJ; eat
        OBJ; flush OBJ; focus on OBJ; wait; wait1. Focusing says "this is it": on the wrong thing it ends the task.

        Args:
            action: One action, such as "move metal pot to stove"; or a number, when asked which one was meant.
        """
        if self.ended:
            return {"observation": "The task has ended.", "score": self.score, "ends_chain": True}
        self._actions.append(action)
        if len(action) > MAX_ACTION_LENGTH:
            observation = NOT_UNDERSTOOD
        else:
            text = action.encode("utf-8", "replace").decode()
            observation, self.score, completed = await self._call(lambda simulator: jvm.take_step(simulator, text))
            self.ended = completed or self.score < 0
        self.invalid_actions += observation == NOT_UNDERSTOOD
        return {"observation": observation, "score": self.score, "ends_chain": self.ended}

    @tool
    async def scienceworld_valid_actions(self, about: str = "") -> str:
        """List what can be done here and now, which takes no time in the world: the forms that actions have, and the
        things to put into them. With a word, the actions that name it.

        Args:
            about: A word, such as "pot".
        """
        word = about.strip()
        if not word:
            templates, objects = await self._call(
                lambda simulator: (list(simulator.getPossibleActions()), list(simulator.getPossibleObjects()))
            )
            return f"Actions: {'; '.join(templates)}.\nOBJ may be: {', '.join(objects)}."
        listed = await self._call(lambda simulator: str(simulator.getValidActionObjectCombinationsJSON()))
        valid = sorted(
            {combination["action"] for combination in json.loads(listed)["validActions"]}
        )  # often a thousand
        matching = [action for action in valid if word.lower() in action.lower()]
        left = len(matching) - MAX_LISTED_ACTIONS
        note = [f"… and {left} more. Use a longer word."] if left > 0 else []
        return "\n".join([*matching[:MAX_LISTED_ACTIONS], *note]) or f"Nothing can be done with {word!r:.80}."

    async def expert(self) -> ToolCall | str:
        """The first action of the simulator's solution that has not been carried out.

        The solution is a plan from the start of the task. After other actions it may no longer complete the task.
        """
        if self.ended:
            return "Done."
        if self._gold is None:
            self._gold = await threads.call(self._process.call_scratch, self._variation.find_gold_path)
        done = 0
        for action in self._actions:
            done += done < len(self._gold) and action == self._gold[done]
        return ToolCall("scienceworld_step", {"action": self._gold[done]}) if done < len(self._gold) else "Done."

    async def check(self) -> None:
        await threads.call(self._process.check)

    async def close(self) -> None:
        process, self._jvm = self._jvm, None
        if process is not None:
            await threads.call(jvm.release, process)


@reward
def scienceworld_score(env: ScienceWorld) -> dict[str, Any]:
    """Final score, 0 to 1. 0 if the task has failed for good.

    Metrics: `success` (the score is 1), `failed` (for good), the number of `steps`, and of `invalid_actions` that the
    simulator could not parse.
    """
    return {
        "reward": max(env.score, 0) / 100,
        "success": float(env.score == 100),
        "failed": float(env.score < 0),
        "steps": env.steps,
        "invalid_actions": env.invalid_actions,
    }


@reward
def scienceworld_progress(trajectory: Trajectory) -> list[float]:
    """Change of the score (0 to 1) per turn; the sum is `scienceworld_score`."""
    gains = []
    score_before = 0.0
    for turn in trajectory.turns:
        score_after = score_before
        for call in turn.calls:
            if call.name == "scienceworld_step" and "score" in call.info:
                score_after = max(call.info["score"], 0) / 100
        gains.append(score_after - score_before)
        score_before = score_after
    return gains


@reward
def scienceworld_episode_reward(env: ScienceWorld) -> float:
    """10 for a completed task, else 0: the scale of the original AgentFly, for comparison with its recipes."""
    return 10.0 * (env.score == 100)
