"""TrainPlan: agent, tasks and configuration of a run, checked before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentfly.agent import BaseAgent
from agentfly.errors import ConfigError
from agentfly.rollout.scheduler import validate_run
from agentfly.templates.template import History
from agentfly.training.config import TrainConfig
from agentfly.training.config_records import EvaluationConfig, WarmStart
from agentfly.types import Task


@dataclass(frozen=True)
class TrainPlan:
    """What is trained, on which tasks, and how."""

    make_agent: Callable[..., BaseAgent]
    """Makes the agent, given `model_name_or_path`, `backend` and `template`."""
    tasks: Sequence[Task]
    config: TrainConfig = field(default_factory=TrainConfig)
    eval_tasks: Sequence[Task] = ()
    """Held-out tasks; empty disables evaluation."""
    recipe: Path | None = None
    """The recipe file, which a resumed run reads again."""
    warm_start: WarmStart | None = None
    """SFT that the recipe's model needs first."""

    def __post_init__(self) -> None:
        evaluation = self.config.evaluation
        for name, default in asdict(EvaluationConfig()).items():
            value = getattr(evaluation, name)
            if not self.eval_tasks and value != default:
                raise ConfigError(f"evaluation.{name}={value} would have no effect: there are no eval_tasks")
        if evaluation.tasks is not None:
            if evaluation.tasks > (available := len(self.eval_tasks)):
                raise ConfigError(
                    f"evaluation.tasks={evaluation.tasks}, but there are {available} eval_tasks; give fewer"
                )
            object.__setattr__(self, "eval_tasks", self.eval_tasks[: evaluation.tasks])

        def content(task: Task) -> str:  # with the columns: two tasks may share a question in different environments
            return str((task.messages, sorted(task.columns.items(), key=lambda item: item[0])))

        trained = {content(task) for task in self.tasks}
        if both := [task.id for task in self.eval_tasks if content(task) in trained]:
            raise ConfigError(f"{len(both)} of the held-out tasks are trained on too, {both[0]!r} among them")

    def check_agent(self, agent: BaseAgent) -> None:
        """Raise ConfigError, before the first token, where the plan cannot train this agent."""
        if agent.scorer is None:
            raise ConfigError("this agent has no reward, so there is nothing to learn from; give it reward=…")
        config = self.config
        if config.algorithm.needs_components and len(agent.scorer.rewards) < 2:
            raise ConfigError(
                f"{config.algorithm} normalizes each of several rewards, and this agent has one: give a list, such as "
                "reward=[(correct, 1.0), (short, 0.1)], or train with algorithm=grpo"
            )
        rewrites_history = (
            (agent.template is not None and agent.template.history is not History.APPEND)
            or "folding" in config.run_options
            or config.run_options.get("strategy") == "step"
        )
        if config.segment_reward != "broadcast" and not rewrites_history:
            raise ConfigError(
                f"segment_reward={config.segment_reward!r} would have no effect: no history is rewritten here, so "
                "every chain is one segment; set run_options.strategy='step', or give a folding rule"
            )
        validate_run(agent, [*self.tasks, *self.eval_tasks])
