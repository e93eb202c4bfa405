"""From trajectories to new weights."""

from agentfly.training.config import TrainConfig
from agentfly.training.starting import train

__all__ = ["TrainConfig", "train"]
