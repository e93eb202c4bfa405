"""What a training run is put together from, and what is done around each step of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from agentfly.agent import BaseAgent
from agentfly.algorithm import Group
from agentfly.algorithms.divergence import KLController
from agentfly.errors import ConfigError
from agentfly.rollout.events import ChainEnded, Event
from agentfly.runs import Alarm, EvalFigures, Progress, RunWriter, Sinks, StepRecord, Watch, chain_metrics
from agentfly.runs.curve import write_curve
from agentfly.runs.report import write_report
from agentfly.training.batch import Sample
from agentfly.training.checkpoint import Checkpoints, State
from agentfly.training.collecting import Collected, Collector
from agentfly.training.config import TrainConfig
from agentfly.training.crediting import credited
from agentfly.training.evaluation import evaluate
from agentfly.training.feed import Feed
from agentfly.training.learner import Learner
from agentfly.training.publishing import Canary, publish
from agentfly.trajectory import Trajectory
from agentfly.types import Task

_LOG = logging.getLogger(__name__)
MakeAgent = Callable[..., BaseAgent]
"""Makes the agent, given `model_name_or_path`, `backend` and `template`."""


@dataclass(frozen=True)
class Plan:
    """What is to be trained, on what, and how."""

    make_agent: MakeAgent
    tasks: Sequence[Task]
    config: TrainConfig = field(default_factory=TrainConfig)
    eval_tasks: Sequence[Task] = ()
    """Held out; empty: nothing is evaluated."""
    recipe: Path | None = None
    """The file it comes from, which a resumed run reads again."""

    def __post_init__(self) -> None:
        if self.config.eval_every is not None and not self.eval_tasks:
            raise ConfigError(f"eval_every={self.config.eval_every} would have no effect: there are no eval_tasks")
        if self.config.eval_chains != 1 and not self.eval_tasks:
            raise ConfigError(f"eval_chains={self.config.eval_chains} would have no effect: there are no eval_tasks")
        known = {_said(task) for task in self.tasks}
        if both := [task.id for task in self.eval_tasks if _said(task) in known]:
            raise ConfigError(f"{len(both)} of the held-out tasks are trained on too, {both[0]!r} among them")


def _said(task: Task) -> str:
    """What makes a task: two may be asked in the same words about different worlds."""
    return str((task.messages, sorted(task.columns.items(), key=lambda item: item[0])))


class Trainer:
    """The parts of one run. `loop.run` turns the crank."""

    def __init__(
        self,
        plan: Plan,
        learner: Learner,
        agent: BaseAgent,
        writer: RunWriter,
        sinks: Sinks,
        checkpoints: Checkpoints,
        save_tokenizer: Callable[[Path], object],
    ) -> None:
        self.config, self._plan = plan.config, plan
        self.learner, self.agent, self._save_tokenizer = learner, agent, save_tokenizer
        self._writer, self._sinks = writer, sinks
        self._checkpoints = checkpoints
        self._feed = Feed(plan.tasks, plan.config.seed)
        self.collector = Collector(agent, self._feed, plan.config, sinks.progress)
        self.canary = Canary(learner, agent.backend)
        self._controller = KLController(plan.config.kl, plan.config.kl_target)
        self._watch = Watch()
        self._best: tuple[float, int] | None = None
        """The reward of the best evaluation, and the step it followed."""
        self.step = 0
        self._seconds: dict[str, float] = {}
        self._since = 0.0
        """When the last step ended."""
        self._unkept: list[Alarm] = []
        self._open = AsyncExitStack()

    def credited(self, groups: Sequence[Group]) -> list[Sample]:
        """What there is to learn from the groups of a step."""
        return credited(groups, self.learner, self.config, self._controller.value)

    def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Update the model, if there is anything to learn; what was measured."""
        return self.learner.update(samples) if samples else self.learner.skip()

    # ── around the run ──

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._writer.close)
            stack.push_async_callback(self.agent.close)
            stack.callback(self._sinks.close)
            self._sinks.start(self._writer.config)
            for record in self._writer.records():
                self._watch.look(record.step, record.metrics)
            await publish(self.learner, self.agent.backend, self.step, self.canary)
            if self.step == 0 and self._plan.eval_tasks:
                self._sinks.progress(Progress("evaluate"))
                self._tell(StepRecord(0, self.config.steps, eval=await self._evaluated()))
            self._open = stack.pop_all()
        self._since = time.perf_counter()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._report()
        finally:
            await self._open.__aexit__(kind, error, trace)

    def _report(self) -> None:
        template = self.agent.template
        write_report(self._writer, None if template is None else template.codec.decode)
        try:
            write_curve(self._writer)
        except ConfigError as error:  # what draws it is not installed, and the run is done all the same
            _LOG.warning("%s", error)

    def resume(self, state: State) -> None:
        """Go on after the step that a checkpoint was taken at."""
        values = dict(state.values)
        self.step = state.step
        self._feed.position = values["feed"]
        self._controller.load_state_dict(values["kl"])
        self._charge()
        self._best = None if values["best"] is None else (values["best"][0], values["best"][1])
        self.learner.load_state_dict(state.tensors, values["learner"])

    # ── around a step ──

    def begin_step(self) -> None:
        self.step += 1
        self._unkept = []

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Counts what happens inside as time of the phase."""
        self._sinks.progress(Progress(phase))
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begun

    def keep(self, collected: Collected, samples: Sequence[Sample]) -> None:
        """Write the chains of a step into the run, with what their tokens were worth."""
        worth: dict[str, list[Any]] = {}
        for sample in samples:
            worth.setdefault(sample.name.partition("#")[0], []).append(sample.advantages)
        self._keep(collected.trajectories, worth)

    async def end_step(self, collected: Collected, figures: Mapping[str, float]) -> None:
        """Evaluate if it is time, tell everybody, and write a checkpoint if it is time."""
        if "policy/kl" in figures:
            self._controller.update(figures["policy/kl"], len(collected.trajectories))
            self._charge()
        last = self.step == self.config.steps
        due = last or (self.config.eval_every is not None and self.step % self.config.eval_every == 0)
        with self.clock("evaluate"):
            held_out = await self._evaluated() if due else None
        self._tell(self._record(collected, figures, held_out))
        if last or self.step % self.config.save_every == 0 or (held_out is not None and self._best_step == self.step):
            with self.clock("save"):
                self._save()

    def _record(self, collected: Collected, figures: Mapping[str, float], held_out: EvalFigures | None) -> StepRecord:
        rollout = self._seconds.pop("rollout")
        phases = {**collected.seconds, **self._seconds}
        now = time.perf_counter()
        phases["other"] = now - self._since - sum(phases.values())
        self._since, self._seconds = now, {}  # a checkpoint is written after this: its time is the next step's
        metrics = {
            **chain_metrics(collected.trajectories, version=self.step - 1),
            **figures,
            **{f"selection/{name}": float(count) for name, count in collected.selection.chains.items()},
            "selection/groups": float(len(collected.selection.groups)),
            "selection/flat_groups": float(collected.selection.flat),
            "throughput/tokens_per_second": sum(each.sampled_tokens for each in collected.trajectories) / rollout,
        }
        alarms = (*self._watch.look(self.step, metrics, collected.trajectories), *self._unkept)
        return StepRecord(
            self.step, self.config.steps, metrics, phases, held_out, collected.lent, collected.waiting, alarms
        )

    def _keep(
        self, chains: Sequence[Trajectory], worth: Mapping[str, Any] | None = None, held_out: bool = False
    ) -> None:
        """Write chains into the run; one that cannot be written is an alarm."""
        lost = self._writer.write_trajectories(self.step, chains, worth, held_out=held_out)
        if lost:
            self._unkept.append(Alarm("unkept", f"{len(lost)} chains cannot be written: {lost[0]}", step=self.step))

    def _charge(self) -> None:
        """Let the loss know the price of straying, where it is part of the loss."""
        if self.learner.loss.kl:
            self.learner.loss = replace(self.learner.loss, kl=self._controller.value)

    async def _evaluated(self) -> EvalFigures | None:
        if not self._plan.eval_tasks:
            return None
        ended: list[Trajectory] = []

        def keep(event: Event) -> None:
            if isinstance(event, ChainEnded):
                ended.append(event.trajectory)

        options: Any = {**self.config.run_options, "sampling": self.config.sampling, "seed": self.config.seed}
        evaluation = await evaluate(
            self.agent, self._plan.eval_tasks, chains=self.config.eval_chains, greedy=True,
            max_turns=self.config.max_turns, observer=keep, **options,
        )  # fmt: skip
        ended.sort(key=lambda each: (each.group, each.chain))
        self._keep(ended, held_out=True)
        if self._best is None or evaluation.reward.mean > self._best[0]:
            self._best = (evaluation.reward.mean, self.step)
        return evaluation.figures

    def _save(self) -> None:
        tensors, learned = self.learner.state_dict()
        values = {
            "feed": self._feed.position,
            "kl": self._controller.state_dict(),
            "best": self._best,
            "learner": learned,
        }
        self._checkpoints.save(State(self.step, tensors, values), self._write_model, best=self._best_step)

    @property
    def _best_step(self) -> int | None:
        return None if self._best is None else self._best[1]

    def _write_model(self, folder: Path) -> None:
        self.learner.save(folder)
        self._save_tokenizer(folder)

    def _tell(self, record: StepRecord) -> None:
        self._writer.append(record)
        self._sinks.step(record)
