"""Policy losses over sampled tokens, and the metrics they produce.

Only sampled tokens enter, so a token the model did not write cannot reach a loss term; the one exception, the
cross-entropy of observations, has a field of its own. With r = π / π_old and A a token's advantage, the surrogate is

    clip     −min(r·A, clip(r, 1 − low, 1 + high)·A), and for A < 0 at most −dual·A where a dual clip is given
    cispo    −stop_gradient(clip(r, 1 − low, 1 + high))·A·log π: a clipped token keeps a gradient
    plain    −A·log π

The ratio r is the token's own, or the geometric mean of the ratios of its turn or of its segment (a sequence here).

Token weights decide how tokens are averaged. They are computed once per mini-batch, so the losses of its micro-batches
sum to the mini-batch's, however it is split.

The correction of sampler/learner mismatch multiplies each token's loss by ρ = π_learner / π_sampler. The level is what
the ratio is taken over, the mode what happens to a ratio too far from 1:

                 truncate: min(ρ, cap)     mask: ρ inside [1/cap, cap], else 0
    token        each token on its own
    sequence     product over the sequence: unbiased before the cap, of high variance
    geometric    geometric mean over the sequence: the same scale at any length
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from agentfly.algorithms.base import validate_clip
from agentfly.algorithms.kl import MAX_LOG_RATIO, KLEstimator, kl_divergence
from agentfly.errors import ConfigError
from agentfly.validation import record

Aggregation = Literal["token", "sequence", "constant"]
Surrogate = Literal["clip", "cispo", "plain"]
RatioLevel = Literal["token", "turn", "segment"]
Correction = Literal[
    "token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "geometric-truncate", "geometric-mask"
]
_CHOICES: dict[str, tuple[str, object]] = {
    "surrogate": ("loss", Surrogate),
    "ratio": ("level of the ratio", RatioLevel),
    "kl_estimator": ("KL estimator", KLEstimator),
    "correction": ("correction", Correction),
}
"""Fields of `Loss` that are one of several names: what they are in an error message, and the names."""


def aggregation_weights(lengths: Sequence[int], aggregation: Aggregation, constant: int | None = None) -> list[float]:
    """The weight of one token in the loss of a mini-batch, per sequence, from the sequences' numbers of sampled tokens.

        token      1 / (all tokens)
        sequence   1 / (sequences · length of its sequence)
        constant   1 / (sequences · constant): no length is favored; the weights need not sum to 1

    A sequence without sampled tokens is not counted.
    """
    _require_choice("aggregation", aggregation, Aggregation)
    count = sum(length > 0 for length in lengths)
    total = sum(lengths)
    if aggregation == "token":
        return [1 / total if length else 0.0 for length in lengths]
    if aggregation == "sequence":
        return [1 / (count * length) if length else 0.0 for length in lengths]
    if constant is None or constant < 1:
        raise ConfigError(f"the aggregation 'constant' divides by a length of 1 token or more, not by {constant}")
    return [1 / (count * constant) if length else 0.0 for length in lengths]


def sequence_sum(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[tokens] → [sequences]: the sum over each sequence."""
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def sequence_mean(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[tokens] → [tokens]: each value replaced by the mean over its sequence, or over its turn by the ids of turns."""
    counts = torch.bincount(sequence_ids, minlength=num_sequences).clamp(min=1)
    return (sequence_sum(values, sequence_ids, num_sequences) / counts)[sequence_ids]


def correction_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    sequence_ids: Tensor,
    *,
    num_sequences: int,
    correction: Correction,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """[tokens] each: the factors on the loss, without gradient; and which tokens were truncated or masked."""
    level, mode = correction.split("-")
    log_ratio = (old_logprobs - sampler_logprobs).detach()
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio, sequence_ids, num_sequences)[sequence_ids]
    elif level == "geometric":
        log_ratio = sequence_mean(log_ratio, sequence_ids, num_sequences)
    ratio = log_ratio.exp()  # may be infinite; the cap makes it finite
    if mode == "truncate":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio < 1 / cap) | (ratio > cap)
    return ratio.masked_fill(outside, 0.0), outside


@dataclass(frozen=True)
class TokenBatch:
    """The sampled tokens of a micro-batch; every tensor is [tokens]."""

    logprobs: Tensor
    """Under the model being trained; these carry the gradient."""
    old_logprobs: Tensor
    """Under the model as it was before the update."""
    sampler_logprobs: Tensor
    """As the sampling engine reported them."""
    advantages: Tensor
    weights: Tensor
    """Weight of each token in the loss of the whole mini-batch: `aggregation_weights`."""
    sequence_ids: Tensor
    """Index of each token's sequence in the micro-batch (int64)."""
    num_sequences: int
    turn_ids: Tensor | None = None
    """Index of each token's turn in the micro-batch (int64); None where the ratio is not that of the turn."""
    reference_logprobs: Tensor | None = None
    """Under the reference model; None where no KL term is used."""
    entropies: Tensor | None = None
    """Entropy of each token's distribution, with gradient; None where it is not measured."""
    teacher_kl: Tensor | None = None
    """KL divergence of each token's distribution to the teacher's, with gradient; None where it is not a loss term."""
    observation_logprobs: Tensor | None = None
    """[observation tokens] Log-probabilities of what the environment answered, with gradient; None: not trained."""
    observation_weight: float = 0.0
    """Weight of each observation token: 1 / (observation tokens of the mini-batch)."""


@record()
class Loss:
    """The scalar loss of a `TokenBatch`: policy surrogate + kl_coef · KL − entropy_coef · entropy + teacher_coef ·
    KL to the teacher + observation_coef · cross-entropy of the observations."""

    surrogate: Surrogate = "clip"
    clip: tuple[float, ...] = (0.2, 0.2)
    """How far the ratio may go below and above 1; a third number bounds it where the advantage is negative."""
    ratio: RatioLevel = "token"
    """What the ratio is the geometric mean over."""
    kl_coef: float = Field(default=0.0, ge=0)
    """KL coefficient; 0 where KL is part of the reward, or not used."""
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = Field(default=0.0, ge=0)
    """Entropy bonus coefficient."""
    teacher_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL divergence to the teacher; 0 where it is part of the advantages, or not used."""
    observation_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the cross-entropy of observation tokens, averaged over them."""
    correction: Correction | None = None
    """Importance-sampling correction; None measures the mismatch and does not correct it."""
    correction_cap: float = Field(default=2.0, gt=1)

    @field_validator("surrogate", "ratio", "kl_estimator", "correction", mode="before")
    @classmethod
    def _require_known_name(cls, name: Any, info: ValidationInfo) -> Any:
        what, choices = _CHOICES[str(info.field_name)]
        if name is not None:
            _require_choice(what, name, choices)
        return name

    def __post_init__(self) -> None:
        validate_clip("the clip of a loss", self.clip)
        if len(self.clip) == 3 and self.surrogate != "clip":
            raise ConfigError(f"the loss {self.surrogate!r} has no dual clip: give (low, high), not {self.clip}")

    def __call__(self, tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and sums of metrics over the tokens; `combine_metrics` turns the sums into figures."""
        if self.kl_coef and tokens.reference_logprobs is None:
            raise ConfigError("this loss has a KL term, and no `reference_logprobs` came with the tokens")
        if self.entropy_coef and tokens.entropies is None:
            raise ConfigError("this loss has an entropy bonus, and no `entropies` came with the tokens")
        if self.teacher_coef and tokens.teacher_kl is None:
            raise ConfigError("this loss has a divergence to a teacher, and no `teacher_kl` came with the tokens")
        if self.ratio == "turn" and tokens.turn_ids is None:
            raise ConfigError("this loss has the ratio of the turn, and no `turn_ids` came with the tokens")
        if self.observation_coef and tokens.observation_logprobs is None:
            raise ConfigError("this loss trains observations, and no `observation_logprobs` came with the tokens")
        log_ratio = tokens.logprobs - tokens.old_logprobs  # [tokens] log(π / π_old)
        if self.ratio != "token":
            # The mean ratio, with the gradient of the token alone, so that tokens of one sequence may have different
            # advantages; where they share one, the gradient is that of the mean ratio. No more turns than tokens.
            ids, count = tokens.sequence_ids, tokens.num_sequences
            if self.ratio == "turn" and tokens.turn_ids is not None:
                ids, count = tokens.turn_ids, len(log_ratio)
            log_ratio = sequence_mean(log_ratio.detach(), ids, count) + tokens.logprobs - tokens.logprobs.detach()
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        policy = self._surrogate(tokens, log_ratio.exp())
        metrics = self._measure(tokens, log_ratio.detach())
        if self.correction is not None:
            weights, corrected = correction_weights(
                tokens.old_logprobs,
                tokens.sampler_logprobs,
                tokens.sequence_ids,
                num_sequences=tokens.num_sequences,
                correction=self.correction,
                cap=self.correction_cap,
            )
            policy = policy * weights
            metrics |= {"correction_weight": weights.sum(), "corrected": corrected.sum()}
        terms = {"loss_policy": policy}
        if tokens.reference_logprobs is not None:
            kl = kl_divergence(tokens.logprobs, tokens.reference_logprobs, self.kl_estimator)
            metrics["kl"] = kl.detach().sum()
            terms |= {"loss_kl": self.kl_coef * kl} if self.kl_coef else {}
        if tokens.entropies is not None:
            metrics["entropy"] = tokens.entropies.detach().sum()
            terms |= {"loss_entropy": -self.entropy_coef * tokens.entropies} if self.entropy_coef else {}
        if tokens.teacher_kl is not None:
            # Not multiplied by a correction: it is exact in each state, whichever weights sampled the token.
            metrics["teacher_kl"] = tokens.teacher_kl.detach().sum()
            terms["loss_teacher"] = self.teacher_coef * tokens.teacher_kl
        sums = {name: (tokens.weights * term).sum() for name, term in terms.items()}
        if tokens.observation_logprobs is not None:
            cross_entropy = -tokens.observation_weight * tokens.observation_logprobs.sum()
            sums["loss_observation"] = self.observation_coef * cross_entropy
        loss = torch.stack(list(sums.values())).sum()
        return loss, metrics | {name: term.detach() for name, term in {"loss": loss, **sums}.items()}

    def _surrogate(self, tokens: TokenBatch, ratio: Tensor) -> Tensor:
        """[tokens] The policy loss of each token, before weighting."""
        advantages = tokens.advantages
        low, high, *dual = self.clip
        if self.surrogate == "plain":
            return -advantages * tokens.logprobs
        if self.surrogate == "cispo":
            return -ratio.clamp(1 - low, 1 + high).detach() * advantages * tokens.logprobs
        loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
        if dual:
            loss = torch.where(advantages < 0, torch.minimum(loss, -dual[0] * advantages), loss)
        return loss

    def _measure(self, tokens: TokenBatch, log_ratio: Tensor) -> dict[str, Tensor]:
        """Sums over the tokens (maxima for `…_max`) of the ratio, the mismatch and the clipped tokens."""
        ratio = log_ratio.exp()
        mismatch = (tokens.old_logprobs - tokens.sampler_logprobs).detach()
        metrics = {
            "tokens": torch.ones_like(ratio).sum(),
            "ratio": ratio.sum(),
            "ratio_max": ratio.max() if len(ratio) else ratio.sum(),
            "approx_kl": (ratio - 1 - log_ratio).sum(),
            "mismatch_kl": kl_divergence(tokens.sampler_logprobs, tokens.old_logprobs, "k3").detach().sum(),
            "mismatch_max": mismatch.abs().max() if len(ratio) else ratio.sum(),
        }
        if self.surrogate == "plain":
            return metrics
        low, high, *dual = self.clip
        below, above = ratio < 1 - low, ratio > 1 + high
        if self.surrogate != "cispo":  # the minimum with r·A leaves the clip without effect on the other side
            below, above = below & (tokens.advantages < 0), above & (tokens.advantages > 0)
        metrics |= {"clip_low": below.sum(), "clip_high": above.sum()}
        if dual:
            metrics["clip_dual"] = ((ratio > dual[0]) & (tokens.advantages < 0)).sum()
        return metrics


def combine_metrics(micro_batches: Iterable[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Combine the metrics of a mini-batch's micro-batches: `loss…` and `tokens` are summed, `…_max` takes the maximum,
    the rest are means over all tokens."""
    values: dict[str, list[float]] = {}
    for metrics in micro_batches:
        for name, value in metrics.items():
            values.setdefault(name, []).append(float(value))
    tokens = max(sum(values.get("tokens", ())), 1.0)
    out: dict[str, float] = {}
    for name, measurements in values.items():
        if name.endswith("_max"):
            out[name] = max(measurements)
        else:
            out[name] = sum(measurements) if name.startswith("loss") or name == "tokens" else sum(measurements) / tokens
    return out


def average_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of an update's steps: tokens are summed, `…_max` takes the maximum, the rest are means."""
    out = {name: [step[name] for step in steps] for name in steps[0]}
    out["policy/clip_fraction"] = [
        sum(step.get(f"policy/clip_{side}", 0.0) for side in ("low", "high")) for step in steps
    ]
    return {
        name: max(values) if name.endswith("_max") else sum(values) / (1 if name == "policy/tokens" else len(values))
        for name, values in out.items()
    }


def _require_choice(what: str, name: str, choices: object) -> None:
    if name not in get_args(choices):
        close = difflib.get_close_matches(str(name), get_args(choices), 1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"no {what} is named {name!r}; there are {', '.join(get_args(choices))}{hint}")
