"""The environment of `agentfly.models.lookup`: one tool that returns one fact per call."""

from __future__ import annotations

from collections.abc import Mapping

from agentfly.environment import Environment
from agentfly.models.lookup import find_fact
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall


class Lookup(Environment):
    """Facts about people, from the task's column `facts`."""

    async def reset(self, task: Task) -> None:
        self.facts: Mapping[str, Mapping[str, str]] = task.columns["facts"]
        self.columns = task.columns
        self.lookups: set[tuple[str, str]] = set()

    @tool
    async def lookup(self, who: str, what: str) -> str:
        """Look up one fact about a person.

        Args:
            who: The person's name.
            what: A relation or a property.
        """
        self.lookups.add((who, what))
        return find_fact(self.facts, who, what)

    def expert(self) -> ToolCall | str:
        """Look up the related person, then that person's attribute, then answer."""
        who, relation, attribute = (self.columns[name] for name in ("who", "relation", "attribute"))
        other = find_fact(self.facts, who, relation)
        for subject, what in ((who, relation), (other, attribute)):
            if (subject, what) not in self.lookups:
                return ToolCall("lookup", {"who": subject, "what": what})
        return find_fact(self.facts, other, attribute)
