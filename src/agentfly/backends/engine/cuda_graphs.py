"""The model on a GPU: prompts in one variable-length pass, then bursts of single tokens as a captured graph.

Launching a small model's kernels takes longer than running them, so a step of one token a sequence is captured once for
each size of batch and replayed. Tokens stay on the GPU from step to step; the host looks at them once a burst, and what
a job drew beyond its end is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from agentfly.backends.engine.attention import AttentionLayout, LayerCache, QuerySpan
from agentfly.backends.engine.kernels import attend_one, draw_plain
from agentfly.backends.engine.kv_cache import Block, KVCache
from agentfly.backends.engine.model_runner import Drawn, ModelRunner
from agentfly.backends.engine.sampler import draw, is_plain, uniform
from agentfly.backends.engine.scheduler import ScheduledChunk

BURST = 8
"""Most steps between two looks of the host."""
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class PrefillLayout(AttentionLayout):
    """Stretches of several sequences, in one pass."""

    arena: KVCache
    places: torch.Tensor
    gathered: torch.Tensor
    """The places of all tokens that are seen, sequence by sequence."""
    own: torch.Tensor
    """Where each sequence's tokens begin in the batch, and the end."""
    seen: torch.Tensor
    """Where each sequence's seen tokens begin among those gathered, and the end."""
    most: int
    most_seen: int

    def attend(self, rows: torch.Tensor, past: LayerCache) -> torch.Tensor:
        """Gather what is seen, and attend in one kernel."""
        k, v = past.keys.index_select(0, self.gathered), past.values.index_select(0, self.gathered)
        back = -1 if past.window is None else past.window - 1
        out: Any = varlen_attn(
            rows.contiguous(), k, v, self.own, self.seen, self.most, self.most_seen,
            scale=past.scaling, window_size=(back, 0),
        )  # fmt: skip
        attended: torch.Tensor = out
        return attended


@dataclass(slots=True)
class DecodeLayout(AttentionLayout):
    """The last token of every sequence."""

    arena: KVCache
    places: torch.Tensor
    starts: torch.Tensor
    seen: torch.Tensor

    def attend(self, rows: torch.Tensor, past: LayerCache) -> torch.Tensor:
        """Where the keys lie."""
        return attend_one(rows, past.keys, past.values, self.starts, self.seen, past.scaling, past.window)


class CapturedStep:
    """A step of one token for each of `size` sequences, as a graph with buffers of its own."""

    def __init__(self, runner: GraphRunner, size: int) -> None:
        device = runner.device
        self.ids = torch.zeros(1, size, dtype=torch.long, device=device)
        self.positions = torch.zeros(1, size, dtype=torch.long, device=device)
        self.starts = torch.full((size,), runner.spare.start, dtype=torch.long, device=device)
        self.heat = torch.ones(size, device=device)
        self.uniforms = torch.zeros(size, device=device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(runner)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=runner.pool):
            self.logits, self.drawn = self._step(runner)

    def _step(self, runner: GraphRunner) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        at = self.positions[0]
        layout = DecodeLayout(runner.arena, self.starts + at, self.starts, at + 1)
        logits = runner._forward(self.ids, self.positions, layout, 0)
        drawn = draw_plain(logits, self.heat, self.uniforms)
        self.ids[0] = drawn[0]
        self.positions += 1
        return logits, drawn

    def load(self, chunks: Sequence[ScheduledChunk], spare: Block) -> None:
        """Take a batch in; rows beyond it act on a place that nobody reads."""
        idle = self.ids.shape[1] - len(chunks)
        jobs = [chunk.job for chunk in chunks]
        numbers = [
            [job.tokens[-1] for job in jobs] + [0] * idle,
            [job.cached for job in jobs] + [0] * idle,
            [job.stretch.start for job in jobs if job.stretch is not None] + [spare.start] * idle,
        ]
        loaded = torch.tensor(numbers).to(self.ids.device, non_blocking=True)
        self.ids[0], self.positions[0] = loaded[0], loaded[1]
        self.starts.copy_(loaded[2])
        heat = [job.request.sampling.temperature for job in jobs] + [1.0] * idle
        self.heat.copy_(torch.tensor(heat), non_blocking=True)


