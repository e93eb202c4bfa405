"""The model that learns: how likely it finds the tokens that were sampled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentfly.errors import describe
from agentfly.training.batch import Sequences
from agentfly.training.logprobs import Head, Scores, score, score_logits
from agentfly.training.trunk import Trunk

_LOG = logging.getLogger(__name__)


class Policy:
    """A causal language model over batches of sequences."""

    def __init__(self, model: Any, *, recompute: bool = False) -> None:
        self.trunk = Trunk(model, recompute=recompute)
        self._has_plain_head = _has_plain_head(self.trunk)

    def __call__(self, sequences: Sequences, temperatures: Sequence[float]) -> Scores:
        """Scores of the sampled tokens, one after the other; a temperature for each sequence."""
        device = self.trunk.device
        heat = torch.from_numpy(np.repeat(temperatures, sequences.counts).astype(np.float32)).to(device)
        tokens = torch.from_numpy(sequences.targets).long().to(device)
        if not self._has_plain_head:
            return score_logits(self.trunk.logits(sequences), tokens, heat)
        return score(self.trunk(sequences), Head.of(self.trunk.model), tokens, heat)


@torch.no_grad()
def _has_plain_head(trunk: Trunk) -> bool:
    """Whether the model's logits are what we take them for: tried, not looked up."""
    tokens = np.arange(1, 9, dtype=np.int32)
    probe = Sequences((tokens,), (np.arange(8, dtype=np.int32),), tokens)
    name = type(trunk.model).__name__
    try:
        wanted: Tensor = trunk.logits(probe).float()
        got = Head.of(trunk.model).logits(trunk(probe))
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        _LOG.warning("the logits of %s are kept whole: its head cannot be run alone (%s)", name, describe(error))
        return False
    same = bool(torch.allclose(got, wanted, rtol=1e-3, atol=1e-3 * float(wanted.std())))
    if not same and wanted.isfinite().all():
        _LOG.warning("the logits of %s are kept whole: it makes them in a way of its own", name)
    return same
