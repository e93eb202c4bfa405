"""The model on a GPU: every step, whatever mixture of prompts and single tokens, is a captured CUDA graph.

Launching a small model's kernels takes longer than running them, so a step is captured once for each padded number of
tokens and replayed. All inputs of a step are one copy to the GPU, all results one copy back. Sampled tokens stay on the
GPU, so that the next step can be launched before the host has seen them.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from agentfly.backends.engine import kernels
from agentfly.backends.engine.attention import AttentionLayout, LayerCache
from agentfly.backends.engine.kv_cache import KVCache
from agentfly.backends.engine.model_runner import TRACE_LOCK, ModelRunner, WaitForOutput, compile_layers, sampling_rows
from agentfly.backends.engine.request import Batch, Output
from agentfly.backends.engine.sampler import is_plain, sample, uniform
from agentfly.backends.engine.scheduler import Scheduler
from agentfly.backends.engine.tiles import TilePlan, plan_tiles, tile_tokens
from agentfly.errors import describe

_LOG = logging.getLogger(__name__)

SIZES = (
    1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096,
    6144, 8192,
)  # fmt: skip
"""Numbers of tokens that steps are padded to; larger steps are padded to multiples of the last."""
SMALL, LARGE = 128, 512
"""Steps of at most `SMALL` tokens have too few attention tiles to fill a GPU, so each looks at more keys at a time.
Steps of more than `LARGE` tokens are mostly prompts, for which larger tiles are faster."""
LARGE_QUERIES, SMALL_QUERIES = 64, 16
"""Queries of an attention tile in steps of more than `LARGE` tokens, and in others."""
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Attention programs that the keys of long sequences are split for: two run at once, and the last round stays short."""
RING = 3
"""Host buffers in rotation: one is filled, one is being copied, one is being read."""


