"""Means over tasks, and how far off they may be.

The chains of one task resemble one another, so tasks are what is counted: every figure is the mean of one number a
task, and its 95 % interval comes from how those numbers differ. A share (numbers from 0 to 1) gets Wilson's interval,
which neither leaves that range nor shrinks to nothing where all tasks agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pvariance, variance

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks, with the interval that holds the true one 95 times in 100."""

    mean: float
    """NaN where there was nothing to take a mean of."""
    low: float
    """NaN where one number tells nothing about the others."""
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Estimate:
        """Of one number a task: the normal interval of a mean."""
        if not numbers:
            return cls(math.nan, math.nan, math.nan)
        mean = fmean(numbers)
        half = _Z * math.sqrt(variance(numbers, mean) / len(numbers)) if len(numbers) > 1 else math.nan
        return cls(mean, mean - half, mean + half)

    @classmethod
    def of_share(cls, shares: Sequence[float], chains: int) -> Estimate:
        """Of one share a task: Wilson's interval, for as many yes-or-no answers as would spread like these shares.

        Those are one a task where the `chains` of a task always agree, and one a chain at most.
        """
        if not shares:
            return cls.of(shares)
        mean, count = fmean(shares), float(len(shares))
        if (spread := pvariance(shares, mean)) > 0:
            count *= min(mean * (1 - mean) / spread, chains)
        middle = (mean + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
        half = _Z * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
        return cls(mean, max(0.0, min(middle - half, mean)), min(1.0, max(middle + half, mean)))

    @property
    def shown(self) -> str:
        return "–" if math.isnan(self.mean) else f"{self.mean:.3f}"

    @property
    def interval(self) -> str:
        return "" if math.isnan(self.low) else f"{self.low:.3f} – {self.high:.3f}"

    def __str__(self) -> str:
        return f"{self.shown} ({self.interval})" if self.interval else self.shown

    def to_json(self) -> list[float | None]:
        """Mean, low and high; what is no number is null."""
        return [None if math.isnan(each) else each for each in (self.mean, self.low, self.high)]


def pass_at(k: int, chains: int, successes: int) -> float:
    """The share of all ways to pick `k` of a task's chains that hold a success: what `k` tries are worth, unbiased."""
    return 1.0 - math.comb(chains - successes, k) / math.comb(chains, k)
