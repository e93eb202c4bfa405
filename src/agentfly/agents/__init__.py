"""The prebuilt agents and `BaseAgent`."""

from agentfly.agent import BaseAgent
from agentfly.agents.prebuilt import ActionAgent, CodeAgent, HFAgent, ReactAgent

__all__ = ["ActionAgent", "BaseAgent", "CodeAgent", "HFAgent", "ReactAgent"]
