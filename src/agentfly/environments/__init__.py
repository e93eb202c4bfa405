"""The prebuilt worlds."""

from agentfly.environments.alfworld import ALFWorld, ALFWorldUpstream
from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.code_judge import CodeJudge
from agentfly.environments.judge import Judge
from agentfly.environments.model_server import ModelServer
from agentfly.environments.search.world import Search
from agentfly.environments.webshop import WebShop

__all__ = ["ALFWorld", "ALFWorldUpstream", "CodeInterpreter", "CodeJudge", "Judge", "ModelServer", "Search", "WebShop"]
