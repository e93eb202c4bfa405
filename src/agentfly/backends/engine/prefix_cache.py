"""Prefix cache: a radix tree over token ids whose nodes own the slots of the tokens' keys and values.

Looking a prompt up takes time proportional to its length, however much is cached. A running request locks the path to
its last cached token; any number of requests may continue from one node without copying it (`fork`). A chunk of a
prompt is inserted when it is scheduled, before it is computed: every layer writes all keys of a batch before it
attends, so other requests of the same batch can already read them. Unlocked leaves are evicted least recently used
first; a weight update drops everything.

With a `HostCache`, what is evicted stays in the tree and moves to host memory: a chain that waited for a slow tool gets
its prefix back by a copy instead of another forward pass. Nodes in host memory are always below those on the device.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from agentfly.backends.base import Tokens
from agentfly.backends.engine.host_cache import HostCache
from agentfly.backends.engine.kv_cache import NO_SLOTS, KVCache, Slots

_MIN_EVICTED = 1024
"""Slots that are evicted at once, at least, if they are copied to the host: smaller copies cost more than they move."""


class RadixNode:
    """An edge of the tree: some tokens that follow the parent's, and the slots of their keys and values."""

    __slots__ = ("children", "host_slots", "last_used", "locks", "parent", "slots", "step", "tokens")

    def __init__(self, tokens: Tokens, slots: Slots, parent: RadixNode | None) -> None:
        self.tokens = tokens
        self.slots = slots
        """Empty if the node is in host memory."""
        self.host_slots = NO_SLOTS
        """Empty if the node is on the device."""
        self.parent = parent
        self.children: dict[int, RadixNode] = {}
        """By their first token."""
        self.locks = 0
        """Running requests whose path ends here or below."""
        self.last_used = 0
        self.step = 0
        """The scheduler's step that computes the last tokens."""

    @property
    def on_host(self) -> bool:
        return len(self.host_slots) > 0

    @property
    def has_children_on_device(self) -> bool:
        return any(not child.on_host for child in self.children.values())


