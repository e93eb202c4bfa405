"""verl's training processes with our loss, learning-rate schedule and embedded engine."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from transformers import AutoModelForTokenClassification
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from agentfly.integrations.verl import engine, loss
from agentfly.integrations.verl.config import SCHEDULE_VARIABLE
from agentfly.training.optimizer import LRSchedule


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cuda", vendor="cpu")
class CPUValueEngine(FSDPEngineWithValueHead):  # type: ignore[misc]
    """A critic on the platform of `cpu`: verl's own loads the model with flash attention, which needs a GPU."""

    def _build_module(self) -> torch.nn.Module:
        config = self.model_config.hf_config
        config.num_labels = 1
        config.classifier_dropout = 0.0
        model: torch.nn.Module = AutoModelForTokenClassification.from_pretrained(
            self.model_config.local_path, config=config, dtype=torch.float32
        )
        return model


class ScheduledWorker(TrainingWorker):  # type: ignore[misc]
    """Trains one model with the learning-rate schedule of a local run; verl has no linear one."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def reset(self) -> None:
        super().reset()
        engine = self.engine
        if getattr(engine, "lr_scheduler", None) is None:  # the reference model
            return
        schedule = LRSchedule(1.0, **json.loads(os.environ[SCHEDULE_VARIABLE]))
        engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, schedule.at)
        engine.checkpoint_manager.lr_scheduler = engine.lr_scheduler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def skip_update(self) -> None:
        """Advance the learning-rate schedule in a step without samples, as a local run does."""
        self.engine.lr_scheduler_step()


class _AgentFlyWorker:
    """A training process with our loss and engine in verl's registries."""

    actor_worker_cls = ScheduledWorker
    actor: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        engine.register()
        loss.register()
        super().__init__(*args, **kwargs)
        if os.environ.get("VERL_PLATFORM") == "cpu" and not torch.distributed.is_initialized():
            torch.set_num_threads(1)
            # verl would ask for "cpu:gloo,cpu:gloo", which torch refuses.
            torch.distributed.init_process_group(
                "gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def skip_update(self) -> None:
        """Advance the learning-rate schedule of the policy."""
        self.actor.skip_update()


class ColocatedWorker(_AgentFlyWorker, ActorRolloutRefWorker):  # type: ignore[misc]
    """Trains and serves in turn."""


class SeparateWorker(_AgentFlyWorker, DetachActorWorker):  # type: ignore[misc]
    """Trains only."""
