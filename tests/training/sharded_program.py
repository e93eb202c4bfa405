"""What the tests of the sharded learner run on every rank; rank 0 writes the results to a file."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from agentfly.algorithms.base import SegmentArrays
from agentfly.algorithms.loss import Loss
from agentfly.backends.base import Request
from agentfly.backends.engine.loading import load_model
from agentfly.backends.engine.vision import takes_images
from agentfly.errors import BackendFault, NonFiniteError, RankError, describe
from agentfly.training.batch import Sample
from agentfly.training.config_records import UpdateConfig
from agentfly.training.local_learner import LocalLearner
from agentfly.training.lora import add_lora
from agentfly.training.sharded_learner import ShardedLearner
from agentfly.training.sharding import Ranks, gather
from agentfly.types import Completion, Message, Sampling
from tests.backends.engine.tiny import CONFIG, model_of
from tests.training.pieces import make_learner, sample_of, samples
from tests.vision_models import make_segments, open_template, picture

LENGTHS = (30, 5, 17, 40, 9, 2, 61, 33, 12, 25, 48)
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"mini_batches": 2, "loss": Loss(entropy_coef=0.01), "weight_decay": 0.1},
    "ppo": {"critic": True, "epochs": 2},
    "kl": {"loss": Loss(kl_coef=0.1, teacher_coef=0.5), "reference": True, "gradient_checkpointing": True},
    "lora": {"loss": Loss(kl_coef=0.1), "reference": True, "critic": True, "micro_batch_tokens": 60},
    "vision": {"loss": Loss(kl_coef=0.1), "reference": True, "critic": True, "epochs": 2},
}
"""Settings of the learner by name. `kl` and `vision` train tied embeddings."""


def build(case: str, folder: Path, make: Callable[..., LocalLearner] = LocalLearner, **placement: Any) -> LocalLearner:
    """The learner of a case; `gradients` has those of its first step. folder: with a vision model in `vision-model`."""
    model = model_of(config=LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": case == "kl"}))
    if case == "vision":
        model = load_model(str(folder / "vision-model"), torch.device("cpu"), torch.float32)
    if case == "lora":
        model = add_lora(model, 4, seed=0)
    settings = {"learning_rate": 1e-3, "micro_batch_tokens": 100, **CASES[case]}
    if case in ("grpo", "kl"):
        settings["teacher"] = model_of(seed=1, config=LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 1}))
    learner: Any = make_learner(model, make, **settings, **placement)
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


def build_samples(learner: LocalLearner) -> list[Sample]:
    batch = samples(*LENGTHS, temperature=0.9)
    if takes_images(learner.model):
        segments = make_segments(open_template(Path(learner.model.config.name_or_path)))
        arrays = map(SegmentArrays.from_segment, segments)
        batch = [sample_of(segment, seed, temperature=0.9) for seed, segment in enumerate(arrays)]
    if learner.loss.kl_coef:
        reference = learner.score_reference([sample.segment for sample in batch], 0.9)
        batch = [
            replace(sample, reference_logprobs=logprobs) for sample, logprobs in zip(batch, reference, strict=True)
        ]
    return batch


def exercise(learner: LocalLearner, folder: Path, *, brief: bool = False) -> dict[str, Any]:
    """Score, update and save; everything that came of it. brief: score and update once."""
    batch = build_samples(learner)
    segments = [sample.segment for sample in batch]
    outcome: dict[str, Any] = {"scores": learner.score(segments, 0.9)}
    if learner._teacher is not None:
        outcome["scores"] += learner.score_teacher(segments, 0.9)
    outcome["metrics"] = [learner.update(batch)]
    outcome["logprobs"] = learner.update_logprobs
    outcome["metrics"] += [learner.update(batch) for _ in range(0 if brief else 2)]
    outcome["gradients"] = learner.gradients  # type: ignore[attr-defined]
    if brief:
        return outcome
    outcome["weights"] = {name: weight.clone() for name, weight in learner.weights(merged=True)}
    outcome["later scores"] = learner.score(segments, 0.9)
    if learner._critic is not None:
        outcome["values"] = learner.values(segments)
        learner.save(folder)
        outcome["state"] = learner.state_dict()
    return outcome


def resume(learner: LocalLearner, folder: Path, state: Any) -> dict[str, Any]:
    """Load what another layout wrote, and update once more."""
    learner.load(folder)
    learner.load_state_dict(*state)
    metrics = learner.update(build_samples(learner))
    return {"metrics": metrics, "weights": {name: weight.clone() for name, weight in learner.weights(merged=True)}}


async def sample_with_an_image(learner: ShardedLearner) -> list[Completion]:
    """What the engine of each rank answers to one request."""
    folder = Path(learner.model.config.name_or_path)
    template = open_template(folder)
    image = picture(56, 56)
    prompt = template.start([Message("user", ("What? ", image))])
    assert template.image_processor is not None
    positions = [at for at, token in enumerate(prompt) if token == template.image_processor.token_id]
    fleet = learner.open_engines({"model": str(folder), "device": "cpu", "dtype": "float32", "kv_memory": 1 << 22})
    fleet.attach(template)
    assert fleet.supports_images
    request = Request(prompt, Sampling(max_tokens=6, seed=0), images=(image,), image_positions=positions)
    completions = [await engine.generate(request) for engine in fleet.members]
    await fleet.close()
    return completions


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
    Ranks(torch.device("cpu")).close()  # a program may train several times
    ranks = Ranks(torch.device("cpu"))
    results: dict[str, Any] = {}
    for case in cases:
        learner = build(case, folder, ShardedLearner, ranks=ranks)
        assert isinstance(learner, ShardedLearner)
        if not ranks.leads:
            learner.follow()
            continue
        brief = ranks.size > 2
        results[case] = exercise(learner, folder / f"{case}-sharded", brief=brief)
        if "state" in results[case]:
            results[case]["resumed"] = resume(learner, folder / case, torch.load(folder / f"{case}.pt"))
        shards = [weight.to_local().numel() for weight in learner.trainable_weights.values()]  # type: ignore[attr-defined]
        results[case]["numel"] = sum(shards), sum(weight.numel() for weight in learner.trainable_weights.values())
        if case == "vision":
            results["completions"] = asyncio.run(sample_with_an_image(learner))
        ranks.broadcast(None)
    learner = ShardedLearner(model_of(), ranks=ranks, update=UpdateConfig(precision="float32"))
    if ranks.leads:
        results["not finite"] = refuse_broken_samples(learner)
        ranks.broadcast(None)
    else:
        learner.follow()
    results["failed"] = fail(learner, how_to_fail)
    torch.save(results, folder / "sharded.pt")
