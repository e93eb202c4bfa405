"""The prebuilt worlds."""

from agentfly.environments.code_interpreter import CodeInterpreter

__all__ = ["CodeInterpreter"]
