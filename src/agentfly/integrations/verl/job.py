"""The training job: the actor in which verl's trainer runs. This module imports verl only there."""

from __future__ import annotations

from typing import Any

from agentfly.integrations.verl.config import JobSpec


class TrainingJob:
    """Runs verl's trainer; a Ray actor."""

    def run(self, config: Any, spec: JobSpec) -> None:
        """Train until the last step."""
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import get_trainer_cls

        from agentfly.integrations.verl import engine
        from agentfly.integrations.verl.manager import RolloutManager
        from agentfly.integrations.verl.trainer import AgentFlyTrainer

        engine.register()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        tq.init(config.transfer_queue)
        try:
            base = get_trainer_cls(config.trainer.v1.trainer_mode)
            trainer: Any = type(f"AgentFly{base.__name__}", (AgentFlyTrainer, base), {})(config, spec)
            trainer.init()
            trainer.rollout = RolloutManager(spec, trainer.get_llm_client())
            trainer.fit(trainer.rollout)
        finally:
            tq.close()
