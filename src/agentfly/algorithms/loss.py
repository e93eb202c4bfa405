"""The loss: how much each sampled token pulls, and what is measured on the way.

Only tokens that the model sampled exist here, so one that it did not write cannot reach a loss term. The weights of the
tokens say how they are averaged; they are worked out once for a mini-batch, so the losses of its micro-batches add up
to the mini-batch's, however it was cut.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from agentfly.algorithms.correction import Correction, correction_weights
from agentfly.algorithms.divergence import Estimator, divergence
from agentfly.algorithms.surrogates import (
    Clip,
    Surrogate,
    clipped,
    clipped_weight,
    plain,
    sequence_log_ratio,
    token_log_ratio,
)
from agentfly.errors import ConfigError

Aggregation = Literal["token", "sequence", "constant"]


def aggregation_weights(lengths: Sequence[int], how: Aggregation, constant: int | None = None) -> list[float]:
    """The share of one token in the loss of a mini-batch, for each of its sequences by their sampled lengths.

    token: all tokens alike. sequence: all sequences alike, and within each its tokens. constant: each token 1 over the
    number of sequences times the constant, so no length is favoured; the shares need not sum to 1. A sequence without
    sampled tokens is no sequence.
    """
    _known("aggregation", how, Aggregation)
    count, total = sum(length > 0 for length in lengths), sum(lengths)
    if how == "token":
        return [1 / total if length else 0.0 for length in lengths]
    if how == "sequence":
        return [1 / (count * length) if length else 0.0 for length in lengths]
    if constant is None or constant < 1:
        raise ConfigError(f"the aggregation 'constant' divides by a length of 1 token or more, not by {constant}")
    return [1 / (count * constant) if length else 0.0 for length in lengths]


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of a micro-batch, one number each."""

    logprobs: Tensor
    """Under the model that learns; these carry the gradient."""
    old: Tensor
    """Under the model as it was when the batch was begun."""
    sampled: Tensor
    """Under the engine that sampled them."""
    advantages: Tensor
    weights: Tensor
    """The share of each token in the loss of the whole mini-batch: `aggregation_weights`."""
    sequence: Tensor
    """Which sequence of the micro-batch each token belongs to (int64)."""
    sequences: int
    """How many there are."""
    reference: Tensor | None = None
    """Under the reference model; None where the loss asks for no divergence."""
    entropies: Tensor | None = None
    """Of the distribution each was sampled from, with a gradient; None where the loss asks for none."""


