"""The learner in one process: scores sampled tokens and updates the model.

It trains the very model it is given: where the engine samples from the same object, no weights have to be sent. The
model is never in training mode, since dropout would make it another model than the one that sampled.

An update passes over its samples `epochs` times, in `mini_batches` optimizer steps each. The weights of the tokens in
the loss are computed per mini-batch, so splitting it into micro-batches changes memory, not the result. Ratios refer to
the model before the first step; with a single step that is the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from agentfly.algorithms.base import SegmentArrays
from agentfly.algorithms.loss import Loss, TokenBatch, aggregation_weights, average_steps, combine_metrics
from agentfly.backends.engine.loading import max_positions
from agentfly.backends.engine.vision import FeatureCache
from agentfly.errors import ConfigError, NonFiniteError, RecordError
from agentfly.segment import Floats
from agentfly.training.batch import (
    TOWER_TOKENS,
    MicroBatchRunner,
    Sample,
    build_synthetic_samples,
    concatenate,
    gather_field,
    name_samples,
    number_turns,
    require_finite,
    split_mini_batches,
    to_device,
)
from agentfly.training.config import TrainConfig
from agentfly.training.config_records import OptimizerConfig, UpdateConfig
from agentfly.training.lora import MergedWeights, has_adapters, read_weights, save_model
from agentfly.training.model import (
    Critic,
    Policy,
    computes_in_low_precision,
    copy_trainable,
    set_tower_trainable,
    strip_prefix,
)  # fmt: skip
from agentfly.training.optimizer import LRSchedule, Optimizer, trainable_parameters


class LocalLearner:
    """A causal language model in this process, with its optimizer and, on request, critic, reference and teacher."""

    def __init__(
        self,
        model: Any,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerConfig | None = None,
        update: UpdateConfig | None = None,
        reference: bool = False,
        teacher: Any = None,
        critic: bool = False,
        train_tower: bool = False,
    ) -> None:
        """`model` has the initial weights, which the reference keeps; a resumed run calls `load` afterwards.

        teacher: a model with the same vocabulary, which is frozen; None without one.
        train_tower: whether the vision tower of a vision model is trained.
        """
        optimizer = optimizer or OptimizerConfig()
        update = update or UpdateConfig()
        set_tower_trainable(model, train_tower)
        trainable_parameters(model)  # raises where there is nothing to train
        device = self._compute_device(model)
        self.model = model
        self.loss = loss or Loss()
        self._token_weights = partial(aggregation_weights, aggregation=update.aggregation, constant=update.constant)
        self._epochs = update.epochs
        self._mini_batches = update.mini_batches
        self._critic_warmup_steps = optimizer.critic_warmup_steps
        self._seed = update.seed
        features = FeatureCache()
        settings = {"gradient_checkpointing": update.gradient_checkpointing, "features": features}
        self._policy = Policy(model, device, **settings)
        self._reference: Policy | None = None
        if reference and not has_adapters(model):
            self._reference = Policy(copy_trainable(model).requires_grad_(False), device, features=features)
        self._teacher = None if teacher is None else Policy(teacher.requires_grad_(False), device)
        if self.loss.teacher_coef:
            self._require_comparable_heads()
        self._critic = Critic(model, device, **settings) if critic else None
        self._runner = self._build_runner(
            update.micro_batch_tokens,
            padded=not self._policy.backbone.packed,
            low_precision=computes_in_low_precision(update.precision, model, device),
        )
        self._runner.tower_tokens = TOWER_TOKENS if train_tower else 0
        self._place_models()
        schedule = LRSchedule(optimizer.learning_rate, optimizer.warmup_steps, optimizer.schedule, update.total_steps)
        make_optimizer = partial(Optimizer, weight_decay=optimizer.weight_decay, max_norm=optimizer.max_grad_norm)
        self._optimizer = make_optimizer(trainable_parameters(self._policy.backbone.model).items(), schedule)
        if self._critic is not None:
            if optimizer.critic_learning_rate is not None:
                schedule = replace(schedule, peak=optimizer.critic_learning_rate)
            self._critic.optimizer = make_optimizer(trainable_parameters(self._critic.backbone.model).items(), schedule)
        self._updates = 0
        self.update_logprobs: dict[str, Floats] = {}
        """Log-probabilities of the sampled tokens before the last update, by the name of the sample."""

    def _require_comparable_heads(self) -> None:
        """Raise ConfigError where the divergence to the teacher cannot be computed over the whole vocabulary."""
        if self._teacher is None:
            raise ConfigError("this loss has a divergence to a teacher: make the learner with teacher=model")
        reason = None
        if not (self._policy.has_plain_head and self._teacher.has_plain_head):
            reason = "needs heads that are plain linear layers, of the student and of the teacher"
        else:
            models = (policy.backbone.model for policy in (self._policy, self._teacher))
            rows, teacher_rows = (len(model.get_output_embeddings().weight) for model in models)
            if teacher_rows < rows:
                reason = f"compares all logits, and the teacher has {teacher_rows} of the {rows} that the student has"
        if reason is not None:
            raise ConfigError(f"teacher.divergence='exact' {reason}: write teacher.divergence=sampled")

    # ── what the sharded learner does differently ──

    def _compute_device(self, model: Any) -> torch.device:
        return torch.device(next(model.parameters()).device)

    def _build_runner(self, tokens: int, *, padded: bool, low_precision: bool) -> MicroBatchRunner:
        return MicroBatchRunner(self.device, tokens, padded=padded, low_precision=low_precision)

    def _place_models(self) -> None:
        """Called when all models exist, before the optimizers take their weights."""

    @classmethod
    def from_config(cls, model: Any, config: TrainConfig, **placement: Any) -> Self:
        loss = Loss(
            surrogate=config.loss.type,
            clip=config.loss.clip,
            ratio=config.loss.ratio,
            kl_coef=config.kl.coef if config.kl.placement == "loss" else 0.0,
            kl_estimator=config.kl.estimator,
            entropy_coef=config.loss.entropy_coef,
            teacher_coef=config.teacher.coef if config.teacher.is_exact else 0.0,
            observation_coef=config.loss.observation_coef,
            correction=config.loss.correction,  # type: ignore[arg-type]
            correction_cap=config.loss.correction_cap,
        )
        return cls(
            model,
            loss=loss,
            optimizer=config.optimizer,
            update=UpdateConfig(
                aggregation=config.loss.aggregation,
                constant=config.longest_chain,
                total_steps=config.steps,
                epochs=config.epochs,
                mini_batches=config.mini_batches,
                micro_batch_tokens=config.micro_batch_tokens,
                gradient_checkpointing=config.gradient_checkpointing,
                precision=config.precision,
                seed=config.seed,
            ),
            reference=config.kl.coef > 0,
            critic=config.algorithm.needs_values,
            train_tower=config.vision.train_tower,
            **placement,
        )

    @property
    def device(self) -> torch.device:
        return self._policy.backbone.device

    @property
    def low_precision(self) -> bool:
        """Whether it computes in less than float32."""
        return self._runner.low_precision

    @property
    def trainable_weights(self) -> Mapping[str, Tensor]:
        """The weights that change, by name."""
        return self._optimizer.weights

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding matrix."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def parameters(self) -> Iterable[Tensor]:
        """All weights, frozen ones included."""
        return list(self.model.parameters())

    # ── scoring: one [tokens] array per segment, 0 where nothing was sampled ──

    def score(self, segments: Sequence[SegmentArrays], temperature: float) -> list[Floats]:
        """Log-probabilities of the sampled tokens, at the temperature they were sampled with."""
        return self._runner.score(segments, partial(self._policy.logprobs, temperature=temperature))

    def score_reference(self, segments: Sequence[SegmentArrays], temperature: float) -> list[Floats]:
        """Log-probabilities under the initial model: a copy, or the model without its adapters."""
        if self._reference is not None:
            return self._runner.score(segments, partial(self._reference.logprobs, temperature=temperature))
        if not has_adapters(self.model):
            raise ConfigError("this learner keeps no reference model: make it with reference=True")
        with self._policy.backbone.model.disable_adapter():
            return self.score(segments, temperature)

    def score_teacher(self, segments: Sequence[SegmentArrays], temperature: float) -> list[Floats]:
        """Log-probabilities under the teacher."""
        if self._teacher is None:
            raise ConfigError("this learner has no teacher: make it with teacher=model")
        return self._runner.score(segments, partial(self._teacher.logprobs, temperature=temperature))

    def values(self, segments: Sequence[SegmentArrays]) -> list[Floats]:
        """The critic's value of the state before each sampled token."""
        if self._critic is None:
            raise ConfigError("this learner has no critic: make it with critic=True")
        return self._runner.score(segments, self._critic)

    # ── updating ──

    @torch.enable_grad()
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
        self.update_logprobs = {
            sample.name: sample.old_logprobs[sample.segment.mask]
            for sample in samples
            if sample.old_logprobs is not None
        }
        self._runner.seconds.clear()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        retries = self._runner.retries
        order = Random(f"{self._seed}/{self._updates}")
        steps: list[dict[str, float]] = []
        for _ in range(self._epochs):
            if self._mini_batches > 1:
                order.shuffle(samples)
            for batch in split_mini_batches(samples, self._mini_batches):
                # One optimizer step of the policy, after the critic's warm-up, and of the critic where there is one.
                step: dict[str, float] = {}
                try:
                    segments = [sample.scored_segment for sample in batch]
                    if self._updates >= self._critic_warmup_steps:
                        compute_loss = partial(self._policy_loss, batch, on_policy)
                        results = self._runner.run(segments, compute_loss, self._zero_grad)
                        for _, logprobs in results:
                            self.update_logprobs = logprobs | self.update_logprobs  # those before the first step stay
                        measured = combine_metrics(measured for measured, _ in results)
                        step = {f"policy/{name}": value for name, value in measured.items()}
                        step["policy/grad_norm"] = self._optimizer.step(self._updates)
                        self._optimizer.zero_grad()
                    if self._critic is not None:
                        segments = [sample.segment for sample in batch]
                        losses = self._runner.run(segments, partial(self._critic.loss, batch), self._zero_grad)
                        step["critic/loss"] = sum(losses)
                        step["critic/grad_norm"] = self._critic.optimizer.step(self._updates)
                except NonFiniteError as error:
                    number = self._updates + 1
                    raise NonFiniteError(f"update {number}: {error}; its step had {name_samples(batch)}") from error
                finally:
                    self._zero_grad()
                steps.append(step)
        metrics = average_steps(steps) | {"policy/learning_rate": self._optimizer.schedule.at(self._updates)}
        metrics |= {f"update/seconds_{phase}": seconds for phase, seconds in self._runner.seconds.items()}
        if self.device.type == "cuda":
            metrics["update/peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self.device))
        metrics["update/micro_batch_tokens"] = float(self._runner.tokens)
        metrics["update/out_of_memory"] = float(self._runner.retries - retries)
        self._updates += 1
        return metrics

    def skip_update(self) -> None:
        """Count an update without samples: the learning-rate schedule advances."""
        self._updates += 1
        self.update_logprobs = {}

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

    def _policy_loss(
        self, batch: Sequence[Sample], on_policy: bool, indices: list[int]
    ) -> tuple[Tensor, Callable[[], tuple[dict[str, float], dict[str, Floats]]]]:
        """The policy loss of a micro-batch: those samples of the mini-batch `batch`. With it a function that reads what
        the loss measured, and the log-probabilities by the name of the sample. It raises NonFiniteError for this loss.

        on_policy: the model is still the one that sampled, so its own log-probabilities are the old ones.
        """
        token_weights = self._token_weights([sample.num_sampled_tokens for sample in batch])
        samples = [batch[index] for index in indices]
        segments = [sample.segment for sample in samples]
        counts = [sample.num_sampled_tokens for sample in samples]
        gather = partial(gather_field, samples, device=self.device)
        logprobs, entropies, teacher_kl, observation_logprobs = self._score_policy(samples)
        # Every tensor but the last is [sampled tokens of all samples], in the order of `indices`.
        with_reference = self.loss.kl_coef > 0 or all(sample.reference_logprobs is not None for sample in samples)
        tokens = TokenBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if on_policy else gather("old_logprobs"),
            sampler_logprobs=concatenate([segment.logprobs[segment.mask] for segment in segments], self.device),
            advantages=gather("advantages"),
            # Of the mini-batch: divided by the tokens of the micro-batch, the gradient would depend on how it is split.
            weights=concatenate([np.repeat([token_weights[index] for index in indices], counts)], self.device),
            sequence_ids=to_device(np.repeat(np.arange(len(counts)), counts), self.device),
            num_sequences=len(samples),
            turn_ids=to_device(number_turns(segments), self.device) if self.loss.ratio == "turn" else None,
            reference_logprobs=gather("reference_logprobs") if with_reference else None,
            entropies=entropies if self.loss.entropy_coef != 0 else entropies.detach(),
            teacher_kl=teacher_kl,
            observation_logprobs=observation_logprobs,
            observation_weight=1 / max(sum(sample.num_observation_tokens for sample in batch), 1),
        )
        loss, measured = self.loss(tokens)
        # Without their graphs: `read` runs after the backward passes, and would keep every micro-batch's activations.
        values = logprobs.detach()
        metrics = {name: torch.as_tensor(value).detach() for name, value in measured.items()}
        terms = values * tokens.advantages
        if teacher_kl is not None:
            terms = terms + teacher_kl.detach()
        check = partial(require_finite, loss.detach(), "the loss", terms, samples)

        def read() -> tuple[dict[str, float], dict[str, Floats]]:
            check()
            # On the host: ranks send these to each other.
            split = np.split(values.float().cpu().numpy(), np.cumsum(counts)[:-1])
            by_sample = dict(zip((sample.name for sample in samples), split, strict=True))
            return {name: float(value) for name, value in metrics.items()}, by_sample

        return loss, read

    def _score_policy(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities, entropies and divergences to the teacher of the sampled tokens, and log-probabilities of
        the observations; None where the loss has no such term."""
        segments = [sample.scored_segment for sample in samples]
        is_sampled = np.concatenate([sample.segment.mask[sample.scored_segment.mask] for sample in samples])
        lengths = [segment.num_sampled_tokens for segment in segments]
        sampling_temperatures = np.repeat([sample.temperature for sample in samples], lengths)
        temperatures = np.where(is_sampled, sampling_temperatures, 1.0)  # what an environment writes has no temperature
        teacher_kl: Tensor | None = None
        if self.loss.teacher_coef:
            assert self._teacher is not None
            logprobs, entropies, teacher_kl = self._policy.score_with_teacher(segments, temperatures, self._teacher)
        else:
            logprobs, entropies = self._policy(segments, temperatures)
        if not self.loss.observation_coef:
            return logprobs, entropies, teacher_kl, None
        sampled = to_device(np.flatnonzero(is_sampled), self.device)
        observed = to_device(np.flatnonzero(~is_sampled), self.device)
        teacher_kl = None if teacher_kl is None else teacher_kl[sampled]
        return logprobs[sampled], entropies[sampled], teacher_kl, logprobs[observed]

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad()
        if self._critic is not None:
            self._critic.optimizer.zero_grad()

    @torch.enable_grad()
    def measure_update(self, longest: int | None = None) -> tuple[int, int]:
        """Run forward and backward pass over a full micro-batch of synthetic tokens on a GPU.

        longest: length of its sequences. Returns the bytes it takes at its peak beyond what is allocated now, gradients
        included and the optimizer's state not, and its tokens. Weights, optimizer and random state stay as they are.
        """
        positions = max_positions(self.model.config.get_text_config())
        while True:  # until memory is enough for the micro-batch
            length = min(longest or min(self._runner.tokens, 4096), positions)
            count = max(self._runner.tokens // length, 1)
            batch = build_synthetic_samples(count * self._runner.ranks, length, self.vocab_size)
            retries = self._runner.retries
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            segments = [sample.segment for sample in batch]
            self._runner.run(segments, partial(self._policy_loss, batch, False), self._zero_grad)
            self._zero_grad()
            if self._critic is not None:
                self._runner.run(segments, partial(self._critic.loss, batch), self._zero_grad)
                self._zero_grad()
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.empty_cache()
            if self._runner.retries == retries:
                return peak - before, length * count

    # ── weights and state ──

    def weights(self, *, merged: bool = False) -> Iterable[tuple[str, Tensor]]:
        """The weights that change, by name. merged: adapters added into the matrices they belong to."""
        if merged and has_adapters(self.model):
            return MergedWeights(self.model)
        return [(name, weight.detach()) for name, weight in self.trainable_weights.items()]

    def save(self, folder: Path) -> None:
        """Write what transformers (or peft) loads: the whole model, or the adapters alone."""
        save_model(self.model, folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote. The reference model is unchanged."""
        for name, saved in read_weights(self.model, folder, self.trainable_weights).items():
            self.trainable_weights[name].copy_(saved)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state beside the model's weights: tensors, and JSON values."""
        tensors = {f"optimizer/{name}": tensor for name, tensor in self._optimizer.state_dict().items()}
        if self._critic is not None:
            tensors |= {f"critic/{name}": tensor for name, tensor in self._critic.state_dict().items()}
        return tensors, {
            "updates": self._updates,
            "low_precision": self.low_precision,
            "micro_batch_tokens": self._runner.tokens,
            "configured_micro_batch_tokens": self._runner.configured_tokens,
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(strip_prefix("optimizer/", tensors))
        if self._critic is not None:
            self._critic.load_state_dict(strip_prefix("critic/", tensors))
        self._updates = values["updates"]
        if values.get("configured_micro_batch_tokens") == self._runner.configured_tokens:  # else the run changes it
            self._runner.tokens = values["micro_batch_tokens"]
        # precision="auto" is measured in every process: a resumed run keeps what the run began with.
        self._runner.low_precision = values.get("low_precision", self.low_precision)

    def close(self) -> None:
        """Release other processes; there are none."""
