"""Questions about images: generated charts, tables, maps and documents, or images of your own."""

from agentfly.environments.image_qa.environment import ImageQA

__all__ = ["ImageQA"]
