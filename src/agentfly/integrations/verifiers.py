"""Environments of verifiers 0.4 as ours.

`load_environment` makes an Environment of a taskset: our rollout samples and records the chain, token by token;
verifiers sets the task up, its toolsets are called in this process, and its rewards score a trace made of the chain.
What needs verifiers' own loop (several agents, programs as harnesses, hooks between turns, containers) is rejected
there and runs with `load_episodes`: verifiers plays the whole episode and samples from our gateway, which records it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import json
import os
import pkgutil
import sys
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Any, ClassVar, cast

from agentfly.backends.openai_api import message_fields
from agentfly.environment import Environment, Pool
from agentfly.errors import ConfigError, DataError, describe, require_extra
from agentfly.scoring import Reward
from agentfly.threads import call
from agentfly.tooling import Tool, tool
from agentfly.trajectory import Trajectory
from agentfly.types import Task
from agentfly.validation import describe_invalid

COLUMN = "verifiers"
"""The column of a row that has the task of verifiers as JSON."""
TENTHS = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}
"""Tenths of a taskset in each split; a hash of the task decides. Tasksets of verifiers have no splits in common."""


class TasksetEnvironment(Environment):
    """What both kinds of environments have in common: a taskset, and tasks of it."""

    taskset: ClassVar[Any]
    """The `verifiers.v1.Taskset`."""
    reward: ClassVar[Reward]
    """The sum of the taskset's weighted rewards, for `reward=`. Its metrics are all rewards and metrics by name."""
    _stack: AsyncExitStack | None = None
    """What an instance has opened."""

    async def close(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """Tasks of the taskset: shuffled by the seed, or for an endless taskset the block of that number."""
        if split not in TENTHS or count < 0:
            raise DataError(f"draw 0 or more tasks of {', '.join(TENTHS)}, not {count} of {split!r}")
        if cls.taskset.bounded:
            rows = list(cls._split_tasks(split))
            Random(seed).shuffle(rows)
            rows = rows[:count]
        else:
            rows = list(itertools.islice(cls._split_tasks(split), seed * count, (seed + 1) * count))
        if len(rows) < count:
            raise DataError(f"{type(cls.taskset).__name__} has {len(rows)} tasks of the split {split}, not {count}")
        return rows

    @classmethod
    def _split_tasks(cls, split: str) -> Iterator[dict[str, Any]]:
        for data in (task.data for task in cls.taskset):
            row = {"messages": _initial_messages(data), COLUMN: data.model_dump(mode="json")}
            content = json.dumps({**row[COLUMN], "idx": None}, sort_keys=True)
            if zlib.crc32(content.encode()) % 10 in TENTHS[split]:
                yield {"id": str(data.id or data.idx), **row}

    @classmethod
    def _parse_task(cls, task: Task) -> Any:
        """The `verifiers.v1.Task` of a row."""
        if not isinstance(data := task.columns.get(COLUMN), Mapping):
            raise DataError(f"a task of {cls.__name__} has the column {COLUMN!r}; take its tasks from draw_tasks")
        task_class = type(cls.taskset).task_type()
        try:
            return task_class(task_class.data_type().model_validate(dict(data)), cls.taskset.config.task)
        except ValueError as error:
            raise DataError(
                f"the column {COLUMN!r} is no task of {type(cls.taskset).__name__}: {describe_invalid(error)}"
            ) from error


class VerifiersEnvironment(TasksetEnvironment):
    """A taskset played by our rollout. `load_environment` makes the subclass of a taskset."""

    tools: ClassVar[list[Tool]] = []
    """The tools of the taskset, for `tools=`; empty for tasks of a single turn."""

    async def reset(self, task: Task) -> None:
        """Start the task's runtime, set the task up in it, and set up its toolsets."""
        from verifiers.v1 import AgentConfig, SubprocessConfig, Trace
        from verifiers.v1.runtimes import provision_runtime
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, TraceTask
        from verifiers.v1.utils.compile import resolve_runtime_config
        from verifiers.v1.utils.decorators import invoke

        await self.close()
        self.task = self._parse_task(task)
        kind = type(self.task)
        try:
            config = resolve_runtime_config(SubprocessConfig(), self.task)
        except ValueError as error:
            raise ConfigError(f"{error} (with load_episodes)") from error
        self.trace = Trace(
            task=TraceTask(type=kind.__name__, data=self.task.data, key=self.task.key, hash=self.task.hash),
            state=state_cls(kind)(),
            agent=AgentInfo(config=AgentConfig()),
        )
        self._stack = AsyncExitStack()
        environment = self.task.runtime_env()
        self.runtime = await self._stack.enter_async_context(provision_runtime(config, self.trace.id, environment))
        await invoke(self.task.setup, {"trace": self.trace, "runtime": self.runtime})
        self.toolsets = _make_toolsets(self.taskset)
        for index, toolset in enumerate(self.toolsets):
            await self._stack.enter_async_context(toolset._exit_stack)
            toolset._inert_state = self.trace.state  # what `toolset.state` is when no MCP request set another
            await toolset.setup()
            if index >= len(type(self.taskset).toolsets(self.taskset.config)):  # a shared toolset knows no task
                await toolset.setup_task(self.task.data)

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Finalize the task and score a trace of these messages, each with `sampled`."""
        from verifiers.v1.dialects import parse_message
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.utils.decorators import invoke

        self.trace.nodes = [
            MessageNode(parent=parent, message=parse_message(dict(message)), sampled=message["sampled"])
            for parent, message in zip([None, *range(len(messages))], messages, strict=False)
        ]
        self.trace.stop("agent_completed")
        await invoke(self.task.finalize, {"trace": self.trace, "runtime": self.runtime})
        await self.task.score(self.trace, self.runtime)
        return _format_score(self.trace)


class VerifiersEpisode(TasksetEnvironment):
    """An environment whose episodes verifiers plays. `load_episodes` makes the subclass of a configuration."""

    pool = Pool(max_uses=100)  # verifiers keeps an HTTP client per key until its servers stop
    config: ClassVar[Any]
    program: ClassVar[Callable[..., Any]]
    """Plays an episode, for `ExternalAgent(program=…)`."""
    _score: dict[str, Any] | None = None

    async def start(self) -> None:
        """Start verifiers' servers: interception, and the toolsets that all tasks share."""
        from verifiers.v1 import load_environment

        self._stack = AsyncExitStack()
        self.env = load_environment(self.config)
        await self._stack.enter_async_context(self.env.serving())

    async def reset(self, task: Task) -> None:
        self.task, self._score = self._parse_task(task), None

    @tool
    async def play(self, base_url: str, api_key: str, model: str) -> str:
        """Play one episode with a model behind an OpenAI-compatible API; returns the last reply."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        variable = f"AGENTFLY_EPISODE_{uuid.uuid4().hex}"  # verifiers reads keys from variables only
        os.environ[variable] = api_key
        try:
            client = EvalClientConfig(base_url=base_url, api_key_var=variable)
            episode = await self.env.run_episode(self.task, ModelContext(model=model, client=client))
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or not episode.traces:
            reason = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it has no trace"
            raise RuntimeError(f"the episode failed: {reason:.2000}")
        trace = next(trace for trace in episode.traces if trace.agent.trainable)
        self._score = _format_score(trace)
        return str(trace.last_reply)

    async def score(self) -> dict[str, Any]:
        """The score of the episode; 0 if a limit of the chain ended it."""
        return {"reward": 0.0, "completed": 0.0} if self._score is None else {"completed": 1.0, **self._score}


def load_environment(taskset: str | type[Any], **config: Any) -> type[VerifiersEnvironment]:
    """An Environment class of a taskset.

    Args:
        taskset: Id of an installed taskset, such as "gsm8k-v1", or a `verifiers.v1.Taskset` class.
        config: Fields of the taskset's configuration.

    Raises ConfigError for a taskset that is not installed or needs verifiers' own loop.
    """
    with require_extra("load_environment", "verifiers"):
        from verifiers.v1.configs.taskset import TasksetConfig
        from verifiers.v1.taskset import Taskset
        from verifiers.v1.utils.decorators import discover_decorated
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import SingleAgentEnv, environment_class, taskset_class

    name = taskset if isinstance(taskset, str) else taskset.__name__
    kind = _find_plugin(name, taskset_class) if isinstance(taskset, str) else taskset
    problem = ""
    if isinstance(taskset, str) and environment_class(taskset) is not SingleAgentEnv:
        problem = f"runs agents of its own ({environment_class(taskset).__name__})"
    config_class = concrete_type(kind, TasksetConfig, origin=Taskset) or TasksetConfig
    identity = {"id": taskset} if isinstance(taskset, str) else {}
    try:
        loaded = kind(config_class.model_validate({**identity, **config}))
    except ValueError as error:
        raise ConfigError(f"the configuration of the taskset {name!r} is wrong: {describe_invalid(error)}") from error
    task_class = kind.task_type()
    hooks = [
        attribute
        for attribute in dir(task_class)
        for mark in ("stop", "intercept")
        if hasattr(inspect.getattr_static(task_class, attribute), mark)
    ]
    if hooks := [*hooks, *loaded.config.task.stops]:
        problem = f"has hooks between turns ({', '.join(hooks)})"
    elif task_class.NEEDS_CONTAINER:
        problem = "needs a container"
    elif remote := [toolset for toolset in _make_toolsets(loaded) if getattr(toolset.config, "url", None)]:
        names = ", ".join(type(toolset).__name__ for toolset in remote)
        problem = f"has tools on another server ({names})"
    if problem:
        raise ConfigError(f"{name} {problem}, which our rollout cannot do: use load_episodes and an ExternalAgent")
    class_name = "".join(word.capitalize() for word in name.replace("/", "-").replace("_", "-").split("-"))
    class_name = name if not isinstance(taskset, str) else class_name
    methods = {}
    for index, toolset in enumerate(_make_toolsets(loaded)):
        for function in discover_decorated(toolset, "tool"):
            method = _make_tool(class_name, index, toolset, function)
            methods[method.name] = method
    env_class = _make_class(class_name, VerifiersEnvironment, {"taskset": loaded, **methods})
    env_class.tools = [getattr(env_class, method_name) for method_name in methods]

    async def verifiers_reward(trajectory: Trajectory, env: Any) -> dict[str, Any]:
        """The rewards of verifiers, for what the model last saw and wrote."""
        spans = trajectory.segments[-1].spans if trajectory.segments else ()
        messages = [
            {**message_fields(message, extended=True), "sampled": span.author.carries_loss}
            for span in spans
            for message in span.messages
        ]
        return dict(await env.score(messages))

    _set_reward(env_class, verifiers_reward)
    return cast("type[VerifiersEnvironment]", env_class)


def load_episodes(
    taskset: str, *, agent: str = "agent", config: Mapping[str, Any] | None = None
) -> type[VerifiersEpisode]:
    """An Environment class whose episodes verifiers plays, with our gateway as its model.

    Args:
        taskset: Id of an installed taskset.
        agent: The agent of the environment that our model plays. Every other agent needs a `client` of its own.
        config: Fields of the environment's configuration (`--env` of vf-eval): `id`, the agents by name, each with its
            `harness` and `runtime`, and the fields of the taskset under `taskset`.
    """
    with require_extra("load_episodes", "verifiers"):
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_taskset, resolve_env_config, taskset_class

    _find_plugin(taskset, taskset_class)
    settings = dict(config or {})
    try:
        resolved = resolve_env_config({**settings, "taskset": {**settings.get("taskset", {}), "id": taskset}})
    except (ImportError, ValueError) as error:
        raise ConfigError(f"the configuration of {taskset!r} is wrong: {describe_invalid(error)}") from error
    agents = agent_config_fields(resolved)
    if agent not in agents:
        raise ConfigError(f"the environment of {taskset!r} has no agent {agent!r}; it has {', '.join(agents)}")
    if shared := [name for name, agent_config in agents.items() if name != agent and agent_config.client is None]:
        raise ConfigError(
            f"the agents {', '.join(shared)} would be sampled from the model in training: give each a client, such as "
            f'config={{"{shared[0]}": {{"client": {{"base_url": …}}, "model": …}}}}'
        )
    namespace = {"taskset": load_taskset(resolved.taskset), "config": resolved}
    env_class = _make_class(f"{type(namespace['taskset']).__name__}Episode", VerifiersEpisode, namespace)

    async def program(env: Any, base_url: str, api_key: str, model: str) -> str:
        return str(await env.play(base_url, api_key, model))

    async def verifiers_reward(env: Any) -> dict[str, Any]:
        """The rewards of the agent that is trained."""
        return dict(await env.score())

    program.__annotations__["env"] = env_class
    env_class.program = staticmethod(program)
    _set_reward(env_class, verifiers_reward)
    return cast("type[VerifiersEpisode]", env_class)


def _make_class(name: str, base: type[Any], namespace: dict[str, Any]) -> Any:
    return type(name, (base,), {"__module__": __name__, "__doc__": base.__doc__, **namespace})


def _set_reward(env_class: Any, function: Callable[..., Any]) -> None:
    """Give a class its reward, under a name that no other class has."""
    env_class.scored_by = f"{env_class.__name__}_reward"
    function.__annotations__["env"] = env_class
    function.__qualname__ = env_class.scored_by
    env_class.reward = Reward(function, name=env_class.scored_by)


def _make_tool(owner: str, index: int, toolset: Any, function: Callable[..., Any]) -> Tool:
    """A tool that calls a function of the toolset at `index` of the instance, named as verifiers' harnesses name it."""
    own_name = getattr(function, "tool_name", None) or function.__name__
    name = f"{toolset.server_name}_{own_name}" if toolset.server_name else own_name

    @functools.wraps(function)
    async def method(self: VerifiersEnvironment, **arguments: Any) -> dict[str, Any]:
        return {"observation": await call(getattr(self.toolsets[index], function.__name__), **arguments)}

    signature = inspect.signature(function)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(parameters=[self_parameter, *signature.parameters.values()])  # type: ignore[attr-defined]
    method.__name__ = name
    method.__qualname__ = f"{owner}.{name}"
    return Tool(method, name=name)


def _make_toolsets(taskset: Any) -> list[Any]:
    """New toolsets: those that tasks share, then those of a task."""
    shared = type(taskset).toolsets(taskset.config)
    return [*shared, *type(taskset).task_type().toolsets(taskset.config.task)]


def _find_plugin(name: str, find: Callable[[str], Any]) -> Any:
    """Import a taskset. Raises ConfigError with the near names if it is not installed."""
    try:
        return find(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        import verifiers.v1.tasksets as built_in

        modules = {module.name for module in pkgutil.iter_modules([*built_in.__path__, *sys.path])}
        close = difflib.get_close_matches(name.replace("-", "_").lower(), modules, 3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"verifiers cannot load the taskset {name!r}: {describe(error)}.{hint}") from error


def _initial_messages(data: Any) -> list[dict[str, Any]]:
    """The prompt of a task as OpenAI messages."""
    from verifiers.v1.dialects.chat import message_to_wire

    if data.prompt is None:
        raise ConfigError("a task has no prompt: another agent begins the conversation, which needs load_episodes")
    prompt = data.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
    return [{"role": "system", "content": data.system_prompt}, *messages] if data.system_prompt else messages


def _format_score(trace: Any) -> dict[str, Any]:
    """The score of a trace as a reward returns it."""
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward, **metrics, **{n: v for n, v in rewards.items() if n != "reward"}}
