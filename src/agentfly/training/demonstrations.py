"""Demonstrations: chains in which somebody who knows better than the model took its place.

They are recorded as the model's own would have been: the same template writes them, the same reader reads them back,
and the same tokens count as the model's. Nobody sampled them, so their log-probabilities are 0 and their weight version
is -1; they are there to be imitated, and for nothing else.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from agentfly import threads
from agentfly.agent import BaseAgent
from agentfly.backend import Backend, Request
from agentfly.environment import Environment
from agentfly.errors import ConfigError, DataError, TemplateError
from agentfly.outcome import StopReason, Turn
from agentfly.resources import Leases
from agentfly.rollout.chain import Chain
from agentfly.rollout.options import settings_of, tasks_of
from agentfly.rollout.transcript import Transcript
from agentfly.segment import Author
from agentfly.template import Template
from agentfly.training.data import read_tasks
from agentfly.trajectory import Trajectory, chain_id
from agentfly.types import Completion, Finish, Message, Task, ToolCall

NOBODY = -1
"""The weight version of tokens that no model sampled."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """What an expert did, sorted by whether it is worth imitating."""

    kept: tuple[Trajectory, ...]
    dropped: tuple[Trajectory, ...]
    """Those that failed, or earned too little."""

    @property
    def reasons(self) -> dict[str, int]:
        """Why chains were dropped, and how many for each reason."""
        return dict(Counter(map(_reason, self.dropped)).most_common())


def _reason(chain: Trajectory) -> str:
    if chain.reward is None:
        return chain.failures[-1].message if chain.failures else chain.stop.value
    return f"reward {chain.reward:g}"


# ── of an expert ──


async def demonstrate(
    agent: BaseAgent,
    tasks: Any,
    *,
    threshold: float = 1.0,
    max_turns: int = 10,
    chain_seconds: float = 600.0,
    max_concurrent_chains: int = 64,
) -> Demonstrations:
    """Have the expert of the agent's environment do the tasks, through the agent's own tools.

    Kept is what earns at least `threshold`; of an agent without a reward, what came to an end of its own.
    """
    template_of(agent)
    kind, asked = expert_of(agent), tasks_of(tasks)
    settings = settings_of(max_turns, {"chain_seconds": chain_seconds})
    places = asyncio.Semaphore(max_concurrent_chains)

    async def chain(group: int, task: Task) -> Trajectory:
        plan = [*agent.toolbox.environments, *(agent.scorer.environments(task) if agent.scorer else ())]
        shared = agent.manager.group()
        try:
            async with places, agent.manager.leases(task, plan, group=shared, chain=chain_id(group, 0)) as leases:
                shown = copy.copy(agent)
                shown.backend = _Expert(agent, kind, leases)
                return await Chain(shown, task, group, 0, settings, leases).run()
        finally:
            shared.close()

    running = [asyncio.create_task(chain(group, task)) for group, task in enumerate(asked)]
    try:
        chains = await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def good(each: Trajectory) -> bool:
        enough = each.reward is not None and each.reward >= threshold
        return each.stop.failure is None and (enough if agent.scorer else True)

    return Demonstrations(tuple(filter(good, chains)), tuple(each for each in chains if not good(each)))


def expert_of(agent: BaseAgent) -> type[Environment]:
    """The one environment of the agent's that has an expert."""
    there = agent.toolbox.environments
    experts = [kind for kind in there if kind.expert is not Environment.expert]
    if len(experts) == 1:
        return experts[0]
    names = ", ".join(kind.__name__ for kind in experts or there)
    if experts:
        raise ConfigError(f"{names} all have experts, and a chain follows one; give the agent the tools of one of them")
    raise ConfigError(
        f"this agent acts in {names or 'no environment'}, which has no expert; give an environment a method `expert` "
        "that returns a ToolCall or the final answer, or take demonstrations of a file"
    )


class _Expert(Backend):
    """Stands where the tokens come from: each turn is what the expert of the chain's own world does next."""

    def __init__(self, agent: BaseAgent, kind: type[Environment], leases: Leases) -> None:
        self._agent, self._kind, self._leases = agent, kind, leases
        self.context_length = agent.backend.context_length

    @property
    def weight_version(self) -> int:
        return NOBODY

    async def generate(self, request: Request) -> Completion:
        done = await self._leases.act([self._kind], lambda lent: threads.call(lent[self._kind].expert))
        if isinstance(done, ToolCall):
            number = f"call{request.turn + 1:05d}"
            done = Message("assistant", "", (ToolCall(done.name, done.arguments, done.id or number),))
        elif isinstance(done, str):
            done = Message("assistant", done)
        else:
            raise ConfigError(
                f"{self._kind.__name__}.expert gave {done!r:.80}; it must give a ToolCall or the final answer"
            )
        return spoken(self._agent, done)


