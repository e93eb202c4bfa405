"""ProgramSynthesis: a function to write, with a Python interpreter to try it in.

The hidden tests are a column of the task and never in the model's session: the reward `unit_tests` runs them in a
session of the judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.programs import tasks
from agentfly.errors import ConfigError
from agentfly.types import Task, ToolCall


class ProgramSynthesis(CodeInterpreter):
    """A code interpreter with functions to write; the answer is the code."""

    scored_by = "unit_tests"

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, kinds: Sequence[str] = tasks.KINDS
    ) -> list[dict[str, Any]]:
        """Draw functions whose `kinds` take turns: over numbers, strings or lists."""
        return tasks.draw_tasks(split, count, seed, kinds)

    async def reset(self, task: Task) -> None:
        self._solution = task.columns.get("solution")
        self._example = task.columns.get("example")
        await super().reset(task)

    def expert(self) -> ToolCall | str:
        """Run the solution on the example of the question, then answer with it."""
        if not isinstance(self._solution, str) or not isinstance(self._example, str):
            raise ConfigError(
                "only rows with the columns `solution` and `example` have an expert; draw_tasks makes such rows"
            )
        if self.last_output is None:
            return ToolCall("code_interpreter", {"code": f"{self._solution}\n{self._example}"})
        return f"```python\n{self._solution}\n```"
