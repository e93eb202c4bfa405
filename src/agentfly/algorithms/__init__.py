"""Advantage estimators, one small file per algorithm, and the policy losses.

Importing this package does not import torch: the losses are in `agentfly.algorithms.loss`.
"""

from agentfly.algorithms.gdpo import GDPO
from agentfly.algorithms.gigpo import GiGPO
from agentfly.algorithms.grpo import GRPO, RLOO, DrGRPO
from agentfly.algorithms.ppo import PPO
from agentfly.algorithms.registry import ALGORITHMS, build_algorithm
from agentfly.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from agentfly.algorithms.remax import ReMax

__all__ = [
    "ALGORITHMS",
    "GDPO",
    "GRPO",
    "PPO",
    "RLOO",
    "DrGRPO",
    "GiGPO",
    "ReMax",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "build_algorithm",
]
