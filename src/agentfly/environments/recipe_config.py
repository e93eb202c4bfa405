"""Training settings that the recipes share."""

from __future__ import annotations

from typing import Any

from agentfly.training.config import TrainConfig


def small_model_config(
    *, max_turns: int, max_tokens: int, learning_rate: float = 3e-4, warmup_steps: int = 0, **fields: Any
) -> TrainConfig:
    """Settings for a model of some million parameters on a CPU. `fields` are those of TrainConfig that differ."""
    settings = {
        "tasks_per_step": 16,
        "max_turns": max_turns,
        "sampling": {"max_tokens": max_tokens},
        "optimizer": {"learning_rate": learning_rate, "schedule": "linear", "warmup_steps": warmup_steps},
        "micro_batch_tokens": 4096,
        "steps": 40,
        "evaluation": {"every": 10},
        "checkpoint": {"every": 20},
    }
    return TrainConfig(**{**settings, **fields})


def pretrained_model_config(
    *, max_turns: int, max_tokens: int, learning_rate: float = 3e-5, warmup_steps: int = 0, **fields: Any
) -> TrainConfig:
    """Settings for SmolLM2-135M on one GPU, after SFT. `fields` are those of TrainConfig that differ.

    The learning rate gained most of four in docs/lab/rl_factors.md.
    """
    settings = {
        "model": "smollm2-135m",
        "tasks_per_step": 32,
        "max_turns": max_turns,
        "sampling": {"max_tokens": max_tokens},
        "optimizer": {"learning_rate": learning_rate, "warmup_steps": warmup_steps},
        "steps": 30,
        "checkpoint": {"every": 30},
    }
    return TrainConfig(**{**settings, **fields})
