"""A web shop after WebShop (Yao et al., 2022): its pages, actions, goals and score, on official or generated data."""

from agentfly.environments.webshop.environment import WebShop
from agentfly.environments.webshop.official import official_tasks
from agentfly.environments.webshop.visual import VisualWebShop

__all__ = ["VisualWebShop", "WebShop", "official_tasks"]
