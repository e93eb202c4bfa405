"""How CPU time grows with the size of an input."""

import math
from collections.abc import Callable

ROUNDS = 10
FLOOR = 0.05
"""Seconds of CPU time below which a ratio is noise."""


def grows_at_most(cpu_seconds: Callable[[int], float], small: int, large: int, ratio: float) -> bool:
    """Whether the CPU time of `large` is at most `ratio` times that of `small`, or below the floor.

    Other processes, garbage collection and page faults only add to a measurement: each time is the least of three
    rounds, and of up to ten while the ratio is too large.
    """
    least = {small: math.inf, large: math.inf}
    for number in range(ROUNDS):
        for size in least:
            least[size] = min(least[size], cpu_seconds(size))
        if number >= 2 and least[large] <= max(FLOOR, ratio * least[small]):
            return True
    return False
