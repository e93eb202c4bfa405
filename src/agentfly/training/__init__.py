"""Training: from trajectories to new weights. Importing this package does not import torch."""

from agentfly.training.config import TrainConfig
from agentfly.training.config_records import WarmStart
from agentfly.training.start import train

__all__ = ["TrainConfig", "WarmStart", "train"]
