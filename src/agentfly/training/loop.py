"""The whole of training on one screen."""

from __future__ import annotations

import asyncio

from agentfly.threads import compute
from agentfly.training.publishing import publish
from agentfly.training.trainer import Trainer


async def run(trainer: Trainer) -> None:
    """Rollout, credit, update, publish, until all steps are done; then the report.

    Chains of step n are sampled with the weights of version n - 1. Everything that a step leaves is written before the
    next begins, so that a run which is killed goes on where its last checkpoint stands.
    """
    async with trainer:
        while trainer.step < trainer.config.steps:
            trainer.begin_step()
            with trainer.clock("rollout"):
                collected = await trainer.collector.collect(trainer.step)
            with trainer.clock("update"):
                samples = await compute(trainer.credited, collected.groups)
                figures = await compute(trainer.learn, samples)
            with trainer.clock("publish"):
                delivery = publish(trainer.learner, trainer.agent.backend, trainer.step, trainer.canary)
                await asyncio.gather(delivery, compute(trainer.keep, collected, samples))
            await trainer.end_step(collected, figures)
