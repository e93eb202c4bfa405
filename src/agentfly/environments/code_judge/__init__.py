"""A judge that runs code in the sandbox against unit tests or expected output, and the rewards that use it."""

from agentfly.environments.code_judge.environment import CodeJudge, Verdict

__all__ = ["CodeJudge", "Verdict"]
