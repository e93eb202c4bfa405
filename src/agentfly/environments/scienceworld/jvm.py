"""The Java processes that instances share, and the calls of a simulator in one.

A process ends when its last slot is released, and when this program ends for any reason. After the death of one, the
next reservation starts another.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentfly.errors import DataError, require_extra

if TYPE_CHECKING:
    from agentfly.environments.scienceworld.java_process import JavaProcess

_PROCESSES: list[JavaProcess] = []
_LOCK = threading.Lock()


def reserve(max_slots: float = math.inf) -> JavaProcess:
    """Reserve a slot in the fullest process with fewer than `max_slots` taken, so that emptier ones can end."""
    with require_extra("ScienceWorld", "scienceworld"):
        from agentfly.environments.scienceworld.java_process import JavaProcess
    with _LOCK:
        _PROCESSES[:] = [process for process in _PROCESSES if process.usable]
        free = [process for process in _PROCESSES if process.slots < max_slots]
        if not free:
            free = [JavaProcess()]
            _PROCESSES.extend(free)
        fullest = max(free, key=lambda process: process.slots)
        fullest.slots += 1
        return fullest


def release(process: JavaProcess) -> None:
    """Release a slot. The process ends with its last one."""
    with _LOCK:
        process.slots -= 1
        if process.slots:
            return
        if process in _PROCESSES:
            _PROCESSES.remove(process)
    process.terminate("this ScienceWorld is closed")


def list_pids() -> list[int]:
    """Ids of the running Java processes."""
    with _LOCK:
        return [process.pid for process in _PROCESSES if process.usable and process.pid is not None]


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
