"""Connecting to a Ray cluster, calling its actors, and translating Ray's errors."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from agentfly.errors import ConfigError, describe
from agentfly.extras import require_extra

NAMESPACE = "agentfly"
"""Ray namespace of the shared managers, the same for every job."""
MAX_CONCURRENCY = 100_000
"""Concurrent calls per actor. With Ray's default of 1000, waiting chains would keep others from releasing."""
_LOG = logging.getLogger(__name__)
_CONNECT_LOCK = threading.Lock()


class ActorUnreachable(Exception):
    """An actor does not answer. The message is Ray's, without the table of ids."""

    def __init__(self, message: str, dead: bool = True) -> None:
        super().__init__(message)
        self.dead = dead
        """Whether it will never answer again."""

    @classmethod
    def from_ray(cls, error: BaseException | None) -> ActorUnreachable:
        """Translate an error of Ray."""
        exceptions = import_ray().exceptions
        lines = [line.strip() for line in str(error).splitlines() if line and not line[0].isspace()]
        temporary = isinstance(error, exceptions.ActorUnavailableError | exceptions.GetTimeoutError)
        return cls("".join(lines[-1:])[:400] or describe(error or Exception()), dead=not temporary)


def import_ray() -> Any:
    """The ray package."""
    with require_extra("a cluster", "ray"):
        import ray
        import ray.exceptions  # not guaranteed to be imported by the package
    return ray


def connect() -> Any:
    """Ray, connected to this process's cluster, else to the one at RAY_ADDRESS, else to a new local one."""
    ray = import_ray()
    address = os.environ.get("RAY_ADDRESS")
    with _CONNECT_LOCK:
        if ray.is_initialized():
            return ray
        try:
            if address:
                ray.init(address="auto", log_to_driver=False, logging_level="error")
            else:
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
        except Exception as error:  # Ray raises many types
            where = f"RAY_ADDRESS={address} cannot be reached" if address else "no local cluster could be started"
            raise ConfigError(f"Ray is not initialized, and {where}: {describe(error)}") from error
    _LOG.info("Ray was not initialized: %s", f"connected to {address}" if address else "started a local cluster")
    return ray


def raise_if_infeasible(needs: Mapping[str, float]) -> None:
    """Raise ConfigError if no node could ever satisfy the resources; Ray would wait forever."""
    nodes = [node["Resources"] for node in connect().nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        return
    asked = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
    there = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in needs) for node in nodes)
    raise ConfigError(f"an instance asks for {asked}; no node of the cluster has that: they have {there or 'nothing'}")


def call_actor(actor: Any, method: str, *args: Any) -> Any:
    """Call a method of an actor; a reference for `await_answer` or `get_answer`, which may also be ignored."""
    if not import_ray().is_initialized():  # otherwise Ray would start a cluster to look for the actor
        raise ActorUnreachable("this process has left its Ray cluster")
    try:
        return getattr(actor, method).remote(*args)
    except Exception as error:  # for an actor of another cluster Ray raises a bare Exception
        raise ActorUnreachable.from_ray(error) from error


async def await_answer(reference: Any) -> Any:
    """The result of an actor call, or the exception it raised; ActorUnreachable if there will be neither."""
    ray = import_ray()
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ray.exceptions.RayError):
            raise ActorUnreachable.from_ray(error.cause) from error
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ActorUnreachable.from_ray(error) from error


def get_answer(reference: Any, timeout: float) -> Any:
    """Like `await_answer`, but blocks the thread, for at most `timeout` seconds."""
    ray = import_ray()
    try:
        return ray.get(reference, timeout=timeout)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ActorUnreachable.from_ray(error) from error


def kill(actor: Any) -> None:
    """Kill an actor. Does nothing if it is gone, or if this process has left its cluster."""
    ray = import_ray()
    if ray.is_initialized():
        with contextlib.suppress(ray.exceptions.ActorHandleNotFoundError):
            ray.kill(actor)
