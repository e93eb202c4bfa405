"""`train`: a run from Python, without a recipe file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentfly.agent import BaseAgent
from agentfly.rollout.config import parse_tasks
from agentfly.runs import RunDirectory
from agentfly.threads import wait_for
from agentfly.training.config import TrainConfig
from agentfly.training.launch import launch_or_join_ranks
from agentfly.training.plan import TrainPlan


def train(
    agent: Callable[..., BaseAgent],
    tasks: Any,
    config: TrainConfig | None = None,
    *,
    eval_tasks: Any = (),
    run: str | Path,
    resume: bool = False,
) -> RunDirectory:
    """Train an agent on tasks and write everything to the run directory `run`.

    agent: a function that makes the agent, such as `lambda **model: HFAgent(**model, tools=…, reward=…)`; `model` holds
    the model, backend and template of the configuration. tasks, eval_tasks: what `agent.run` takes.
    resume: continue the run in that directory after its newest checkpoint.
    """
    held_out = parse_tasks(eval_tasks) if eval_tasks else ()
    plan = TrainPlan(agent, parse_tasks(tasks), config or TrainConfig(), held_out)
    if launch_or_join_ranks(plan.config, resumed=resume):
        return RunDirectory(run, must_exist=False)  # the machine of another rank may not have it
    from agentfly.training.trainer import Trainer

    start = Trainer.resume if resume else Trainer.create
    wait_for(start(plan, Path(run)).run())
    return RunDirectory(run)
