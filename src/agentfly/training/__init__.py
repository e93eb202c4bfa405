"""From trajectories to new weights."""

from agentfly.training.config import TrainConfig

__all__ = ["TrainConfig"]
