"""Mathematics with a Python interpreter at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.math import generated
from agentfly.errors import ConfigError
from agentfly.types import Task, ToolCall


class MathWithPython(CodeInterpreter):
    """A code interpreter with problems whose answers have to be computed."""

    scored_by = "math_equal"

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, levels: Sequence[int] = generated.LEVELS
    ) -> list[dict[str, Any]]:
        """Problems of the `levels` named, which take turns: 1 a sum in figures, 2 a story, 3 one that takes a loop."""
        return generated.draw_tasks(split, count, seed, levels)

    async def reset(self, task: Task) -> None:
        self._program = task.columns.get("program")
        await super().reset(task)

    def expert(self) -> ToolCall | str:
        """Write the program, and say what it showed.

        It knows how the answer is computed, not the answer.
        """
        if self.last_output is not None:
            return self.last_output.strip().rpartition("\n")[2]
        if not isinstance(self._program, str):
            raise ConfigError("only problems with a column `program` have an expert; draw_tasks makes such rows")
        return ToolCall("code_interpreter", {"code": self._program})