# ── of a file ──


def read_demonstrations(agent: BaseAgent, path: str | Path) -> list[Trajectory]:
    """The conversations of a file, as chains of the agent: rows with `messages` in OpenAI's form, up to an answer.

    Everything before the first reply is the task, to which the agent adds its system prompt and its tools.
    """
    template_of(agent)
    rows = read_tasks(path)
    out = []
    for number, row in enumerate(rows):
        try:
            out.append(recorded(agent, row, number))
        except (ConfigError, TemplateError) as error:
            raise DataError(f"{path}, row {number}: {error}") from error
    return out


def recorded(agent: BaseAgent, row: Task, group: int = 0) -> Trajectory:
    """A conversation as the agent's chain would have recorded it. Nothing is run: the answers are those in it."""
    first = next((at for at, message in enumerate(row.messages) if message.role == "assistant"), 0)
    if not first or row.messages[-1].role != "assistant":
        raise DataError("a demonstration begins with what is asked, and ends with a reply of the assistant's")
    task = Task(row.messages[:first], row.columns, row.id)
    transcript, turns = Transcript(template_of(agent)), list[Turn]()
    transcript.begin(agent.opening(task), Author.TASK, turn=0)
    for own, run in groupby(row.messages[first:], key=lambda message: message.role == "assistant"):
        said = list(run)
        if not own:
            author = Author.TOOL if any(message.role == "tool" for message in said) else Author.USER
            transcript.add(said, author, turn=len(turns))
            continue
        if len(said) > 1:
            raise DataError("two replies follow one another; make them one, or say what came between")
        transcript.sampled(spoken(agent, said[0]), said[0], agent.retell(said[0]), len(turns))
        turns.append(Turn(Finish.STOP))
    answer = row.messages[-1].text
    return Trajectory(task, transcript.close(), tuple(turns), StopReason.ANSWER, answer, group)


# ── turns as tokens ──


def template_of(agent: BaseAgent) -> Template:
    """The template that writes the demonstrations."""
    if agent.template is None:
        raise ConfigError(
            "this agent's server renders its prompts, so nobody knows the tokens of a demonstration; "
            "give the agent a model's folder or name and a backend that speaks tokens"
        )
    return agent.template


def spoken(agent: BaseAgent, said: Message) -> Completion:
    """A reply as if the model had sampled it; refused where the agent would read something else out of it."""
    _refuse_unknown_tools(agent, said)
    template = template_of(agent)
    ids = template.write(said)
    read = agent.parse(template.text(ids, template.start([Message("user", "u")])))
    wanted, got = ([(call.name, dict(call.arguments)) for call in each.tool_calls] for each in (said, read.message))
    same = wanted == got or _validated(agent, wanted) == _validated(agent, got)
    if said.tool_calls and (not same or read.problems):
        raise ConfigError(
            f"{type(agent).__name__} with template {template.name!r} does not read {wanted} back, but "
            f"{got or 'no call'}: write such a turn as text, in the words that the agent asks its model for"
        )
    return Completion(ids, [0.0] * len(ids), [NOBODY] * len(ids), Finish.STOP)


def _validated(agent: BaseAgent, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, Any]]:
    """The calls with their arguments as the tools take them: some formats write every argument as text."""
    tools = {tool.name: tool for tool in agent.toolbox}
    checked = [
        (name, given, tools[name].arguments.check(given) if name in tools else "unknown") for name, given in calls
    ]
    return [(name, given if isinstance(taken, str) else taken) for name, given, taken in checked]


def _refuse_unknown_tools(agent: BaseAgent, said: Message) -> None:
    for call in said.tool_calls:
        if call.problem:
            raise DataError(f"a call of {call.name!r} cannot be read: {call.problem}")
        if call.name not in agent.toolbox.names:
            there = ", ".join(agent.toolbox.names) or "none"
            raise DataError(f"it calls {call.name!r}, which is no tool of the agent's; there are {there}")
