"""Getting into a Ray cluster, asking its actors, and Ray's errors in our words."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from agentfly.errors import ConfigError, describe
from agentfly.extras import needed

NAMESPACE = "agentfly"
"""Where managers have their names, whatever the job."""
MOST_AT_ONCE = 100_000
"""Calls that an actor bears at once. Beyond Ray's own thousand, chains that wait would keep others from giving back."""
_LOG = logging.getLogger(__name__)
_ENTERING = threading.Lock()


class Lost(Exception):
    """An actor does not answer; in Ray's words, without the table of ids."""

    def __init__(self, said: str, dead: bool = True) -> None:
        super().__init__(said)
        self.dead = dead
        """Whether it never will again."""

    @classmethod
    def of(cls, error: BaseException | None) -> Lost:
        """What an error of Ray's says."""
        lines = [line.strip() for line in str(error).splitlines() if line and not line[0].isspace()]
        return cls("".join(lines[-1:])[:400] or describe(error or Exception()), not _unavailable(error))


def _unavailable(error: BaseException | None) -> bool:
    return isinstance(error, installed().exceptions.ActorUnavailableError | installed().exceptions.GetTimeoutError)


def installed() -> Any:
    """The ray package."""
    with needed("a cluster", "ray"):
        import ray
        import ray.exceptions  # the package alone does not promise it
    return ray


def entered() -> Any:
    """Ray, in the cluster that this process is in, else the one RAY_ADDRESS names, else a fresh one of this machine."""
    ray, address = installed(), os.environ.get("RAY_ADDRESS")
    with _ENTERING:
        if ray.is_initialized():
            return ray
        try:
            if address:
                ray.init(address="auto", log_to_driver=False, logging_level="error")
            else:
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
        except Exception as error:  # Ray raises whatever it comes upon
            where = f"RAY_ADDRESS={address} cannot be reached" if address else "no local cluster could be started"
            raise ConfigError(f"Ray is not initialised, and {where}: {describe(error)}") from error
    _LOG.info("Ray was not initialised: %s", f"connected to {address}" if address else "started a cluster here")
    return ray


def refuse_in_vain(needs: Mapping[str, float]) -> None:
    """Raise at once where no node could ever have room; Ray would wait for one for ever."""
    nodes = [node["Resources"] for node in entered().nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        return
    asked = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
    there = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in needs) for node in nodes)
    raise ConfigError(f"an instance asks for {asked}; no node of the cluster has that: they have {there or 'nothing'}")


def sent(actor: Any, method: str, *args: Any) -> Any:
    """Ask an actor. What comes back is for `answered`, or to be left alone."""
    if not installed().is_initialized():  # or else Ray would start a cluster to look for the actor in
        raise Lost("this process has left its Ray cluster")
    try:
        return getattr(actor, method).remote(*args)
    except Exception as error:  # of an actor of another cluster Ray says so in a bare Exception
        raise Lost.of(error) from error


async def answered(answering: Any) -> Any:
    """What an actor that was asked answers, or raises; Lost where neither will come."""
    ray = installed()
    try:
        return await answering
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ray.exceptions.RayError):
            raise Lost.of(error.cause) from error
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise Lost.of(error) from error


def kill(actor: Any) -> None:
    """End an actor at once. One that is gone, or of a cluster that this process has left, is left alone."""
    ray = installed()
    if ray.is_initialized():
        with contextlib.suppress(ray.exceptions.ActorHandleNotFoundError):
            ray.kill(actor)
