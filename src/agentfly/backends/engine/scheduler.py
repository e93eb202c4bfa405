"""Which tokens of which requests go into the next forward pass, and which slots their keys and values get.

Requests join and leave at any step (continuous batching). Every request that is being sampled adds one token to a step;
what is left of the step's token budget goes to prompts, in chunks. When the cache is full, prefixes that no running
request uses are evicted first, then the youngest request is preempted: it goes back to the queue with what it sampled.

A step may be scheduled while the previous one still runs on the GPU: a request's length counts the token that is being
sampled, and what it sampled after its stop token is dropped when it arrives.
"""

from __future__ import annotations

import bisect

import numpy as np

from agentfly.backends.engine.host_cache import HostCache
from agentfly.backends.engine.kv_cache import NO_SLOTS, ContiguousKVCache, KVCache, Slots
from agentfly.backends.engine.prefix_cache import PrefixCache, RadixNode
from agentfly.backends.engine.request import Batch, EngineRequest, Ints, Output, RowTables, Sampled
from agentfly.backends.engine.sampler import is_plain
from agentfly.types import FinishReason

GPU_ROWS, GPU_TOKENS = 512, 8192
"""Default limits on a GPU: requests at once, and tokens of a step."""
CPU_ROWS, CPU_TOKENS = 64, 512
RESERVE, LEAST_RESERVE = 256, 16
"""Slots that a request gets ahead of the tokens it has, and how many if there is not room for all rows to have that."""
MIN_PREFIX = 16
"""Fewer cached tokens are not used: computing them costs as much, and short prompts give the same bits every time."""


