"""Demonstrations: chains of an expert or from a file, recorded as the model's own chains would be.

The same template writes them, the same parser reads them back, and the same tokens count as the model's. No model
sampled them, so their log-probabilities are 0 and their weight version is -1; they serve SFT only.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from agentfly import threads
from agentfly.agent import BaseAgent
from agentfly.backends.base import Backend, Request
from agentfly.data import read_tasks
from agentfly.data.formats import join_completion
from agentfly.environment import Environment
from agentfly.errors import ConfigError, DataError, TemplateError
from agentfly.resources import Leases
from agentfly.rollout.chain import Chain
from agentfly.rollout.config import parse_settings, parse_tasks
from agentfly.rollout.history import Transcript
from agentfly.rollout.scheduler import validate_run
from agentfly.segment import Author
from agentfly.templates.template import Template
from agentfly.tooling.schema import convert_text, drop_nulls, read_tool_schemas
from agentfly.trajectory import StopReason, Trajectory, TurnRecord, chain_id
from agentfly.types import Completion, FinishReason, Message, Sampling, Task, ToolCall

NO_WEIGHT_VERSION = -1
"""The weight version of tokens that no model sampled."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """An expert's chains, split by reward."""

    accepted: tuple[Trajectory, ...]
    rejected: tuple[Trajectory, ...]
    """Chains that failed, or whose reward is below the threshold."""

    @property
    def reasons(self) -> dict[str, int]:
        """Why chains were rejected, with the number of chains per reason."""

        def reason(chain: Trajectory) -> str:
            if chain.reward is None:
                return chain.failures[-1].message if chain.failures else chain.stop.value
            return f"reward {chain.reward:g}"

        return dict(Counter(map(reason, self.rejected)).most_common())


# ── from an expert ──


async def demonstrate(
    agent: BaseAgent,
    tasks: Any,
    *,
    threshold: float = 1.0,
    max_turns: int = 10,
    chain_seconds: float = 600.0,
    max_concurrent_chains: int = 64,
) -> Demonstrations:
    """Run the expert of the agent's environment on the tasks, through the agent's own tools.

    Chains with a reward of at least `threshold` are accepted; without a reward, those that ended without failure.
    """
    demonstration_template(agent)
    env_class = find_expert(agent)
    settings = parse_settings(max_turns, {"chain_seconds": chain_seconds})
    slots = asyncio.Semaphore(max_concurrent_chains)

    async def chain(group: int, task: Task) -> Trajectory:
        env_classes = [*agent.toolbox.environments, *(agent.scorer.environments(task) if agent.scorer else ())]
        shared = agent.manager.group()
        try:
            async with slots, agent.manager.leases(task, env_classes, group=shared, chain=chain_id(group, 0)) as leases:
                expert_agent = copy.copy(agent)
                expert_agent.backend = _ExpertBackend(agent, env_class, leases)
                return await Chain(expert_agent, task, group, 0, settings, leases).run()
        finally:
            shared.close()

    parsed = parse_tasks(tasks)
    validate_run(agent, parsed)
    running = [asyncio.create_task(chain(group, task)) for group, task in enumerate(parsed)]
    try:
        chains = await asyncio.gather(*running)
    finally:
        for chain_task in running:
            chain_task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def accept(chain: Trajectory) -> bool:
        rewarded = chain.reward is not None and chain.reward >= threshold
        return chain.stop.failure is None and (rewarded or agent.scorer is None)

    accepted = tuple(filter(accept, chains))
    return Demonstrations(accepted, tuple(chain for chain in chains if not accept(chain)))


def find_expert(agent: BaseAgent) -> type[Environment]:
    """The only environment class of the agent that has an expert. Raises ConfigError where there is not exactly one."""
    env_classes = agent.toolbox.environments
    experts = [cls for cls in env_classes if cls.expert is not Environment.expert]
    if len(experts) == 1:
        return experts[0]
    names = ", ".join(cls.__name__ for cls in experts or env_classes)
    if experts:
        raise ConfigError(f"{names} all have experts, and a chain follows one; give the agent the tools of one of them")
    raise ConfigError(
        f"this agent acts in {names or 'no environment'}, which has no expert; give an environment a method `expert` "
        "that returns a ToolCall or the final answer, or read demonstrations from a file"
    )


