"""The reward of the treasure hunt."""

from agentfly import reward
from treasure_hunt.environment import TreasureHunt


@reward
def treasure_found(env: TreasureHunt) -> float:
    """1 if the treasure was found, else 0."""
    return float(env.found)
