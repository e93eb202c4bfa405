"""One forward pass of the model over a packed batch, and the tokens sampled from it."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from agentfly.backends.base import Request
from agentfly.backends.engine import attention, native_kernels, packed_linear
from agentfly.backends.engine.attention import AttentionLayout, DenseAttention, NativeAttention
from agentfly.backends.engine.kv_cache import ContiguousKVCache, KVCache, QuerySpan, zeros
from agentfly.backends.engine.loading import config_shape
from agentfly.backends.engine.request import Batch, EngineRequest, Output
from agentfly.backends.engine.sampler import SamplingRow, sample, uniform
from agentfly.backends.engine.scheduler import Scheduler
from agentfly.backends.engine.vision import FeatureCache, FeatureOverlay, takes_images
from agentfly.errors import describe
from agentfly.types import Sampling
from agentfly.vision.processor import EncodedImage

_LOG = logging.getLogger(__name__)


WaitForOutput = Callable[[], Output]
"""Waits until a step that was started is done, and returns what it sampled."""


class ModelRunner:
    """A model over a key-value cache."""

    shares_prefixes = True
    """Whether what was computed for one request can be used by another."""
    depth = 0
    """Steps that may be under way when the next one is scheduled."""

    def __init__(self, model: Any, memory: int) -> None:
        """`model`: its weights are shared, not copied. `memory`: bytes for keys and values."""
        parameter = next(model.parameters())
        layers, heads, width = config_shape(model.config.get_text_config())
        capacity = max(memory // bytes_per_token(model), 1)
        self.device = parameter.device
        self.model = self._build_model(model)
        packed_linear.pack(self.model)
        self.supports_images = takes_images(model)
        self._overlay = FeatureOverlay(self.model)
        self.features = FeatureCache()
        self.kv_cache = self._build_cache(capacity, (layers, 2, capacity, heads, width), parameter.detach())
        native = self.device.type == "cpu" and self.kv_cache.data.dtype == torch.float32
        kernels = native_kernels.load() if native else None
        self._attention = DenseAttention if kernels is None else partial(NativeAttention, kernels)

    def _build_model(self, model: Any) -> Any:
        """A model object of our own with the same weights, whose attention uses the cache."""
        return share_weights(model, attention.NAME)

    def _build_cache(self, capacity: int, shape: tuple[int, ...], like: torch.Tensor) -> KVCache:
        return ContiguousKVCache(capacity, zeros(shape, like))

    def attach(self, scheduler: Scheduler) -> None:
        """Set the scheduler whose batches are run."""

    def warm_up(self) -> None:
        """Do ahead of the first request, in the engine's thread, what would delay requests later."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> WaitForOutput:
        """Run a batch and sample a token after every chunk that ends its request's tokens."""
        logits = self.logits(batch)
        output = Output(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32))
        if batch.samples.any():
            output = Output(*(column.numpy(force=True) for column in sample(logits, sampling_rows(batch))))
        return lambda: output

    def reset(self) -> None:
        """Drop what was derived from the weights: they are about to change."""
        packed_linear.unpack_weights(self.model)
        self.features.clear()

    @torch.inference_mode()
    def first_nonfinite_module(self, tokens: Sequence[int]) -> str:
        """The first module of the model whose output is not finite for these tokens; empty if all are."""
        names: list[str] = []

        def look(name: str) -> Any:
            def hook(_: Any, __: Any, out: Any) -> None:
                first = out[0] if isinstance(out, tuple) else out
                if not names and isinstance(first, torch.Tensor) and not torch.isfinite(first).all():
                    names.append(name)

            return hook

        self.reset()  # a packed layer cannot be copied
        plain = share_weights(self.model, "eager")
        hooks = [module.register_forward_hook(look(name)) for name, module in plain.named_modules() if name]
        plain(torch.tensor([[max(token, 0) for token in tokens]], device=self.device))  # negative: of an image
        for hook in hooks:
            hook.remove()
        return names[0] if names else ""

    def logits(self, batch: Batch) -> torch.Tensor:
        """[chunk that samples, vocabulary]: the logits after the last token of each."""
        tables = batch.tables
        rows = np.repeat(batch.rows, batch.counts)  # [token]
        begins = np.cumsum(batch.counts) - batch.counts  # [chunk] index of its first token in the batch
        positions = np.repeat(batch.starts - begins, batch.counts) + np.arange(len(rows))  # [token] in its sequence
        packed = np.stack([tables.tokens[rows, positions], positions, tables.slots[rows, positions]])
        if self.supports_images:
            packed[0].clip(0, out=packed[0])  # negative: of an image, whose features replace it
        tensor = torch.from_numpy(packed).to(self.device)  # [ids, positions, slots; token]: one copy to the device
        spans = []
        for row, start, count in zip(batch.rows.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True):
            slots = None
            if not tables.adjacent[row]:
                slots = torch.from_numpy(tables.slots[row, : start + count].astype(np.int64)).to(self.device)
            spans.append(QuerySpan(count, start, int(tables.slots[row, 0]), slots))
        ends = np.cumsum(batch.counts)[batch.samples] - 1
        layout = self._attention(self.kv_cache, tensor[2], spans)
        kept = torch.from_numpy(ends).to(self.device)
        if not (self.supports_images and any(request.images for request in batch.requests)):
            return self.forward(tensor[:1], tensor[1:2], layout, kept)
        features, indices, rotary = self.image_inputs(batch)
        with self._overlay.use(features, indices):
            return self.forward(tensor[:1], rotary, layout, kept)

    def image_inputs(
        self, batch: Batch, size: int | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Features, their indices in the batch, and rotary positions ([1, tokens] or [3, 1, tokens]) of a batch.

        `size`: number of tokens that the positions are padded to.
        """
        needed = []
        image_rows: list[tuple[EncodedImage, slice]] = []
        indices = []
        rotary = []
        begin = 0
        for request, start, count in zip(batch.requests, batch.starts.tolist(), batch.counts.tolist(), strict=True):
            if request.images is None:
                rotary.append(np.arange(start, start + count)[None])
            else:
                request.images.prepare(self.model, request.prompt)
                rotary.append(request.images.rotary(start, count))
                inside = request.images.within(start, count)
                needed += [image for image, _ in inside]
                image_rows += inside
                indices.append(request.images.indices(start, count) + begin)
            begin += count
        axes = max(map(len, rotary))
        positions = np.concatenate([np.broadcast_to(chunk, (axes, chunk.shape[1])) for chunk in rotary], 1)
        positions = np.pad(positions, ((0, 0), (0, (size or begin) - begin)))
        moved = torch.from_numpy(positions).to(self.device)
        at = moved if axes == 1 else moved[:, None]
        if not image_rows:
            return None, None, at
        features = self.features.load(self.model, needed)
        rows = torch.cat([features[image.digest][part_of_image] for image, part_of_image in image_rows])
        return rows, torch.from_numpy(np.concatenate(indices)).to(self.device), at

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, layout: AttentionLayout, kept: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of the tokens at the indices `kept`: [kept, vocab]. ids, positions: [1, tokens]."""
        out = self.model(input_ids=ids, position_ids=positions, logits_to_keep=kept, use_cache=False, layout=layout)
        logits: torch.Tensor = out.logits[0]
        return logits


class SequentialRunner(ModelRunner):
    """For a model whose attention cannot be replaced: one sequence at a time, with the model's own cache."""

    shares_prefixes = False

    def __init__(self, model: Any, memory: int) -> None:
        super().__init__(model, memory)
        self._pasts: WeakKeyDictionary[EngineRequest, Any] = WeakKeyDictionary()

    def _build_model(self, model: Any) -> Any:
        return share_weights(model)

    def _build_cache(self, capacity: int, shape: tuple[int, ...], like: torch.Tensor) -> KVCache:
        return KVCache(capacity, like.new_empty(0))

    def logits(self, batch: Batch) -> torch.Tensor:
        """A prompt is computed when all of it is scheduled, never in chunks."""
        logits = []
        for chunk, request in enumerate(batch.requests):
            row, start = batch.rows[chunk], batch.starts[chunk]
            if start == 0:  # it starts, or starts again with other weights: the old cache belongs to the old ones
                self._pasts.pop(request, None)
            if not batch.samples[chunk]:
                continue
            past = self._pasts.get(request)
            first = 0 if past is None else start
            ids = batch.tables.tokens[row, first : start + batch.counts[chunk]].astype(np.int64)
            out = self.model(
                input_ids=torch.from_numpy(ids).to(self.device)[None], past_key_values=past, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            if getattr(out, "past_key_values", None) is not None:
                self._pasts[request] = out.past_key_values
            logits.append(out.logits[0, -1])
        return torch.stack(logits) if logits else torch.empty(0)


def sampling_rows(batch: Batch) -> list[SamplingRow]:
    """How the token after each chunk that samples is drawn."""
    tables = batch.tables
    rows = batch.rows[batch.samples]
    ends = (batch.starts + batch.counts)[batch.samples]
    uniforms = uniform(tables.seed[rows], ends - tables.prompt[rows]).tolist()
    requests = [request for request, samples in zip(batch.requests, batch.samples, strict=True) if samples]
    sampling = [request.request.sampling for request in requests]
    out = []
    for settings, number, row, end in zip(sampling, uniforms, rows, ends, strict=True):
        tokens = tables.tokens[row, :end]
        seen = tokens[tokens >= 0] if settings.repetition_penalty != 1.0 else None  # without the tokens of images
        out.append(SamplingRow(settings, number, seen))
    return out


def bytes_per_token(model: Any) -> int:
    """Bytes of one token's keys and values."""
    layers, heads, width = config_shape(model.config.get_text_config())
    return 2 * layers * heads * width * int(next(model.parameters()).dtype.itemsize)


def share_weights(model: Any, attention_by: str | None = None) -> Any:
    """Another model object with the same weights. `attention_by`: name of its attention; None leaves it as it is."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo)
    if attention_by is not None:
        # Only the language model's attention is replaced; the tower of a vision model keeps its own.
        text = model.config.get_text_config()
        names = (name for name in model.config.sub_configs if getattr(model.config, name, None) is text)
        name = next(names, None)
        twin.set_attn_implementation(attention_by if name is None else {name: attention_by})
    return twin.eval()


TRACE_LOCK = threading.RLock()
"""Held while a module is called that torch may compile. While torch traces one, it intercepts the calls of every module
of the process: calls of another thread would fail, or become part of the traced graph."""


def compile_layers(model: Any) -> None:
    """Let torch fuse the small operations of each decoder layer, at its first use.

    A layer is compiled again for another gradient mode, for frozen weights and for a batch of one row. All models of a
    class share the limit on how often: engine, learner, reference model and critic need more than torch's default.
    Call the model under `TRACE_LOCK`.
    """
    # Floats such as the epsilon of a norm or the scaling of an adapter are constants. Traced as variables, they would
    # be tensors in host memory, for which torch builds C++ kernels even if the model is on a GPU.
    torch._dynamo.config.specialize_float = True
    decoder = model.get_decoder()
    layers: Any = getattr(decoder, "layers", None) or getattr(decoder, "h", ())
    for layer in layers:
        layer.compile(dynamic=True)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


# ── whether a model can run over packed batches: tried, not looked up ──

TRIAL_WINDOW = 8
"""The sliding window of the trial, for layers that have one: a window that hides nothing would prove nothing."""
TRIAL_LENGTHS = 5, 23
"""Prompts of the trial. In steps of TRIAL_WINDOW + 1 tokens: both at once, two chunks of the longer, its last token."""


def supports_packing(model: Any) -> bool:
    """Whether the model's logits over a packed batch are those over each sequence alone.

    In 16 bits they may differ by three times as much as two attentions of transformers over one sequence do: with deep
    random weights that can be a tenth of their spread and more, where a wrong attention makes them unrelated.
    """
    try:
        alone = _shrink_window(share_weights(model))
        vocabulary = alone.get_input_embeddings().weight.shape[0]
        prompts = [[(7 * at + 3 * length) % vocabulary for at in range(length)] for length in TRIAL_LENGTHS]
        packed = _packed_logits(ModelRunner(alone, sum(TRIAL_LENGTHS) * 2 * bytes_per_token(alone)), prompts)
        expected = _last_logits(alone, prompts)
        if not expected.isfinite().all():
            return True  # a broken model: the first request reports where
        difference = (packed - expected) / expected.std().clamp(min=1e-6)
        if next(model.parameters()).dtype == torch.float32:
            return bool(difference.abs().max() < 1e-3)
        rounding = (_last_logits(share_weights(alone, "eager"), prompts) - expected) / expected.std().clamp(min=1e-6)
        return bool(difference.norm() < max(0.05 * difference.numel() ** 0.5, 3 * rounding.norm()))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _LOG.info("%s cannot be run over packed batches: %s", type(model).__name__, describe(error))
        return False


@torch.inference_mode()
def _last_logits(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """[prompt, vocabulary] logits of the token after each prompt, each run alone."""
    logits = [model(torch.tensor([prompt], device=model.device)).logits[0, -1] for prompt in prompts]
    return torch.stack(logits).float()


@torch.inference_mode()
def _packed_logits(runner: ModelRunner, prompts: list[list[int]]) -> torch.Tensor:
    requests = [EngineRequest(Request(prompt, Sampling()), np.asarray(prompt, np.int32), 1) for prompt in prompts]
    scheduler = Scheduler(runner.kv_cache, len(requests), TRIAL_WINDOW + 1, context=max(TRIAL_LENGTHS) + 1)
    for request in requests:
        scheduler.add(request)
    logits_of: dict[EngineRequest, torch.Tensor] = {}
    while (batch := scheduler.schedule()) is not None:
        ended = [request for request, samples in zip(batch.requests, batch.samples, strict=True) if samples]
        logits_of.update(zip(ended, runner.logits(batch), strict=True))
    return torch.stack([logits_of[request] for request in requests]).float()


def _shrink_window(model: Any) -> Any:
    config = model.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        for module in (config, *model.modules()):
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, TRIAL_WINDOW)
    return model