class _ExpertBackend(Backend):
    """A backend whose completions are the next actions of the expert in the chain's own environment."""

    weight_version = NO_WEIGHT_VERSION

    def __init__(self, agent: BaseAgent, env_class: type[Environment], leases: Leases) -> None:
        self._agent = agent
        self._env_class = env_class
        self._leases = leases
        self.context_length = agent.backend.context_length
        # The model that learns from the demonstration sees images, whatever the backend of the agent does.
        self.supports_images = agent.template is not None and agent.template.image_processor is not None

    async def generate(self, request: Request) -> Completion:
        env_class = self._env_class
        action = await self._leases.act([env_class], lambda envs: threads.call(envs[env_class].expert))
        if isinstance(action, ToolCall):
            call = ToolCall(action.name, action.arguments, action.id or f"call{request.turn + 1:05d}")
            return completion_from_reply(self._agent, Message("assistant", "", (call,)))
        if isinstance(action, str):
            return completion_from_reply(self._agent, Message("assistant", action))
        raise ConfigError(
            f"{env_class.__name__}.expert returned {action!r:.80}; it must return a ToolCall or the final answer"
        )


# ── from a file ──


def read_demonstrations(agent: BaseAgent, path: str | Path, **reading: Any) -> list[Trajectory]:
    """Read the conversations of a file or dataset as chains of the agent: rows of messages that end with an answer.

    The messages before the first reply are the task, to which the agent adds its system prompt and its tools. A row
    with a column `tools` is rendered with these instead. reading: options of `read_tasks`.
    """
    demonstration_template(agent)
    rows = read_tasks(path, **reading)
    out = []
    for number, row in enumerate(rows):
        try:
            out.append(record_conversation(agent, join_completion(row), number))
        except (ConfigError, TemplateError) as error:
            raise DataError(f"{path}, row {number}: {error}") from error
    return out


def record_conversation(agent: BaseAgent, row: Task, group: int = 0) -> Trajectory:
    """Record a conversation as a chain of the agent. No tool is run: the observations are those in the messages."""
    first = next((at for at, message in enumerate(row.messages) if message.role == "assistant"), 0)
    if not first or row.messages[-1].role != "assistant":
        problem = "a demonstration must begin with the question and end with a reply of the assistant"
        problem += f"; it begins with a message of {row.messages[0].role} and ends with one of {row.messages[-1].role}"
        if first == 0 and "completion" not in row.columns:
            problem += "; a column with the reply is taken if it is renamed to 'completion'"
        raise DataError(problem)
    agent = _apply_row_tools(agent, row)
    task = Task(row.messages[:first], row.columns, row.id)
    transcript = Transcript(demonstration_template(agent))
    turns: list[TurnRecord] = []
    transcript.begin(agent.initial_messages(task), Author.TASK, turn=0)
    for is_reply, run in groupby(row.messages[first:], key=lambda message: message.role == "assistant"):
        messages = list(run)
        if not is_reply:
            messages = [replace(message, content=agent.visible(message.content, strict=True)) for message in messages]
            author = Author.TOOL if any(message.role == "tool" for message in messages) else Author.USER
            transcript.add(messages, author, turn=len(turns))
            continue
        if len(messages) > 1:
            raise DataError("two replies follow one another; merge them, or add the messages between them")
        reply = _drop_nulls(agent, messages[0])
        transcript.add_completion(completion_from_reply(agent, reply), reply, agent.history_message(reply), len(turns))
        turns.append(TurnRecord(FinishReason.STOP))
    return Trajectory(task, transcript.close(), tuple(turns), StopReason.ANSWER, row.messages[-1].text, group)


def _apply_row_tools(agent: BaseAgent, row: Task) -> BaseAgent:
    """The agent with a template that shows the tools of the row's column `tools`; the agent itself without one."""
    if not agent.native_tools:  # its system prompt describes its tools
        agent.toolbox.check_column(row)
        return agent
    schemas = read_tool_schemas(row.columns.get("tools"))
    if schemas is None:
        return agent
    row_agent = copy.copy(agent)
    row_agent.template = _load_row_template(agent.load_template, json.dumps(schemas))
    return row_agent


