"""The learner: scores sampled tokens and updates the model.

`Learner` is what the trainer needs, and `LocalLearner` implements it in one process. It trains the very model it is
given: where the engine samples from the same object, no weights have to be sent. The model is never in training mode,
since dropout would make it another model than the one that sampled.

An update passes over its samples `epochs` times, in `mini_batches` optimizer steps each. The weights of the tokens in
the loss are computed per mini-batch, so splitting it into micro-batches changes memory, not the result. Ratios refer to
the model before the first step; with a single step that is the model itself.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from agentfly.algorithms.base import SegmentArrays
from agentfly.algorithms.loss import Aggregation, Loss, aggregation_weights, combine_metrics
from agentfly.backends.engine.loading import load_model, resolve_dtype
from agentfly.errors import ConfigError, DataError, NonFiniteError, RecordError
from agentfly.models.huggingface import hide_progress_bars
from agentfly.segment import Floats
from agentfly.training.batch import (
    ModelInputs,
    Sample,
    build_token_batch,
    gather_field,
    num_input_tokens,
    split_micro_batches,
    split_mini_batches,
)
from agentfly.training.config import TrainConfig
from agentfly.training.critic import Critic, strip_prefix
from agentfly.training.lora import MergedWeights, has_adapters, load_adapters, save_adapters
from agentfly.training.model import Policy
from agentfly.training.optimizer import LRSchedule, Optimizer, Schedule, trainable_parameters

Precision = Literal["auto", "float32", "bfloat16"]


class Learner(Protocol):
    """What the trainer, the advantage computation and the weight sync need of a learner.

    The scores are one [tokens] array per segment, 0 where the model did not sample.
    """

    low_precision: bool
    """Whether it computes in less than float32."""

    @property
    def trainable_weights(self) -> Mapping[str, Tensor]: ...
    @property
    def vocab_size(self) -> int: ...
    def parameters(self) -> Iterable[Tensor]: ...

    def score(self, segments: Sequence[SegmentArrays], temperature: float) -> Sequence[Floats]: ...
    def score_reference(self, segments: Sequence[SegmentArrays], temperature: float) -> Sequence[Floats]: ...
    def values(self, segments: Sequence[SegmentArrays]) -> Sequence[Floats]: ...

    def update(self, samples: Sequence[Sample]) -> dict[str, float]: ...
    def skip_update(self) -> None: ...
    def set_kl_coef(self, coef: float) -> None: ...

    def weights(self, *, merged: bool = False) -> Iterable[tuple[str, Tensor]]: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...
    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None: ...


class LocalLearner:
    """A causal language model in this process, with its optimizer and, where asked for, a critic and a reference."""

    def __init__(
        self,
        model: Any,
        *,
        loss: Loss | None = None,
        aggregation: Aggregation = "token",
        constant: int | None = None,
        learning_rate: float = 1e-6,
        critic_learning_rate: float | None = None,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        total_steps: int = 1,
        max_grad_norm: float = 1.0,
        epochs: int = 1,
        mini_batches: int = 1,
        micro_batch_tokens: int = 16384,
        gradient_checkpointing: bool = False,
        precision: Precision = "auto",
        reference: bool = False,
        critic: bool = False,
        seed: int = 0,
    ) -> None:
        """`model` has the initial weights, which the reference keeps; a resumed run calls `load` afterwards.

        constant: length that the aggregation "constant" divides by. critic_learning_rate: None is the learning rate.
        warmup_steps and total_steps count updates.
        """
        weights = trainable_parameters(model)
        self.model = model
        self.loss = loss or Loss()
        self._token_weights = partial(aggregation_weights, aggregation=aggregation, constant=constant)
        self._epochs = epochs
        self._mini_batches = mini_batches
        self._micro_batch_tokens = micro_batch_tokens
        self._seed = seed
        self._policy = Policy(model, gradient_checkpointing=gradient_checkpointing)
        lr = LRSchedule(learning_rate, warmup_steps, schedule, total_steps)
        make_optimizer = partial(Optimizer, weight_decay=weight_decay, max_norm=max_grad_norm)
        self._optimizer = make_optimizer(weights.items(), lr)
        self.low_precision = _computes_in_low_precision(precision, model)
        self._autocast = partial(torch.autocast, self.device.type, torch.bfloat16, enabled=self.low_precision)
        self._reference: Policy | None = None
        if reference and not has_adapters(model):
            self._reference = Policy(copy.deepcopy(model).requires_grad_(False))
        self._critic: Critic | None = None
        if critic:
            own = replace(lr, peak=learning_rate if critic_learning_rate is None else critic_learning_rate)
            self._critic = Critic(
                model,
                lambda weights: make_optimizer(weights.items(), own),
                gradient_checkpointing=gradient_checkpointing,
            )
        self._updates = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @classmethod
    def from_config(cls, model: Any, config: TrainConfig) -> LocalLearner:
        loss = Loss(
            surrogate=config.loss.type,
            clip=config.loss.clip,  # type: ignore[arg-type]
            kl_coef=config.kl.coef if config.kl.placement == "loss" else 0.0,
            kl_estimator=config.kl.estimator,
            entropy_coef=config.loss.entropy_coef,
            correction=config.loss.correction,  # type: ignore[arg-type]
            correction_cap=config.loss.correction_cap,
        )
        return cls(
            model,
            loss=loss,
            aggregation=config.loss.aggregation,
            constant=config.longest_chain,
            learning_rate=config.optimizer.learning_rate,
            critic_learning_rate=config.optimizer.critic_learning_rate,
            weight_decay=config.optimizer.weight_decay,
            warmup_steps=config.optimizer.warmup_steps,
            schedule=config.optimizer.schedule,
            total_steps=config.steps,
            max_grad_norm=config.optimizer.max_grad_norm,
            epochs=config.epochs,
            mini_batches=config.mini_batches,
            micro_batch_tokens=config.micro_batch_tokens,
            gradient_checkpointing=config.gradient_checkpointing,
            precision=config.precision,
            reference=config.kl.coef > 0,
            critic=config.algorithm.needs_values,
            seed=config.seed,
        )

    @property
    def device(self) -> torch.device:
        return self._policy.backbone.device

    @property
    def trainable_weights(self) -> Mapping[str, Tensor]:
        """The weights that change, by name."""
        return self._optimizer.weights

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding matrix."""
        size: int = self.model.get_input_embeddings().weight.shape[0]
        return size

    def parameters(self) -> Iterable[Tensor]:
        """All weights, frozen ones included."""
        parameters: Iterable[Tensor] = self.model.parameters()
        return parameters

    # ── scoring: one [tokens] array per segment, 0 where nothing was sampled ──

    def score(self, segments: Sequence[SegmentArrays], temperature: float) -> list[Floats]:
        """Log-probabilities of the sampled tokens, at the temperature they were sampled with."""
        return self._score_batches(segments, self._logprobs(self._policy, temperature))

    def score_reference(self, segments: Sequence[SegmentArrays], temperature: float) -> list[Floats]:
        """Log-probabilities under the initial model: a copy, or the model without its adapters."""
        if self._reference is not None:
            return self._score_batches(segments, self._logprobs(self._reference, temperature))
        if not has_adapters(self.model):
            raise ConfigError("this learner keeps no reference model: make it with reference=True")
        with self._policy.backbone.model.disable_adapter():
            return self.score(segments, temperature)

    def values(self, segments: Sequence[SegmentArrays]) -> list[Floats]:
        """The critic's value of the state before each sampled token."""
        if self._critic is None:
            raise ConfigError("this learner has no critic: make it with critic=True")
        return self._score_batches(segments, self._critic)

    @staticmethod
    def _logprobs(policy: Policy, temperature: float) -> Callable[[ModelInputs], Tensor]:
        return lambda inputs: policy(inputs, [temperature] * len(inputs.counts)).logprobs

    @torch.no_grad()
    def _score_batches(
        self, segments: Sequence[SegmentArrays], forward: Callable[[ModelInputs], Tensor]
    ) -> list[Floats]:
        out = [np.zeros(len(segment.tokens), np.float32) for segment in segments]
        sampled = [index for index, segment in enumerate(segments) if segment.mask.any()]
        for batch in self._split(sampled, lambda index: num_input_tokens(segments[index])):
            inputs = ModelInputs.from_segments([segments[index] for index in batch])
            with self._autocast():
                scores = forward(inputs).float().cpu().numpy()
            for index, own in zip(batch, np.split(scores, np.cumsum(inputs.counts)[:-1]), strict=True):
                out[index][segments[index].mask] = own
        return out

    def _split(self, items: Sequence[Any], length: Callable[[Any], int]) -> list[list[Any]]:
        return split_micro_batches(items, self._micro_batch_tokens, length, padded=not self._policy.backbone.packed)

    # ── updating ──

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Run one update over the samples and return its metrics.

        Raises NonFiniteError, naming the samples, where a loss or gradient is not finite; that step is not taken.
        """
        samples = [sample for sample in samples if sample.num_sampled_tokens]
        if not samples:
            raise RecordError("there is nothing to learn from: the model sampled no token of these samples")
        on_policy = self._epochs * self._mini_batches == 1
        if not on_policy:
            samples = self._with_old_logprobs(samples)
        self._seconds.clear()
        order = Random(f"{self._seed}/{self._updates}")
        steps = []
        for _ in range(self._epochs):
            if self._mini_batches > 1:
                order.shuffle(samples)
            steps += [self._step(batch, on_policy) for batch in split_mini_batches(samples, self._mini_batches)]
        metrics = _average_steps(steps) | {"policy/learning_rate": self._optimizer.schedule.at(self._updates)}
        metrics |= {f"update/seconds_{phase}": seconds for phase, seconds in self._seconds.items()}
        if self.device.type == "cuda":
            metrics["update/peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
        self._updates += 1
        return metrics

    def skip_update(self) -> None:
        """Count an update without samples: the learning-rate schedule advances."""
        self._updates += 1

    def set_kl_coef(self, coef: float) -> None:
        """Change the KL coefficient of the loss; no effect on a loss without a KL term."""
        if self.loss.kl_coef:
            self.loss = replace(self.loss, kl_coef=coef)

    def _with_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """Fill in the log-probabilities before the first step where they are missing."""
        out = list(samples)
        missing = [index for index, sample in enumerate(samples) if sample.old_logprobs is None]
        for temperature in {samples[index].temperature for index in missing}:
            indices = [index for index in missing if samples[index].temperature == temperature]
            scores = self.score([samples[index].segment for index in indices], temperature)
            for index, old in zip(indices, scores, strict=True):
                out[index] = replace(samples[index], old_logprobs=old)
        return out

    @torch.enable_grad()
    def _step(self, batch: Sequence[Sample], on_policy: bool) -> dict[str, float]:
        """One optimizer step of the policy and, where there is one, of the critic."""
        token_weights = self._token_weights([sample.num_sampled_tokens for sample in batch])
        weight_of = dict(zip(map(id, batch), token_weights, strict=True))
        micro_batches = [
            (samples, ModelInputs.from_segments([sample.segment for sample in samples]))
            for samples in self._split(batch, lambda sample: num_input_tokens(sample.segment))
        ]
        try:
            sums = []
            for samples, inputs in micro_batches:
                with self._time_phase("forward"), self._autocast():
                    scores = self._policy(inputs, [sample.temperature for sample in samples])
                    has_reference = all(sample.reference_logprobs is not None for sample in samples)
                    tokens = build_token_batch(
                        samples,
                        [weight_of[id(sample)] for sample in samples],
                        scores,
                        on_policy=on_policy,
                        with_reference=self.loss.kl_coef > 0 or has_reference,
                        entropy_gradient=self.loss.entropy_coef != 0,
                    )
                    loss, measured = self.loss(tokens)
                _require_finite(loss, "the loss", tokens.logprobs * tokens.advantages, samples)
                with self._time_phase("backward"):
                    loss.backward()
                sums.append(measured)
                del scores, tokens, loss  # the graph, before the next forward pass needs the memory
            metrics = {f"policy/{name}": value for name, value in combine_metrics(sums).items()}
            metrics["policy/grad_norm"] = self._optimizer.step(self._updates)
            if self._critic is not None:
                num_tokens = sum(sample.num_sampled_tokens for sample in batch)
                metrics["critic/loss"] = 0.0
                for samples, inputs in micro_batches:
                    with self._time_phase("forward"), self._autocast():
                        errors = self._critic(inputs) - gather_field(samples, "returns", self.device)
                    loss = errors.square().sum() / (2 * num_tokens)  # Σ (V − return)² / (2 · tokens)
                    _require_finite(loss, "the critic's loss", errors, samples)
                    with self._time_phase("backward"):
                        loss.backward()
                    metrics["critic/loss"] += loss.item()
                    del errors, loss
                metrics["critic/grad_norm"] = self._critic.optimizer.step(self._updates)
        except NonFiniteError as error:
            raise NonFiniteError(f"update {self._updates + 1}: {error}; its step had {_names(batch)}") from error
        finally:
            self._optimizer.zero_grad()
            if self._critic is not None:
                self._critic.optimizer.zero_grad()
        return metrics

    @contextmanager
    def _time_phase(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start

    # ── weights and state ──

    def weights(self, *, merged: bool = False) -> Iterable[tuple[str, Tensor]]:
        """The weights that change, by name. merged: adapters added into the matrices they belong to."""
        if merged and has_adapters(self.model):
            return MergedWeights(self.model)
        return [(name, each.detach()) for name, each in self.trainable_weights.items()]

    def save(self, folder: Path) -> None:
        """Write what transformers (or peft) loads: the whole model, or the adapters alone."""
        with hide_progress_bars():
            if has_adapters(self.model):
                save_adapters(self.model, folder)
            else:
                self.model.save_pretrained(folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote. The reference model is unchanged."""
        if has_adapters(self.model):
            load_adapters(self.model, folder)
            return
        saved = dict(load_model(str(folder), torch.device("cpu"), torch.float32).named_parameters())
        for name, weight in self.trainable_weights.items():
            if name not in saved or saved[name].shape != weight.shape:
                raise DataError(f"the model in {folder} is not the one being trained: its weight {name} differs")
            weight.copy_(saved[name])

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state beside the model's weights: tensors, and JSON values."""
        tensors = {f"optimizer/{name}": each for name, each in self._optimizer.state_dict().items()}
        if self._critic is not None:
            tensors |= {f"critic/{name}": each for name, each in self._critic.state_dict().items()}
        return tensors, {"updates": self._updates, "low_precision": self.low_precision}

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(strip_prefix("optimizer/", tensors))
        if self._critic is not None:
            self._critic.load_state_dict(strip_prefix("critic/", tensors))
        self._updates = values["updates"]
        # precision="auto" is measured in every process: a resumed run keeps what the run began with.
        self.low_precision = values.get("low_precision", self.low_precision)
        self._autocast = partial(torch.autocast, self.device.type, torch.bfloat16, enabled=self.low_precision)


