"""The household as an environment: one command at a time, until the task is done.

A game that was won stays won: the chain ends there, and nothing that is still sent can undo it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from agentfly.environment import Environment, Pool
from agentfly.environments.alfworld import generated, words
from agentfly.environments.alfworld.expert import next_command
from agentfly.environments.alfworld.game import Game
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.upstream import UpstreamGame
from agentfly.errors import ConfigError, DataError
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall


class Engine(Protocol):
    """Something that plays a game."""

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
    """Whether every observation ends with the commands that do something now."""
    expert_explores: ClassVar[bool] = True
    """Whether the expert has to search as a player does; else it knows where everything is."""

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
        """Games of all six kinds, which take turns, in all four kinds of rooms, or of the `kinds` and in the `rooms`
        that are named; every one can be won."""
        return generated.draw_tasks(split, count, seed, kinds, rooms)

    async def reset(self, task: Task) -> None:
        """Begin the game of the column `game`."""
        self._game = _game_of(task)
        self._house = Household(self._game)
        self.steps = 0
        """Commands so far."""
        self.in_vain = 0
        """How many of them did nothing."""
        self.won = False

    @property
    def _engine(self) -> Engine:
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
        said = await self._step(action)
        self.steps += 1
        self.in_vain += said == words.NOTHING_HAPPENS
        if self.shows_commands and not self.won:
            said += f"\nYou can: {', '.join(self._engine.commands)}."
        return {"observation": said, "won": self.won, "ends_chain": self.won}

    async def _step(self, action: str) -> str:
        said = self._house.step(action)
        self.won = self._house.won
        return said

    @tool
    async def alfworld_get_admissible_commands(self) -> str:
        """List every command that does something now."""
        return "\n".join(self._engine.commands)

    @tool
    async def alfworld_get_task_objective(self) -> str:
        """Say again what the task is."""
        return self._game.task

    def expert(self) -> ToolCall | str:
        """The next command towards the goal."""
        if self.won:
            return "Done."
        command = next_command(self._house, explores=self.expert_explores)
        if command is None:
            raise ConfigError(f"the expert sees no way to {self._game.task!r} from here")
        return ToolCall("alfworld_step", {"action": command})


class ALFWorldUpstream(ALFWorld):
    """The same household, played by the official engine (extra `alfworld`)."""

    pool = Pool(place="process", reset_timeout=120.0)
    _upstream: UpstreamGame | None = None

    async def reset(self, task: Task) -> None:
        """Begin the game in the official engine; ours plays along, for the expert."""
        await super().reset(task)
        await self.close()
        self._upstream = UpstreamGame(self._game)

    @property
    def _engine(self) -> Engine:
        assert self._upstream is not None
        return self._upstream

    async def _step(self, action: str) -> str:
        self._house.step(action)
        said = self._engine.step(action)
        self.won = self._engine.won
        return said

    async def close(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None


def _game_of(task: Task) -> Game:
    if "game" not in task.columns:
        raise DataError(f"task {task.id!r} has no column 'game'; ALFWorld.draw_tasks and official_tasks make such rows")
    return Game.from_json(task.columns["game"])
