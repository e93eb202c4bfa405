"""The learner: scores what was sampled, and moves the model towards what paid.

The model is the very one that it was given: where the engine samples from it too, nothing has to be delivered. It is
never in training mode, since dropout would make it another model than the one that sampled.

An update goes through its samples `epochs` times, in `mini_batches` steps each. The shares of the tokens in the loss
are worked out for a mini-batch as a whole, so it may be cut to fit into memory without changing what is learned. The
model as it was before the first step is the one that ratios refer to: with one step it is the model itself.
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
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from agentfly.algorithm import Piece
from agentfly.algorithms.loss import Aggregation, Loss, aggregation_weights, combine_metrics
from agentfly.backends.transformers.loading import dtype_of, load_model
from agentfly.errors import ConfigError, DataError, ModelBroken, RecordError
from agentfly.models.bars import without_bars
from agentfly.segment import Floats
from agentfly.training.batch import Sample, Sequences, micro_batches, mini_batches, shown
from agentfly.training.critic import Critic, below
from agentfly.training.lora import Merged, has_adapters, load_adapters, save_adapters
from agentfly.training.microbatch import MicroBatch, names
from agentfly.training.optimizer import Descent, Rate, Schedule, trainable
from agentfly.training.policy import Policy

Precision = Literal["auto", "float32", "bfloat16"]


class Learner:
    """A causal language model with its optimizer and, where asked for, a critic and a reference model."""

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
        recompute: bool = False,
        precision: Precision = "auto",
        reference: bool = False,
        critic: bool = False,
        seed: int = 0,
    ) -> None:
        """`model` is as it was at the very start, for that is the reference: a resumed run loads what it learned.

        `constant`: the length that the aggregation of that name divides by. `critic_learning_rate`: None takes the
        learning rate. `warmup_steps` and `total_steps` count updates.
        """
        weights = trainable(model)
        self.model = model
        self.loss = loss or Loss()
        self._shares = partial(aggregation_weights, how=aggregation, constant=constant)
        self._epochs, self._mini_batches, self._budget, self._seed = epochs, mini_batches, micro_batch_tokens, seed
        self._policy = Policy(model, recompute=recompute)
        rate = Rate(learning_rate, warmup_steps, schedule, total_steps)
        descent = partial(Descent, weight_decay=weight_decay, max_norm=max_grad_norm)
        self._descent = descent(weights.items(), rate)
        self.rounds = _rounds(precision, model)
        """Whether it computes in less than float32."""
        self._autocast = partial(torch.autocast, self.device.type, torch.bfloat16, enabled=self.rounds)
        adapted = has_adapters(model)
        self._reference = Policy(_frozen(model)) if reference and not adapted else None
        self._critic: Critic | None = None
        if critic:
            own = replace(rate, peak=learning_rate if critic_learning_rate is None else critic_learning_rate)
            self._critic = Critic(model, lambda weights: descent(weights.items(), own), recompute=recompute)
        self._updates = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def device(self) -> torch.device:
        return self._policy.trunk.device

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """The weights that change, by name."""
        return self._descent.weights

    # ── what it says of tokens: one number each, 0 where none was sampled ──

    def score(self, pieces: Sequence[Piece], temperature: float) -> list[Floats]:
        """The log-probabilities of what was sampled, at the temperature it was sampled with."""
        return self._said(pieces, lambda batch: _logprobs(self._policy, batch, temperature))

    def reference(self, pieces: Sequence[Piece], temperature: float) -> list[Floats]:
        """The same under the model as it was at the start: a copy, or the model without its adapters."""
        if self._reference is not None:
            policy = self._reference
            return self._said(pieces, lambda batch: _logprobs(policy, batch, temperature))
        if not has_adapters(self.model):
            raise ConfigError("this learner keeps no reference model: make it with reference=True")
        with self._policy.trunk.model.disable_adapter():
            return self.score(pieces, temperature)

    def values(self, pieces: Sequence[Piece]) -> list[Floats]:
        """What the critic says before each token."""
        if self._critic is None:
            raise ConfigError("this learner has no critic: make it with critic=True")
        return self._said(pieces, self._critic)

    @torch.no_grad()
    def _said(self, pieces: Sequence[Piece], say: Callable[[Sequences], Tensor]) -> list[Floats]:
        out = [np.zeros(len(piece.tokens), np.float32) for piece in pieces]
        spoken = [at for at, piece in enumerate(pieces) if piece.mask.any()]
        for batch in self._cut(spoken, lambda at: shown(pieces[at])):
            sequences = Sequences.of([pieces[at] for at in batch])
            with self._autocast():
                said = say(sequences).float().cpu().numpy()
            for at, numbers in zip(batch, np.split(said, np.cumsum(sequences.counts)[:-1]), strict=True):
                out[at][pieces[at].mask] = numbers
        return out

    def _cut(self, items: Sequence[Any], length: Callable[[Any], int]) -> list[list[Any]]:
        return micro_batches(items, self._budget, length, padded=not self._policy.trunk.packed)

    # ── learning ──

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Learn from samples; what was measured. Where something is no number, ModelBroken says of which samples, and
        the step that it would have been is not taken."""
        spoken = [each for each in samples if each.sampled]
        if not spoken:
            raise RecordError("there is nothing to learn from: the model sampled no token of these samples")
        in_one = self._epochs * self._mini_batches == 1
        spoken = spoken if in_one else self._with_old(spoken)
        self._seconds.clear()
        order, steps = Random(f"{self._seed}/{self._updates}"), []
        for _ in range(self._epochs):
            if self._mini_batches > 1:
                order.shuffle(spoken)
            steps += [self._step(batch, in_one) for batch in mini_batches(spoken, self._mini_batches)]
        figures = _summed_up(steps) | {"policy/learning_rate": self._descent.rate.at(self._updates)}
        self._updates += 1
        return figures | {f"update/seconds_{phase}": spent for phase, spent in self._seconds.items()} | self._memory()

    def skip(self) -> dict[str, float]:
        """Let a step pass in which there was nothing to learn: the schedule goes on."""
        self._updates += 1
        return {}

    def _with_old(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with what the model says of them before the first step."""
        missing = [at for at, sample in enumerate(samples) if sample.old is None]
        out = list(samples)
        for heat in {samples[at].temperature for at in missing}:
            alike = [at for at in missing if samples[at].temperature == heat]
            for at, old in zip(alike, self.score([samples[at].piece for at in alike], heat), strict=True):
                out[at] = replace(samples[at], old=old)
        return out

    @torch.enable_grad()
    def _step(self, batch: Sequence[Sample], is_first: bool) -> dict[str, float]:
        """One step of the optimizer, and one of the critic's."""
        shares = dict(zip(map(id, batch), self._shares([sample.sampled for sample in batch]), strict=True))
        cut = [
            MicroBatch(samples, [shares[id(sample)] for sample in samples], self.device)
            for samples in self._cut(batch, lambda sample: shown(sample.piece))
        ]
        try:
            measured = combine_metrics([self._descend(micro, is_first) for micro in cut])
            figures = {f"policy/{name}": value for name, value in measured.items()}
            figures["policy/grad_norm"] = self._descent.step(self._updates)
            if self._critic is not None:
                tokens = sum(sample.sampled for sample in batch)
                figures["critic/loss"] = sum(self._descend_values(self._critic, micro, tokens) for micro in cut)
                figures["critic/grad_norm"] = self._critic.descent.step(self._updates)
        except ModelBroken as error:
            raise ModelBroken(f"update {self._updates + 1}: {error}; its step had {names(batch)}") from error
        finally:
            self._descent.clear()
            if self._critic is not None:
                self._critic.descent.clear()
        return figures

    def _descend(self, micro: MicroBatch, is_first: bool) -> dict[str, Tensor]:
        """Add what a micro-batch says to the gradient."""
        with_reference = self.loss.kl > 0 or all(sample.reference is not None for sample in micro.samples)
        with self._clock("forward"), self._autocast():
            scores = self._policy(micro.sequences, micro.temperatures)
            tokens = micro.tokens(
                scores, is_first=is_first, with_reference=with_reference, with_entropy=self.loss.entropy != 0
            )
            loss, measured = self.loss(tokens)
        micro.refuse_broken(loss, tokens.logprobs * tokens.advantages, "the loss")
        with self._clock("backward"):
            loss.backward()
        return measured

    def _descend_values(self, critic: Critic, micro: MicroBatch, tokens: int) -> float:
        """The same for the critic: half the square of what it missed, as a mean over the tokens of the mini-batch."""
        with self._clock("forward"), self._autocast():
            missed = critic(micro.sequences) - micro.gathered("returns")
        loss = missed.square().sum() / (2 * tokens)
        micro.refuse_broken(loss, missed, "the critic's loss")
        with self._clock("backward"):
            loss.backward()
        return loss.item()

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - begun

    def _memory(self) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return {"update/peak_memory_bytes": float(peak)}

    # ── what it leaves ──

    def weights(self, *, merged: bool = False) -> Iterable[tuple[str, Tensor]]:
        """The weights that change, by name; `merged`: adapters as the matrices that they make."""
        if merged and has_adapters(self.model):
            return Merged(self.model)
        return [(name, each.detach()) for name, each in self.trained.items()]

    def save(self, folder: Path) -> None:
        """Write what plain transformers loads: the whole model, or the adapters alone."""
        with without_bars():
            if has_adapters(self.model):
                save_adapters(self.model, folder)
            else:
                self.model.save_pretrained(folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take the weights that `save` wrote; the reference stays what it is."""
        if has_adapters(self.model):
            load_adapters(self.model, folder)
            return
        saved = dict(load_model(str(folder), torch.device("cpu"), torch.float32).named_parameters())
        for name, weight in self.trained.items():
            if name not in saved or saved[name].shape != weight.shape:
                raise DataError(f"the model in {folder} is another one than is trained: look at its weight {name}")
            weight.copy_(saved[name])

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What it remembers beside the model's weights: tensors, and what JSON can keep."""
        tensors = {f"optimizer/{name}": each for name, each in self._descent.state_dict().items()}
        if self._critic is not None:
            tensors |= {f"critic/{name}": each for name, each in self._critic.state_dict().items()}
        return tensors, {"updates": self._updates}

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self._descent.load_state_dict(below("optimizer/", tensors))
        if self._critic is not None:
            self._critic.load_state_dict(below("critic/", tensors))
        self._updates = values["updates"]


def _rounds(precision: Precision, model: Any) -> bool:
    quick = dtype_of(None, next(model.parameters()).device) is torch.bfloat16
    if precision == "bfloat16" and not quick:
        raise ConfigError("precision='bfloat16', but this CPU is slower in it than in float32, or dies of it")
    if precision not in get_args(Precision):
        raise ConfigError(f"precision is one of {', '.join(get_args(Precision))}, not {precision!r}")
    return (quick and precision != "float32") or any(each.dtype != torch.float32 for each in model.parameters())


def _frozen(model: Any) -> Any:
    return copy.deepcopy(model).requires_grad_(False)


def _logprobs(policy: Policy, sequences: Sequences, temperature: float) -> Tensor:
    return policy(sequences, [temperature] * len(sequences.counts)).logprobs


def _summed_up(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of an update's steps as one: tokens add up, the largest of largest, means of all others."""
    out = {name: [step[name] for step in steps] for name in steps[0]}
    clipped = [sum(step.get(f"policy/clip_{side}", 0.0) for side in ("low", "high")) for step in steps]
    return {
        name: max(values) if name.endswith("_max") else sum(values) / (1 if name == "policy/tokens" else len(values))
        for name, values in {**out, "policy/clip_fraction": clipped}.items()
    }
