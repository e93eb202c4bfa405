"""Rollout servers that only sleep: how long a reply takes on a replica with a given decode curve.

A replica decodes all its rows together. With b rows each gets s(b) tokens per second; s falls with b. So a reply's time
depends on the other rows of its replica while it runs. The same computation gives the ideal schedule, without any
overhead, and the sleeping servers of `benchmarks.cluster`.

Nothing of verl or torch is imported: a server process stays small.
"""

import asyncio
import heapq
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

CURVES = {
    "3b": ((1, 342.0), (64, 250.0), (256, 144.0), (512, 93.0)),
    "7b": ((1, 149.0), (64, 109.0), (256, 63.0), (512, 40.0)),
}
"""Rows of a replica → tokens per second of each row. 3b: measured on an H200 (docs/lab/engine.md). 7b: computed from it
by the ratio of the weights, 2.3; not measured."""


class Turn(NamedTuple):
    sampled: int
    """Tokens of the reply."""
    observed: int
    """Tokens of the tool's answer; 0 after the last reply."""


Chain = Sequence[Turn]


class SharedDecoder:
    """The rows of one replica. Each decodes s(rows) tokens per second until its reply is complete.

    Every row gets the same rate, so one number describes the progress of all: the tokens that a row which is there from
    the beginning would have decoded. A reply that starts at progress p is complete at p + its tokens.
    """

    def __init__(self, curve: Sequence[tuple[int, float]], stretch: float = 1.0) -> None:
        """stretch: factor by which everything is slower."""
        self._rows, self._rates = zip(*curve, strict=True)
        self._stretch = stretch
        self._progress = 0.0
        self._time = 0.0
        self._replies: list[tuple[float, int, Any]] = []
        """Heap of (progress at which it is complete, number, what to return)."""
        self._numbers = itertools.count()

    @property
    def _rate(self) -> float:
        return float(np.interp(len(self._replies), self._rows, self._rates)) / self._stretch

    def _advance(self, now: float) -> None:
        if self._replies:
            self._progress += (now - self._time) * self._rate
        self._time = now

    def add(self, now: float, tokens: int, reply: Any) -> None:
        """Start a reply."""
        self._advance(now)
        heapq.heappush(self._replies, (self._progress + tokens, next(self._numbers), reply))

    def next_end(self) -> float | None:
        """When the next reply is complete if none is added before; None if there is none."""
        if not self._replies:
            return None
        return self._time + max(0.0, self._replies[0][0] - self._progress) / self._rate

    def pop_ended(self, now: float) -> list[Any]:
        """Remove the replies that are complete."""
        self._advance(now)
        ended = []
        while self._replies and self._replies[0][0] <= self._progress + 1e-6:
            ended.append(heapq.heappop(self._replies)[2])
        return ended


@dataclass(frozen=True)
class Ideal:
    """The schedule without overhead."""

    wall: float
    """Seconds until the last chain has ended."""
    turns: int
    longest: float
    """Seconds of the longest chain if it were alone: no number of replicas makes the wall shorter."""


def simulate_ideal(
    chains: Sequence[Chain], replicas: int, curve: Sequence[tuple[int, float]], tool_seconds: float
) -> Ideal:
    """All chains start at once and stay on their replica, split evenly; a tool takes `tool_seconds`."""
    wall = 0.0
    for replica in range(replicas):
        replica_chains = chains[replica::replicas]
        decoder = SharedDecoder(curve)
        asking = [(0.0, number, 0) for number in range(len(replica_chains))]  # time, chain, turn
        while asking or decoder.next_end() is not None:
            end = decoder.next_end()
            if end is None or (asking and asking[0][0] < end):
                now, number, turn = heapq.heappop(asking)
                decoder.add(now, replica_chains[number][turn].sampled, (number, turn))
                continue
            for number, turn in decoder.pop_ended(end):
                if turn + 1 < len(replica_chains[number]):
                    heapq.heappush(asking, (end + tool_seconds, number, turn + 1))
            wall = max(wall, end)
    alone = [sum(turn.sampled for turn in chain) / curve[0][1] + tool_seconds * (len(chain) - 1) for chain in chains]
    return Ideal(wall, sum(map(len, chains)), max(alone))


@dataclass
class Reply:
    """What verl's client reads of a server's answer."""

    token_ids: list[int]
    log_probs: list[float]
    extra_fields: dict[str, Any]
    stop_reason: str = "completed"


class ServerHost:
    """A process with some replicas; a Ray actor. A chain's replies have the recorded lengths of that chain."""

    def __init__(
        self,
        chains: Sequence[Chain],
        replicas: int,
        *,
        curve: Sequence[tuple[int, float]],
        stretch: float,
        tool_seconds: float,
        tokenizer: str,
        num_chains: int,
    ) -> None:
        """num_chains: chains per group; request ids are `gPOSITION/…/CHAIN`. tokenizer: a tokenizer.json."""
        from tokenizers import Tokenizer

        self._chains = chains
        self._num_chains = num_chains
        self._milliseconds = round(1000 * stretch * tool_seconds)
        self._decoders = [SharedDecoder(curve, stretch) for _ in range(replicas)]
        self._timers: list[asyncio.TimerHandle | None] = [None] * replicas
        self._encode = Tokenizer.from_file(tokenizer).encode
        self._filler = self._encode(" a").ids
        (self._end_of_turn,) = self._encode("<|im_end|>").ids

    async def ping(self) -> None:
        """Return when the process has started."""

    async def generate(self, replica: int, request_id: str, prompt_ids: list[int], **_: Any) -> Reply:
        """Sleep for as long as the reply takes, and return a tool call of its length, or the last answer."""
        group, chain = map(int, re.findall(r"\d+", request_id.partition("/")[0] + "/" + request_id.rpartition("/")[2]))
        turns = self._chains[group * self._num_chains + chain]
        number = (prompt_ids.count(self._end_of_turn) - 2) // 2  # system and user, then a reply and an answer per turn
        turn = turns[number]
        text = "done<|im_end|>"
        if number + 1 < len(turns):
            arguments = f'{{"words": {turn.observed}, "milliseconds": {self._milliseconds}}}'
            text = f'<tool_call>\n{{"name": "act", "arguments": {arguments}}}\n</tool_call><|im_end|>'
        ids = self._encode(text).ids
        ids = self._filler * max(0, turn.sampled - len(ids)) + ids
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._decoders[replica].add(loop.time(), turn.sampled, ended)
        self._wait(replica, loop)
        await ended
        return Reply(ids, [-0.5] * len(ids), {"global_steps": 0})

    def _wait(self, replica: int, loop: asyncio.AbstractEventLoop) -> None:
        """Set the timer of a replica to its next complete reply."""
        if timer := self._timers[replica]:
            timer.cancel()
        end = self._decoders[replica].next_end()
        self._timers[replica] = None if end is None else loop.call_at(end, self._finish, replica, loop)

    def _finish(self, replica: int, loop: asyncio.AbstractEventLoop) -> None:
        for ended in self._decoders[replica].pop_ended(loop.time()):
            if not ended.done():  # else its request was cancelled
                ended.set_result(None)
        self._wait(replica, loop)


class ReplicaHandle:
    """One replica of a host, with the part of an actor handle that verl's client uses: `generate.remote(…)`."""

    def __init__(self, host: Any, replica: int) -> None:
        self.host = host
        self.replica = replica

    @property
    def generate(self) -> "ReplicaHandle":
        return self

    def remote(self, **request: Any) -> Any:
        return self.host.generate.remote(self.replica, **request)