class Scheduler:
    """The queue, the running requests and their slots."""

    def __init__(
        self,
        kv_cache: KVCache,
        max_rows: int,
        max_tokens: int,
        *,
        context: int,
        share_prefixes: bool = True,
        host_cache: HostCache | None = None,
    ) -> None:
        """Maximum number of concurrent requests, of tokens in a step, and of tokens of a request (`context`)."""
        self.kv_cache = kv_cache
        self.prefix_cache = PrefixCache(kv_cache, host_cache)
        self.tables = RowTables(max_rows, context)
        self.waiting: list[EngineRequest] = []
        """Sorted by priority."""
        self.running: dict[EngineRequest, None] = {}
        self.changed: dict[int, tuple[int, int]] = {}
        """Row to (first, last) position of slots that were assigned since a runner with its own table last looked."""
        self._share_prefixes = share_prefixes
        self.max_tokens = max_tokens
        self._requests: list[EngineRequest | None] = [None] * max_rows
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._prefilling: dict[EngineRequest, None] = {}
        self._not_plain = 0
        self._step = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def needs_host_sampling(self) -> bool:
        """Whether a running request asks for more than a temperature: its filters need all tokens so far."""
        return self._not_plain > 0

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        bisect.insort(self.waiting, request, key=lambda queued: queued.priority)

    def remove(self, request: EngineRequest) -> None:
        """Drop a request; what was computed for it stays in the prefix cache."""
        if request in self.running:
            self._release(request, keep=True)
        elif request in self.waiting:
            self.waiting.remove(request)

    def clear(self) -> None:
        """Drop all requests and the prefix cache."""
        self.reset()
        self.waiting.clear()

    def reset(self) -> None:
        """Forget everything computed, since the weights changed or a step failed. Running requests start again."""
        for request in list(self.running):
            self._preempt(request, keep=False)
        self.prefix_cache.clear()

    # ── one step ──

    def schedule(self) -> Batch | None:
        """Plan the next forward pass; None if there is nothing to compute now."""
        tables = self.tables
        self._step += 1
        rows = self._decode_rows()
        for row in rows[tables.computed[rows] >= tables.reserved[rows]]:
            request = self._requests[row]
            if request is not None and not self._reserve(request):
                self._preempt(request)
            # Preemption may have freed a row that is still in `rows`: without this, it would be decoded.
            rows = self._decode_rows()
        if self.kv_cache.contiguous:  # neighbors in the cache are attended to together
            rows = rows[np.argsort(tables.slots[rows, 0])]
        requests = [self._requests[row] for row in rows.tolist()]
        starts = tables.computed[rows]
        # Before the forward pass: the next step may be planned while this one still runs.
        tables.computed[rows] += 1
        tables.length[rows] += 1
        chunks: list[tuple[EngineRequest, int, int]] = []
        # Decoding comes first and prompts take what is left, so that a long prompt cannot stall running turns.
        budget = max(self.max_tokens - len(rows), 0)
        for request in list(self._prefilling):
            budget -= self._schedule_chunk(request, budget, chunks)
        for request in list(self.waiting) if budget > 0 else ():
            if budget <= 0 or not self._free_rows:
                break
            node, prefix = self.prefix_cache.root, NO_SLOTS
            if self._share_prefixes:  # the last token is always computed: its logits are needed
                node, prefix = self.prefix_cache.fork(request.tokens[:-1])
            if len(prefix) < MIN_PREFIX:
                self.prefix_cache.unlock(node)
                node, prefix = self.prefix_cache.root, NO_SLOTS
            if self.kv_cache.contiguous and node.step == self._step:
                self.prefix_cache.unlock(node)  # to be copied, it must have been computed: in the next step
                continue
            if not self._admit(request, node, prefix):
                self.prefix_cache.unlock(node)
                break
            self.waiting.remove(request)
            budget -= self._schedule_chunk(request, budget, chunks)
        if not requests and not chunks:
            return None
        requests += [request for request, _, _ in chunks]
        added = np.array([[request.row, start, count] for request, start, count in chunks], np.int64).reshape(-1, 3)
        rows = np.concatenate([rows, added[:, 0]])
        starts = np.concatenate([starts, added[:, 1]])
        counts = np.concatenate([np.ones(len(rows) - len(added), np.int64), added[:, 2]])
        samples = tables.decoding[rows]  # a chunk that ends its request's tokens has set it
        return Batch(
            tables, requests, rows=rows, starts=starts, counts=counts, samples=samples,
            decodes=len(rows) - len(added), generations=tables.generation[rows],
        )  # fmt: skip

    def update(
        self, batch: Batch, output: Output, version: int
    ) -> tuple[list[tuple[EngineRequest, FinishReason]], list[tuple[EngineRequest, list[int]]]]:
        """Take sampled tokens in. Returns the requests that finished, still in their rows, and tokens to report."""
        tables = self.tables
        chunks = np.flatnonzero(batch.samples)
        # A request may have left, and its row have a new one, since the step was scheduled: its token is dropped.
        present = np.flatnonzero(tables.generation[batch.rows[chunks]] == batch.generations[chunks])
        chunks = chunks[present]
        rows = batch.rows[chunks]
        tokens = output.tokens[present]
        at = tables.received[rows]
        tables.tokens[rows, at] = tokens
        tables.logprobs[rows, at] = output.logprobs[present]
        tables.raw_logprobs[rows, at] = output.raw_logprobs[present]
        tables.versions[rows, at] = version
        tables.received[rows] += 1
        stopped = (tables.stop_ids[rows] == tokens[:, None]).any(1)
        full = tables.received[rows] >= tables.last[rows]
        finished: list[tuple[EngineRequest, FinishReason]] = []
        reported: list[tuple[EngineRequest, list[int]]] = []
        for index in np.flatnonzero(stopped | full | tables.watched[rows]):
            request = batch.requests[chunks[index]]
            row = rows[index]
            stop = bool(stopped[index])
            if request.request.sampling.stop and not stop:
                stop = request.contains_stop(tables.tokens[row, tables.prompt[row] : tables.received[row]])
            if request.request.on_tokens is not None:
                reported.append((request, [int(tokens[index])]))
            if stop or full[index]:
                finished.append((request, FinishReason.STOP if stop else FinishReason.LENGTH))
        return finished, reported

    def get_output(self, request: EngineRequest) -> Sampled:
        """What was sampled for a request so far."""
        return self.tables.copy_output(request.row) if request in self.running else request.saved

    def _decode_rows(self) -> Ints:
        return np.flatnonzero(self.tables.decoding & (self.tables.length < self.tables.last))

    def _schedule_chunk(self, request: EngineRequest, budget: int, chunks: list[tuple[EngineRequest, int, int]]) -> int:
        """Add the next tokens of a request that are not computed, at most `budget`. Returns how many."""
        tables = self.tables
        row = request.row
        start = int(tables.computed[row])
        count = min(int(tables.length[row]) - start, budget)
        if count <= 0:
            return 0
        chunks.append((request, start, count))
        # Into the cache at once, so that requests of this very step can continue it. Only where all tokens before are
        # the cache's: a node with a gap before it would be found by prompts whose earlier keys are not there.
        if self._share_prefixes and tables.shared[row] == start:
            assert request.node is not None
            chunk = slice(start, start + count)
            node = self.prefix_cache.extend(request.node, tables.tokens[row, chunk], tables.slots[row, chunk])
            if node is not None:
                node.step = self._step
                request.node = node
                tables.shared[row] += count
        tables.computed[row] += count
        if tables.computed[row] == tables.length[row]:
            tables.length[row] += 1
            tables.decoding[row] = True
            del self._prefilling[request]
        return count

    # ── rows and slots ──

    def _admit(self, request: EngineRequest, node: RadixNode, prefix: Slots) -> bool:
        """Give a request a row, and slots behind a prefix that it has locked. False if there is no room."""
        tokens = request.tokens
        last = len(request.prompt) + request.limit
        target = min(len(tokens) + self._ahead(), last - 1)
        on_device = int((prefix >= 0).sum())
        slots = self._allocate(target - on_device, int(prefix[on_device - 1]) if on_device else None)
        if slots is None:
            return False
        if on_device < len(prefix):
            on_host = len(prefix) - on_device
            prefix = np.concatenate([prefix[:on_device], slots[:on_host]])
            slots = slots[on_host:]
            self.prefix_cache.restore(node, prefix[on_device:])
        tables = self.tables
        row = self._free_rows.pop()
        request.row = row
        request.node = node
        self._requests[row] = request
        self.running[request] = None
        self._prefilling[request] = None
        tables.tokens[row, : len(tokens)] = tokens
        tables.slots[row, : len(prefix)] = prefix
        tables.slots[row, len(prefix) : target] = slots
        tables.prompt[row] = len(request.prompt)
        tables.received[row] = tables.length[row] = len(tokens)
        tables.computed[row] = len(prefix)
        tables.shared[row] = len(prefix)
        tables.reserved[row] = target
        tables.last[row] = last
        tables.seed[row] = request.seed
        tables.temperature[row] = request.request.sampling.temperature
        tables.watched[row] = request.request.on_tokens is not None or bool(request.request.sampling.stop)
        self._not_plain += not is_plain(request.request.sampling)
        stop_ids = list(request.request.stop_ids)
        missing = len(stop_ids) - tables.stop_ids.shape[1]
        if missing > 0:
            tables.stop_ids = np.pad(tables.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        tables.stop_ids[row] = -1
        tables.stop_ids[row, : len(stop_ids)] = stop_ids
        self._note_slots(request, 0)
        sampled = slice(len(request.prompt), len(tokens))
        tables.logprobs[row, sampled] = request.saved.logprobs
        tables.raw_logprobs[row, sampled] = request.saved.raw_logprobs
        tables.versions[row, sampled] = request.saved.versions
        return True

    def _reserve(self, request: EngineRequest) -> bool:
        """Give a request slots for its next tokens, preempting younger ones if there is no room."""
        tables = self.tables
        row = request.row
        reserved = int(tables.reserved[row])
        last = int(tables.last[row]) - 1
        last_slot = int(tables.slots[row, reserved - 1])
        target = min(reserved + self._ahead(), last)
        slots = self._allocate(target - reserved, last_slot)
        while slots is None:  # one slot is enough to go on; a reserve is not worth preempting others for
            target = reserved + 1
            slots = self._allocate(1, last_slot)
            if slots is None:
                youngest = max(self.running, key=lambda candidate: candidate.priority)
                if youngest is request:
                    return False
                self._preempt(youngest)
        tables.slots[row, reserved:target] = slots
        tables.reserved[row] = target
        self._note_slots(request, reserved)
        return True

    def _ahead(self) -> int:
        """How many slots a request is given ahead."""
        plenty = self.kv_cache.free + self.prefix_cache.evictable > RESERVE * self.tables.rows
        return RESERVE if plenty or self.kv_cache.contiguous else min(RESERVE, LEAST_RESERVE)

    def _note_slots(self, request: EngineRequest, first: int) -> None:
        """A request was given slots from position `first` on. Move it to adjacent ones where the cache prefers them."""
        tables = self.tables
        row = request.row
        reserved = int(tables.reserved[row])
        earlier_first, _ = self.changed.get(row, (first, 0))
        self.changed[row] = (min(earlier_first, first), reserved)
        if not isinstance(self.kv_cache, ContiguousKVCache):
            return
        slots = tables.slots[row, :reserved]
        tables.adjacent[row] = (np.diff(slots) == 1).all()
        run = None if tables.adjacent[row] else self.kv_cache.allocate_run(reserved)
        if run is not None:
            assert request.node is not None
            self.kv_cache.copy(slots[: tables.computed[row]], run)
            # The request now owns all its slots. Those of the shared prefix stay with the cache, for other requests.
            self.kv_cache.release(slots[tables.shared[row] :])
            self.prefix_cache.unlock(request.node)
            request.node = self.prefix_cache.root
            tables.shared[row] = 0
            tables.slots[row, :reserved] = run
            tables.adjacent[row] = True

    def _allocate(self, count: int, last_slot: int | None) -> Slots | None:
        """Free slots, after evicting cached prefixes if there are too few."""
        missing = count - self.kv_cache.free
        if missing > 0:
            if missing > self.prefix_cache.evictable:
                return None
            self.prefix_cache.evict(missing)
        return self.kv_cache.allocate(count, last_slot)

    def _preempt(self, request: EngineRequest, keep: bool = True) -> None:
        """Take a request's row away and queue it again. A token that is being sampled is sampled again later."""
        request.saved = self.tables.copy_output(request.row)
        self._release(request, keep)
        self.add(request)

    def _release(self, request: EngineRequest, keep: bool) -> None:
        """Free a row; `keep` what was computed in the prefix cache."""
        tables = self.tables
        row = request.row
        shared, reserved = int(tables.shared[row]), int(tables.reserved[row])
        # The last sampled token has no keys and values yet, and the token of a step that is under way no id.
        valid = min(int(tables.computed[row]), int(tables.received[row]))
        node = request.node
        assert node is not None
        if keep and self._share_prefixes:
            self.prefix_cache.insert(node, tables.tokens[row, shared:valid], tables.slots[row, shared:valid])
            self.kv_cache.release(tables.slots[row, valid:reserved])
        else:
            self.prefix_cache.unlock(node)
            self.kv_cache.release(tables.slots[row, shared:reserved])
        tables.decoding[row] = False
        tables.generation[row] += 1
        self.changed.pop(row, None)
        self._requests[row] = None
        self._free_rows.append(row)
        self._not_plain -= not is_plain(request.request.sampling)
        self._prefilling.pop(request, None)
        del self.running[request]
        request.row = -1
        request.node = None
