"""Whether a model can be run over packed batches: tried, not looked up."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from agentfly.backends.base import Request
from agentfly.backends.engine.model_runner import ModelRunner, bytes_per_token, share_weights
from agentfly.backends.engine.request import EngineRequest
from agentfly.backends.engine.scheduler import Scheduler
from agentfly.errors import describe
from agentfly.types import Sampling

WINDOW = 8
"""The window that layers with a window are tried with."""
LENGTHS = 5, 23
"""Prompts of the trial. In steps of WINDOW + 1 tokens: both at once, two stretches of the longer, its last token."""
_LOG = logging.getLogger(__name__)


def supports_packing(model: Any) -> bool:
    """Whether the model says over a packed batch what it says over each sequence alone.

    Windows are made shorter than the sequences for this: one that hides nothing would prove nothing.
    """
    try:
        alone = _shrink_window(share_weights(model))
        vocabulary = alone.get_input_embeddings().weight.shape[0]
        prompts = [[(7 * at + 3 * length) % vocabulary for at in range(length)] for length in LENGTHS]
        packed = _packed_logits(ModelRunner(alone, sum(LENGTHS) * 2 * bytes_per_token(alone)), prompts)
        wanted = torch.stack([_single_logits(alone, prompt) for prompt in prompts]).float()
    except Exception as error:
        _LOG.info("%s cannot be run over packed batches: %s", type(model).__name__, describe(error))
        return False
    if not wanted.isfinite().all():
        return True  # a broken model, and the first turn says where
    spread = (packed - wanted).abs().max().item() / max(wanted.std().item(), 1e-6)
    return spread < (1e-3 if next(model.parameters()).dtype == torch.float32 else 0.3)


@torch.inference_mode()
def _packed_logits(runner: ModelRunner, prompts: list[list[int]]) -> torch.Tensor:
    jobs = [EngineRequest(Request(prompt, Sampling()), np.asarray(prompt, np.int32), 1, str) for prompt in prompts]
    scheduler = Scheduler(runner.arena, len(jobs), WINDOW + 1)
    for job in jobs:
        scheduler.add(job)
    found: dict[EngineRequest, torch.Tensor] = {}
    while chunks := scheduler.step():
        ended = [chunk.job for chunk in chunks if chunk.samples]
        found.update(zip(ended, runner.logits(chunks), strict=True))
        for chunk in chunks:
            chunk.job.cached += chunk.count
    return torch.stack([found[job] for job in jobs]).float()


@torch.inference_mode()
def _single_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([prompt], device=model.device)).logits
    return logits[0, -1]


def _shrink_window(model: Any) -> Any:
    config = model.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        for part in (config, *model.modules()):
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, WINDOW)
    return model
