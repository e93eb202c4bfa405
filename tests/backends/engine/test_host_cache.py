"""Prefixes in host memory: they come back with the values they had, no slot is lost, and sampling does not change."""

import asyncio
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly-rl[train]'")

from agentfly.backends.engine import model_runner  # noqa: E402
from agentfly.backends.engine.host_cache import HostCache  # noqa: E402
from agentfly.backends.engine.kv_cache import ContiguousKVCache, KVCache  # noqa: E402
from agentfly.backends.engine.prefix_cache import PrefixCache  # noqa: E402
from tests.backends.engine.tiny import CONFIG, backend_of, make_request, model_of  # noqa: E402

BYTES_PER_TOKEN = 2 * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * 16 * 4


def build_caches(cls: type[KVCache], capacity: int, host_capacity: int) -> tuple[KVCache, HostCache, PrefixCache]:
    kv_cache = cls(capacity, torch.zeros(2, 2, capacity, 1, 1))
    host_cache = HostCache(kv_cache, host_capacity * 16)
    assert host_cache.capacity == host_capacity
    return kv_cache, host_cache, PrefixCache(kv_cache, host_cache)


def value_of(prefix: list[int]) -> int:
    """What the cache holds for the last token of a prefix: as with attention, it depends on all tokens before."""
    return hash(tuple(prefix)) % 1_000_003


def read_values(kv_cache: KVCache, slots: Any) -> list[list[float]]:
    return kv_cache.data[:, :, torch.as_tensor(slots).long(), 0, 0].reshape(4, -1).T.tolist()


def sample(kv_cache: KVCache, cache: PrefixCache, tokens: list[int]) -> tuple[Any, list[int]] | None:
    """Do what the scheduler does for a request: fork, restore, compute the rest. None if there is no room."""
    ids = np.array(tokens, np.int32)
    node, prefix = cache.fork(ids)
    on_device = int((prefix >= 0).sum())
    needed = len(tokens) - on_device
    if needed > kv_cache.free + cache.evictable:
        cache.unlock(node)
        return None
    if needed > kv_cache.free:
        cache.evict(needed - kv_cache.free)
    slots = kv_cache.allocate(needed)
    assert slots is not None
    on_host = len(prefix) - on_device
    prefix = np.concatenate([prefix[:on_device], slots[:on_host]])
    if on_host:
        cache.restore(node, prefix[on_device:])
    expected = [[value_of(tokens[: index + 1]) + part for part in range(4)] for index in range(len(prefix))]
    assert read_values(kv_cache, prefix) == expected
    for index, slot in enumerate(slots[on_host:], len(prefix)):
        kv_cache.data.view(4, -1)[:, slot] = value_of(tokens[: index + 1]) + torch.arange(4)
    return (node, ids, np.concatenate([prefix, slots[on_host:]]), len(prefix)), tokens


