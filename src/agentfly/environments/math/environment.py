"""MathWithPython: mathematics problems with a Python interpreter as the tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.math import tasks
from agentfly.errors import ConfigError
from agentfly.types import Task, ToolCall


class MathWithPython(CodeInterpreter):
    """A code interpreter with problems whose answers have to be computed."""

    scored_by = "math_equal"

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, levels: Sequence[int] = tasks.LEVELS
    ) -> list[dict[str, Any]]:
        """Draw problems whose `levels` take turns: 1 arithmetic, 2 a word problem, 3 a problem that needs a loop."""
        return tasks.draw_tasks(split, count, seed, levels)

    async def reset(self, task: Task) -> None:
        self._program = task.columns.get("program")
        await super().reset(task)

    def expert(self) -> ToolCall | str:
        """Run the program of the column `program`, then answer with the last line of its output."""
        if self.last_output is not None:
            return self.last_output.strip().rpartition("\n")[2]
        if not isinstance(self._program, str):
            raise ConfigError("only problems with a column `program` have an expert; draw_tasks makes such rows")
        return ToolCall("code_interpreter", {"code": self._program})
