"""Training settings that the recipes share."""

from __future__ import annotations

from typing import Any

from agentfly.training.config import TrainConfig


def small_model_config(*, max_turns: int, max_tokens: int, **fields: Any) -> TrainConfig:
    """Settings for a model of some million parameters on a CPU. `fields` are those of TrainConfig that differ."""
    settings = {
        "tasks_per_step": 16,
        "max_turns": max_turns,
        "sampling": {"max_tokens": max_tokens},
        "optimizer": {"learning_rate": 3e-4, "schedule": "linear"},
        "micro_batch_tokens": 4096,
        "steps": 40,
        "evaluation": {"every": 10},
        "checkpoint": {"every": 20},
    }
    return TrainConfig(**{**settings, **fields})
