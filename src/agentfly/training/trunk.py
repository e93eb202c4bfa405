"""A model up to its head, run over many sequences at once: the hidden states that the head is asked for, no others.

Sequences lie in one row, one after the other, without padding; attention is done sequence by sequence, so that none
sees another. A model whose attention cannot be replaced gets them as rows that are padded on the right, where
padding comes after all that counts and so changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from agentfly.backends.transformers.attention import attended, register
from agentfly.backends.transformers.probe import packs
from agentfly.backends.transformers.runner import sharing
from agentfly.training.batch import Sequences

NAME = "agentfly-training"


class Trunk:
    """The weights of a model in a model object of its own, in which nothing is random: no dropout, ever."""

    def __init__(self, model: Any, *, recompute: bool = False) -> None:
        """`recompute`: keep only what goes into each layer, and compute the rest again on the way back."""
        on_cpu = next(model.parameters()).device.type == "cpu"  # a GPU would spend its time on starting small kernels
        self.packed = on_cpu and packs(model)
        self.model = sharing(model, NAME if self.packed else None)
        if recompute:
            _recompute(self.model)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def __call__(self, sequences: Sequences) -> Tensor:
        """What goes into the head at the places that are asked for: [token, width]."""
        return self._asked(sequences, self._states)

    def logits(self, sequences: Sequences) -> Tensor:
        """What comes out of the model there: [token, word]."""
        return self._asked(sequences, lambda **shown: self.model(**shown).logits)

    def _asked(self, sequences: Sequences, run: Callable[..., Tensor]) -> Tensor:
        lengths = [len(tokens) for tokens in sequences.tokens]
        if self.packed:
            starts = np.cumsum([0, *lengths[:-1]])
            positions = np.concatenate([np.arange(length) for length in lengths])
            shown = {"position_ids": self._moved(positions)[None], "lengths": lengths}
            ids = np.concatenate(sequences.tokens)[None]
        else:
            starts, shown = np.arange(len(lengths)) * max(lengths), {}
            ids = np.stack([np.pad(tokens, (0, max(lengths) - len(tokens))) for tokens in sequences.tokens])
        out = run(input_ids=self._moved(ids), use_cache=False, **shown)
        places = [start + asked for start, asked in zip(starts, sequences.asked, strict=True)]
        return out.flatten(0, 1).index_select(0, self._moved(np.concatenate(places)))

    def _moved(self, numbers: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device)

    def _states(self, **shown: Any) -> Tensor:
        """What reaches the head, which is given nothing to do itself."""
        caught: list[Tensor] = []

        def catch(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            caught.append(given[0])
            return (given[0][:, :0], *given[1:])

        hook = self.model.get_output_embeddings().register_forward_pre_hook(catch)
        try:
            self.model(**shown)
        finally:
            hook.remove()
        return caught[0]


def _recompute(model: Any) -> None:
    """Layers compute again only in training mode; what is inside of them stays out of it, and so does dropout."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
            for name in [name for name, value in vars(layer).items() if "dropout" in name and isinstance(value, float)]:
                setattr(layer, name, 0.0)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    lengths: list[int],
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of sequences that lie one after the other in one row: [1, head, token, width]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = [
        _attended(q, k, v, scaling, sliding_window, softcap).transpose(1, 2)
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(parts, 1), None


def _attended(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
    """One sequence: without a mask where it can be, for that is what is quick."""
    mask, count = None, q.shape[2]
    if window is not None and window < count:
        mask = torch.ones(count, count, dtype=q.dtype, device=q.device).tril().triu(1 - window).log()
    return attended(q, k, v, mask, scaling, softcap, causal=mask is None)


register(NAME, attend)
