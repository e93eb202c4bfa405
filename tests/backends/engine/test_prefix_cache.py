"""The prefix cache: shared prefixes without copies, no lost slots, lookups independent of the size of the cache."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly-rl[train]'")

from agentfly.backends.base import Request  # noqa: E402
from agentfly.backends.engine import prefix_cache  # noqa: E402
from agentfly.backends.engine.kv_cache import ContiguousKVCache, KVCache  # noqa: E402
from agentfly.backends.engine.prefix_cache import PrefixCache  # noqa: E402
from agentfly.backends.engine.request import EngineRequest  # noqa: E402
from agentfly.backends.engine.scheduler import Scheduler  # noqa: E402
from agentfly.types import Sampling  # noqa: E402


def cache_of(capacity: int, cls: type[KVCache] = KVCache) -> tuple[KVCache, PrefixCache]:
    pool = cls(capacity, torch.empty(0))
    return pool, PrefixCache(pool)


def insert(pool: KVCache, cache: PrefixCache, tokens: list[int]) -> Any:
    """Compute and insert a sequence; returns its slots."""
    ids = np.array(tokens, np.int32)
    node, prefix = cache.fork(ids)
    slots = pool.allocate(len(ids) - len(prefix))
    assert slots is not None
    cache.insert(node, ids[len(prefix) :], slots)
    return np.concatenate([prefix, slots])


def test_continuations_of_a_prefix_share_its_slots() -> None:
    pool, cache = cache_of(100)
    slots = insert(pool, cache, [1, 2, 3, 4, 5, 6])
    forks = [cache.fork(np.array([1, 2, 3, 4, last], np.int32)) for last in (7, 8, 9)]
    assert [fork[1].tolist() for fork in forks] == [slots[:4].tolist()] * 3
    assert pool.free == 100 - 6
    for (node, _), last in zip(forks, (7, 8, 9), strict=True):
        released = pool.allocate(1)
        assert released is not None
        assert cache.extend(node, np.array([last], np.int32), released) is not None
    assert pool.free == 100 - 6 - 3


def test_forked_prefix_is_not_evicted_until_it_is_unlocked() -> None:
    pool, cache = cache_of(10)
    slots = insert(pool, cache, list(range(8)))
    node, prefix = cache.fork(np.arange(5, dtype=np.int32))
    cache.evict(10)
    assert (pool.free, cache.evictable) == (5, 0)
    assert prefix.tolist() == slots[:5].tolist()
    cache.unlock(node)
    cache.evict(10)
    assert (pool.free, list(cache.nodes())) == (10, [])


def test_least_recently_used_prefix_is_evicted_first() -> None:
    pool, cache = cache_of(30)
    for first in (1, 2, 3):
        insert(pool, cache, [first, *range(10, 19)])
    node, _ = cache.fork(np.array([1, *range(10, 19)], np.int32))
    cache.unlock(node)
    cache.evict(12)
    lengths = [len(cache.fork(np.array([first, *range(10, 19)], np.int32))[1]) for first in (1, 2, 3)]
    assert lengths == [10, 0, 8]


@pytest.mark.parametrize("cls", [KVCache, ContiguousKVCache])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "fork", "unlock", "evict"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=12),
        ),
        max_size=40,
    )
)
def test_slots_are_never_lost_or_shared_by_different_tokens(cls: type[KVCache], plan: list[Any]) -> None:
    pool, cache = cache_of(60, cls)
    held: list[Any] = []
    for what, tokens in plan:
        if what == "insert":
            if pool.free < len(tokens):
                cache.evict(len(tokens) - pool.free)
            if pool.free >= len(tokens):
                insert(pool, cache, tokens)
        elif what == "fork":
            node, slots = cache.fork(np.array(tokens, np.int32))
            held.append((node, tokens[: len(slots)], slots.tolist()))
        elif what == "unlock" and held:
            cache.unlock(held.pop(len(tokens) % len(held))[0])
        elif what == "evict":
            cache.evict(len(tokens))
        nodes = list(cache.nodes())
        owned = np.concatenate([pool.free_slots(), *(node.slots for node in nodes)])
        assert sorted(owned.tolist()) == list(range(60))
        assert cache.evictable == sum(len(node.tokens) for node in nodes if not node.locks)
        assert all(child.parent is node for node in nodes for child in node.children.values())
        for _, prefix, slots in held:  # a locked prefix keeps its slots
            _, path_slots, done = cache.match(np.array(prefix, np.int32))
            assert (done, np.concatenate([[], *path_slots]).tolist()) == (len(prefix), slots)


def test_lookup_does_not_depend_on_the_size_of_the_cache() -> None:
    compared = []
    original = prefix_cache._common_length
    for count in (2, 2000):
        pool, cache = cache_of(200_000)
        for number in range(count):
            insert(pool, cache, [1, 2, 3, *divmod(number, 50), *range(20)])
        calls: list[int] = []
        with patch.object(
            prefix_cache, "_common_length", lambda *sequences, calls=calls: calls.append(1) or original(*sequences)
        ):
            cache.match(np.array([1, 2, 3, 0, 1, *range(20)], np.int32))
        compared.append(len(calls))
    assert compared[1] <= compared[0] + 2  # nodes on the path, not cached sequences


def test_requests_of_one_step_share_a_prompt_that_the_step_computes() -> None:
    scheduler = Scheduler(KVCache(1000, torch.empty(0)), 8, 500, context=200)
    prompt = np.arange(100, dtype=np.int32)
    for _ in range(8):
        scheduler.add(EngineRequest(Request(prompt.tolist(), Sampling(max_tokens=5)), prompt, 5))
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.counts.tolist() == [100, 1, 1, 1, 1, 1, 1, 1]
    slots = scheduler.tables.slots[batch.rows, :99]
    assert (slots == slots[0]).all()


def test_adjacent_slots_are_preferred_to_scattered_ones() -> None:
    pool = ContiguousKVCache(20, torch.empty(0))
    first, second, third = (pool.allocate(5) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert second.tolist() == [5, 6, 7, 8, 9]
    pool.release(second)
    grown = pool.allocate(2, last_slot=4)
    assert grown is not None
    assert grown.tolist() == [5, 6]
    assert pool.allocate_run(6) is None
    pieces = pool.allocate(8)
    assert pieces is not None
    assert sorted(pieces.tolist()) == [7, 8, 9, 15, 16, 17, 18, 19]
    assert pool.allocate(1) is None
