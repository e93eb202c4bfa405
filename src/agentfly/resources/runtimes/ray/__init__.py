"""Instances and managers on the nodes of a Ray cluster.

    runtime.py        Pool(runtime=RayRuntime()): every instance in its own actor, spread over the nodes;
                      connecting to a cluster, calling actors, translating Ray's errors
    manager.py        RayManager("shared"): the client of a manager that many processes share
    manager_actor.py  the actor of that shared manager

An actor dies with the process that created it, and Ray fails the pending calls of a dead actor. Failure detection rests
on this: a call that never returns fails when the other side is gone.
"""

from agentfly.resources.runtimes.ray.manager import RayManager
from agentfly.resources.runtimes.ray.runtime import RayRuntime

__all__ = ["RayManager", "RayRuntime"]
