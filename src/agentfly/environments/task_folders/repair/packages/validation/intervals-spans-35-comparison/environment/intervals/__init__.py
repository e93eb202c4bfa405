"""Sets of whole numbers, kept as spans."""

from intervals.spans import IntervalSet

__all__ = ["IntervalSet"]
