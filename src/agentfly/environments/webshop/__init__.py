"""A web shop after WebShop (Yao and others, 2022): its pages, actions, goals and score, on its data or on generated."""

from agentfly.environments.webshop.environment import WebShop
from agentfly.environments.webshop.official import official_tasks

__all__ = ["WebShop", "official_tasks"]
