"""A web shop after WebShop (Yao et al., 2022): its pages, actions, goals and score, on official or generated data."""

from agentfly.environments.webshop.environment import VisualWebShop, WebShop
from agentfly.environments.webshop.tasks import official_tasks

__all__ = ["VisualWebShop", "WebShop", "official_tasks"]
