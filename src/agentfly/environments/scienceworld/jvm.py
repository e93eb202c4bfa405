"""Java processes, each with several simulators in it.

The simulator was not made for threads: two calls at once disturb one another, even in different simulators. So the
calls of one process take turns. When a process dies or hangs, all simulators in it are lost, and say so; the next
reservation gets a process that lives. A process ends when nobody has a place in it any more, and with this program,
however that ends.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from agentfly.errors import EnvironmentFault
from agentfly.extras import needed

if TYPE_CHECKING:
    from agentfly.environments.scienceworld.gateway import Gateway

T = TypeVar("T")


class JVM:
    """A Java process, started by the first who asks something of it. All calls block; any thread may make them."""

    def __init__(self) -> None:
        self.places = 0
        """How many simulators have a place in it."""
        self._turn = threading.Lock()
        self._gateway: Gateway | None = None
        self._spare: Any = None
        self._lost = ""
        """Why it can no longer be used; empty while it can."""

    @property
    def pid(self) -> int | None:
        """The process; None before anybody asked for it."""
        return self._gateway.pid if self._gateway else None

    def ask(self, question: Callable[[Gateway], T]) -> T:
        """What comes of `question`, when it is its turn."""
        with self._turn:
            try:
                return self._living().ask(question)
            except ConnectionError as error:
                self.end(f"ScienceWorld's Java process is lost: {error}")
                raise EnvironmentFault(self._lost) from error

    def aside(self, question: Callable[[Any], T]) -> T:
        """What comes of a `question` to a simulator that is nobody's, and keeps nothing from one to the next."""

        def asked(gateway: Gateway) -> T:
            if self._spare is None:
                self._spare = gateway.interface()
            return question(self._spare)

        return self.ask(asked)

    def _living(self) -> Gateway:
        if self._gateway is None and not self._lost:
            with needed("ScienceWorld", "scienceworld"):
                from agentfly.environments.scienceworld.gateway import Gateway
            self._gateway = Gateway()
            if self._lost:  # ended while it was being started
                self._gateway.close()
        self.check()
        assert self._gateway is not None
        return self._gateway

    def check(self) -> None:
        """Raise if it can no longer be used."""
        if self._gateway is not None and not self._lost and not self._gateway.alive:
            self.end(f"ScienceWorld's Java process has died (it said: {self._gateway.last_words})")
        if self._lost:
            raise EnvironmentFault(self._lost)

    @property
    def usable(self) -> bool:
        return not self._lost and (self._gateway is None or self._gateway.alive)

    def end(self, why: str) -> None:
        """End the process, whatever it is doing; whoever asks it something is told why."""
        self._lost = self._lost or why
        if self._gateway is not None:
            self._gateway.close()


_JVMS: list[JVM] = []
_LOCK = threading.Lock()


def reserve(most: float = math.inf) -> JVM:
    """A place in a process of which fewer than `most` are taken; in the fullest of these, so that others can end."""
    with _LOCK:
        _JVMS[:] = [each for each in _JVMS if each.usable]
        free = [each for each in _JVMS if each.places < most]
        jvm = max(free, key=lambda each: each.places, default=None)
        if jvm is None:
            jvm = JVM()
            _JVMS.append(jvm)
        jvm.places += 1
        return jvm


def release(jvm: JVM) -> None:
    """Give a place back. The process ends with the last one."""
    with _LOCK:
        jvm.places -= 1
        if jvm.places:
            return
        if jvm in _JVMS:
            _JVMS.remove(jvm)
    jvm.end("this ScienceWorld is closed")


def processes() -> list[int]:
    """The Java processes that there are now."""
    with _LOCK:
        return [each.pid for each in _JVMS if each.usable and each.pid is not None]
