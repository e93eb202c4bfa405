"""The prebuilt worlds."""

from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.code_judge import CodeJudge
from agentfly.environments.model_server import ModelServer
from agentfly.environments.search.world import Search

__all__ = ["CodeInterpreter", "CodeJudge", "ModelServer", "Search"]
