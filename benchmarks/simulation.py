"""Event simulation of chains, backend slots and a queue, without overhead.

A chain alternates between generation and tools. Generation occupies one of the backend's slots; a tool occupies none.
A duration depends on its chain and turn only, not on the order of events, so every policy and every real run on the
same `Draws` has the same work.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import count


@dataclass(frozen=True)
class Draws:
    """Lognormal durations of every generation and every tool call of a workload."""

    seed: int = 0
    chains: int = 256
    turns: int = 5
    slots: int = 64
    generation_mean: float = 0.2
    generation_sigma: float = 1.0
    tool_mean: float = 0.1
    tool_sigma: float = 1.5
    chain_sigma: float = 0.0
    """Above 0, the generations of a chain are all multiplied by one lognormal factor with this sigma."""

    @cached_property
    def generation(self) -> list[list[float]]:
        """Seconds by chain and turn."""
        drawn = self._draw("generation", self.turns, self.generation_mean, self.generation_sigma)
        pace = self._draw("pace", 1, 1.0, self.chain_sigma)
        return [[seconds * pace[chain][0] for seconds in drawn[chain]] for chain in range(self.chains)]

    @cached_property
    def tool(self) -> list[list[float]]:
        """Seconds by chain and turn; the last turn is an answer without a call."""
        return self._draw("tool", self.turns - 1, self.tool_mean, self.tool_sigma)

    def _draw(self, kind: str, turns: int, mean: float, sigma: float) -> list[list[float]]:
        mu = math.log(mean) - sigma**2 / 2
        stream = random.Random(f"{self.seed} {kind}")
        return [[stream.lognormvariate(mu, sigma) for _ in range(turns)] for _ in range(self.chains)]

    @property
    def bound(self) -> float:
        """Lower bound for every schedule: the longest chain, and the total generation time divided by the slots."""
        paths = (sum(self.generation[c]) + sum(self.tool[c]) for c in range(self.chains))
        return max(max(paths), sum(map(sum, self.generation)) / self.slots)


@dataclass
class Chain:
    """The state of a chain that a scheduler may use."""

    number: int
    turns_done: int = 0
    generated: float = 0.0
    """Seconds of generation it has received."""
    own_time: float = 0.0
    """Seconds of generation and tools, without queueing."""
    remaining: float = 0.0
    """Remaining seconds of generation and tools; known to an oracle only."""


Policy = Callable[[Chain, float, random.Random], tuple[float, ...]]
"""Maps a chain and the time it began to wait to its priority: the smallest first, ties by arrival."""

POLICIES: dict[str, Policy] = {
    "first come, first served": lambda chain, now, dice: (now,),
    "fewest turns done": lambda chain, now, dice: (chain.turns_done, now),
    "most turns done": lambda chain, now, dice: (-chain.turns_done, now),
    "least generation received": lambda chain, now, dice: (chain.generated, now),
    "most generation received": lambda chain, now, dice: (-chain.generated, now),
    "least own time": lambda chain, now, dice: (chain.own_time, now),
    "most own time": lambda chain, now, dice: (-chain.own_time, now),
    "fewest turns, then most own time": lambda chain, now, dice: (chain.turns_done, -chain.own_time),
    "fewest turns, then least own time": lambda chain, now, dice: (chain.turns_done, chain.own_time),
    "lowest chain number": lambda chain, now, dice: (chain.number,),
    "last come, first served": lambda chain, now, dice: (-now,),
    "random": lambda chain, now, dice: (dice.random(),),
    "oracle: longest remaining path": lambda chain, now, dice: (-chain.remaining,),
}


@dataclass(frozen=True)
class Schedule:
    """When each chain of a workload ended."""

    completions: list[float]

    @property
    def wall(self) -> float:
        return max(self.completions)

    @property
    def mean_completion(self) -> float:
        return sum(self.completions) / len(self.completions)


def simulate(draws: Draws, policy: Policy) -> Schedule:
    """Simulate independent chains; `policy` orders those that wait for a slot."""
    chains = [Chain(n, remaining=sum(draws.generation[n]) + sum(draws.tool[n])) for n in range(draws.chains)]
    completions = [0.0] * draws.chains
    dice, arrivals, free = random.Random(draws.seed), count(), draws.slots
    events = [(0.0, n, "asks") for n in range(draws.chains)]
    waiting: list[tuple[tuple[float, ...], int, int]] = []
    while events:
        now, n, what = heapq.heappop(events)
        chain = chains[n]
        if what == "asks":
            heapq.heappush(waiting, (policy(chain, now, dice), next(arrivals), n))
        else:
            free += 1
            chain.turns_done += 1
            if chain.turns_done == draws.turns:
                completions[n] = now
            else:
                pause = draws.tool[n][chain.turns_done - 1]
                chain.own_time += pause
                chain.remaining -= pause
                heapq.heappush(events, (now + pause, n, "asks"))
        # All chains that ask at this time are queued before one of them is served.
        while free and waiting and not (events and events[0][0] == now):
            free -= 1
            chain = chains[heapq.heappop(waiting)[2]]
            work = draws.generation[chain.number][chain.turns_done]
            chain.generated += work
            chain.own_time += work
            chain.remaining -= work
            heapq.heappush(events, (now + work, chain.number, "generated"))
    return Schedule(completions)


def lock_step(draws: Draws, *, tools_in_parallel: bool) -> Schedule:
    """Simulate batched trainers: all chains generate one turn, then all call their tools, and so on."""
    now = 0.0
    for turn in range(draws.turns):
        slots = [now] * draws.slots
        for chain in range(draws.chains):
            heapq.heapreplace(slots, slots[0] + draws.generation[chain][turn])
        now = max(slots)
        if turn < draws.turns - 1:
            pauses = [draws.tool[chain][turn] for chain in range(draws.chains)]
            now += max(pauses) if tools_in_parallel else sum(pauses)
    return Schedule([now] * draws.chains)
