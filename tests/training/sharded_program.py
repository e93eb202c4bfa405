"""What the tests of the sharded learner run on every rank; rank 0 writes the results to a file."""

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from agentfly.algorithms.loss import Loss
from agentfly.errors import BackendFault, NonFiniteError, RankError, describe
from agentfly.training.batch import Sample
from agentfly.training.local_learner import LocalLearner
from agentfly.training.lora import add_lora
from agentfly.training.sharded_learner import ShardedLearner
from agentfly.training.sharding import Ranks, gather
from tests.backends.engine.tiny import CONFIG, model_of
from tests.training.pieces import samples

LENGTHS = (30, 5, 17, 40, 9, 2, 61, 33, 12, 25, 48)
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"mini_batches": 2, "loss": Loss(entropy_coef=0.01), "weight_decay": 0.1},
    "ppo": {"critic": True, "epochs": 2},
    "kl": {"loss": Loss(kl_coef=0.1), "reference": True, "gradient_checkpointing": True},
    "lora": {"loss": Loss(kl_coef=0.1), "reference": True, "critic": True, "micro_batch_tokens": 60},
}
"""Settings of the learner by name. `kl` trains tied embeddings."""


def build(case: str, make: Callable[..., LocalLearner] = LocalLearner, **placement: Any) -> LocalLearner:
    """The learner of a case; `gradients` has those of its first step."""
    model = model_of(config=LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": case == "kl"}))
    if case == "lora":
        model = add_lora(model, 4, seed=0)
    settings = {"learning_rate": 1e-3, "precision": "float32", "micro_batch_tokens": 100, **CASES[case]}
    learner: Any = make(model, **settings, **placement)
    learner.gradients = {}
    for optimizer, prefix in ((learner._optimizer, ""), (learner._critic and learner._critic.optimizer, "critic/")):
        if optimizer is not None:
            optimizer.step = catch_gradients(optimizer, learner.gradients, prefix)
    return learner  # type: ignore[no-any-return]


def catch_gradients(optimizer: Any, caught: dict[str, torch.Tensor], prefix: str) -> Callable[[int], float]:
    step: Callable[[int], float] = optimizer.step

    def catch(update: int) -> float:
        for name, weight in optimizer.weights.items():
            if weight.grad is not None and prefix + name not in caught:
                caught[prefix + name] = gather(weight.grad).clone()
        return step(update)

    return catch


def given(learner: LocalLearner) -> list[Sample]:
    batch = samples(*LENGTHS, temperature=0.9)
    if learner.loss.kl_coef:
        reference = learner.score_reference([each.segment for each in batch], 0.9)
        batch = [replace(each, reference_logprobs=own) for each, own in zip(batch, reference, strict=True)]
    return batch


def exercise(learner: LocalLearner, folder: Path, *, brief: bool = False) -> dict[str, Any]:
    """Score, update and save; everything that came of it. brief: score and update once."""
    batch = given(learner)
    segments = [each.segment for each in batch]
    found: dict[str, Any] = {"scores": learner.score(segments, 0.9)}
    found["metrics"] = [learner.update(batch)]
    found["logprobs"] = learner.update_logprobs
    found["metrics"] += [learner.update(batch) for _ in range(0 if brief else 2)]
    found["gradients"] = learner.gradients  # type: ignore[attr-defined]
    if brief:
        return found
    found["weights"] = {name: each.clone() for name, each in learner.weights(merged=True)}
    found["later scores"] = learner.score(segments, 0.9)
    if learner._critic is not None:
        found["values"] = learner.values(segments)
        learner.save(folder)
        found["state"] = learner.state_dict()
    return found


def resume(learner: LocalLearner, folder: Path, state: Any) -> dict[str, Any]:
    """Load what another layout wrote, and update once more."""
    learner.load(folder)
    learner.load_state_dict(*state)
    metrics = learner.update(given(learner))
    return {"metrics": metrics, "weights": {name: each.clone() for name, each in learner.weights(merged=True)}}


class Engine:
    """Reads the weights that it is sent; that of rank 1 fails."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        if self._rank == 1:
            raise BackendFault("the engine of rank 1 is gone")
        for _ in weights:
            pass


def fail(learner: ShardedLearner, how: str) -> str:
    """Rank 1 raises in a weight sync, or is killed in the middle of an update: the error of rank 0."""
    learner._engine = Engine(learner.ranks.rank)  # type: ignore[assignment]
    if learner.ranks.rank == 1 and how == "kill":
        layer = learner._policy.backbone.model.model.layers[1]
        layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if not learner.ranks.leads:
        learner.follow()
    try:
        if how == "kill":
            learner.update(samples(*LENGTHS))
        else:
            learner.update_engine(1)
    except (RankError, RuntimeError) as error:
        return describe(error)
    return "no error"


def refuse_broken_samples(learner: ShardedLearner) -> str:
    """Update with an advantage that is not finite, which one rank has; then with the others."""
    batch = samples(*LENGTHS)
    bad = replace(batch[3], advantages=np.full(LENGTHS[3], np.nan, np.float32))
    try:
        learner.update([*batch[:3], bad, *batch[4:]])
    except NonFiniteError as error:
        learner.update(batch[:3])
        return str(error)
    return "no error"


def run_rank(environment: dict[str, str], output: Path, folder: Path, how_to_fail: str, *cases: str) -> None:
    """Run one rank. environment: variables that torchrun sets. output: where stdout and stderr go."""
    os.environ.update(environment)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    ranks = Ranks(torch.device("cpu"))
    results: dict[str, Any] = {}
    for case in cases:
        learner = build(case, ShardedLearner, ranks=ranks)
        assert isinstance(learner, ShardedLearner)
        if not ranks.leads:
            learner.follow()
            continue
        brief = ranks.size > 2
        results[case] = exercise(learner, folder / f"{case}-sharded", brief=brief)
        if "state" in results[case]:
            results[case]["resumed"] = resume(learner, folder / case, torch.load(folder / f"{case}.pt"))
        shards = [each.to_local().numel() for each in learner.trainable_weights.values()]  # type: ignore[attr-defined]
        results[case]["numel"] = sum(shards), sum(each.numel() for each in learner.trainable_weights.values())
        ranks.broadcast(None)
    learner = ShardedLearner(model_of(), ranks=ranks, precision="float32")
    if ranks.leads:
        results["not finite"] = refuse_broken_samples(learner)
        ranks.broadcast(None)
    else:
        learner.follow()
    results["failed"] = fail(learner, how_to_fail)
    torch.save(results, folder / "sharded.pt")
