"""A process that runs chains: all chains of a group, in one event loop, with environments that all workers share."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import replace

import torch
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agentfly.agent import BaseAgent
from agentfly.integrations.verl.backend import VerlBackend, current_group
from agentfly.integrations.verl.config import JobSpec
from agentfly.integrations.verl.recorder import FinishedGroup, GroupRequest
from agentfly.integrations.verl.rows import build_placeholder, build_rows
from agentfly.resources.manager import resolve_runtime
from agentfly.resources.runtimes.ray import RayManager, RayRuntime
from agentfly.rollout.scheduler import ChainJob, run_chains
from agentfly.training.rollout_batch import ROUNDS, TaskSampler, select_sampled
from agentfly.trajectory import Trajectory
from agentfly.types import Task


class ChainWorker:
    """Runs groups and evaluations; a Ray actor."""

    def __init__(self, arguments: bytes) -> None:
        """Build the agent of the plan over verl's servers. `arguments`: the pickled JobSpec and verl's client."""
        spec: JobSpec
        spec, client = pickle.loads(arguments)
        torch.set_num_threads(1)
        tq.init()
        plan = spec.make_plan()
        self._config = plan.config
        self._sampler = TaskSampler(plan.tasks, plan.config.seed)
        self._eval_tasks = plan.eval_tasks
        self._recorder = spec.recorder
        backend = VerlBackend(client, spec.context_length)
        self.agent = plan.make_agent(model_name_or_path=spec.model, backend=backend, template=plan.config.template)
        share_environments(self.agent, self._sampler.task_at(0), spec.run_name)
        self._settings = plan.config.chain_settings(seed=plan.config.seed)

    async def ready(self) -> None:
        """Return when the agent is built."""

    async def run_group(self, request: GroupRequest) -> None:
        """Run the chains of a task, record them, and put the rows of those that are trained into the queue."""
        config = self._config
        if config.async_training.max_staleness:
            group = request.position
            seed = config.seed * 1_000_003
        else:  # as in a local run, which numbers groups within a step
            group = request.position % config.tasks_per_step
            seed = (config.seed * 1_000_003 + request.step) * ROUNDS
        settings = replace(self._settings, seed=seed)
        greedy = replace(settings, sampling=replace(config.sampling, temperature=0.0))
        task = self._sampler.task_at(request.position)
        jobs = [ChainJob(task, group, chain, settings) for chain in range(config.num_chains)]
        if config.algorithm.needs_greedy:
            jobs.append(ChainJob(task, group, config.num_chains, greedy))
        await tq.async_kv_put(key=request.uid, partition_id="train", tag={"status": "running"})
        current_group.set(request.uid)
        chains = await self._run(jobs)
        baseline = chains.pop() if config.algorithm.needs_greedy else None
        pools = await asyncio.to_thread(self.agent.manager.pool_metrics)  # may ask an actor
        finished = FinishedGroup(
            request=request,
            chains=tuple(chains),
            greedy=baseline,
            leased=sum(each.leased for each in pools),
            waiting=sum(each.waiting for each in pools),
            tools=tuple(self.agent.toolbox.names),
        )
        selected = [episode for episodes in select_sampled(chains, config).groups for episode in episodes]
        rows = [row for episode in selected for row in build_rows(episode.trajectory)]
        rows = rows or [build_placeholder(version=request.step - 1)]
        await self._recorder.add_group.remote(finished)
        await tq.async_kv_batch_put(
            keys=[row.key(request.uid) for row in rows],
            fields=list_of_dict_to_tensordict([row.fields(request.uid) for row in rows]),
            tags=[row.tag(request.step) for row in rows],
            partition_id="train",
        )
        await tq.async_kv_put(key=request.uid, partition_id="train", tag={"status": "finished"})

    async def run_evaluation(self, indices: Sequence[int], label: str) -> list[Trajectory]:
        """Run the sampled chains and the greedy chain of some held-out tasks."""
        chains = self._config.evaluation.chains
        greedy = replace(self._settings, sampling=replace(self._settings.sampling, temperature=0.0))
        jobs = [
            ChainJob(self._eval_tasks[index], index, chain, self._settings if chain < chains else greedy)
            for index in indices
            for chain in range(chains + 1)
        ]
        current_group.set(label)
        return await self._run(jobs)

    async def _run(self, jobs: Sequence[ChainJob]) -> list[Trajectory]:
        chains = [chain async for chain in run_chains(self.agent, jobs, manager=self.agent.manager)]
        return sorted(chains, key=lambda each: (each.group, each.chain))


def share_environments(agent: BaseAgent, task: Task, run_name: str) -> None:
    """Lease environments with the runtime `ray` from one manager that all workers share.

    Other environments are started by each worker, on its own machine.
    """
    own = agent.manager
    scored = () if agent.scorer is None else agent.scorer.environments(task)
    pools = [own.pools.get(env_class, env_class.pool) for env_class in (*agent.toolbox.environments, *scored)]
    if any(isinstance(resolve_runtime(pool.runtime), RayRuntime) for pool in pools):
        agent.manager = RayManager(run_name, own.pools, instances=own.budget.instances, memory=own.budget.memory)
