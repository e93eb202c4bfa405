"""Log-probabilities, entropies and the divergence to a teacher, without the logits of a whole batch in memory.

The head is applied to a chunk of hidden states at a time, in the forward pass and again in the backward pass: with a
vocabulary of 150,000, the logits of one long chain would take more memory than the model. It is as fast as storing
them, since only one matrix product is repeated.

A token is scored at the temperature it was sampled with. Where the sampler also truncated the distribution (top-p,
top-k, min-p), its log-probabilities are of the truncated distribution and these are not: the difference is part of the
mismatch that the loss measures and corrects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits in memory at once, by device type."""


@dataclass(frozen=True)
class Head:
    """The language-model head: hidden states → logits."""

    weight: Tensor
    """[vocab, width]"""
    bias: Tensor | None = None
    scale: float = 1.0
    """Factor on the logits (Cohere, Granite)."""
    softcap: float | None = None
    """Bound of the logits (Gemma 2); None without one."""

    @classmethod
    def from_model(cls, model: Any) -> Head:
        """The head of a causal language model, with its adapters merged in."""
        config = model.config.get_text_config()
        layer = model.get_output_embeddings()
        weight = layer.weight
        if not getattr(layer, "disable_adapters", True):
            weight = weight + sum(layer.get_delta_weight(name) for name in layer.active_adapters)
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return cls(weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, width] → [tokens, vocab] in float32 or finer, whatever the product is computed in."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1:
            logits = logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def take_rows(self, count: int) -> Head:
        """The head of the first tokens of the vocabulary."""
        bias = None if self.bias is None else self.bias[:count]
        return Head(self.weight[:count], bias, self.scale, self.softcap)

    def to(self, dtype: torch.dtype) -> Head:
        bias = None if self.bias is None else self.bias.to(dtype)
        return Head(self.weight.to(dtype), bias, self.scale, self.softcap)