@dataclass(frozen=True)
class Loss:
    """Turns tokens into one number to descend."""

    surrogate: Surrogate = "clip"
    clip: Clip = (0.2, 0.2)
    kl: float = 0.0
    """Weight of the divergence from the reference model; 0 where it is part of the reward, or unwanted."""
    kl_estimator: Estimator = "k3"
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    correction: Correction | None = None
    """None: what the sampler's probabilities say is measured, not corrected."""
    correction_cap: float = 2.0

    def __post_init__(self) -> None:
        _known("loss", self.surrogate, Surrogate)
        _known("estimator of the divergence", self.kl_estimator, Estimator)
        if self.correction is not None:
            _known("correction", self.correction, Correction)
        if not self.correction_cap > 1:
            raise ConfigError(f"the correction's cap is a ratio above 1, not {self.correction_cap}")
        if not self.kl >= 0:
            raise ConfigError(f"the weight of the divergence cannot be negative: {self.kl}")
        _check_clip(self.surrogate, self.clip)

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to descend, and sums of what was measured: `combine_metrics` makes numbers of them."""
        self._check_complete(tokens)
        log_ratio = self._log_ratio(tokens)
        policy = self._policy(tokens, log_ratio.exp())
        measured = self._measure(tokens, log_ratio.detach())
        if self.correction is not None:
            weights, cut = correction_weights(
                tokens.old, tokens.sampled, tokens.sequence, tokens.sequences, self.correction, self.correction_cap
            )
            policy = policy * weights
            measured |= {"correction_weight": weights.sum(), "corrected": cut.sum()}
        terms = {"loss_policy": policy}
        if tokens.reference is not None:
            strayed = divergence(tokens.logprobs, tokens.reference, self.kl_estimator)
            measured["kl"] = strayed.detach().sum()
            terms |= {"loss_kl": self.kl * strayed} if self.kl else {}
        if tokens.entropies is not None:
            measured["entropy"] = tokens.entropies.detach().sum()
            terms |= {"loss_entropy": -self.entropy * tokens.entropies} if self.entropy else {}
        summed = {name: (tokens.weights * term).sum() for name, term in terms.items()}
        loss = torch.stack(list(summed.values())).sum()
        return loss, measured | {name: term.detach() for name, term in {"loss": loss, **summed}.items()}

    def _log_ratio(self, tokens: Tokens) -> Tensor:
        if self.surrogate == "gspo":
            return sequence_log_ratio(tokens.logprobs, tokens.old, tokens.sequence, tokens.sequences)
        return token_log_ratio(tokens.logprobs, tokens.old)

    def _policy(self, tokens: Tokens, ratio: Tensor) -> Tensor:
        if self.surrogate == "plain":
            return plain(tokens.advantages, tokens.logprobs)
        if self.surrogate == "cispo":
            return clipped_weight(ratio, tokens.advantages, tokens.logprobs, self.clip)
        return clipped(ratio, tokens.advantages, self.clip)

    def _measure(self, tokens: Tokens, log_ratio: Tensor) -> dict[str, Tensor]:
        ratio, mismatch = log_ratio.exp(), (tokens.old - tokens.sampled).detach()
        measured = {
            "tokens": torch.ones_like(ratio).sum(),
            "ratio": ratio.sum(),
            "ratio_max": _largest(ratio),
            "approx_kl": (ratio - 1 - log_ratio).sum(),
            "mismatch_kl": divergence(tokens.sampled, tokens.old, "k3").detach().sum(),
            "mismatch_max": _largest(mismatch.abs()),
        }
        if self.surrogate != "plain":
            measured |= {f"clip_{side}": cut.sum() for side, cut in self._cut(ratio, tokens.advantages).items()}
        return measured

    def _cut(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Which tokens each clip holds back."""
        low, high, *dual = self.clip
        if self.surrogate == "cispo":
            return {"low": ratio < 1 - low, "high": ratio > 1 + high}
        cut = {"low": (ratio < 1 - low) & (advantages < 0), "high": (ratio > 1 + high) & (advantages > 0)}
        return cut | ({"dual": (ratio > dual[0]) & (advantages < 0)} if dual else {})

    def _check_complete(self, tokens: Tokens) -> None:
        if self.kl and tokens.reference is None:
            raise ConfigError("this loss weighs the divergence from a reference model, and no `reference` came with it")
        if self.entropy and tokens.entropies is None:
            raise ConfigError("this loss has an entropy bonus, and no `entropies` came with the tokens")


def combine_metrics(micro_batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """What the micro-batches of a mini-batch measured, as one: `loss…` and `tokens` add up, `…_max` is the largest,
    the rest are means over all tokens."""
    gathered: dict[str, list[float]] = {}
    for measured in micro_batches:
        for name, value in measured.items():
            gathered.setdefault(name, []).append(float(value))
    tokens = max(sum(gathered.get("tokens", ())), 1.0)
    return {name: _combined(name, values, tokens) for name, values in gathered.items()}


def _combined(name: str, values: Sequence[float], tokens: float) -> float:
    if name.endswith("_max"):
        return max(values)
    return sum(values) if name.startswith("loss") or name == "tokens" else sum(values) / tokens


def _largest(numbers: Tensor) -> Tensor:
    return numbers.max() if len(numbers) else numbers.sum()


def _known(kind: str, name: str, names: object) -> None:
    if name not in get_args(names):
        close = difflib.get_close_matches(str(name), get_args(names), 1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"no {kind} is named {name!r}; there are {', '.join(get_args(names))}{hint}")


def _check_clip(surrogate: Surrogate, clip: Clip) -> None:
    if len(clip) not in (2, 3) or not (0 <= clip[0] <= 1 and clip[1] >= 0):
        raise ConfigError(
            f"a clip is (low, high) or (low, high, dual) with low in 0..1 and high at least 0, not {clip}"
        )
    if len(clip) == 3 and surrogate != "clip":
        raise ConfigError(f"the loss {surrogate!r} has no dual clip: give (low, high), not {clip}")
    if len(clip) == 3 and not clip[2] > 1 + clip[1]:
        raise ConfigError(f"a dual clip bounds the ratio above 1 + high, so it cannot be {clip[2]} in {clip}")
