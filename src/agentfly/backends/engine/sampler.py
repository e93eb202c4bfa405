"""Sampling: one row of logits per sequence, each with its own settings, and the log-probabilities of sampled tokens.

A token is sampled by inverting the cumulative distribution at one uniform number, which depends on the request's seed
and the token's position alone: the same seed gives the same tokens whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from agentfly.errors import ConfigError
from agentfly.types import Sampling

BLOCK = 256
"""Tokens of the vocabulary per block: the inverse is found first among blocks, then inside one."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the next token of one sequence is sampled."""

    sampling: Sampling
    uniform: float
    """From 0 to 1, not including 1."""
    seen: npt.NDArray[np.int32] | None = None
    """Tokens so far, for a repetition penalty; None if there is none."""


def uniform(seed: npt.ArrayLike, position: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) from seed and position alone (splitmix64)."""
    with np.errstate(over="ignore"):
        state = np.asarray(seed, np.uint64) * np.uint64(0xD1342543DE82EF95)
        state = state + (np.asarray(position, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) / float(1 << 53)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tokens, their log-probabilities under the distribution sampled from, and under the model's own.

    `logits`: [row, vocabulary]. Both log-probabilities of a greedy token are the model's own.
    """
    raw = logits.float()
    if raw.device.type == "mps":
        raw = raw.cpu()  # mps has no float64, in which the cumulative shares are summed
    scores = raw  # [row, vocabulary], copied where it is changed
    for at, row in enumerate(rows):
        penalty = row.sampling.repetition_penalty
        if penalty != 1.0 and row.seen is not None:
            scores = scores.clone() if scores is raw else scores
            seen = torch.from_numpy(np.unique(row.seen).astype(np.int64)).to(raw.device)
            values = raw[at, seen]
            scores[at, seen] = torch.where(values > 0, values / penalty, values * penalty)
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        scores = scores / torch.tensor(temperatures, device=scores.device)[:, None]
    if any(_filters(row.sampling) for row in rows):
        # What top-k, top-p and min-p exclude becomes minus infinity; the likeliest token always stays.
        scores = scores.clone()
        for at, row in enumerate(rows):
            if _filters(row.sampling):
                scores[at] = _filter_row(scores[at], row.sampling)
    highest = scores.amax(-1, keepdim=True)
    uniforms = torch.tensor([row.uniform for row in rows], device=raw.device, dtype=torch.double)
    tokens, total = _inverse(_shares(scores, highest), uniforms)
    tokens.clamp_(max=raw.shape[1] - 1)  # a row of NaN finds no token
    greedy = torch.tensor([row.sampling.temperature == 0 for row in rows], device=raw.device)[:, None]
    if any(row.sampling.temperature == 0 for row in rows):
        tokens = torch.where(greedy, scores.argmax(-1, keepdim=True), tokens)
    drawn = scores.gather(1, tokens) - highest - total.log()  # [row, 1]
    raw_logprobs = drawn
    if scores is not raw:
        raw_logprobs = raw.gather(1, tokens) - raw.logsumexp(-1, keepdim=True)
        drawn = torch.where(greedy, raw_logprobs, drawn)
    return tokens[:, 0], drawn[:, 0], raw_logprobs[:, 0]


def _shares(scores: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """exp(score - highest score) as [row, block, token]; 0 after the end of the vocabulary."""
    rows, vocabulary = scores.shape
    blocks = -(-vocabulary // BLOCK)
    shares = scores.new_empty(rows, blocks * BLOCK)
    torch.sub(scores, highest, out=shares[:, :vocabulary]).exp_()
    shares[:, vocabulary:] = 0
    return shares.view(rows, blocks, BLOCK)


def _inverse(shares: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token at which the cumulative share reaches `uniforms`, and the sum of all shares.

    First its block is found, then its place there. A token with share 0 is never found, whatever the rounding.
    """
    sizes = shares.sum(-1).double()  # [row, block]; in float32 the sum over 150,000 tokens would lose small shares
    ends = sizes.cumsum(-1)
    target = uniforms[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    # Relative to the block: its cumulative shares are rounded differently than `ends`, and an absolute target could lie
    # behind the last of them.
    fraction = (target - (ends - sizes).gather(1, block)) / sizes.gather(1, block)
    inside = shares[torch.arange(len(shares), device=shares.device), block[:, 0]].double().cumsum(-1)
    offset = torch.searchsorted(inside, fraction.clamp_(0, 1 - 2**-53) * inside[:, -1:], right=True)
    return block * BLOCK + offset.clamp_(max=BLOCK - 1), ends[:, -1:].float()


def reject_extremes(sampling: Sampling) -> None:
    """Reject settings whose results overflow float32: they would look like a broken model to the whole batch."""
    if sampling.temperature != 0 and not 1e-5 <= sampling.temperature <= 1e5:
        raise ConfigError(f"a temperature of {sampling.temperature} is not between 1e-5 and 1e5; 0 is greedy")
    if not 1e-3 <= sampling.repetition_penalty <= 1e3:
        raise ConfigError(f"a repetition_penalty of {sampling.repetition_penalty} is out of reach; 1 is none")


def is_plain(sampling: Sampling) -> bool:
    """Whether a request asks for a temperature and nothing else."""
    return sampling.repetition_penalty == 1.0 and not _filters(sampling)


def _filters(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)


def _filter_row(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Apply the filters in transformers' order: top-k, top-p, min-p."""
    if 0 < sampling.top_k < len(scores):
        threshold = scores.topk(int(sampling.top_k)).values[-1]
        scores = scores.masked_fill(scores < threshold, -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(descending=True)
        mass_above = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        out = torch.zeros_like(scores, dtype=torch.bool)
        out[order[mass_above >= sampling.top_p]] = True
        out[order[0]] = False  # with top_p=0 nothing would be left
        scores = scores.masked_fill(out, -math.inf)
    if sampling.min_p > 0.0:
        probabilities = scores.softmax(-1)
        scores = scores.masked_fill(probabilities < sampling.min_p * probabilities.max(), -math.inf)
    return scores
