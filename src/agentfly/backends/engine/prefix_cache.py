"""Prefix cache: a radix tree over token ids whose nodes own the slots of the tokens' keys and values.

Looking a prompt up takes time proportional to its length, however much is cached. A running request locks the path to
its last cached token; any number of requests may continue from one node without copying it (`fork`). A chunk of a
prompt is inserted when it is scheduled, before it is computed: every layer writes all keys of a batch before it
attends, so other requests of the same batch can already read them. Unlocked leaves are evicted least recently used
first; a weight update drops everything.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from agentfly.backends.base import Tokens
from agentfly.backends.engine.kv_cache import NO_SLOTS, KVCache, Slots


class RadixNode:
    """An edge of the tree: some tokens that follow the parent's, and the slots of their keys and values."""

    __slots__ = ("children", "last_used", "locks", "parent", "slots", "step", "tokens")

    def __init__(self, tokens: Tokens, slots: Slots, parent: RadixNode | None) -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.children: dict[int, RadixNode] = {}
        """By their first token."""
        self.locks = 0
        """Running requests whose path ends here or below."""
        self.last_used = 0
        self.step = 0
        """The scheduler's step that computes the last tokens."""


class PrefixCache:
    """The tree, and the slots it owns."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self._clock = itertools.count(1)
        self.clear_tree()

    def clear_tree(self) -> None:
        """Forget all nodes without releasing their slots."""
        self.root = RadixNode(np.empty(0, np.int32), NO_SLOTS, None)
        self.evictable = 0
        """Slots of unlocked nodes."""
        self._leaves: list[tuple[int, int, RadixNode]] = []
        """Heap of (last use, id, node): candidates for eviction. Entries may be out of date."""

    def clear(self) -> None:
        """Release everything. No node may be locked."""
        for node in self.nodes():
            self._kv_cache.release(node.slots)
        self.clear_tree()

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes except the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def match(self, tokens: Tokens, node: RadixNode | None = None) -> tuple[RadixNode, list[Slots], int]:
        """Walk down from `node` (default: the root) along `tokens`.

        Returns the node at which the longest cached prefix ends (a node is split where it ends), the slots
        of the nodes passed and how many tokens they are.
        """
        node = node or self.root
        slots: list[Slots] = []
        done = 0
        tokens = tokens.astype(np.int32, copy=False)
        data = tokens.tobytes()  # comparing bytes takes a tenth of the time of comparing small arrays
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                break
            # The tokens leave this edge in its middle: both continuations then share the upper part.
            if not data.startswith(child.tokens.tobytes(), done * tokens.itemsize):
                child = self._split(child, _common_length(child.tokens, tokens[done:]))
            node = child
            slots.append(node.slots)
            done += len(node.tokens)
        return node, slots, done

    def fork(self, tokens: Tokens) -> tuple[RadixNode, Slots]:
        """Lock the longest cached prefix of `tokens` for one more continuation of it.

        Returns its last node, which the caller unlocks when it is done, and the slots of the prefix: they are shared
        with all other continuations, not copied.
        """
        node, slots, _ = self.match(tokens)
        self.lock(node)
        return node, np.concatenate(slots) if slots else NO_SLOTS

    def extend(self, node: RadixNode, tokens: Tokens, slots: Slots) -> RadixNode | None:
        """Add the tokens after a node that the caller has locked; the slots then belong to the tree.

        Returns the node that ends with the last of them, and moves the caller's lock there. None if the tree has
        another continuation with the same first token: nothing is added, and the slots stay the caller's.
        """
        if node is not self.root and node.locks == 1 and not node.children:  # only the caller is here
            node.tokens = np.concatenate([node.tokens, tokens])
            node.slots = np.concatenate([node.slots, slots])
            return node
        if int(tokens[0]) in node.children:
            return None
        # Copies: the arguments are views of the request's row, which the next request in it overwrites.
        child = RadixNode(tokens.copy(), slots.copy(), node)
        child.locks = 1
        node.children[int(tokens[0])] = child
        return child

    def insert(self, node: RadixNode, tokens: Tokens, slots: Slots) -> None:
        """Add the tokens after a node that the caller has locked, and remove that lock.

        The slots then belong to the tree. Tokens that it has already keep one set of slots, the other is released: the
        newer ones are kept where no running request reads the old ones, since they lie together with what follows.
        """
        while len(tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                extended = self.extend(node, tokens, slots)
                assert extended is not None
                node = extended
                break
            same = _common_length(child.tokens, tokens)
            if same < len(child.tokens):
                child = self._split(child, same)
            self.lock(child)
            self.unlock(node)
            node = child
            if node.locks == 1:
                self._kv_cache.release(node.slots)
                node.slots = slots[:same].copy()
            else:
                self._kv_cache.release(slots[:same])
            tokens = tokens[same:]
            slots = slots[same:]
        self.unlock(node)

    def lock(self, node: RadixNode) -> None:
        """Keep a node and all before it from being evicted."""
        at: RadixNode | None = node
        while at is not None and at.parent is not None:
            if at.locks == 0:
                self.evictable -= len(at.tokens)
            at.locks += 1
            at = at.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock`."""
        now = next(self._clock)
        at: RadixNode | None = node
        while at is not None and at.parent is not None:
            at.locks -= 1
            at.last_used = now
            if at.locks == 0:
                self.evictable += len(at.tokens)
                self._offer(at)
            at = at.parent

    def evict(self, count: int) -> None:
        """Release at least `count` slots of unlocked nodes, or all of them: the least recently used leaves first."""
        while count > 0 and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            # Out of date: in use again, no leaf any more, gone, or used later (a newer entry has that time).
            if node.locks or node.children or parent is None or node.last_used != last_used:
                continue
            gone = min(count, len(node.tokens))
            self._kv_cache.release(node.slots[len(node.slots) - gone :])
            self.evictable -= gone
            count -= gone
            if gone < len(node.tokens):  # from the end: what stays must begin right behind the parent's last token
                node.tokens = node.tokens[:-gone]
                node.slots = node.slots[:-gone]
                self._offer(node)
            else:
                del parent.children[int(node.tokens[0])]
                node.parent = None
                self._offer(parent)

    def _offer(self, node: RadixNode) -> None:
        """Make an unlocked leaf a candidate for eviction."""
        if not node.locks and not node.children and node.parent is not None:
            heapq.heappush(self._leaves, (node.last_used, id(node), node))

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut a node in two. Returns the upper part, which is new: requests that hold the node end where they did."""
        parent = node.parent
        assert parent is not None
        upper = RadixNode(node.tokens[:at], node.slots[:at], parent)
        upper.locks = node.locks  # requests below hold the whole path: unlocking walks through the new node too
        upper.last_used = node.last_used
        upper.step = node.step
        upper.children[int(node.tokens[at])] = node
        parent.children[int(node.tokens[0])] = upper
        node.parent = upper
        node.tokens = node.tokens[at:]
        node.slots = node.slots[at:]
        return upper


def _common_length(one: Tokens, other: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(one), len(other))
    same = one[:length] == other[:length]
    return length if same.all() else int(same.argmin())
