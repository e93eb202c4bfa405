"""A function to be written, with a Python interpreter to try it in.

The tests that decide are in the row, and never in the session that the model has: the reward `unit_tests` runs them in
a sandbox of the judge's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.programs import generated
from agentfly.errors import ConfigError
from agentfly.types import Task, ToolCall


class ProgramSynthesis(CodeInterpreter):
    """A code interpreter with functions to write; the answer is the code."""

    scored_by = "unit_tests"

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, kinds: Sequence[str] = generated.KINDS
    ) -> list[dict[str, Any]]:
        """Functions of the `kinds` named, which take turns: over numbers, strings or lists."""
        return generated.draw_tasks(split, count, seed, kinds)

    async def reset(self, task: Task) -> None:
        self._solution, self._example = task.columns.get("solution"), task.columns.get("example")
        await super().reset(task)

    def expert(self) -> ToolCall | str:
        """Try the function on the example that the question shows, then give it as the answer."""
        if not isinstance(self._solution, str) or not isinstance(self._example, str):
            raise ConfigError(
                "only rows with the columns `solution` and `example` have an expert; draw_tasks makes such"
            )
        if self.last_output is None:
            return ToolCall("code_interpreter", {"code": f"{self._solution}\n{self._example}"})
        return f"```python\n{self._solution}\n```"
