"""AgentFly environments as an environment of verifiers 0.4, which finds plugins as top-level modules:

vf-eval agentfly-verifiers --env.taskset.environment Lookup --env.taskset.split validation -n 20
"""

from agentfly_verifiers.taskset import AgentFlyEnv, AgentFlyHarness, AgentFlyTaskset

__all__ = ["AgentFlyEnv", "AgentFlyHarness", "AgentFlyTaskset"]
