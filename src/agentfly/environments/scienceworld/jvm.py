"""The simulators, and the Java processes that several of them share. Calls block until the process has answered.

The simulator is not thread-safe: two concurrent calls interfere even between different simulators, so the calls of one
process are serialized by a lock. When a process dies or hangs, all its simulators raise EnvironmentFault and the next
reservation starts a new process. A process ends when its last slot is released, and when this program ends for any
reason.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from agentfly.errors import DataError, EnvironmentFault, require_extra

if TYPE_CHECKING:
    from agentfly.environments.scienceworld.java_process import JavaProcess

T = TypeVar("T")


class JVM:
    """A Java process, started by the first call. All calls block and are thread-safe."""

    def __init__(self) -> None:
        self.slots = 0
        """Number of reserved slots."""
        self._lock = threading.Lock()
        self._java: JavaProcess | None = None
        self._scratch: Any = None
        self._failure = ""
        """Why the process is unusable. Empty while it is usable."""

    @property
    def pid(self) -> int | None:
        """Process id. None before the first call."""
        return self._java.pid if self._java else None

    @property
    def usable(self) -> bool:
        return not self._failure and (self._java is None or self._java.alive)

    def call(self, function: Callable[[JavaProcess], T]) -> T:
        """Run `function` with the Java process, one call at a time; start the process on the first one."""
        with self._lock:
            if self._java is None and not self._failure:
                with require_extra("ScienceWorld", "scienceworld"):
                    from agentfly.environments.scienceworld.java_process import JavaProcess
                self._java = JavaProcess()
                if self._failure:  # terminated by another thread during the start
                    self._java.close()
            self.check()
            assert self._java is not None
            try:
                return self._java.call(function)
            except ConnectionError as error:
                self.terminate(f"ScienceWorld's Java process is lost: {error}")
                raise EnvironmentFault(self._failure) from error

    def call_scratch(self, function: Callable[[Any], T]) -> T:
        """Run `function` with a spare simulator that belongs to no environment; its state is not kept between calls."""

        def run(java: JavaProcess) -> T:
            if self._scratch is None:
                self._scratch = java.create_simulator()
            return function(self._scratch)

        return self.call(run)

    def check(self) -> None:
        """Raise EnvironmentFault if the process is unusable."""
        if self._java is not None and not self._failure and not self._java.alive:
            self.terminate(f"ScienceWorld's Java process has died (last output: {self._java.last_output})")
        if self._failure:
            raise EnvironmentFault(self._failure)

    def terminate(self, reason: str) -> None:
        """Kill the process; running and later calls raise EnvironmentFault with the first `reason` given."""
        self._failure = self._failure or reason
        if self._java is not None:
            self._java.close()


_JVMS: list[JVM] = []
_LOCK = threading.Lock()


def reserve(max_slots: float = math.inf) -> JVM:
    """Reserve a slot in the fullest process with fewer than `max_slots` taken, so that emptier ones can end."""
    with _LOCK:
        _JVMS[:] = [jvm for jvm in _JVMS if jvm.usable]
        free = [jvm for jvm in _JVMS if jvm.slots < max_slots]
        jvm = max(free, key=lambda jvm: jvm.slots, default=None)
        if jvm is None:
            jvm = JVM()
            _JVMS.append(jvm)
        jvm.slots += 1
        return jvm


def release(jvm: JVM) -> None:
    """Release a slot. The process ends with its last one."""
    with _LOCK:
        jvm.slots -= 1
        if jvm.slots:
            return
        if jvm in _JVMS:
            _JVMS.remove(jvm)
    jvm.terminate("this ScienceWorld is closed")


def list_pids() -> list[int]:
    """Ids of the running Java processes."""
    with _LOCK:
        return [jvm.pid for jvm in _JVMS if jvm.usable and jvm.pid is not None]


@dataclass(frozen=True, slots=True)
class Variation:
    """A variation of a task, as the simulator loads it."""

    task: str
    """One of the thirty task names, such as `boil`."""
    number: int
    """Index of the variation."""
    simplification: str = "easy"
    """Comma-separated simplifications. Empty for none."""

    def load(self, interface: Any, gold: bool = False) -> None:
        """Load it into a simulator; with `gold`, compute the solution first, which takes up to some seconds."""
        count = interface.getTaskMaxVariations(self.task)
        if not 0 <= self.number < count:
            raise DataError(f"{self.task} has variations 0 to {count - 1}; there is no {self.number}")
        if error := interface.load(self.task, self.number, self.simplification, gold):
            raise DataError(f"ScienceWorld cannot load {self}: {error}")

    def find_gold_path(self, interface: Any) -> list[str]:
        """Actions that solve it from its start. Changes the state of the simulator."""
        self.load(interface, gold=True)
        return list(interface.getGoldActionSequence())


def take_step(interface: Any, action: str) -> tuple[str, int, bool]:
    """Carry out an action: the observation, the score (0 to 100; -100 if the task has failed for good), and whether
    the task is completed."""
    observation = str(interface.step(action))
    return observation, round(100 * interface.getScore()), bool(interface.getCompleted())
