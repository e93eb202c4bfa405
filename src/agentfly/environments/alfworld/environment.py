"""ALFWorld as an environment: one command at a time until the goal is reached.

A won game stays won: the chain ends there, and further commands of the same turn are not carried out.
"""

from __future__ import annotations

from typing import Any, ClassVar

from agentfly.environment import Environment
from agentfly.environments.alfworld.game import ALFWorldGame
from agentfly.environments.alfworld.household import NOTHING_HAPPENS, Household, next_command
from agentfly.environments.alfworld.tasks import draw_tasks
from agentfly.environments.data import get_column
from agentfly.errors import ConfigError
from agentfly.scoring import reward
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall


class ALFWorld(Environment):
    """A household in text: find things, clean, heat or cool them, put them where they belong."""

    scored_by = "alfworld_won"
    shows_commands: ClassVar[bool] = False
    """Whether every observation ends with the admissible commands."""
    expert_explores: ClassVar[bool] = True
    """Whether the expert must search like a player; otherwise it knows the location of everything."""

    draw_tasks = staticmethod(draw_tasks)

    async def reset(self, task: Task) -> None:
        """Start the game in the column `game`."""
        hint = "ALFWorld.draw_tasks and official_tasks make such rows"
        self._game = ALFWorldGame.from_json(get_column(task, "game", hint))
        self._house = Household(self._game)
        self._commands: list[str] = []
        self.steps = 0
        """Number of commands so far."""
        self.invalid_actions = 0
        """Number of commands that did nothing."""
        self.won = False

    @tool
    async def alfworld_step(self, action: str) -> dict[str, Any]:
        """Do one thing in the household. The commands are: look; inventory; go to RECEPTACLE; open RECEPTACLE; close
        RECEPTACLE; take OBJECT from RECEPTACLE; move OBJECT to RECEPTACLE; examine RECEPTACLE or OBJECT; use OBJECT;
        clean, heat or cool OBJECT with RECEPTACLE; slice OBJECT with OBJECT; help. Names have a number: "fridge 1".

        Args:
            action: One command, such as "go to fridge 1".
        """
        if self.won:
            return {"observation": "The task is done.", "won": True, "ends_chain": True}
        observation = self._house.step(action)
        self.won = self._house.won
        self.steps += 1
        self._commands.append(action)
        self.invalid_actions += observation == NOTHING_HAPPENS
        if self.shows_commands and not self.won:
            observation += f"\nYou can: {', '.join(self._house.commands)}."
        return {"observation": observation, "won": self.won, "ends_chain": self.won}

    @tool
    async def alfworld_get_admissible_commands(self) -> str:
        """List every command that does something now."""
        return "\n".join(self._house.commands)

    @tool
    async def alfworld_get_task_objective(self) -> str:
        """Say again what the task is."""
        return self._game.task

    async def snapshot(self) -> list[str]:
        """The commands so far: the household is deterministic, and carrying them out again takes no time."""
        return list(self._commands)

    async def restore(self, state: list[str]) -> None:
        """Carry out the commands of a snapshot."""
        for command in state:
            await self.alfworld_step(command)

    def expert(self) -> ToolCall | str:
        """The next command toward the goal."""
        if self.won:
            return "Done."
        command = next_command(self._house, explores=self.expert_explores)
        if command is None:
            raise ConfigError(f"the expert finds no way to {self._game.task!r} from here")
        return ToolCall("alfworld_step", {"action": command})


@reward
def alfworld_won(env: ALFWorld) -> dict[str, Any]:
    """1 for a won game, else 0. Metrics: `steps`, and `invalid_actions`, the commands that did nothing."""
    return {"reward": float(env.won), "steps": env.steps, "invalid_actions": env.invalid_actions}


@reward
def alfworld_episode_reward(env: ALFWorld) -> float:
    """10 for a won game, else 0: the scale of the original AgentFly, for comparison with its recipes."""
    return 10.0 * env.won
