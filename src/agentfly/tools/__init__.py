"""The prebuilt tools."""

from agentfly.tools.answer import answer
from agentfly.tools.calculate import calculate, calculator

__all__ = ["answer", "calculate", "calculator"]
