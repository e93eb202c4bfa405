"""What is in the arena and may be used again: the tokens of turns that ended, until the room or the weights are gone.

The next turn of a chain begins with all that the last one showed and said, so only what is new is computed. The chains
of a group begin with the same prompt, so the first one computes it and the others copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentfly.backends.base import Tokens
from agentfly.backends.engine.kv_cache import Block, KVCache
from agentfly.backends.engine.request import EngineRequest

HEAD = 16
"""Tokens that two sequences must have in common to be looked at."""
LOOKED_AT = 32
"""Most sequences that a prompt is compared with."""


@dataclass(eq=False, slots=True)
class CachedPrefix:
    """The computed tokens of a turn that ended."""

    tokens: Tokens
    stretch: Block
    chain: str


class PrefixCache:
    """Turns that ended, by how they begin."""

    def __init__(self, arena: KVCache) -> None:
        self._arena = arena
        self._kept: dict[bytes, list[CachedPrefix]] = {}
        self._by_use: dict[CachedPrefix, None] = {}
        """The same, what was used last at the end."""

    def insert(self, job: EngineRequest) -> None:
        """Put a job's computed tokens on the shelf; from now on its stretch is the shelf's."""
        assert job.stretch is not None
        tokens = np.asarray(job.tokens[: job.cached], np.int32)
        if len(tokens) < HEAD:
            self._arena.give(job.stretch)
        else:
            kept = CachedPrefix(tokens, job.stretch, job.request.chain)
            self._kept.setdefault(_head(tokens), []).append(kept)
            self._by_use[kept] = None
        job.stretch = None

    @property
    def room(self) -> int:
        """Places that could be had by dropping everything."""
        return sum(kept.stretch.room for kept in self._by_use)

    def longest_match(self, job: EngineRequest) -> tuple[CachedPrefix | None, int]:
        """What has most in common with a prompt, and how many tokens; the prompt's last token is always computed.

        Every chain of a run may begin with the same words: a chain's own turns are looked at first, then the latest.
        """
        best, most = None, 0
        there = self._kept.get(_head(job.prompt), [])
        own = [kept for kept in there if kept.chain == job.request.chain]
        for kept in (*own[-1:], *reversed(there[-LOOKED_AT:])):
            same = common_prefix_length(kept.tokens, job.prompt[:-1])
            if same > most:
                best, most = kept, same
        if best is not None:
            self._by_use[best] = self._by_use.pop(best)
        return best, most

    def pop(self, kept: CachedPrefix) -> Block:
        """Take something off the shelf; its stretch is the caller's."""
        head = _head(kept.tokens)
        del self._by_use[kept]
        self._kept[head].remove(kept)
        if not self._kept[head]:
            del self._kept[head]
        return kept.stretch

    def evict_lru(self, but: CachedPrefix | None = None) -> bool:
        """Free the room of what has not been used for longest; False where there is nothing to free."""
        oldest = next((kept for kept in self._by_use if kept is not but), None)
        if oldest is None:
            return False
        self._arena.give(self.pop(oldest))
        return True

    def clear(self) -> None:
        """Forget everything: the weights it was computed with are gone."""
        while self.evict_lru():
            pass


def common_prefix_length(one: Tokens, other: Tokens) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def longest_running_match(job: EngineRequest, jobs: Sequence[EngineRequest]) -> tuple[EngineRequest | None, int]:
    """The job of those under way whose prompt begins most like this one's, and how many tokens they have in common."""
    best, most = None, 0
    for other in reversed(jobs[-LOOKED_AT:]):  # the chains of a group come one after the other
        same = common_prefix_length(other.prompt, job.prompt[:-1])
        if same > most:
            best, most = other, same
    return (best, most) if most >= HEAD else (None, 0)


def _head(tokens: Tokens) -> bytes:
    return tokens[:HEAD].tobytes()