class StepGraph(AttentionLayout):
    """A step of `size` tokens as a CUDA graph, with its input buffers."""

    def __init__(self, runner: GraphRunner, size: int) -> None:
        self._runner = runner
        self.size = size
        self.samples = min(size, runner.max_rows)
        """Most tokens that a step samples."""
        heads, key_heads = runner.heads
        self._queries = SMALL_QUERIES if size <= LARGE else LARGE_QUERIES
        self._keys = 128 if size <= SMALL else 64
        self._tile_tokens = tile_tokens(heads, key_heads, self._queries)
        tiles = min(size, runner.max_rows + size // self._tile_tokens + 2)
        parts = tiles + runner.max_parts
        lengths = [size] * 4 + [len(TilePlan._fields) * parts] + [self.samples] * 4
        self._device = torch.zeros(sum(lengths), dtype=torch.int32, device=runner.device)
        self._host = [torch.zeros(sum(lengths), dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        splits = np.cumsum(lengths)[:-1]
        self._arrays = [np.split(buffer.numpy(), splits) for buffer in self._host]
        (
            self._ids, self.positions, self.rows, self._shifts, plan, self._sample_at, self._sample_row, temperatures,
            uniforms,
        ) = self._device.split(lengths)  # fmt: skip
        self._parts = plan.view(len(TilePlan._fields), parts)
        self._temperatures = temperatures.view(torch.float32)
        self._uniforms = uniforms.view(torch.float32)
        self.output = torch.zeros(3, self.samples, device=runner.device)
        self._results = [torch.zeros(3, self.samples, pin_memory=True) for _ in range(RING)]
        self._turn = 0
        self._fill(self._arrays[0], None)
        self._device.copy_(self._host[0])
        self._graph: torch.cuda.CUDAGraph | None = None
        if runner.captures:
            self._capture()

    def _capture(self) -> None:
        # Once without capture: the first run compiles Triton kernels and allocates workspaces, which a capture refuses.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._runner.pool, capture_error_mode="thread_local"):
                self._step()
            self._graph = graph
        except RuntimeError as error:  # its layers wait for the GPU, as some mixtures of experts do
            self._runner.captures = False
            name = type(self._runner.model).__name__
            _LOG.warning("%s is run kernel by kernel, its steps cannot be captured: %s", name, describe(error))

    def _step(self) -> None:
        runner = self._runner
        # An id below 0 stands for the token that the row sampled last, which only the GPU knows.
        ids = torch.where(self._ids < 0, runner.last_tokens.index_select(0, self.rows), self._ids).long()
        rotary = runner.rotary
        if rotary is None:  # after the images of a prompt, rotary positions under M-RoPE are shifted
            rotary = (self.positions + self._shifts if runner.supports_images else self.positions).long()[None]
        logits = runner.forward(ids[None], rotary, self, self._sample_at.long())
        kernels.sample_plain(logits, self._temperatures, self._uniforms, self.output)
        runner.last_tokens.index_copy_(0, self._sample_row.long(), self.output[0].view(torch.int32))
        runner.logits_buffer[: self.samples].copy_(logits)  # one buffer for all graphs, read where there are filters

    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        cached_keys, cached_values = self._runner.kv_cache.data[layer]
        kernels.store_kv(keys, values, cached_keys, cached_values, self._runner.table, self.rows, self.positions)
        return cached_keys, cached_values

    def attend(self, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        return kernels.paged_attention(
            queries, cache.keys, cache.values, self._runner.table, self.rows, self.positions,
            self._parts, self._runner.partial_results, queries=self._queries, keys_at_once=self._keys,
            scaling=cache.scaling, window=cache.window,
        )  # fmt: skip

    def replay(self, batch: Batch) -> WaitForOutput:
        """Run a batch."""
        # The next buffer of the ring: the copy to the GPU that was started from the last one may still be running.
        self._turn = (self._turn + 1) % RING
        self._fill(self._arrays[self._turn], batch)
        self._device.copy_(self._host[self._turn], non_blocking=True)
        prompts = batch.requests[batch.decodes :]
        if self._runner.supports_images and any(request.images is not None for request in prompts):
            # Kernel by kernel: features are not inputs of the graph.
            with TRACE_LOCK, self._runner.use_images(batch, self.size):
                self._step()
        elif self._graph is not None:
            self._graph.replay()
        else:
            with TRACE_LOCK:
                self._step()
        sampling = int(batch.samples.sum())
        filters = self._runner.scheduler.needs_host_sampling
        if filters and not all(is_plain(request.request.sampling) for request in batch.requests):
            self._resample_with_filters(batch, sampling)
        result = self._results[self._turn]
        result.copy_(self.output, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> Output:
            done.synchronize()
            sampled = result.numpy()[:, :sampling].copy()
            return Output(sampled[0].view(np.int32).astype(np.int64), sampled[1], sampled[2])

        return wait

    def _resample_with_filters(self, batch: Batch, count: int) -> None:
        """Sample all rows again with their filters and penalties."""
        tokens, logprobs, raw = sample(self._runner.logits_buffer[:count], sampling_rows(batch))
        self.output[0].view(torch.int32)[:count] = tokens
        self.output[1, :count] = logprobs
        self.output[2, :count] = raw
        self._runner.last_tokens[self._sample_row[:count].long()] = tokens.int()

    def _fill(self, arrays: list[np.ndarray], batch: Batch | None) -> None:
        """Write the inputs of a step; tokens beyond the batch belong to a row that no request has."""
        ids, positions, rows, shifts, plan, sample_at, sample_row, temperatures, uniforms = arrays
        tokens = 0
        samples = 0
        # Spans of tokens of one sequence each: their first token, number of tokens, and tokens of the sequence before.
        firsts = counts = pasts = np.zeros(0, np.int64)
        if batch is not None:
            tables = batch.tables
            decodes = batch.decodes
            ids[:decodes] = -1
            positions[:decodes] = batch.starts[:decodes]
            rows[:decodes] = batch.rows[:decodes]
            if self._runner.supports_images:
                for index, request in enumerate(batch.requests[:decodes]):
                    shifts[index] = 0 if request.images is None else request.images.shift
            firsts = np.cumsum(batch.counts) - batch.counts
            counts, pasts = batch.counts, batch.starts
            tokens = int(batch.counts.sum())
            chunks = zip(batch.rows[decodes:], firsts[decodes:], counts[decodes:], pasts[decodes:], strict=True)
            for row, first, count, past in chunks:
                chunk = slice(first, first + count)
                ids[chunk] = np.maximum(tables.tokens[row, past : past + count], 0)  # negative: of an image
                positions[chunk] = np.arange(past, past + count)
                shifts[chunk] = 0  # with images, `GraphRunner.rotary` has the positions
                rows[chunk] = row
            sampled_rows = batch.rows[batch.samples]
            ends = (batch.starts + batch.counts)[batch.samples]
            samples = len(sampled_rows)
            sample_at[:samples] = np.cumsum(batch.counts)[batch.samples] - 1
            sample_row[:samples] = sampled_rows
            temperatures.view(np.float32)[:samples] = tables.temperature[sampled_rows]
            numbers = uniform(tables.seed[sampled_rows], ends - tables.prompt[sampled_rows]).astype(np.float32)
            # float32 rounds numbers close to 1 up to 1, at which no token would be reached.
            uniforms.view(np.float32)[:samples] = np.minimum(numbers, np.float32(1 - 2**-24))
        # Padding belongs to a row whose only slot is unused: with the rows that the last step left here, it would
        # overwrite keys and values of running requests.
        ids[tokens:] = 0
        positions[tokens:] = 0
        shifts[tokens:] = 0
        rows[tokens:] = self._runner.max_rows
        if tokens < self.size:
            firsts = np.append(firsts, tokens)
            counts = np.append(counts, self.size - tokens)
            pasts = np.append(pasts, 0)
        plan_tiles(firsts, counts, pasts, tokens_of_tile=self._tile_tokens, max_parts=self._runner.max_parts).write(
            plan.reshape(self._parts.shape)
        )
        sample_at[samples:] = 0
        sample_row[samples:] = self._runner.max_rows
        temperatures.view(np.float32)[samples:] = 1
        uniforms.view(np.float32)[samples:] = 0


class GraphRunner(ModelRunner):
    """A model over a paged cache on a GPU."""

    depth = 1

    def __init__(self, model: Any, memory: int, compiled: bool = True) -> None:
        """`compiled`: let torch fuse the small operations of each layer, some seconds at the first use."""
        super().__init__(model, memory)
        config = self.model.config.get_text_config()
        self.heads = (config.num_attention_heads, self.kv_cache.data.shape[3])
        padding = self.kv_cache.allocate(1)
        assert padding is not None
        self._padding_slot = int(padding[0])
        self.pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, StepGraph] = {}
        self._turn = 0
        self.captures = True
        self.rotary: torch.Tensor | None = None
        """[1 or 3, tokens] rotary positions of a step with images; None: those of the step's own buffers."""
        if compiled:
            compile_layers(self.model)

    def _build_cache(self, capacity: int, shape: tuple[int, ...], like: torch.Tensor) -> KVCache:
        return KVCache(capacity, like.new_zeros(shape))

    def attach(self, scheduler: Scheduler) -> None:
        """Make the GPU's copy of the scheduler's slot table, with one more row for padding."""
        self.scheduler = scheduler
        self.max_rows, context = scheduler.tables.slots.shape
        self.table = torch.full((self.max_rows + 1, context), self._padding_slot, dtype=torch.int32, device=self.device)
        heads, key_heads = self.heads
        multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.max_parts = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // key_heads + 1
        """Attention programs of a key head for parts of tiles, beside one for every tile."""
        queries = kernels.padded_queries(LARGE_QUERIES, heads // key_heads)
        width = self.kv_cache.data.shape[4]
        self.partial_results = kernels.PartialResults(2 * self.max_parts, key_heads, queries, width, self.device)
        self.last_tokens = torch.zeros(self.max_rows + 1, dtype=torch.int32, device=self.device)
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        self.logits_buffer = torch.zeros(self.max_rows, vocabulary, dtype=self.kv_cache.data.dtype, device=self.device)
        self._staging = [torch.zeros(0, dtype=torch.int32) for _ in range(RING)]
        self._staged = torch.zeros(0, dtype=torch.int32, device=self.device)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture all steps, the largest first: the others then need no more memory."""
        with torch.cuda.device(self.device):
            for size in reversed(SIZES):
                if size < 2 * self.scheduler.max_tokens:
                    self._graph(size)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> WaitForOutput:
        with torch.cuda.device(self.device):
            self._update_table()
            return self._graph(batch.tokens).replay(batch)

    @contextmanager
    def use_images(self, batch: Batch, size: int) -> Iterator[None]:
        """During one step, put the features of the batch's images into their places."""
        features, indices, self.rotary = self.image_inputs(batch, size)
        try:
            with self._overlay.use(features, indices):
                yield
        finally:
            self.rotary = None

    def _graph(self, tokens: int) -> StepGraph:
        """The graph for a step of that number of tokens."""
        at = bisect.bisect_left(SIZES, tokens)
        size = SIZES[at] if at < len(SIZES) else -(-tokens // SIZES[-1]) * SIZES[-1]
        if size not in self._graphs:
            with TRACE_LOCK:
                self._graphs[size] = StepGraph(self, size)
        return self._graphs[size]

    def _update_table(self) -> None:
        """Copy the slots that requests were given since the last step to the GPU's table."""
        changed = self.scheduler.changed
        if not changed:
            return
        tables = self.scheduler.tables
        ranges = [(row, first, last) for row, (first, last) in changed.items()]
        # Indices into the flattened table.
        indices = np.concatenate([np.arange(first, last) + row * tables.context for row, first, last in ranges])
        slots = np.concatenate([tables.slots[row, first:last] for row, first, last in ranges])
        changed.clear()
        count = len(slots)
        self._turn = (self._turn + 1) % RING
        if len(self._staging[self._turn]) < 3 * count:
            self._staging[self._turn] = torch.zeros(6 * count, dtype=torch.int32, pin_memory=True)
        if len(self._staged) < 3 * count:
            self._staged = torch.zeros(6 * count, dtype=torch.int32, device=self.device)
        host = self._staging[self._turn][: 3 * count]
        array = host.numpy()
        # One copy for both: `count` indices of 64 bits, then `count` slots of 32.
        array[: 2 * count].view(np.int64)[:] = indices
        array[2 * count :] = slots
        staged = self._staged[: 3 * count]
        staged.copy_(host, non_blocking=True)
        self.table.view(-1).index_copy_(0, staged[: 2 * count].view(torch.int64), staged[2 * count :])