@lru_cache(maxsize=64)
def _load_row_template(load_template: partial[Template], schemas: str) -> Template:
    """Load a template for tools as JSON text. An audit takes a while, and most rows of a file have the same tools."""
    return load_template(tools=json.loads(schemas))


def _collect_parameters(agent: BaseAgent) -> dict[str, Mapping[str, Any]]:
    """The parameters of the tools that the model is shown, by name: those of the row, or the agent's."""
    schemas = demonstration_template(agent).tools if agent.native_tools else agent.toolbox.schemas
    return {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}


def _check_arguments(agent: BaseAgent, name: str, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    """The arguments as the tool parses them, or why it does not take them. A tool of the row is known by its schema."""
    parameters = _collect_parameters(agent)[name]
    for tool in agent.toolbox:
        if tool.name == name and tool.arguments.schema == parameters:
            return tool.arguments.check(arguments)
    if missing := [required for required in parameters.get("required") or () if required not in arguments]:
        return f"the arguments of {name!r} do not fit: {missing[0]!r} is missing"
    return convert_text(arguments, parameters)


def _drop_nulls(agent: BaseAgent, reply: Message) -> Message:
    """The reply without null arguments that the tools do not take. Raises DataError where a tool needs the argument."""
    tools = _collect_parameters(agent)
    calls = []
    for call in reply.tool_calls:
        if call.name in tools:
            arguments = drop_nulls(call.arguments, tools[call.name])
            checked = {} if arguments == call.arguments else _check_arguments(agent, call.name, arguments)
            if isinstance(checked, str):
                raise DataError(f"without its null arguments, a call is incomplete: {checked.removeprefix('Error: ')}")
            call = replace(call, arguments=arguments)
        calls.append(call)
    return replace(reply, tool_calls=tuple(calls))


# ── replies as tokens ──


def demonstration_template(agent: BaseAgent) -> Template:
    """The template that renders the demonstrations. Raises ConfigError where the server renders prompts itself."""
    if agent.template is None:
        raise ConfigError(
            "this agent's server renders its prompts, so the tokens of a demonstration are unknown; "
            "give the agent a model's folder or name and a backend that takes tokens"
        )
    return agent.template


def completion_from_reply(agent: BaseAgent, reply: Message) -> Completion:
    """A reply as if the model had sampled it. Raises where the agent would parse other calls from its tokens."""
    names = list(_collect_parameters(agent))
    for call in reply.tool_calls:
        if call.problem:
            raise DataError(f"a call of {call.name!r} cannot be read: {call.problem}")
        if call.name not in names:
            owner = "agent" if names == agent.toolbox.names else "row"
            raise DataError(
                f"it calls {call.name!r}, which is not a tool of the {owner}; there are {', '.join(names) or 'none'}"
            )
    template = demonstration_template(agent)
    ids = template.write(agent.write_reply(reply))
    completion = Completion(ids, [0.0] * len(ids), [NO_WEIGHT_VERSION] * len(ids), FinishReason.STOP)
    parsed = agent.read(Request(template.start([Message("user", "u")]), Sampling()), completion)
    expected, read_back = (
        [(call.name, dict(call.arguments)) for call in message.tool_calls] for message in (reply, parsed.message)
    )
    same = expected == read_back or _validate_calls(agent, expected) == _validate_calls(agent, read_back)
    if reply.tool_calls and (not same or parsed.problems):
        raise ConfigError(
            f"{type(agent).__name__} with template {template.name!r} does not read {expected} back, but "
            f"{read_back or 'no call'}: write such a turn as text, in the format that the agent asks its model for"
        )
    return completion


def _validate_calls(agent: BaseAgent, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, Any]]:
    """The calls with their arguments as the tools parse them: some formats write every argument as text."""
    tools = _collect_parameters(agent)
    out = []
    for name, arguments in calls:
        parsed = _check_arguments(agent, name, arguments) if name in tools else "unknown"
        out.append((name, arguments if isinstance(parsed, str) else parsed))  # text is an error message
    return out
