"""Our policy loss, registered in verl: surrogates, clipping and averaging are those of a local run."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss

from agentfly.algorithms.loss import Loss, Surrogate, TokenBatch
from agentfly.integrations.verl.config import NAME, NO_DUAL_CLIP


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
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a micro-batch; all tensors are [rows, response].

    verl averages gradients over the data-parallel ranks, hence the factor dp_size. `rollout_is_weights` are the
    factors of our importance-sampling correction.
    """
    mask = response_mask.bool()
    batch = config.global_batch_info
    lengths = mask.sum(-1)  # [rows]
    match loss_agg_mode:
        case "token-mean":
            row_weights = torch.ones_like(lengths, dtype=torch.float32) / batch["batch_num_tokens"]
        case "seq-mean-token-mean":
            row_weights = 1 / (batch["global_batch_size"] * lengths.clamp(min=1))
        case _:  # seq-mean-token-sum-norm
            factor = batch["global_batch_size"] * batch["loss_scale_factor"]
            row_weights = torch.ones_like(lengths, dtype=torch.float32) / factor
    weights = (row_weights * batch["dp_size"])[:, None].expand_as(mask)[mask]
    if rollout_is_weights is not None:
        weights = weights * rollout_is_weights[mask]
    rows = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)[mask]
    dual = () if config.clip_ratio_c >= NO_DUAL_CLIP else (config.clip_ratio_c,)
    loss = Loss(
        surrogate=surrogate,
        clip=(config.clip_ratio_low, config.clip_ratio_high, *dual) if surrogate != "plain" else (0.2, 0.2),
    )
    old = old_log_prob[mask]
    tokens = TokenBatch(
        logprobs=log_prob[mask],
        old_logprobs=old,
        sampler_logprobs=old,  # the mismatch is measured by the trainer
        advantages=advantages[mask],
        weights=weights,
        sequence_ids=rows,
        num_sequences=len(mask),
    )
    total, measured = loss(tokens)
    count = max(len(old), 1)
    names = ("ratio", "approx_kl", "clip_low", "clip_high", "clip_dual")
    return total, {f"actor/{name}": float(measured[name]) / count for name in names if name in measured}


def register() -> None:
    """Enter the losses in verl's registry, one per surrogate."""
    for surrogate in get_args(Surrogate):
        register_policy_loss(f"{NAME}-{surrogate}")(partial(compute_policy_loss, surrogate=surrogate))
