"""A language model as a judge, behind an OpenAI-compatible server, and the rewards that use it."""

from agentfly.environments.judge.environment import Judge

__all__ = ["Judge"]
