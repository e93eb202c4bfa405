"""verl's and TRL's own functions, called in a separate process: the tests import neither.

Everything goes in and out as numpy arrays, one row a sequence, padded, with a mask of the tokens that count.
"""

import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.algorithms.fetch import CACHE

Array = npt.NDArray[Any]
Ask = Callable[..., Any]


@contextmanager
def reference(name: str) -> Iterator[Ask]:
    """A process that sees one framework: `ask(function, *arguments)` calls one of the functions below in it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_add_import_path, initargs=(str(CACHE / name),)) as process:
        yield lambda function, *arguments, **more: process.submit(function, *arguments, **more).result(timeout=120)


def _add_import_path(folder: str) -> None:
    sys.path.insert(0, folder)  # what it needs comes with it, of other versions than ours


def verl_advantages(name: str, rewards: Array, mask: Array, groups: Array, **more: Any) -> tuple[Array, Array]:
    """Advantages and returns by one of verl's estimators."""
    import torch
    from verl.trainer.ppo import core_algos

    estimator = core_algos.get_adv_estimator_fn(name)
    named: dict[str, Any] = {"token_level_rewards": torch.tensor(rewards), "response_mask": torch.tensor(mask)}
    if name in ("grpo", "gdpo", "rloo", "reinforce_plus_plus_baseline"):
        named["index"] = groups
    if name == "gdpo":  # looks for the last token of each reply
        ones = torch.ones(len(mask), 1 + mask.shape[1], dtype=torch.long)
        more = {**more, "batch": {"prompts": ones[:, :1], "attention_mask": ones}}
    if name == "reinforce_plus_plus":
        more = {"config": SimpleNamespace(**more)}
    named |= {key: torch.tensor(value) if isinstance(value, np.ndarray) else value for key, value in more.items()}
    advantages, returns = estimator(**named)
    return advantages.numpy(), returns.numpy()


def verl_loss(
    name: str, tokens: dict[str, Array], clip: tuple[float, ...], aggregation: str, constant: int, weights: Array | None
) -> tuple[float, Array, float]:
    """One of verl's policy losses, its gradient with respect to the log-probabilities, and its share of clipped."""
    import torch
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    low, high, dual = (*clip, 1e9)[:3]
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual
    )
    config.global_batch_info.update(loss_scale_factor=constant)
    logprobs = torch.tensor(tokens["logprobs"], requires_grad=True)
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=torch.tensor(tokens["old"]),
        log_prob=logprobs,
        advantages=torch.tensor(tokens["advantages"]),
        response_mask=torch.tensor(tokens["mask"]),
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=None if weights is None else torch.tensor(weights),
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.numpy(), float(metrics.get("actor/pg_clipfrac", np.nan))


def verl_divergence(logprobs: Array, reference: Array, estimator: str) -> Array:
    import torch
    from verl.trainer.ppo import core_algos

    return core_algos.kl_penalty(torch.tensor(logprobs), torch.tensor(reference), estimator).numpy()


def verl_controller(value: float, target: float, horizon: float, steps: list[tuple[float, int]]) -> float:
    from verl.trainer.ppo import core_algos

    controller = core_algos.AdaptiveKLController(value, target, horizon)
    for divergence, chains in steps:
        controller.update(divergence, chains)
    return float(controller.value)


def verl_correction(apart: Array, mask: Array, level: str, threshold: str | float) -> Array:
    """verl's importance weights: truncated for one threshold, IcePop's mask for two."""
    import torch
    from verl.trainer.ppo import rollout_corr_helper

    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        torch.tensor(apart), torch.tensor(mask), level, threshold
    )
    return weights.numpy()


def verl_rejection(apart: Array, mask: Array, option: str, threshold: str) -> Array:
    """Which tokens verl's rejection keeps."""
    import torch
    from verl.trainer.ppo import rollout_corr_helper

    return rollout_corr_helper.compute_rollout_rejection_mask(
        torch.tensor(apart), torch.tensor(mask), option, threshold
    )[0].numpy()


def trl_loss(
    kind: str, level: str, tokens: dict[str, Array], clip: tuple[float, ...], beta: float, entropy: float, longest: int
) -> tuple[float, Array]:
    """TRL's GRPO loss and its gradient, with a stand-in for the trainer's model and machinery."""
    import torch
    from trl.trainer.grpo_trainer import GRPOTrainer

    low, high, *dual = clip
    logprobs = torch.tensor(tokens["logprobs"], requires_grad=True)
    mask = torch.tensor(tokens["mask"])
    corrects = "correction" in tokens
    trainer = SimpleNamespace(
        loss_type=kind, importance_sampling_level=level, epsilon_low=low, epsilon_high=high, beta=beta,
        args=SimpleNamespace(delta=dual[0] if dual else None, use_bias_correction_kl=False),
        max_completion_length=longest, use_vllm=corrects, vllm_importance_sampling_correction=corrects,
        _entropy_bonus_enabled=bool(entropy), entropy_coef=entropy, use_adaptive_entropy=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False,
        model=SimpleNamespace(training=False), _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.tensor(tokens["entropies"]), None),
    )  # fmt: skip
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask,
        "advantages": torch.tensor(tokens["advantages"]), "old_per_token_logps": torch.tensor(tokens["old"]),
        "ref_per_token_logps": torch.tensor(tokens["reference"]), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if corrects:
        inputs["importance_sampling_ratio"] = torch.tensor(tokens["correction"])
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.numpy()
