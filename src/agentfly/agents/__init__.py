"""The prebuilt agents and `BaseAgent`."""

from agentfly.agent import BaseAgent
from agentfly.agents.external import ExternalAgent
from agentfly.agents.prebuilt import ActionAgent, CodeAgent, HFAgent, ReactAgent
from agentfly.agents.vision import GUIAgent, VisionAgent

__all__ = ["ActionAgent", "BaseAgent", "CodeAgent", "ExternalAgent", "GUIAgent", "HFAgent", "ReactAgent", "VisionAgent"]
