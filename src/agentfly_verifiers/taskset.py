"""A taskset, a harness and an environment of verifiers.

The taskset has our tasks. The harness runs a chain of our rollout in this process and samples through verifiers'
interception server, so that the trace has every model call. The reward is ours.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects import parse_message
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.runtimes import ProgramResult

from agentfly.agents import HFAgent
from agentfly.backends.openai_api import message_fields
from agentfly.cli.resolve import resolve_environment
from agentfly.data import read_tasks
from agentfly.errors import ConfigError
from agentfly.resources import ResourceManager
from agentfly.scoring import find_reward
from agentfly.types import Task

_MANAGER: contextvars.ContextVar[ResourceManager | None] = contextvars.ContextVar("agentfly_manager", default=None)
"""The manager of the environment that runs the current episode."""


class AgentFlyTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    environment: str = ""
    """Name of an installed environment, module:Class, or path/to/file.py:Class."""
    reward: str = ""
    """Name of the reward; empty: the environment's own (`scored_by`)."""
    split: str = "train"
    count: int = 100
    seed: int = 0
    rows: Path | None = None
    """Dataset file to use instead of tasks that the environment draws."""


class AgentFlyData(vf.TaskData):  # type: ignore[misc]
    environment: str
    reward: str
    row: dict[str, Any]
    """The task as a row of our datasets."""


class AgentFlyTask(vf.Task[AgentFlyData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def agentfly_reward(self, trace: vf.Trace) -> float:
        """The reward of the chain."""
        score = trace.info.get("agentfly")
        if score is None:
            raise ConfigError("an AgentFly task is played by its own harness: do not set --env.agent.harness.id")
        return float(score["reward"])

    @vf.metric  # type: ignore[untyped-decorator]
    async def agentfly_metrics(self, trace: vf.Trace) -> dict[str, float]:
        """The numbers among the metrics of the chain."""
        metrics = trace.info.get("agentfly", {}).get("metrics", {})
        return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


class AgentFlyTaskset(vf.Taskset[AgentFlyTask, AgentFlyTasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[AgentFlyTask]:
        """The tasks of the split, or of the file."""
        config = self.config
        if not config.environment:
            raise ConfigError("which environment? Set --env.taskset.environment; `agentfly env list` has the names")
        env_class = resolve_environment(config.environment)
        reward = config.reward or env_class.scored_by
        if not reward:
            raise ConfigError(f"{config.environment} has no reward of its own; set --env.taskset.reward")
        find_reward(reward)
        if config.rows is not None:
            tasks = read_tasks(config.rows)
        else:
            tasks = [Task.of(row) for row in env_class.draw_tasks(config.split, config.count, seed=config.seed)]
        for task in tasks:
            data = AgentFlyData(
                id=task.id,
                prompt=[parse_message(message_fields(message, extended=True)) for message in task.messages],
                environment=config.environment,
                reward=reward,
                row={"id": task.id, "messages": [message.to_dict() for message in task.messages], **task.columns},
            )
            yield AgentFlyTask(data, config.task)


class AgentFlyHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    max_turns: int = 10
    """Turns of a chain."""


class AgentFlyHarness(vf.Harness[AgentFlyHarnessConfig]):  # type: ignore[misc]
    """Runs a chain of our rollout: one instance of the environment, its tools, and the reward."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Run the chain and leave its score in `trace.info`."""
        if not isinstance(data, AgentFlyData):
            raise ConfigError(f"this harness plays tasks of agentfly-verifiers, not {type(data).__name__}")
        env_class = resolve_environment(data.environment)
        agent = HFAgent(
            ctx.model,
            tools=[env_class],
            reward=data.reward,
            system_prompt=data.system_prompt,
            backend="client",
            backend_config={"base_url": endpoint, "api_key": secret, "exact": False, "retries": 0},
            manager=_MANAGER.get(),
        )
        try:
            (chain,) = await agent.run(data.row, max_turns=self.config.max_turns)
        finally:
            await agent.close()
        if chain.score is None:
            failures = "; ".join(f"{failure.kind.value}: {failure.message}" for failure in chain.failures)
            return ProgramResult(1, "", f"the chain ended as {chain.stop.value}: {failures}")
        trace.info["agentfly"] = {
            "reward": chain.score.total,
            "metrics": dict(chain.score.metrics),
            "stop_reason": chain.stop.value,
        }
        return ProgramResult(0, chain.prediction, "")


class AgentFlyEnvConfig(SingleAgentEnvConfig):  # type: ignore[misc]
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class AgentFlyEnv(vf.Env[AgentFlyEnvConfig]):  # type: ignore[misc]
    """One agent over the taskset; all episodes lease instances of one resource manager."""

    async def start(self) -> None:
        self._manager = ResourceManager()

    async def stop(self) -> None:
        await self._manager.close()

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        token = _MANAGER.set(self._manager)
        try:
            await agents.agent.run(task)
        finally:
            _MANAGER.reset(token)
