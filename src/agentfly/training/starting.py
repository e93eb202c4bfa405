"""Training in one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentfly.agent import BaseAgent, wait_for
from agentfly.rollout.options import tasks_of
from agentfly.runs import RunDirectory
from agentfly.training.config import TrainConfig


def train(
    agent: Callable[..., BaseAgent],
    tasks: Any,
    config: TrainConfig | None = None,
    *,
    eval_tasks: Any = (),
    run: str | Path,
    resume: bool = False,
) -> RunDirectory:
    """Train an agent on tasks, and leave everything in the folder `run`.

    `agent` makes it, as `HFAgent(**model, tools=…, reward=…)` does: `model` is what the configuration says of the
    model, its backend and its template. `tasks` and `eval_tasks` are what `agent.run` takes. `resume`: go on with the
    run in that folder after its newest checkpoint.
    """
    from agentfly.training import loop  # torch, which `import agentfly.training` does without
    from agentfly.training.setup import new_run, resumed_run
    from agentfly.training.trainer import Plan

    held_out = tasks_of(eval_tasks) if eval_tasks else ()
    plan = Plan(agent, tasks_of(tasks), config or TrainConfig(), held_out)
    trainer = resumed_run(plan, Path(run)) if resume else new_run(plan, Path(run))
    wait_for(loop.run(trainer))
    return RunDirectory(run)