class GraphRunner(ModelRunner):
    """A model over an arena on a GPU."""

    def __init__(self, model: Any, memory: int, compiled: bool = True) -> None:
        """`compiled`: have torch fuse the small operations of each layer, some seconds at the first use."""
        super().__init__(model, memory)
        spare = self.arena.take(BURST + 1)
        assert spare is not None
        self.spare = spare
        self.pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, CapturedStep] = {}
        if compiled:
            for layer in self.model.get_decoder().layers:
                layer.compile(dynamic=True)

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk]) -> list[list[Drawn]]:
        """Prompts first, in one pass; then so many single tokens for every job that is being sampled."""
        single = [at for at, chunk in enumerate(chunks) if chunk.count == 1 and chunk.samples]
        others = [at for at, chunk in enumerate(chunks) if not (chunk.count == 1 and chunk.samples)]
        drawn: list[list[Drawn]] = [[] for _ in chunks]
        for places, run in ((others, super().run), (single, self._burst)):
            if places:
                for at, got in zip(places, run([chunks[at] for at in places]), strict=True):
                    drawn[at] = got
        return drawn

    def _layout(self, places: torch.Tensor, pieces: tuple[QuerySpan, ...]) -> AttentionLayout:
        gathered = np.concatenate([np.arange(each.start, each.start + each.seen) for each in pieces])
        own = np.cumsum([0, *(each.count for each in pieces)])
        seen = np.cumsum([0, *(each.seen for each in pieces)])
        on = [torch.as_tensor(each).to(self.device, non_blocking=True) for each in (gathered, own, seen)]
        most, most_seen = max(each.count for each in pieces), max(each.seen for each in pieces)
        return PrefillLayout(self.arena, places, on[0], on[1].int(), on[2].int(), most, most_seen)

    def _burst(self, chunks: Sequence[ScheduledChunk]) -> list[list[Drawn]]:
        captured = self._capture(len(chunks))
        captured.load(chunks, self.spare)
        if not all(is_plain(chunk.job.request.sampling) for chunk in chunks):
            captured.graph.replay()
            drawn = draw(captured.logits[: len(chunks)], [chunk.job.row for chunk in chunks])
            return [[each] for each in zip(*(part.tolist() for part in drawn), strict=True)]
        steps = min(BURST, *(_room(chunk) for chunk in chunks))
        seeds = np.array([chunk.job.seed for chunk in chunks], np.uint64)
        counts = np.array([len(chunk.job.logprobs) for chunk in chunks])
        numbers = np.zeros((steps, captured.uniforms.shape[0]), np.float32)
        numbers[:, : len(chunks)] = [uniform(seeds, counts + step) for step in range(steps)]
        uniforms = torch.from_numpy(np.minimum(numbers, np.float32(1 - 2**-24))).to(self.device, non_blocking=True)
        kept = []
        for step in range(steps):
            captured.uniforms.copy_(uniforms[step])
            captured.graph.replay()
            kept.append([part.clone() for part in captured.drawn])
        tokens, drawn_with, own = (torch.stack(part).tolist() for part in zip(*kept, strict=True))
        return [
            [(tokens[step][row], drawn_with[step][row], own[step][row]) for step in range(steps)]
            for row in range(len(chunks))
        ]

    def _capture(self, rows: int) -> CapturedStep:
        size = next((each for each in SIZES if each >= rows), -(-rows // SIZES[-1]) * SIZES[-1])
        if size not in self._captured:
            self._captured[size] = CapturedStep(self, size)
        return self._captured[size]


def _room(chunk: ScheduledChunk) -> int:
    """Steps for which a job has places, and tokens left to draw."""
    job = chunk.job
    assert job.stretch is not None
    return max(min(job.stretch.room - job.cached, job.limit - len(job.logprobs)), 1)
