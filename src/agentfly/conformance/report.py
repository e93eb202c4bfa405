"""Results of a conformance check."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PropertyStatus(enum.Enum):
    """Outcome of checking one property."""

    PASS = "pass"
    FAIL = "FAIL"
    NOT_APPLICABLE = "n/a"


class PropertyFailed(Exception):
    """The property does not hold; the message says what was observed."""


class NotApplicable(Exception):
    """The property does not apply to this environment; the message says why."""


@dataclass(frozen=True, slots=True)
class PropertyResult:
    """Outcome of one property, with what was observed."""

    name: str
    status: PropertyStatus
    detail: str

    def __str__(self) -> str:
        return f"{self.status.value:4}  {self.name:<20}  {self.detail}"


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """Results of all properties of one environment."""

    environment: str
    results: tuple[PropertyResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no property failed."""
        return not self.failures

    @property
    def failures(self) -> dict[str, str]:
        """The failed properties, with what was observed."""
        return {each.name: each.detail for each in self.results if each.status is PropertyStatus.FAIL}

    def __str__(self) -> str:
        return "\n".join([self.environment, *map(str, self.results)])