class PrefixCache:
    """The tree, and the slots it owns."""

    def __init__(self, kv_cache: KVCache, host_cache: HostCache | None = None) -> None:
        """host_cache: where evicted prefixes move. None: they are dropped."""
        self._kv_cache = kv_cache
        self._host_cache = host_cache
        self._clock = itertools.count(1)
        self.clear_tree()

    def clear_tree(self) -> None:
        """Forget all nodes without releasing their slots."""
        self.root = RadixNode(np.empty(0, np.int32), NO_SLOTS, None)
        self.evictable = 0
        """Slots of unlocked nodes."""
        self._leaves: list[tuple[int, int, RadixNode]] = []
        """Heap of (last use, id, node): candidates for eviction. Entries may be out of date."""
        self._host_leaves: list[tuple[int, int, RadixNode]] = []
        """The same, for being dropped from host memory."""

    def clear(self) -> None:
        """Release everything. No node may be locked."""
        for node in self.nodes():
            self._release_slots(node)
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
        of the nodes passed (-1 for tokens in host memory) and how many tokens they are.
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
            slots.append(np.full(len(node.tokens), -1, np.int32) if node.on_host else node.slots)
            done += len(node.tokens)
        return node, slots, done

    def fork(self, tokens: Tokens) -> tuple[RadixNode, Slots]:
        """Lock the longest cached prefix of `tokens` for one more continuation of it.

        Returns its last node, which the caller unlocks when it is done, and the slots of the prefix: they are shared
        with all other continuations, not copied. Slots of -1, at the end, are of tokens in host memory: the caller
        gives them slots with `restore`.
        """
        node, slots, _ = self.match(tokens)
        self.lock(node)
        return node, np.concatenate(slots) if slots else NO_SLOTS

    def restore(self, node: RadixNode, slots: Slots) -> None:
        """Copy the part of a locked path that is in host memory into these slots, which then belong to the tree."""
        end = len(slots)
        while node.on_host:
            assert self._host_cache is not None
            assert node.parent is not None
            begin = end - len(node.tokens)
            self._host_cache.load(node.host_slots, slots[begin:end])
            self._host_cache.release(node.host_slots)
            node.host_slots, node.slots = NO_SLOTS, slots[begin:end].copy()
            node, end = node.parent, begin

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
                self._release_slots(node)
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
                self.evictable -= len(at.slots)
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
                self.evictable += len(at.slots)
                self._offer(at)
            at = at.parent

    def evict(self, count: int) -> None:
        """Release at least `count` slots of unlocked nodes, or all of them: the least recently used leaves first."""
        if self._host_cache is not None:
            count = max(count, min(_MIN_EVICTED, self._kv_cache.capacity // 16))
        while count > 0 and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            # Out of date: in use again, no leaf any more, gone, or used later (a newer entry has that time).
            is_leaf = node.parent is not None and not node.on_host and not node.has_children_on_device
            if node.locks or not is_leaf or node.last_used != last_used:
                continue
            if count < len(node.tokens):  # from the end: what stays must begin right behind the parent's last token
                self._split(node, len(node.tokens) - count)
            count -= len(node.tokens)
            self.evictable -= len(node.tokens)
            host_slots = self._allocate_on_host(len(node.tokens))
            if host_slots is None:
                self._drop(node)
            else:
                assert self._host_cache is not None
                self._host_cache.save(node.slots, host_slots)
                self._kv_cache.release(node.slots)
                node.slots, node.host_slots = NO_SLOTS, host_slots
                self._offer(node)
                assert node.parent is not None
                self._offer(node.parent)

    def _allocate_on_host(self, count: int) -> Slots | None:
        """Slots in host memory, for which the least recently used ones there are dropped; None if it is too small."""
        if self._host_cache is None or count > self._host_cache.capacity:
            return None
        while self._host_cache.free < count and self._host_leaves:
            last_used, _, node = heapq.heappop(self._host_leaves)
            if node.on_host and not node.locks and not node.children and node.last_used == last_used:
                self._drop(node)
        return self._host_cache.allocate(count)

    def _drop(self, node: RadixNode) -> None:
        """Remove an unlocked node, and what is behind it in host memory."""
        parent = node.parent
        assert parent is not None
        del parent.children[int(node.tokens[0])]
        stack = [node]
        while stack:
            removed = stack.pop()
            stack += removed.children.values()
            self._release_slots(removed)
            # Candidates for eviction may still name it: without these, its slots would be released once more.
            removed.parent, removed.slots, removed.host_slots = None, NO_SLOTS, NO_SLOTS
        self._offer(parent)

    def _release_slots(self, node: RadixNode) -> None:
        self._kv_cache.release(node.slots)
        if self._host_cache is not None and node.on_host:
            self._host_cache.release(node.host_slots)
            node.host_slots = NO_SLOTS

    def _offer(self, node: RadixNode) -> None:
        """Make an unlocked leaf a candidate for eviction, or for being dropped from host memory."""
        if node.locks or node.parent is None:
            return
        if node.on_host:
            if not node.children:
                heapq.heappush(self._host_leaves, (node.last_used, id(node), node))
        elif not node.has_children_on_device:
            heapq.heappush(self._leaves, (node.last_used, id(node), node))

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut a node in two. Returns the upper part, which is new: requests that hold the node end where they did."""
        parent = node.parent
        assert parent is not None
        upper = RadixNode(node.tokens[:at], node.slots[:at], parent)
        upper.host_slots = node.host_slots[:at]
        upper.locks = node.locks  # requests below hold the whole path: unlocking walks through the new node too
        upper.last_used = node.last_used
        upper.step = node.step
        upper.children[int(node.tokens[at])] = node
        parent.children[int(node.tokens[0])] = upper
        node.parent = upper
        node.tokens = node.tokens[at:]
        node.slots = node.slots[at:]
        node.host_slots = node.host_slots[at:]
        return upper


def _common_length(one: Tokens, other: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(one), len(other))
    same = one[:length] == other[:length]
    return length if same.all() else int(same.argmin())
