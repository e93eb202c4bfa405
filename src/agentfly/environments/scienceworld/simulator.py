"""One simulator, in a Java process that it shares with others. Every call blocks until its turn has come and gone."""

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
    """What a simulator loads."""

    task: str
    """One of the thirty tasks, such as `boil`."""
    number: int
    """Which of its variations."""
    simplification: str = "easy"
    """Names with commas between them; empty: none."""

    def load(self, interface: Any, gold: bool = False) -> None:
        """Have a simulator begin it; with `gold`, after finding out how it is done, which takes up to seconds."""
        count = interface.getTaskMaxVariations(self.task)
        if not 0 <= self.number < count:
            raise DataError(f"{self.task} has variations 0 to {count - 1}; there is no {self.number}")
        if wrong := interface.load(self.task, self.number, self.simplification, gold):
            raise DataError(f"ScienceWorld cannot load {self}: {wrong}")


@dataclass(frozen=True, slots=True)
class Step:
    """What came of an action."""

    observation: str
    score: int
    """0 to 100; -100 where the task can no longer be done."""
    completed: bool


class Simulator:
    """A place for one world at a time."""

    def __init__(self, most: int) -> None:
        """`most`: how many may share a process."""
        self._jvm = jvm.reserve(most)
        self._interface: Any = None
        self._closed = False

    def open(self) -> None:
        """Make it ready; the first in a process starts that."""
        self._interface = self._jvm.ask(lambda gateway: gateway.interface())

    def check(self) -> None:
        """Raise if its process is lost."""
        self._jvm.check()

    def load(self, variation: Variation) -> None:
        """Begin anew."""
        self._ask(variation.load)

    def step(self, action: str) -> Step:
        """Do something."""

        def stepped(interface: Any) -> Step:
            observation = str(interface.step(action))
            return Step(observation, round(100 * interface.getScore()), bool(interface.getCompleted()))

        return self._ask(stepped)

    def forms(self) -> tuple[list[str], list[str]]:
        """The forms that actions have, and the things that there are to put into them."""
        return self._ask(lambda interface: (list(interface.getPossibleActions()), list(interface.getPossibleObjects())))

    def valid_actions(self) -> list[str]:
        """Every action that does something now: often a thousand."""
        listed = self._ask(lambda interface: str(interface.getValidActionObjectCombinationsJSON()))
        return sorted({each["action"] for each in json.loads(listed)["validActions"]})

    def gold_path(self, variation: Variation) -> list[str]:
        """Actions that do the task, from its beginning. The world of this simulator is left as it is."""

        def found(interface: Any) -> list[str]:
            variation.load(interface, gold=True)
            return list(interface.getGoldActionSequence())

        return self._jvm.aside(found)

    def close(self) -> None:
        """Give the place back."""
        if not self._closed:
            self._closed = True
            jvm.release(self._jvm)
            self._interface = None

    def _ask(self, question: Callable[[Any], T]) -> T:
        def asked(_: object) -> T:
            if self._interface is None:
                raise EnvironmentFault("this ScienceWorld is closed")
            return question(self._interface)

        return self._jvm.ask(asked)
