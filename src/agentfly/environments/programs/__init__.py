"""Program synthesis: functions to write, scored by hidden tests. Generated tasks and MBPP."""

from agentfly.environments.programs.environment import ProgramSynthesis, mbpp_tasks

__all__ = ["ProgramSynthesis", "mbpp_tasks"]
