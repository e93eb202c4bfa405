"""A taskset of verifiers, trained: its tasks, its tool and its reward, in chains that our rollout records.

    agentfly train verifiers
    agentfly eval verifiers --model tiny

The first half of this file is written for verifiers alone. An installed taskset is loaded by its id instead:
`load_environment("gsm8k-v1")`. The questions are those of the recipe `lookup`, which the tiny model is pretrained on.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.lookup import recipe
from agentfly.errors import require_extra
from agentfly.integrations.verifiers import load_environment
from agentfly.models.lookup import draw, find_fact
from agentfly.types import ToolCall

with require_extra("the recipe verifiers", "verifiers"):
    import verifiers.v1 as vf


class LookupData(vf.TaskData):  # type: ignore[misc]
    facts: dict[str, dict[str, str]]
    who: str
    relation: str
    attribute: str
    answer: str


class LookupToolset(vf.Toolset[vf.ToolsetConfig, vf.State]):  # type: ignore[misc]
    TOOL_PREFIX = None

    async def setup_task(self, task: LookupData) -> None:
        self.facts = task.facts
        self.asked = 0

    @vf.tool  # type: ignore[untyped-decorator]
    async def lookup(self, who: str, what: str) -> str:
        """Look up one fact about a person.

        Args:
            who: The person's name.
            what: A relation or a property.
        """
        self.asked += 1
        return find_fact(self.facts, who, what)


class LookupTask(vf.Task[LookupData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [LookupToolset(vf.ToolsetConfig())]

    @vf.reward  # type: ignore[untyped-decorator]
    async def exact_answer(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric  # type: ignore[untyped-decorator]
    async def lookups(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class LookupTaskset(vf.Taskset[LookupTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[LookupTask]:
        random = Random(1)
        for _ in range(2500):
            row = draw(random)
            yield LookupTask(LookupData(prompt=row.pop("question"), **row), self.config.task)


class VerifiersLookup(load_environment(LookupTaskset)):  # type: ignore[misc]
    """The taskset as our Environment; the expert is for demonstrations and tests."""

    def expert(self) -> ToolCall | str:
        data = self.task.data
        other = find_fact(data.facts, data.who, data.relation)
        steps = [(data.who, data.relation), (other, data.attribute)]
        questions = self.toolsets[0].asked
        if questions < len(steps):
            who, what = steps[questions]
            return ToolCall("lookup", {"who": who, "what": what})
        return find_fact(data.facts, *steps[-1])


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[VerifiersLookup], reward=VerifiersLookup.reward)


tasks = VerifiersLookup.draw_tasks("train", 1600)
eval_tasks = VerifiersLookup.draw_tasks("validation", 100)
requires = ("train", "verifiers")
config = recipe.config
