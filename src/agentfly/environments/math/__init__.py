"""Mathematics with a Python interpreter: generated problems, GSM8K, MATH, and a judge of answers."""

from agentfly.environments.math.environment import MathJudge, MathWithPython
from agentfly.environments.math.tasks import gsm8k_tasks, math_tasks

__all__ = ["MathJudge", "MathWithPython", "gsm8k_tasks", "math_tasks"]
