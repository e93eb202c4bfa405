"""What was found of an environment: a finding for each property."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    """What became of a property."""

    PASS = "pass"
    FAIL = "FAIL"
    NOT_APPLICABLE = "n/a"


class Broken(Exception):
    """The property does not hold; says what was seen."""


class NotApplicable(Exception):
    """The environment cannot have this property; says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One property, and what was seen."""

    name: str
    verdict: Verdict
    seen: str

    def __str__(self) -> str:
        return f"{self.verdict.value:4}  {self.name:<20}  {self.seen}"


@dataclass(frozen=True, slots=True)
class Report:
    """Every property of one environment."""

    environment: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether no property fails."""
        return not self.failures

    @property
    def failures(self) -> dict[str, str]:
        """The properties that do not hold, and what was seen of each."""
        return {each.name: each.seen for each in self.findings if each.verdict is Verdict.FAIL}

    def __str__(self) -> str:
        return "\n".join([self.environment, *map(str, self.findings)])
