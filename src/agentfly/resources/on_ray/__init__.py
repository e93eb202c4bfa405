"""Instances, and the manager itself, on the nodes of a Ray cluster.

    place.py     Pool(place=OnRay()): every instance in an actor, spread over the nodes
    seat.py      the actor that an instance lives in
    manager.py   RayManager("shared"): one manager for the chains of many processes, as each of them sees it
    desk.py      the actor that is that manager
    cluster.py   getting into a cluster, and Ray's errors in our words

An actor dies with the process that made it, and Ray tells whoever waits for its answer. All watching here rests on
that: a call that never returns fails when the other side is gone.
"""

from agentfly.resources.on_ray.manager import RayManager
from agentfly.resources.on_ray.place import OnRay

__all__ = ["OnRay", "RayManager"]
