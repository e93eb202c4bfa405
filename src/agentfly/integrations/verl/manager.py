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
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
import transfer_queue as tq
from ray.exceptions import RayActorError, RayTaskError
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agentfly.errors import RankError, describe
from agentfly.integrations.verl.backend import VerlBackend, current_group
from agentfly.integrations.verl.config import JobSpec
from agentfly.integrations.verl.recorder import FinishedGroup, GroupRequest
from agentfly.integrations.verl.rows import build_placeholder, build_rows
from agentfly.resources.manager import resolve_runtime
from agentfly.resources.runtimes.ray import RayManager, RayRuntime
from agentfly.rollout.scheduler import ChainJob, run_chains
from agentfly.training.rollout_batch import ROUNDS, TaskSampler, select_chains
from agentfly.trajectory import Trajectory

_LOG = logging.getLogger(__name__)
MAX_ATTEMPTS = 8
"""Times a group is started before the death of its worker ends the job."""
_WAIT_SECONDS = 0.5
"""Interval at which calls that have ended are looked for."""


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
        # Environments with the runtime `ray` are leased from one manager that all workers share; the others are started
        # by each worker, on its own machine.
        own, scorer = self.agent.manager, self.agent.scorer
        scored = () if scorer is None else scorer.environments(self._sampler.task_at(0))
        pools = [own.pools.get(each, each.pool) for each in (*self.agent.toolbox.environments, *scored)]
        if any(isinstance(resolve_runtime(pool.runtime), RayRuntime) for pool in pools):
            limits = {"instances": own.budget.instances, "memory": own.budget.memory}
            self.agent.manager = RayManager(spec.run_name, own.pools, **limits)
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
        selected = [episode for episodes in select_chains(chains, config).groups for episode in episodes]
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


class RolloutManager:
    """The chain workers of a run, in the process of verl's trainer."""

    def __init__(self, spec: JobSpec, client: Any) -> None:
        """`client`: verl's client of the servers."""
        # Ray restarts a dead worker on a node that is alive; it makes its agent again. Its arguments are serialized
        # here: Ray warns about handles of actors among those of an actor that it restarts.
        worker: Any = ray.remote(ChainWorker).options(
            num_cpus=1, max_restarts=-1, max_concurrency=10_000, scheduling_strategy="SPREAD"
        )
        cloudpickle: Any = ray.cloudpickle
        arguments = cloudpickle.dumps((spec, client))
        self.workers: list[Any] = [worker.remote(arguments) for _ in range(spec.workers)]
        ray.get([each.ready.remote() for each in self.workers])
        self.reruns = 0
        """Groups that were started again after the death of their worker."""
        self._error: BaseException | None = None
        self._running: dict[Any, tuple[GroupRequest, int, int]] = {}
        """Call of a worker → its group, the number of the worker, and the attempt."""
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="agentfly-rollout-manager", daemon=True).start()

    def generate_sequences(self, prompts: Any) -> None:
        """Start the groups of a batch of positions, without waiting for them: what verl's trainer calls."""
        self.raise_error()  # verl would replace failed groups by others

        def unwrap(value: Any) -> Any:  # tensordict wraps some values, depending on what the others are
            return getattr(value, "data", value)

        step = int(unwrap(prompts["global_steps"]))
        for uid, position in zip(prompts["uid"], prompts["position"], strict=True):
            request = GroupRequest(uid=str(unwrap(uid)), position=int(unwrap(position)), step=step)
            self._start(request, attempt=1)

    def raise_error(self) -> None:
        """Raise what made a group fail, if one did."""
        if self._error is not None:
            raise self._error

    def evaluate(self, num_tasks: int, label: str) -> list[Trajectory]:
        """Run the evaluation's chains on all workers; the share of a worker that died is run again by another one."""
        count = len(self.workers)
        shares = [share for start in range(count) if (share := list(range(start, num_tasks, count)))]
        chains: list[Trajectory] = []
        attempt = 0
        while shares:
            # A share goes to another worker than before.
            calls = [
                (share, self.workers[(number + attempt) % count].run_evaluation.remote(share, label))
                for number, share in enumerate(shares)
            ]
            shares = []
            attempt += 1
            for share, call in calls:
                try:
                    chains += ray.get(call)
                except RayTaskError as error:  # before RayActorError: it is also an instance of its cause's class
                    raise error.cause from error
                except RayActorError as error:
                    if attempt == MAX_ATTEMPTS:
                        raise RankError(f"a chain worker died in all {attempt} attempts: {describe(error)}") from error
                    _LOG.warning("a chain worker died in the evaluation: its tasks are run again by another one")
                    shares.append(share)
            if shares:
                time.sleep(5 * attempt)  # a dead worker takes seconds to restart, and refuses calls until then
        return sorted(chains, key=lambda each: (each.group, each.chain))

    def _start(self, request: GroupRequest, attempt: int, avoid: int | None = None) -> None:
        """Start a group on the worker with the fewest groups."""
        with self._lock:
            load = Counter(number for _, number, _ in self._running.values())
            numbers = [each for each in range(len(self.workers)) if each != avoid] or [0]
            number = min(numbers, key=lambda each: (load[each], each))
            call = self.workers[number].run_group.remote(request)
            self._running[call] = (request, number, attempt)

    def _watch(self) -> None:
        """Look at calls that have ended; runs in a thread for as long as the process."""
        while True:
            with self._lock:
                calls = list(self._running)
            if not calls:
                time.sleep(_WAIT_SECONDS)
                continue
            try:
                for call in ray.wait(calls, num_returns=1, timeout=_WAIT_SECONDS)[0]:
                    self._handle_end(call)
                    with self._lock:
                        del self._running[call]
            except Exception as error:  # verl would wait for these groups for ever
                with self._lock:
                    lost = [request for request, _, _ in self._running.values()]
                    self._running.clear()
                for request in lost:
                    self._fail(request, error)

    def _handle_end(self, call: Any) -> None:
        """Run the group of a call that ended with the death of its worker again; remember another error."""
        request, number, attempt = self._running[call]
        try:
            ray.get(call)
            return
        except RayTaskError as error:  # before RayActorError: it is also an instance of its cause's class
            self._fail(request, error.cause)
            return
        except RayActorError as error:
            death = describe(error)
        if attempt == MAX_ATTEMPTS:
            message = f"the group at position {request.position} ended {attempt} workers: {death}"
            self._fail(request, RankError(message))
            return
        tags = (tq.kv_list("train") or {}).get("train", {})
        if tags.get(request.uid, {}).get("status") == "finished":
            return  # it died after its last row: verl may be training on the group
        _LOG.warning("a chain worker died: the group at position %d is run again elsewhere", request.position)
        time.sleep(5 * (attempt - 1))  # with a single worker, until it has restarted
        self.reruns += 1
        rows = [key for key in tags if key.startswith(f"{request.uid}_")]
        if rows:
            tq.kv_clear(keys=rows, partition_id="train")
        self._start(request, attempt + 1, avoid=number)

    def _fail(self, request: GroupRequest, error: BaseException) -> None:
        """Remember the error, and end verl's waiting for the group; the trainer then raises it."""
        self._error = self._error or error
        tq.kv_put(key=request.uid, partition_id="train", tag={"status": "failure"})
