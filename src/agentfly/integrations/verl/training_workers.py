"""verl's training processes with our loss, learning-rate schedule and embedded engine.

Importing this module enters the losses in verl's registry, one per surrogate and level of the ratio: surrogates,
clipping and averaging are those of a local run.
"""

from __future__ import annotations

import json
import os
from functools import partial
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

import agentfly.integrations.verl.engine  # noqa: F401 (enters it in verl's registries)
from agentfly.algorithms.loss import Loss, RatioLevel, Surrogate, TokenBatch
from agentfly.integrations.verl.config import NAME, NO_DUAL_CLIP, SCHEDULE_VARIABLE
from agentfly.training.optimizer import LRSchedule


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None,
    surrogate: Surrogate,
    ratio: RatioLevel,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a micro-batch; all tensors are [rows, response].

    verl averages gradients over the data-parallel ranks, hence the factor dp_size. `rollout_is_weights` are the
    factors of our importance-sampling correction.
    """
    mask = response_mask.bool()
    batch = config.global_batch_info
    lengths = mask.sum(-1)  # [rows]
    rows = batch["global_batch_size"]
    divisor = {
        "token-mean": batch["batch_num_tokens"],
        "seq-mean-token-mean": rows * lengths.clamp(min=1),
        "seq-mean-token-sum-norm": rows * (batch["loss_scale_factor"] or 1),
    }[loss_agg_mode]
    row_weights = batch["dp_size"] / divisor * torch.ones_like(lengths, dtype=torch.float32)
    weights = row_weights[:, None].expand_as(mask)[mask]
    if rollout_is_weights is not None:
        weights = weights * rollout_is_weights[mask]
    dual = () if config.clip_ratio_c >= NO_DUAL_CLIP else (config.clip_ratio_c,)
    clip = (config.clip_ratio_low, config.clip_ratio_high, *dual) if surrogate != "plain" else (0.2, 0.2)
    old = old_log_prob[mask]
    tokens = TokenBatch(
        logprobs=log_prob[mask],
        old_logprobs=old,
        sampler_logprobs=old,  # the mismatch is measured by the trainer
        advantages=advantages[mask],
        weights=weights,
        sequence_ids=torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)[mask],
        num_sequences=len(mask),
    )
    total, measured = Loss(surrogate=surrogate, clip=clip, ratio=ratio)(tokens)
    names = ("ratio", "approx_kl", "clip_low", "clip_high", "clip_dual")
    return total, {f"actor/{name}": float(measured[name]) / max(len(old), 1) for name in names if name in measured}


_RATIOS: tuple[RatioLevel, ...] = ("token", "segment")
"""The levels of the ratio that need no more than rows: where a turn begins is not in them."""
for _surrogate, _ratio in product(get_args(Surrogate), _RATIOS):
    _policy_loss = partial(compute_policy_loss, surrogate=_surrogate, ratio=_ratio)
    register_policy_loss(f"{NAME}-{_surrogate}-{_ratio}")(_policy_loss)


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
    """A training process with our schedule, and on CPUs with a process group of its own."""

    actor_worker_cls = ScheduledWorker
    actor: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
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
