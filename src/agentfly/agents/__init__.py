"""The prebuilt agents and `BaseAgent`."""

from agentfly.agent import BaseAgent
from agentfly.agents.action import ActionAgent
from agentfly.agents.code import CodeAgent
from agentfly.agents.hf import HFAgent
from agentfly.agents.react import ReactAgent

__all__ = ["ActionAgent", "BaseAgent", "CodeAgent", "HFAgent", "ReactAgent"]
