"""Which tokens of which jobs go into the next forward pass, and where their keys and values lie.

Jobs join and leave at any step. Every job that is being sampled adds one token to a step; what is left of the step's
budget goes to prompts, in chunks. Where the arena is full, what is on the shelf goes first, then the youngest job goes
back to the queue, with what it has sampled.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from agentfly.backends.engine.kv_cache import Block, KVCache
from agentfly.backends.engine.prefix_cache import CachedPrefix, PrefixCache, longest_running_match
from agentfly.backends.engine.request import EngineRequest

RESERVE = 256
"""Tokens of room that a job gets ahead of what it has."""
WORTH_WAITING = 32
"""Tokens of prompt that another job is about to compute, for which a job waits to copy them."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens of one job that are computed in a step: `count` of them behind those that are cached."""

    job: EngineRequest
    count: int

    @property
    def samples(self) -> bool:
        """Whether the next token can be drawn after it."""
        return self.job.cached + self.count == len(self.job.tokens)


class Scheduler:
    """The queue, the jobs that run, and the room they have."""

    def __init__(self, arena: KVCache, rows: int, tokens: int, reuse: bool = True) -> None:
        """`rows`: most jobs at once; `tokens`: most tokens in one step; `reuse`: whether what was computed can be."""
        self.arena, self.shelf, self._reuse = arena, PrefixCache(arena), reuse
        self._rows, self._tokens = rows, tokens
        self.waiting: list[EngineRequest] = []
        """The least advanced chain first, and among equals whoever came first."""
        self.running: list[EngineRequest] = []

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, job: EngineRequest) -> None:
        """Queue a job."""
        bisect.insort(self.waiting, job, key=_order)

    def remove(self, job: EngineRequest) -> None:
        """A job is over: what was computed of it is kept for the next turn."""
        if job in self.running:
            self.running.remove(job)
            self.shelf.insert(job)
            if not self._reuse:
                self.shelf.clear()
        elif job in self.waiting:
            self.waiting.remove(job)

    def clear(self) -> None:
        """Let go of every job."""
        for job in [*self.running, *self.waiting]:
            self.remove(job)
        self.shelf.clear()

    def forget(self) -> None:
        """The weights changed: nothing that was computed is right any more."""
        self.shelf.clear()
        for job in self.running:
            job.cached = 0

    def step(self) -> list[ScheduledChunk]:
        """The chunks of the next forward pass; empty where there is nothing to do."""
        for job in [each for each in self.running if each.cramped]:
            if job.stretch is not None and not self._has_room(job):
                self._suspend(job)
        self._admit()
        sampled = [job for job in self.running if job.cached == len(job.tokens) - 1]
        chunks = [
            ScheduledChunk(job, 1) for job in sorted(sampled, key=_place)
        ]  # in order of place, they are quicker to attend
        left = max(self._tokens - len(chunks), 1)
        for job in self.running:
            missing = len(job.tokens) - job.cached
            if missing > 1 and left > 0:
                chunks.append(ScheduledChunk(job, min(missing, left)))
                left -= chunks[-1].count
        return chunks

    def _admit(self) -> None:
        for job in list(self.waiting):
            if len(self.running) >= self._rows:
                break
            source: CachedPrefix | EngineRequest | None
            source, same = self.shelf.longest_match(job)
            ahead, shared = longest_running_match(job, self.running) if self._reuse else (None, 0)
            if ahead is not None and shared > same + WORTH_WAITING:
                if ahead.cached < shared:
                    continue  # what it shares with another is being computed: it waits, and then copies
                source, same = ahead, shared
            if not self._place(job, source, same) and (self.running or not self._place(job, None, 0)):
                break  # alone it has the whole arena, if need be without what it could have shared
            self.waiting.remove(job)
            self.running.append(job)

    def _place(self, job: EngineRequest, source: CachedPrefix | EngineRequest | None, same: int) -> bool:
        """Give a job room, with the tokens that it has in common with a source. False: there is no room."""
        room = self._reserved(job)
        if isinstance(source, CachedPrefix):
            if source.chain == job.request.chain or same == len(source.tokens):
                return self._take_over(job, source, same, room)
            stretch = self._room(room, source)
        else:
            stretch = self._room(room)
        if stretch is None:
            return False
        if source is not None and source.stretch is not None:
            self.arena.copy(source.stretch.start, stretch.start, same)
        job.stretch, job.cached = stretch, same
        return True

    def _take_over(self, job: EngineRequest, source: CachedPrefix, same: int, room: int) -> bool:
        """Go on where an ended turn lies, or move it to where there is room."""
        stretch = source.stretch
        if not self.arena.grow(stretch, room):
            moved = self._room(room, source)
            if moved is None:
                return False
            self.arena.copy(stretch.start, moved.start, same)
            self.arena.give(self.shelf.pop(source))
            stretch = moved
        else:
            self.shelf.pop(source)
        job.stretch, job.cached = stretch, same
        return True

    def _reserved(self, job: EngineRequest) -> int:
        """Places for what a job has and some of what it will sample."""
        last = len(job.prompt) + job.limit
        return min(len(job.tokens) + RESERVE, last)

    def _has_room(self, job: EngineRequest) -> bool:
        """Whether a running job has a place for all its tokens, if need be after it was moved."""
        assert job.stretch is not None
        room = min(self._reserved(job) + len(job.sampled), len(job.prompt) + job.limit)
        if self.arena.grow(job.stretch, room):
            return True
        while (moved := self._room(room)) is None:
            youngest = max(self.running, key=_order)
            if youngest is job:
                return False
            self._suspend(youngest)
        self.arena.copy(job.stretch.start, moved.start, job.cached)
        self.arena.give(job.stretch)
        job.stretch = moved
        return True

    def _suspend(self, job: EngineRequest) -> None:
        """Take a job's room away; it is computed anew when there is room again."""
        assert job.stretch is not None
        self.running.remove(job)
        self.arena.give(job.stretch)
        job.stretch, job.cached = None, 0
        self.add(job)

    def _room(self, room: int, but: CachedPrefix | None = None) -> Block | None:
        """A stretch, if need be after things went off the shelf; None where that is not enough."""
        if self.arena.free + self.shelf.room < room:
            return None
        while (stretch := self.arena.take(room)) is None:
            if not self.shelf.evict_lru(but):
                return None
        return stretch


def _place(job: EngineRequest) -> int:
    return job.stretch.start if job.stretch is not None else 0


def _order(job: EngineRequest) -> tuple[int, int]:
    return job.request.turn, job.number
