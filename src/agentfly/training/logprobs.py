"""Log-probabilities of given tokens: the logits of a whole batch never lie in memory at once.

The head is applied to some hidden states at a time, forward and again backward: for 150,000 words, the logits of one
long chain would take more memory than the model. As fast as keeping them, since nothing but one product is done twice.

A token is scored under the distribution at the temperature it was sampled with. Where the sampler also cut off the
unlikely (top-p, top-k, min-p), its own log-probabilities are of the cut distribution, and these are not: the difference
shows in the mismatch that the loss measures and corrects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits that are in memory at once."""


class Scores(NamedTuple):
    """Of tokens, one number each."""

    logprobs: Tensor
    entropies: Tensor
    """Of the distributions they are from."""


@dataclass(frozen=True)
class Head:
    """How logits come of hidden states."""

    weight: Tensor
    """[word, width]"""
    bias: Tensor | None = None
    scale: float = 1.0
    """What logits are multiplied by (Cohere, Granite)."""
    softcap: float | None = None
    """The bound of logits (Gemma 2); None: there is none."""

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a causal language model, with what its adapters add to it."""
        config, layer = model.config.get_text_config(), model.get_output_embeddings()
        weight = layer.weight
        if not getattr(layer, "disable_adapters", True):
            weight = weight + sum(layer.get_delta_weight(name) for name in layer.active_adapters)
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return cls(weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))

    def logits(self, hidden: Tensor) -> Tensor:
        """In full precision, whatever the product was computed in."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1:
            logits = logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def in_precision(self, dtype: torch.dtype) -> Head:
        bias = None if self.bias is None else self.bias.to(dtype)
        return Head(self.weight.to(dtype), bias, self.scale, self.softcap)


def score(hidden: Tensor, head: Head, tokens: Tensor, temperatures: Tensor) -> Scores:
    """Score tokens by the hidden states before them. `hidden`: [token, width]; the others: [token]."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    rows = max(LOGITS.get(device, LOGITS["cpu"]) // len(head.weight), 1)
    heat = torch.where(temperatures > 0, temperatures, 1.0)
    with torch.autocast(device, enabled=False):
        return Scores(*_score(hidden, head.weight, head.bias, head.scale, head.softcap, tokens, heat, rows, dtype))


def score_logits(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Scores:
    """The same from logits that are there already."""
    heat = torch.where(temperatures > 0, temperatures, 1.0)
    logs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / heat[:, None]).log_softmax(-1)
    return Scores(logs.gather(1, tokens[:, None])[:, 0], -(logs.exp() * logs).sum(-1))


class _Score(torch.autograd.Function):
    """Forward keeps one number a token; backward computes the logits again."""

    @staticmethod
    def forward(
        context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None,
        tokens: Tensor, heat: Tensor, rows: int, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        head = Head(weight, bias, scale, softcap).in_precision(dtype)
        sums, logprobs, entropies = torch.empty_like(heat), torch.empty_like(heat), torch.empty_like(heat)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = head.logits(hidden[part].to(dtype)).div_(heat[part, None])
            sums[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(1, tokens[part, None])[:, 0] - sums[part]
            shares = (logits - sums[part, None]).exp_()
            entropies[part] = sums[part] - torch.linalg.vecdot(shares, logits)
        context.save_for_backward(hidden, weight, bias, tokens, heat, sums, entropies)
        context.settings = scale, softcap, rows, dtype
        return logprobs, entropies

    @staticmethod
    def backward(context: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, heat, sums, entropies = context.saved_tensors
        scale, softcap, rows, dtype = context.settings
        head = Head(weight, bias, scale, softcap).in_precision(dtype)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if context.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if bias is not None and context.needs_input_grad[2] else None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            states = hidden[part].to(dtype)
            pull = _pull(head, states, *(each[part] for each in (tokens, heat, sums, entropies, *given))).to(dtype)
            to_hidden[part] = pull @ head.weight
            if to_weight is not None:
                _add_product(to_weight, pull.T, states)
            if to_bias is not None:
                to_bias += pull.sum(0)
        return to_hidden, to_weight, to_bias, *[None] * 6


def _pull(
    head: Head, states: Tensor, tokens: Tensor, heat: Tensor, sums: Tensor, entropies: Tensor,
    for_logprobs: Tensor, for_entropies: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient with respect to what the head's product gave."""
    logits = head.logits(states)
    bend = None if head.softcap is None else 1 - (logits / head.softcap).square()
    logs = logits.div_(heat[:, None]).sub_(sums[:, None])
    if for_entropies.any():
        pull = logs + entropies[:, None]
        shares = logs.exp_()
        pull = pull.mul_(-for_entropies[:, None]).sub_(for_logprobs[:, None]).mul_(shares)
    else:
        pull = logs.exp_().mul_(-for_logprobs[:, None])
    pull.scatter_add_(1, tokens[:, None], for_logprobs[:, None])
    pull.mul_((head.scale / heat)[:, None])
    return pull if bend is None else pull.mul_(bend)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


_score: Any = _Score.apply
