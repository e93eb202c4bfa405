"""The chain workers, and the manager that sends them groups. A group whose worker died is run again by another one.

verl's trainer submits groups with `generate_sequences` and waits until the queue has them all. A call of a worker ends
when its group does, so a dead worker shows as an error of its calls.
A worker runs all chains of a group in one event loop, with environments that all workers share.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
import torch
import transfer_queue as tq
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agentfly.errors import RankError, describe
from agentfly.integrations.verl.backend import VerlBackend, current_group
from agentfly.integrations.verl.config import JobSpec
from agentfly.integrations.verl.rows import build_placeholder, build_rows
from agentfly.resources.manager import resolve_runtime
from agentfly.resources.runtimes.ray import RayManager, RayRuntime
from agentfly.rollout.scheduler import ChainJob, run_chains
from agentfly.runs import Progress
from agentfly.training.collector import ROUNDS
from agentfly.training.selection import select_chains
from agentfly.training.task_sampler import TaskSampler
from agentfly.trajectory import Trajectory

_LOG = logging.getLogger(__name__)
MAX_ATTEMPTS = 8
"""Times a group is started before the death of its worker ends the job."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """A group to run."""

    uid: str
    """verl's id of the group."""
    position: int
    """Position of its task in the stream of tasks, or among the held-out ones."""
    step: int
    """The training step that asked for it."""
    held_out: bool = False
    """Whether it belongs to an evaluation, and not to verl's queue."""


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """The chains of a group."""

    request: GroupRequest
    chains: tuple[Trajectory, ...]
    greedy: Trajectory | None
    """The greedy chain of the task, in an evaluation and where the algorithm needs one; it is not trained."""
    leased: int
    """Environments leased by chains of all workers when it ended."""
    waiting: int


class ChainWorker:
    """Runs groups; a Ray actor."""

    def __init__(self, arguments: bytes) -> None:
        """Build the agent of the plan over verl's servers. `arguments`: the pickled JobSpec and verl's client."""
        spec: JobSpec
        spec, client = pickle.loads(arguments)
        torch.set_num_threads(1)
        tq.init()
        plan = spec.make_plan()
        self._plan = plan
        self._config = plan.config
        self._sampler = TaskSampler(plan.tasks, plan.config.seed)
        backend = VerlBackend(client, spec.context_length)
        self.agent = plan.make_agent(model_name_or_path=spec.model, backend=backend, template=plan.config.template)
        # Environments with the runtime `ray` are leased from one manager that all workers share; the others are started
        # by each worker, on its own machine.
        manager, scorer = self.agent.manager, self.agent.scorer
        scored = () if scorer is None else scorer.environments(self._sampler.task_at(0))
        env_classes = (*self.agent.toolbox.environments, *scored)
        pools = [manager.pools.get(env_class, env_class.pool) for env_class in env_classes]
        if any(isinstance(resolve_runtime(pool.runtime), RayRuntime) for pool in pools):
            limits = {"instances": manager.budget.instances, "memory": manager.budget.memory}
            self.agent.manager = RayManager(f"agentfly-{spec.folder.name}", manager.pools, **limits)

    async def check(self) -> list[str]:
        """Raise ConfigError where the agent cannot be trained; returns the names of its tools."""
        self._plan.check_agent(self.agent)
        return list(self.agent.toolbox.names)

    async def run_group(self, request: GroupRequest) -> FinishedGroup:
        """Run the chains of a task, and put the rows of those that are trained into verl's queue."""
        config = self._config
        group = request.position
        count = config.num_chains
        if request.held_out:
            task = self._plan.eval_tasks[request.position]
            count = config.evaluation.chains
            seed = config.seed
        else:
            task = self._sampler.task_at(request.position)
            seed = config.seed * 1_000_003
            if not config.async_training.max_staleness:  # as in a local run, which numbers groups within a step
                group %= config.tasks_per_step
                seed = (seed + request.step) * ROUNDS
            await tq.async_kv_put(key=request.uid, partition_id="train", tag={"status": "running"})
        settings = config.chain_settings(seed=seed)
        jobs = [ChainJob(task, group, chain, settings) for chain in range(count)]
        with_greedy = request.held_out or config.algorithm.needs_greedy
        if with_greedy:
            greedy = replace(settings, sampling=replace(settings.sampling, temperature=0.0))
            jobs.append(ChainJob(task, group, count, greedy))
        current_group.set(request.uid)
        running = run_chains(self.agent, jobs, manager=self.agent.manager)
        chains = sorted([chain async for chain in running], key=lambda chain: chain.chain)
        pools = await asyncio.to_thread(self.agent.manager.pool_metrics)  # may ask an actor
        finished = FinishedGroup(
            request=request,
            chains=tuple(chains[:count]),
            greedy=chains[count] if with_greedy else None,
            leased=sum(pool.leased for pool in pools),
            waiting=sum(pool.waiting for pool in pools),
        )
        if not request.held_out:
            selected = [episode for episodes in select_chains(finished.chains, config).groups for episode in episodes]
            rows = [row for episode in selected for row in build_rows(episode.trajectory)]
            rows = rows or [build_placeholder(version=request.step - 1)]
            await tq.async_kv_batch_put(
                keys=[row.key(request.uid) for row in rows],
                fields=list_of_dict_to_tensordict([row.fields(request.uid) for row in rows]),
                tags=[row.tag(request.step) for row in rows],
                partition_id="train",
            )
        return finished