def _computes_in_low_precision(precision: Precision, model: Any) -> bool:
    bfloat16_is_fast = resolve_dtype(None, next(model.parameters()).device) is torch.bfloat16
    if precision == "bfloat16" and not bfloat16_is_fast:
        raise ConfigError("precision='bfloat16', but this CPU is slower in it than in float32, or does not support it")
    if precision not in get_args(Precision):
        raise ConfigError(f"precision is one of {', '.join(get_args(Precision))}, not {precision!r}")
    in_float32 = all(each.dtype == torch.float32 for each in model.parameters())
    return (bfloat16_is_fast and precision != "float32") or not in_float32


def _require_finite(loss: Tensor, what: str, terms: Tensor, samples: Sequence[Sample]) -> None:
    """Raise NonFiniteError if the loss is not finite, naming the samples with non-finite terms. terms: [tokens]."""
    if not loss.isfinite():
        owners = np.repeat(np.arange(len(samples)), [sample.num_sampled_tokens for sample in samples])
        bad = sorted(set(owners[(~terms.isfinite()).cpu().numpy()].tolist()))
        wrong = [samples[index] for index in bad] or samples
        raise NonFiniteError(f"{what} is {loss.item()}: look at {_names(wrong)}")


def _names(samples: Sequence[Sample]) -> str:
    some = ", ".join(sample.name or "(unnamed)" for sample in samples[:5])
    return f"the samples {some}" + (f" and {len(samples) - 5} more" if len(samples) > 5 else "")


def _average_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of an update's steps: tokens are summed, `…_max` takes the maximum, the rest are means."""
    out = {name: [step[name] for step in steps] for name in steps[0]}
    out["policy/clip_fraction"] = [
        sum(step.get(f"policy/clip_{side}", 0.0) for side in ("low", "high")) for step in steps
    ]
    return {
        name: max(values) if name.endswith("_max") else sum(values) / (1 if name == "policy/tokens" else len(values))
        for name, values in out.items()
    }
