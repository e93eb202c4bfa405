"""One simulator in a shared Java process. Every call blocks until the process is free and has answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from agentfly.environments.scienceworld import jvm
from agentfly.errors import DataError, EnvironmentFault

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variation:
    """A variation of a task, as the simulator loads it."""

    task: str
    """One of the thirty task names, such as `boil`."""
    number: int
    """Index of the variation."""
    simplification: str = "easy"
    """Comma-separated simplifications; empty for none."""

    def load(self, interface: Any, gold: bool = False) -> None:
        """Load it into a simulator; with `gold`, compute the solution first, which takes up to some seconds."""
        count = interface.getTaskMaxVariations(self.task)
        if not 0 <= self.number < count:
            raise DataError(f"{self.task} has variations 0 to {count - 1}; there is no {self.number}")
        if wrong := interface.load(self.task, self.number, self.simplification, gold):
            raise DataError(f"ScienceWorld cannot load {self}: {wrong}")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of an action."""

    observation: str
    score: int
    """0 to 100; -100 if the task has failed for good."""
    completed: bool


class Simulator:
    """A slot in a Java process with one simulator."""

    def __init__(self, max_slots: int) -> None:
        """max_slots: how many simulators may share a process."""
        self._jvm = jvm.reserve(max_slots)
        self._interface: Any = None
        self._closed = False

    def open(self) -> None:
        """Create the simulator; the first one of a process starts the process."""
        self._interface = self._jvm.call(lambda gateway: gateway.create_simulator())

    def check(self) -> None:
        """Raise EnvironmentFault if the process is unusable."""
        self._jvm.check()

    def load(self, variation: Variation) -> None:
        """Load a variation from its start."""
        self._call(variation.load)

    def step(self, action: str) -> StepResult:
        """Carry out an action."""

        def run(interface: Any) -> StepResult:
            observation = str(interface.step(action))
            return StepResult(observation, round(100 * interface.getScore()), bool(interface.getCompleted()))

        return self._call(run)

    def list_templates(self) -> tuple[list[str], list[str]]:
        """The action templates, and the objects that can replace `OBJ` in them."""
        return self._call(
            lambda interface: (list(interface.getPossibleActions()), list(interface.getPossibleObjects()))
        )

    def list_valid_actions(self) -> list[str]:
        """All actions that are valid now, often a thousand."""
        listed = self._call(lambda interface: str(interface.getValidActionObjectCombinationsJSON()))
        return sorted({each["action"] for each in json.loads(listed)["validActions"]})

    def find_gold_path(self, variation: Variation) -> list[str]:
        """Actions that solve the variation from its start. Does not touch the state of this simulator."""

        def run(interface: Any) -> list[str]:
            variation.load(interface, gold=True)
            return list(interface.getGoldActionSequence())

        return self._jvm.call_scratch(run)

    def close(self) -> None:
        """Release the slot. Idempotent."""
        if not self._closed:
            self._closed = True
            jvm.release(self._jvm)
            self._interface = None

    def _call(self, function: Callable[[Any], T]) -> T:
        def run(_: object) -> T:
            if self._interface is None:
                raise EnvironmentFault("this ScienceWorld is closed")
            return function(self._interface)

        return self._jvm.call(run)