def score(
    hidden: Tensor, head: Head, tokens: Tensor, temperatures: Tensor, teacher: tuple[Tensor, Head] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens, and entropy and KL(π ‖ π_teacher) of their distributions, in nats: [tokens] each.

    hidden: [tokens, width], the hidden states before the tokens; tokens, temperatures: [tokens]. teacher: its hidden
    states, [tokens, its width], and its head, both without gradient. The head has at least as many rows as the
    student's; further ones, which pad the vocabulary, are left out. Without a teacher the divergences are 0.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    models = 1 if teacher is None else 2  # whose logits are in memory together
    chunk = max(LOGITS.get(device, LOGITS["cpu"]) // (models * len(head.weight)), 1)
    temperatures = torch.where(temperatures > 0, temperatures, 1.0)
    if teacher is not None:
        teacher = teacher[0].to(dtype), teacher[1].take_rows(len(head.weight)).to(dtype)
    with torch.autocast(device, enabled=False):
        scores: tuple[Tensor, Tensor, Tensor] = _chunked_score(
            hidden, head.weight, head.bias, head.scale, head.softcap, tokens, temperatures, chunk, dtype, teacher
        )
    return scores


def score_logits(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, as `score`, from given logits, [tokens, vocab]."""
    temperatures = torch.where(temperatures > 0, temperatures, 1.0)
    logs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]).log_softmax(-1)
    return logs.gather(1, tokens[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


class _ChunkedScore(torch.autograd.Function):
    """The forward pass stores a few numbers per token; the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None,
        tokens: Tensor, temperatures: Tensor, chunk: int, dtype: torch.dtype, teacher: tuple[Tensor, Head] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        # Autocast is off in here, so the cast is by hand: in float32 the product would miss the GPU's fast units.
        head = Head(weight, bias, scale, softcap).to(dtype)
        score_chunk = _fuse(_score_chunk, hidden.device.type)
        logsumexp = torch.empty_like(temperatures)
        logprobs = torch.empty_like(temperatures)
        entropies = torch.empty_like(temperatures)
        divergences = torch.empty_like(temperatures)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logsumexp[part], logprobs[part], entropies[part], divergences[part] = score_chunk(
                head, hidden[part].to(dtype), tokens[part], temperatures[part], _select_teacher(teacher, part)
            )
        context.save_for_backward(hidden, weight, bias, tokens, temperatures, logsumexp, entropies, divergences)
        context.settings = scale, softcap, chunk, dtype, teacher
        context.set_materialize_grads(False)  # an output that no loss term uses has the gradient None, not zeros
        return logprobs, entropies, divergences

    @staticmethod
    def backward(context: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *per_token = context.saved_tensors  # [tokens, width], [vocab, width], [vocab], [tokens]…
        scale, softcap, chunk, dtype, teacher = context.settings
        head = Head(weight, bias, scale, softcap).to(dtype)
        compute_grad = _fuse(_grad_logits, hidden.device.type)
        grad_hidden = torch.empty_like(hidden)
        # Frozen under LoRA: a gradient of the whole head would be the largest tensor of the pass, and unused.
        grad_weight = torch.zeros_like(weight) if context.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and context.needs_input_grad[2] else None
        with_entropy = output_grads[1] is not None  # testing whether it is all 0 would wait for the GPU
        grads = [torch.zeros_like(per_token[1]) if grad is None else grad for grad in output_grads]
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            states = hidden[part].to(dtype)  # [chunk, width]
            token_values = (values[part] for values in (*per_token, *grads))  # [chunk] each
            grad_logits = compute_grad(  # [chunk, vocab]
                head, states, *token_values, teacher=_select_teacher(teacher, part), with_entropy=with_entropy
            ).to(dtype)
            grad_hidden[part] = grad_logits @ head.weight
            # In place where the types agree: another matrix of [vocab, width] per chunk would double the peak.
            if grad_weight is not None and grad_weight.dtype == dtype:
                grad_weight.addmm_(grad_logits.T, states)
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ states
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


def _select_teacher(teacher: tuple[Tensor, Head] | None, part: slice) -> tuple[Tensor, Head] | None:
    """The teacher's hidden states of a chunk, and its head."""
    return None if teacher is None else (teacher[0][part], teacher[1])


def _teacher_logprobs(teacher: tuple[Tensor, Head], temperatures: Tensor) -> Tensor:
    """[chunk, vocab]"""
    states, head = teacher
    return head.logits(states).div_(temperatures[:, None]).log_softmax(-1)


def _score_chunk(
    head: Head, states: Tensor, tokens: Tensor, temperatures: Tensor, teacher: tuple[Tensor, Head] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log of the partition function, log-probability, entropy and divergence of each token of a chunk, [chunk] each."""
    logits = head.logits(states).div_(temperatures[:, None])  # [chunk, vocab]
    logsumexp = logits.logsumexp(-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logsumexp
    probs = (logits - logsumexp[:, None]).exp_()
    entropies = logsumexp - torch.linalg.vecdot(probs, logits)  # H = lse − Σ p·z
    if teacher is None:
        return logsumexp, logprobs, entropies, torch.zeros_like(entropies)
    log_ratio = logits.sub_(logsumexp[:, None]).sub_(_teacher_logprobs(teacher, temperatures))
    return logsumexp, logprobs, entropies, torch.linalg.vecdot(probs, log_ratio)


def _grad_logits(
    head: Head, states: Tensor, tokens: Tensor, temperatures: Tensor, logsumexp: Tensor, entropies: Tensor,
    divergences: Tensor, grad_logprobs: Tensor, grad_entropies: Tensor, grad_divergences: Tensor, *,
    teacher: tuple[Tensor, Head] | None, with_entropy: bool,
) -> Tensor:  # fmt: skip
    """[chunk, vocab]: the gradient with respect to the output of the head's linear layer.

    with_entropy: whether a gradient of an entropy can be other than 0.

    With z the scaled logits, p their softmax, H the entropy, y the token, q the teacher's distribution and D = KL(p‖q):

        ∂ log p_y / ∂z = onehot(y) − p      ∂ H / ∂z = −p · (log p + H)      ∂ D / ∂z = p · (log p − log q − D)
    """
    logits = head.logits(states)
    # d tanh(x) = 1 − tanh(x)², taken before `logits` is overwritten in place.
    softcap_slope = None if head.softcap is None else 1 - (logits / head.softcap).square()
    log_probs = logits.div_(temperatures[:, None]).sub_(logsumexp[:, None])
    if with_entropy or teacher is not None:
        # All three terms have the form p · (…): the sum in the brackets first, times p once, in one [chunk, vocab].
        constant = grad_logprobs + grad_entropies * entropies + grad_divergences * divergences
        grad = log_probs * (grad_divergences - grad_entropies)[:, None]
        if teacher is not None:
            grad.sub_(_teacher_logprobs(teacher, temperatures).mul_(grad_divergences[:, None]))
        grad.sub_(constant[:, None]).mul_(log_probs.exp_())
    else:
        grad = log_probs.exp_().mul_(-grad_logprobs[:, None])
    grad.scatter_add_(1, tokens[:, None], grad_logprobs[:, None])
    grad.mul_((head.scale / temperatures)[:, None])
    return grad if softcap_slope is None else grad.mul_(softcap_slope)


@cache
def _fuse(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function with its elementwise operations fused on a GPU, where reading and writing the logits dominates."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function


_chunked_score: Any = _ChunkedScore.apply