class RolloutManager:
    """The chain workers of a run, in the process of verl's trainer."""

    def __init__(self, spec: JobSpec, client: Any, on_progress: Callable[[Progress], None]) -> None:
        """`client`: verl's client of the servers."""
        # Ray restarts a dead worker on a node that is alive; it makes its agent again. Its arguments are serialized
        # here: Ray warns about handles of actors among those of an actor that it restarts.
        worker: Any = ray.remote(ChainWorker).options(
            num_cpus=1, max_restarts=-1, max_concurrency=10_000, scheduling_strategy="SPREAD"
        )
        cloudpickle: Any = ray.cloudpickle
        arguments = cloudpickle.dumps((spec, client))
        self.workers: list[Any] = [worker.remote(arguments) for _ in range(spec.workers)]
        try:
            self.tools: list[str] = ray.get([actor.check.remote() for actor in self.workers])[0]
        except RayTaskError as error:
            raise error.cause from error
        self.reruns = 0
        """Groups that were started again after the death of their worker."""
        self._on_progress = on_progress
        self._load = [0] * len(self.workers)
        """Groups that each worker runs."""
        self._finished: dict[str, FinishedGroup] = {}
        """Groups for verl's trainer, by verl's id, until it takes them."""
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agentfly-rollout-manager", daemon=True).start()

    def generate_sequences(self, prompts: Any) -> None:
        """Start the groups of a batch of positions, without waiting for them: what verl's trainer calls."""
        self.raise_error()  # verl would replace failed groups by others

        def unwrap(value: Any) -> Any:  # tensordict wraps some values, depending on what the others are
            return getattr(value, "data", value)

        step = int(unwrap(prompts["global_steps"]))
        for uid, position in zip(prompts["uid"], prompts["position"], strict=True):
            request = GroupRequest(uid=str(unwrap(uid)), position=int(unwrap(position)), step=step)
            asyncio.run_coroutine_threadsafe(self._run_for_verl(request), self._loop)

    def take_groups(self, uids: Iterable[str], oldest: int = 0) -> list[FinishedGroup]:
        """Remove and return finished groups, by position; groups started before the step `oldest` are dropped."""
        taken = [self._finished.pop(uid) for uid in uids]
        for uid, group in list(self._finished.items()):
            if group.request.step < oldest:
                del self._finished[uid]
        return sorted(taken, key=lambda group: group.request.position)

    def evaluate(self, num_tasks: int, step: int) -> list[FinishedGroup]:
        """Run the held-out tasks to their end."""
        requests = [
            GroupRequest(uid=f"eval-{step}-{position}", position=position, step=step, held_out=True)
            for position in range(num_tasks)
        ]
        running = [asyncio.run_coroutine_threadsafe(self._run_group(request), self._loop) for request in requests]
        return [future.result() for future in running]

    def raise_error(self) -> None:
        """Raise what made a group fail, if one did."""
        if self._error is not None:
            raise self._error

    async def _run_for_verl(self, request: GroupRequest) -> None:
        """Run a group that verl waits for. An error ends verl's waiting, and the trainer raises it."""
        put: Callable[..., Awaitable[Any]] = partial(
            asyncio.to_thread, tq.kv_put, key=request.uid, partition_id="train"
        )
        try:
            group = await self._run_group(request)
            self._finished[request.uid] = group
            self._on_progress(Progress("generate", len(self._finished), 0, group.leased, group.waiting))
            await put(tag={"status": "finished"})
        except Exception as error:
            self._error = self._error or error
            await put(tag={"status": "failure"})

    async def _run_group(self, request: GroupRequest) -> FinishedGroup:
        """Run a group on the worker with the fewest groups, and again on another one if that worker dies."""
        numbers = range(len(self.workers))
        avoid = -1
        for attempt in range(1, MAX_ATTEMPTS + 1):
            number = min(numbers, key=lambda candidate: (candidate == avoid, self._load[candidate]))
            self._load[number] += 1
            try:
                group: FinishedGroup = await self.workers[number].run_group.remote(request)
                return group
            except RayTaskError as error:  # before RayActorError: it is also an instance of its cause's class
                raise error.cause from error
            except (RayActorError, ObjectLostError) as error:
                death = describe(error)
            finally:
                self._load[number] -= 1
            if attempt == MAX_ATTEMPTS:
                break
            _LOG.warning("a chain worker died: the group at position %d is run again elsewhere", request.position)
            await asyncio.sleep(5 * (attempt - 1))  # with a single worker, until it has restarted
            self.reruns += 1
            avoid = number
            listed = (await asyncio.to_thread(tq.kv_list, "train") or {}).get("train", {})
            if rows := [key for key in listed if key.startswith(f"{request.uid}_")]:
                await asyncio.to_thread(tq.kv_clear, keys=rows, partition_id="train")
        raise RankError(f"the group at position {request.position} ended {MAX_ATTEMPTS} workers: {death}")
