"""The prebuilt worlds."""

from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.code_judge import CodeJudge
from agentfly.environments.model_server import ModelServer

__all__ = ["CodeInterpreter", "CodeJudge", "ModelServer"]
