"""ALFWorld as an environment: one command at a time until the goal is reached.

A won game stays won: the chain ends there, and further commands of the same turn are not carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from agentfly.environment import Environment, Pool
from agentfly.environments.alfworld import generated, observations
from agentfly.environments.alfworld.expert import next_command
from agentfly.environments.alfworld.game import ALFWorldGame
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.upstream import UpstreamGame
from agentfly.errors import ConfigError, DataError
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall


class ALFWorldEngine(Protocol):
    """Interface of the two engines, `Household` and `UpstreamGame`."""

    def introduction(self) -> str: ...
    def step(self, command: str) -> str: ...
    @property
    def commands(self) -> list[str]: ...
    @property
    def won(self) -> bool: ...


class ALFWorld(Environment):
    """A household in text: find things, clean, heat or cool them, put them where they belong."""

    scored_by = "alfworld_won"
    shows_commands: ClassVar[bool] = False
    """Whether every observation ends with the admissible commands."""
    expert_explores: ClassVar[bool] = True
    """Whether the expert must search like a player; otherwise it knows the location of everything."""

    @classmethod
    def draw_tasks(
        cls,
        split: str = "train",
        count: int = 100,
        *,
        seed: int = 0,
        kinds: Sequence[str] | None = None,
        rooms: Sequence[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Generated, winnable games, round-robin over the task types `kinds` (None: all six) in the given `rooms`."""
        return generated.draw_tasks(split, count, seed, kinds=kinds, rooms=rooms)

    async def reset(self, task: Task) -> None:
        """Start the game in the column `game`."""
        if "game" not in task.columns:
            raise DataError(
                f"task {task.id!r} has no column 'game'; ALFWorld.draw_tasks and official_tasks make such rows"
            )
        self._game = ALFWorldGame.from_json(task.columns["game"])
        self._house = Household(self._game)
        self.steps = 0
        """Number of commands so far."""
        self.invalid_actions = 0
        """Number of commands that did nothing."""
        self.won = False

    @property
    def _engine(self) -> ALFWorldEngine:
        return self._house

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
        observation = self._step(action)
        self.won = self._engine.won
        self.steps += 1
        self.invalid_actions += observation == observations.NOTHING_HAPPENS
        if self.shows_commands and not self.won:
            observation += f"\nYou can: {', '.join(self._engine.commands)}."
        return {"observation": observation, "won": self.won, "ends_chain": self.won}

    def _step(self, action: str) -> str:
        return self._house.step(action)

    @tool
    async def alfworld_get_admissible_commands(self) -> str:
        """List every command that does something now."""
        return "\n".join(self._engine.commands)

    @tool
    async def alfworld_get_task_objective(self) -> str:
        """Say again what the task is."""
        return self._game.task

    def expert(self) -> ToolCall | str:
        """The next command toward the goal."""
        if self.won:
            return "Done."
        command = next_command(self._house, explores=self.expert_explores)
        if command is None:
            raise ConfigError(f"the expert finds no way to {self._game.task!r} from here")
        return ToolCall("alfworld_step", {"action": command})


class ALFWorldUpstream(ALFWorld):
    """The same household, played by the official engine (extra `alfworld`)."""

    pool = Pool(runtime="process", reset_timeout=120.0)
    _upstream: UpstreamGame | None = None

    async def reset(self, task: Task) -> None:
        """Start the game in the official engine; a `Household` follows along for the expert."""
        await super().reset(task)
        await self.close()
        self._upstream = UpstreamGame(self._game)

    @property
    def _engine(self) -> ALFWorldEngine:
        assert self._upstream is not None
        return self._upstream

    def _step(self, action: str) -> str:
        self._house.step(action)
        return self._engine.step(action)

    async def close(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None
