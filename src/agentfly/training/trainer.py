"""The trainer: builds a run from a plan, and the training loop.

Chains of step n are sampled with the weights of version n - 1, or with up to `async_training.max_staleness` older ones
while the learner updates. An evaluation or checkpoint after step n is of version n: the next update waits for it.
Everything a step produces is written before the next one starts, so that a killed run resumes from its last checkpoint
with the same result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from agentfly.agent import BaseAgent
from agentfly.algorithms.kl import KLController
from agentfly.evaluation import evaluate
from agentfly.models import resolve
from agentfly.runs import (
    Alarm,
    AlarmMonitor,
    EvalFigures,
    Progress,
    RunDirectory,
    RunWriter,
    StepRecord,
    chain_metrics,
    open_loggers,
)
from agentfly.runs.report import write_report_files
from agentfly.segment import Floats
from agentfly.templates.tokenizer import load_tokenizer, save_tokenizer
from agentfly.threads import compute, trim_heap
from agentfly.training.advantages import compute_samples, measure_teacher
from agentfly.training.async_rollout import AsyncCollector
from agentfly.training.build import build_learner_and_agent
from agentfly.training.checkpoint import CheckpointManager, TrainerState, refuse_unsafe_changes
from agentfly.training.collector import Collector, RolloutBatch, StepCollector
from agentfly.training.launch import is_torchrun_rank
from agentfly.training.learner import Learner, Teacher
from agentfly.training.memory import MemoryPlan
from agentfly.training.plan import TrainPlan
from agentfly.training.task_sampler import DifficultySampler, TaskSampler
from agentfly.training.teacher import TeacherServer
from agentfly.training.weight_sync import Canary, sync_weights
from agentfly.trajectory import Trajectory


class Trainer:
    """One training run. `run` executes it; `async with` opens it for stepping by hand with `train_step`."""

    @classmethod
    def create(cls, plan: TrainPlan, folder: Path, *, metadata: Mapping[str, Any] | None = None) -> Self:
        """Start a run in a folder that has none. metadata: stored beside the configuration."""
        with ExitStack() as undo:
            learner, agent, memory = build_learner_and_agent(plan, undo, sharded=is_torchrun_rank())
            settings = {**plan.config.to_json(), **(metadata or {}), "memory": memory.to_json()}
            writer = RunWriter.create(folder, settings, plan.recipe)
            undo.callback(writer.discard_if_empty)
            trainer = cls(plan, learner, agent, memory, writer)
            trainer._collector.mark_checkpoint(0)
            undo.pop_all()
        return trainer

    @classmethod
    def resume(
        cls,
        plan: TrainPlan,
        folder: Path,
        *,
        metadata: Mapping[str, Any] | None = None,
        from_step: int | None = None,
    ) -> Self:
        """Resume the run in a folder, after its newest checkpoint, or from the start if it has none.

        metadata: replaces what is stored. from_step: resume after this step's checkpoint instead of the newest.
        """
        config = plan.config
        refuse_unsafe_changes(config, RunDirectory(folder))
        checkpoints = CheckpointManager(folder / "checkpoints", config.checkpoint.keep)
        has_checkpoint = bool(checkpoints.candidates()) or from_step is not None
        state, model_folder = checkpoints.load(from_step) if has_checkpoint else (None, None)
        with ExitStack() as undo:
            writer = undo.enter_context(RunWriter.open(folder))
            learner, agent, memory = build_learner_and_agent(plan, undo, sharded=is_torchrun_rank())
            if state is not None and model_folder is not None:
                learner.load(model_folder)
                checkpoints.remove_after(state.step)
            # Now that everything is loaded: a resume that fails must not remove what is after its step.
            writer.truncate_after(-1 if state is None else state.step)
            writer.update_config({**config.to_json(), **(metadata or {}), "memory": memory.to_json()})
            trainer = cls(plan, learner, agent, memory, writer)
            if state is not None:
                trainer._load_state(state)
            rollout = {} if state is None else state.values.get("rollout", {})
            trainer._collector.restore(trainer.step, rollout)
            undo.pop_all()
        return trainer

    def __init__(
        self, plan: TrainPlan, learner: Learner, agent: BaseAgent, memory: MemoryPlan, writer: RunWriter
    ) -> None:
        """Use `create` or `resume`, which build the parts of a run and release them where one of them fails."""
        config = plan.config
        self.config = config
        self.learner = learner
        self.agent = agent
        self.memory = memory
        self.step = 0
        """Steps completed, or the step in progress."""
        self._plan = plan
        self._writer = writer
        self._loggers = open_loggers(config.loggers, writer)
        self._checkpoints = CheckpointManager(writer.checkpoints, config.checkpoint.keep)
        self._tokenizer = load_tokenizer(resolve(config.model))
        make_sampler = DifficultySampler if config.zero_variance == "avoid" else TaskSampler
        self._task_sampler = make_sampler(plan.tasks, config.seed)
        is_async = config.async_training.max_staleness > 0
        make_collector = partial(AsyncCollector, journal=writer.path / "rollout.jsonl") if is_async else StepCollector
        self._collector: Collector = make_collector(agent, self._task_sampler, config, self._loggers.progress)
        self._canary = Canary(learner, agent.backend)
        self._stream = torch.cuda.Stream() if is_async and learner.device.type == "cuda" else None
        self._teacher: Teacher = learner if config.teacher.base_url is None else TeacherServer(config)
        self._kl = KLController(config.kl.coef, config.kl.target)
        self._alarm_monitor = AlarmMonitor()
        self._unwritten: list[Alarm] = []
        """Alarms of this step for chains that could not be written."""
        self._best: tuple[float, int] | None = None
        """Mean reward of the best evaluation, and the step it followed."""
        self._seconds: dict[str, float] = {}
        """Seconds of this step by phase."""
        self._phase = ""
        """The phase in progress."""
        self._stopping = False
        """Whether the run was cancelled and ends after this step."""
        self._step_position = 0
        """Position in the tasks at the start of the step."""
        self._step_ended = 0.0
        self._open = AsyncExitStack()

    async def run(self) -> None:
        """Run all remaining steps, then write the report. If cancelled, end with a checkpoint and the report."""
        async with self:
            while self.step < self.config.steps:
                step = asyncio.create_task(self.train_step())
                try:
                    await asyncio.shield(step)
                except asyncio.CancelledError:
                    await self._stop(step)
                    raise

    async def _stop(self, step: asyncio.Task[None]) -> None:
        """End the step in progress with a checkpoint: abandon a rollout, leave out an evaluation, finish an update."""
        self._stopping = True
        if self._phase in ("rollout", "evaluate"):
            step.cancel()
        await asyncio.wait([step])
        if not step.cancelled():
            step.result()
            # The cancellation may arrive when the step has decided already that no checkpoint is due.
            if self.step not in self._checkpoints.steps():
                self._save_checkpoint()
            return
        self.step -= 1
        # The journal of an asynchronous rollout has everything since the last checkpoint. A checkpoint of this step is
        # not written again: the old one would be removed first, and a process that is being stopped may be killed then.
        due = self.step and not self.config.async_training.max_staleness
        if due and self.step not in self._checkpoints.steps():
            self._task_sampler.position = self._step_position
            self._save_checkpoint()

    async def train_step(self) -> None:
        """One step: rollout, advantages, update, weight sync, then evaluation and checkpoint where due."""
        self.step += 1
        self._step_position = self._task_sampler.position
        self._unwritten = []
        with self._time_phase("rollout"):
            batch = await self._collector.collect(self.step)
        with self._time_phase("update"):
            if self.agent.backend.can_sleep and not self.config.async_training.max_staleness:
                # It sleeps until the sync wakes it up. Merged adapters are not all of the weights.
                await self.agent.backend.sleep(keep_weights=self.config.lora_rank is not None)
            learn = compute if self._stream is None else partial(compute, _run_on_stream, self._stream)
            score = partial(compute_samples, teacher=self._teacher)
            samples = await learn(score, batch.groups, self.learner, self.config, self._kl.coef)
            advantages: dict[str, list[Floats]] = {}  # by chain, one array per segment
            for sample in samples:
                advantages.setdefault(sample.name.partition("#")[0], []).append(sample.advantages)
            writing = asyncio.create_task(asyncio.to_thread(self._write_trajectories, batch.trajectories, advantages))
            try:
                metrics = await learn(self.learner.update, samples) if samples else {}
                metrics |= measure_teacher(samples)
                if not samples:
                    self.learner.skip_update()
            finally:
                await writing
            await asyncio.to_thread(self._writer.write_learner_logprobs, self.step, self.learner.update_logprobs)
        with self._time_phase("publish"):
            await sync_weights(self.learner, self.agent.backend, self.step, self._canary)
            self._collector.advance(self.step)
            await asyncio.to_thread(trim_heap)
        if "policy/kl" in metrics:
            self._kl.update(metrics["policy/kl"], len(batch.trajectories))
            self.learner.set_kl_coef(self._kl.coef)
        last = self.step == self.config.steps
        every = self.config.evaluation.every
        evaluation = None
        with self._time_phase("evaluate"):
            if not self._stopping and (last or (every is not None and self.step % every == 0)):
                try:
                    evaluation = await self._evaluate()
                except asyncio.CancelledError:
                    if not self._stopping:
                        raise
        self._log(self._build_record(batch, metrics, evaluation))
        best = evaluation is not None and self._best_step == self.step
        if last or best or self._stopping or self.step % self.config.checkpoint.every == 0:
            with self._time_phase("save"):
                self._save_checkpoint()

    # ── opening and closing a run ──

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._close_writer)
            stack.callback(self.learner.close)
            stack.push_async_callback(self.agent.close)
            stack.push_async_callback(self._collector.close)
            stack.callback(self._loggers.close)
            self._loggers.start(self._writer.config)
            for record in self._writer.records():
                self._alarm_monitor.observe(record.step, record.metrics, evaluation=record.eval)
            await sync_weights(self.learner, self.agent.backend, self.step, self._canary)
            if self.step == 0 and self._plan.eval_tasks:
                self._log(StepRecord(0, self.config.steps, eval=await self._evaluate()))
            self._open = stack.pop_all()
        self._step_ended = time.perf_counter()
        return self

    async def __aexit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        try:
            if error_type is None or issubclass(error_type, asyncio.CancelledError):
                template = self.agent.template
                write_report_files(self._writer, None if template is None else template.codec.decode)
        finally:
            await self._open.__aexit__(error_type, error, traceback)

    def _close_writer(self) -> None:
        if self._step_ended:
            self._writer.close()
        else:  # the run did not start
            self._writer.discard_if_empty()

    @property
    def canary_tolerance(self) -> float:
        """Accepted mean difference of log-probabilities between sampler and learner, in nats per token."""
        return self._canary.tolerance

    # ── parts of a step ──

    @contextmanager
    def _time_phase(self, phase: str) -> Iterator[None]:
        """Report the phase as progress and count its seconds."""
        self._phase = phase
        self._loggers.progress(Progress(phase))
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def _write_trajectories(
        self, chains: Sequence[Trajectory], advantages: Mapping[str, Any] | None = None, *, held_out: bool = False
    ) -> None:
        """Write chains to the run directory; chains that cannot be written raise an alarm, not an error."""
        failed = self._writer.write_trajectories(self.step, chains, advantages, held_out=held_out)
        if failed:
            message = f"{len(failed)} chains cannot be written: {failed[0]}"
            self._unwritten.append(Alarm("unwritten", message, step=self.step))

    async def _evaluate(self) -> EvalFigures | None:
        """Evaluate on the held-out tasks, write the chains, and track the best step."""
        if not self._plan.eval_tasks:
            return None
        self._loggers.progress(Progress("evaluate"))
        chains: list[Trajectory] = []
        config = self.config
        total = len(self._plan.eval_tasks) * (config.evaluation.chains + 1)  # one of them greedy

        def add(chain: Trajectory) -> None:
            chains.append(chain)
            self._loggers.progress(Progress("evaluate", len(chains), total))

        evaluation = await evaluate(
            self.agent,
            self._plan.eval_tasks,
            chains=config.evaluation.chains,
            greedy=True,
            on_trajectory=add,
            **config.agent_options(seed=config.seed),
        )
        self._write_trajectories(sorted(chains, key=lambda chain: (chain.group, chain.chain)), held_out=True)
        if self._best is None or evaluation.reward.mean > self._best[0]:
            self._best = (evaluation.reward.mean, self.step)
        return evaluation.figures

    def _build_record(
        self, batch: RolloutBatch, update_metrics: Mapping[str, float], evaluation: EvalFigures | None
    ) -> StepRecord:
        rollout = self._seconds.pop("rollout")
        phases = {**batch.seconds, **self._seconds}
        now = time.perf_counter()
        elapsed = now - self._step_ended
        phases["other"] = elapsed - sum(phases.values())
        self._step_ended = now
        if self.config.async_training.max_staleness:
            rollout = elapsed  # chains run during the whole step
        self._seconds = {}  # a checkpoint is written after this: its time counts to the next step
        metrics = {
            **chain_metrics(batch.trajectories, version=self.step - 1),
            **update_metrics,
            **self._collector.pop_metrics(elapsed),
            **batch.selection.metrics,
            "throughput/tokens_per_second": sum(trajectory.sampled_tokens for trajectory in batch.trajectories)
            / rollout,
        }
        tools = self.agent.toolbox.names
        alarms = self._alarm_monitor.observe(self.step, metrics, batch.trajectories, tools, evaluation)
        return StepRecord(
            self.step,
            self.config.steps,
            metrics,
            phases,
            eval=evaluation,
            leased=batch.leased,
            waiting=batch.waiting,
            alarms=(*alarms, *self._unwritten),
        )

    def _log(self, record: StepRecord) -> None:
        self._writer.append(record)
        self._loggers.step(record)

    # ── checkpoints ──

    @property
    def _best_step(self) -> int | None:
        return None if self._best is None else self._best[1]

    def _save_checkpoint(self) -> None:
        tensors, learner_state = self.learner.state_dict()
        values = {
            "tasks": self._task_sampler.state_dict(),
            "rollout": self._collector.state_dict(),
            "kl": self._kl.state_dict(),
            "best": self._best,
            "learner": learner_state,
        }

        def write_model(folder: Path) -> None:
            template = self.agent.template
            self.learner.save(folder)
            save_tokenizer(self._tokenizer, folder, chat_template=None if template is None else template.source)

        self._checkpoints.save(TrainerState(self.step, tensors, values), write_model, best=self._best_step)
        self._collector.mark_checkpoint(self.step)

    def _load_state(self, state: TrainerState) -> None:
        """Continue after a checkpoint, whose model is loaded."""
        values = state.values
        self.step = state.step
        self._task_sampler.load_state_dict(values["tasks"])
        self._kl.load_state_dict(values["kl"])
        self.learner.set_kl_coef(self._kl.coef)
        self._best = None if values["best"] is None else (values["best"][0], values["best"][1])
        self.learner.load_state_dict(state.tensors, values["learner"])


def _run_on_stream(stream: torch.cuda.Stream, function: Callable[..., Any], *args: Any) -> Any:
    """Run learner work on a CUDA stream of its own: on the engine's, sampling would wait for the update's kernels."""
    stream.wait_stream(torch.cuda.default_stream())  # on which the engine reads the weights
    with torch.cuda.stream(stream):
        result = function(*args)
    stream.synchronize()
    return result