@pytest.mark.parametrize("cls", [KVCache, ContiguousKVCache])
@pytest.mark.parametrize("host_capacity", [10, 45, 400])
@settings(max_examples=80, deadline=None)
@given(
    plan=st.lists(
        st.tuples(
            st.sampled_from(["turn", "turn", "start", "end", "drop", "evict"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=14),
        ),
        max_size=60,
    )
)
def test_evicted_prefixes_come_back_with_their_values(cls: type[KVCache], host_capacity: int, plan: list[Any]) -> None:
    kv_cache, host_cache, cache = build_caches(cls, 40, host_capacity)
    running: list[Any] = []
    for what, tokens in plan:
        if what in ("turn", "start"):
            request = sample(kv_cache, cache, tokens)
            if request is not None:
                running.append(request[0])
        if what == "evict":
            cache.evict(len(tokens))
        if running and what in ("turn", "end", "drop"):
            node, ids, slots, cached = running.pop()
            if what == "drop":
                cache.unlock(node)
                kv_cache.release(slots[cached:])
            else:
                cache.insert(node, ids[cached:], slots[cached:])
        nodes = list(cache.nodes())
        unfinished = [slots[cached:] for _, _, slots, cached in running]
        owned = np.concatenate([kv_cache.free_slots(), *(node.slots for node in nodes), *unfinished])
        assert sorted(owned.tolist()) == list(range(40))
        owned_on_host = np.concatenate([host_cache.free_slots(), *(node.host_slots for node in nodes)])
        assert sorted(owned_on_host.tolist()) == list(range(host_capacity))
        assert cache.evictable == sum(len(node.slots) for node in nodes if not node.locks)
        for node in nodes:
            assert {len(node.slots), len(node.host_slots)} == {0, len(node.tokens)}
            assert node.parent is cache.root or not (node.parent.on_host and not node.on_host)
    for node, ids, slots, cached in running:
        cache.insert(node, ids[cached:], slots[cached:])
    cache.clear()
    assert (kv_cache.free, host_cache.free) == (40, host_capacity)


def run_chains(chains: int, turns: int, **settings: Any) -> tuple[list[list[int]], list[list[float]], int]:
    """Chains that take turns, each of which grows: what they sampled, and how many tokens were computed."""
    backend = backend_of(model_of(), max_rows=4, max_batch_tokens=64, **settings)
    computed = []
    forward = model_runner.ModelRunner.logits

    def count(runner: Any, batch: Any) -> Any:
        computed.append(int(batch.counts.sum()))
        return forward(runner, batch)

    async def run() -> tuple[list[list[int]], list[list[float]]]:
        draw = np.random.default_rng(0)
        histories = [draw.integers(3, 300, 40).tolist() for _ in range(chains)]
        sampled: list[list[int]] = [[] for _ in range(chains)]
        logprobs: list[list[float]] = [[] for _ in range(chains)]
        for turn in range(turns):
            for chain, history in enumerate(histories):
                completion = await backend.generate(make_request(history, max_tokens=8, seed=100 * turn + chain))
                sampled[chain] += completion.token_ids
                logprobs[chain] += completion.logprobs
                history += [*completion.token_ids, *draw.integers(3, 300, 10).tolist()]
        await backend.close()
        return sampled, logprobs

    with patch.object(model_runner.ModelRunner, "logits", count):
        return *asyncio.run(run()), sum(computed)


def test_chains_that_outgrow_the_cache_are_not_computed_again() -> None:
    fitting = run_chains(8, 6, kv_memory=8 * 200 * BYTES_PER_TOKEN)
    thrashing = run_chains(8, 6, kv_memory=260 * BYTES_PER_TOKEN)
    offloading = run_chains(8, 6, kv_memory=260 * BYTES_PER_TOKEN, host_memory=8 * 200 * BYTES_PER_TOKEN)
    assert fitting[0] == offloading[0] == thrashing[0]
    np.testing.assert_allclose(np.concatenate(offloading[1]), np.concatenate(fitting[1]), atol=1e-4)
    assert thrashing[2] > 1.5 * fitting[2]
    assert offloading[2] <= 1.1 * fitting[2]


def test_new_weights_drop_what_is_in_host_memory() -> None:
    backend = backend_of(
        model_of(), kv_memory=130 * BYTES_PER_TOKEN, host_memory=1000 * BYTES_PER_TOKEN, max_rows=2, max_batch_tokens=64
    )
    prompts = [list(range(first, first + 60)) for first in (10, 80, 150)]

    async def run() -> list[list[int]]:
        for prompt in prompts:
            await backend.generate(make_request(prompt, max_tokens=4, temperature=0.0))
        changed = model_of(seed=1)
        await backend.update_weights(changed.named_parameters(), 1)
        completion = await backend.generate(make_request(prompts[0], max_tokens=4, temperature=0.0))
        await backend.close()
        return completion.token_ids

    async def run_alone() -> list[list[int]]:
        alone = backend_of(model_of(seed=1))
        completion = await alone.generate(make_request(prompts[0], max_tokens=4, temperature=0.0))
        await alone.close()
        return completion.token_ids

    assert asyncio.run(run()) == asyncio.run(run_alone())
