"""The keeper: one small process beside this one, which outlives it just long enough to clear up after it.

    this process ── keeper ── guardian ── worker ── whatever an environment starts
                          └── guardian ── worker

The keeper forks workers, quickly, since it has loaded what they need. Each has a guardian, which adopts what the worker
leaves behind, and ends all of it when the worker ends. When this process is gone, however it went, the keeper kills
what is below it, removes the folders and containers it was told of, and ends.
"""

from agentfly.resources.keeper.handle import Keeper, Worker, keeper

__all__ = ["Keeper", "Worker", "keeper"]
