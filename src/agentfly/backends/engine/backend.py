"""`backend="transformers"`: samples from a Hugging Face model in this process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from agentfly.backends.base import Backend, OnUpdate, Request, validate_prompt
from agentfly.backends.engine import loading
from agentfly.backends.engine.engine import Engine
from agentfly.backends.engine.kv_cache import default_cache_bytes, retain_freed_memory
from agentfly.backends.engine.model_runner import ModelRunner, SequentialRunner, supports_packing
from agentfly.backends.engine.request import EngineRequest
from agentfly.backends.engine.sampler import reject_extremes
from agentfly.backends.engine.scheduler import CPU_ROWS, CPU_TOKENS, GPU_ROWS, GPU_TOKENS
from agentfly.backends.engine.vision import RequestImages, mark_images, takes_images
from agentfly.errors import BackendFault, ConfigError, describe
from agentfly.models import resolve
from agentfly.templates.codec import Codec
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import load_tokenizer
from agentfly.threads import release_helpers
from agentfly.types import Completion
from agentfly.validation import PositiveInt, validate_arguments
from agentfly.vision.processor import ImageProcessor, load_image_processor

_LOG = logging.getLogger(__name__)
MAX_STOP_IDS = 64
MAX_ID = (1 << 31) - 1
CACHE_ATTEMPTS = 3
"""How often a cache without a given size is allocated, each time from what is free."""


class EngineBackend(Backend):
    """A Hugging Face causal language model with continuous batching."""

    @validate_arguments
    def __init__(
        self,
        model: Any,
        *,
        device: str | None = None,
        dtype: str | None = None,
        kv_memory: PositiveInt | None = None,
        host_memory: PositiveInt | None = None,
        max_rows: PositiveInt | None = None,
        max_batch_tokens: PositiveInt | None = None,
        on_update: str | OnUpdate = OnUpdate.CONTINUE,
    ) -> None:
        """None takes the default of the device.

        Args:
            model: A folder, a hub name, or a model object, whose weights are then shared, not copied.
            device: cpu or cuda.
            dtype: float32, bfloat16 or float16.
            kv_memory: Size of the KV cache in bytes.
            host_memory: Bytes of host memory for prefixes that the KV cache evicts. None: they are computed again.
            max_rows: Maximum number of turns sampled at once.
            max_batch_tokens: Maximum number of tokens in one forward pass.
            on_update: What running turns do when the weights change: continue, finish or abort.
        """
        self._on_update = OnUpdate.of(on_update)
        if max_rows is not None and max_batch_tokens is not None and max_rows > max_batch_tokens:
            raise ConfigError(f"{max_rows=} turns take a token each: {max_batch_tokens=} must be as many")
        if isinstance(model, str):
            at = loading.resolve_device(device)
            self._name = resolve(model)
            with _explain_out_of_memory(f"the weights of {model} do", at, "end another process or use a smaller model"):
                loaded = loading.load_model(self._name, at, loading.resolve_dtype(dtype, at))
        else:
            if device is not None or dtype is not None:
                raise ConfigError("a model object has its device and dtype already; leave device= and dtype= out")
            self._name, loaded = "", model
        self.model = loaded
        """The model as given or loaded; it has the weights that are sampled from."""
        at = next(loaded.parameters()).device
        gpu = at.type == "cuda"
        self._runner = _build_runner_in_free_memory(loaded, kv_memory, at)
        self.context_length = min(loading.max_positions(loaded.config.get_text_config()), self._runner.kv_cache.free)
        self._vocabulary = loaded.get_input_embeddings().weight.shape[0]
        self._codec: Codec | None = None
        self._image_processor: ImageProcessor | None = None
        self._token_texts: dict[int, str] = {}
        max_tokens = max_batch_tokens or (GPU_TOKENS if gpu else CPU_TOKENS)
        if not gpu:
            retain_freed_memory()
        release_helpers()  # those of loading; from here on the engine's thread computes
        rows = min(max_rows or (GPU_ROWS if gpu else CPU_ROWS), max_tokens)
        self._engine = Engine(self._runner, rows, max_tokens, self.context_length, host_memory=host_memory or 0)
        weakref.finalize(self, self._engine.stop)  # a backend that is dropped without close() ends its thread

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights it samples from, by name. A learner that trains these tensors has nothing to deliver."""
        return dict(self._runner.model.named_parameters(remove_duplicate=False))

    @property
    def weight_version(self) -> int:
        return self._engine.version

    def attach(self, template: Template) -> None:
        self._codec = template.codec
        self._image_processor = template.image_processor if self._takes_images else None
        self.supports_images = self._image_processor is not None

    @property
    def _takes_images(self) -> bool:
        return takes_images(self.model) and not isinstance(self._runner, SequentialRunner)

    async def generate(self, request: Request) -> Completion:
        """Sample one turn, batched with all others.

        Requests that would fail in the batch, and so fail other turns, are rejected here. An exception of `on_tokens`
        is raised here and ends this turn only.
        """
        assert self.context_length is not None
        reject_extremes(request.sampling)
        prompt = validate_prompt(request.prompt, self._vocabulary, self.context_length)
        if len(request.stop_ids) > MAX_STOP_IDS or not all(0 <= token <= MAX_ID for token in request.stop_ids):
            raise ConfigError(f"stop_ids must be at most {MAX_STOP_IDS} token ids, not {list(request.stop_ids)!r:.80}")
        images = None
        if request.images:
            if self._image_processor is None and self._takes_images and self._name:
                self._image_processor = load_image_processor(self._name)
            if self._image_processor is None:
                raise ConfigError("this model takes no images: it has no vision tower, or its folder has no processor")
            positions = np.asarray(request.image_positions, np.int64)
            images = RequestImages([self._image_processor.encode(image) for image in request.images], positions)
            if sum(image.num_tokens for image in images.images) != len(positions):
                raise BackendFault(f"the prompt has {len(positions)} image tokens, its images need another number")
            prompt = mark_images(prompt, positions, images.images)
        room = self.context_length - len(prompt)
        if request.sampling.stop:
            self._decode([])  # raises without a tokenizer; in the engine's thread it would fail the whole batch
        limit = min(int(request.sampling.max_tokens or room), room)
        return await self._engine.sample(
            EngineRequest(request, prompt, limit, self._decode, texts=self._token_texts, images=images)
        )

    def _decode(self, ids: Sequence[int]) -> str:
        if self._codec is None:
            if not self._name:
                raise ConfigError("stop strings need a tokenizer: hand the backend to an agent, or name the model")
            self._codec = Codec(load_tokenizer(self._name))
        return self._codec.decode(ids)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Copy weights into the model, by name, between two steps. Weights that are left out stay as they are.

        A learner that trains the model object this backend was made of passes none: `update_weights((), 5)`.
        """
        await self._engine.update(lambda: self._load(weights), version, self._on_update)

    def _load(self, weights: Iterable[tuple[str, Any]]) -> Callable[[], None]:
        """Validate all weights; returns a function that copies them.

        Weights that are computed on the fly are validated by their shapes alone, and computed once, one at a time.
        """
        named = self.weights
        shapes = {name: parameter.shape for name, parameter in named.items()}
        pairs: Iterable[tuple[str, torch.Tensor]]
        if isinstance(weights, loading.LazyWeights):
            pairs, new_shapes = weights, list(weights.shapes.items())
        else:
            pairs = tensors = list(loading.iterate_tensors(weights))
            new_shapes = [(name, tensor.shape) for name, tensor in tensors]
        # All of them before one is copied: after half of an update, the weights would belong to no version.
        for name, shape in new_shapes:
            loading.check_weight(name, shape, shapes)

        @torch.no_grad()
        def commit() -> None:
            for name, value in pairs:
                named[name].copy_(value)

        return commit

    async def close(self) -> None:
        await self._engine.close()


def _first_line(error: Exception) -> str:
    return describe(error).partition("\n")[0]


@contextmanager
def _explain_out_of_memory(what: str, device: torch.device, advice: str) -> Iterator[None]:
    """Turn torch's error into a ConfigError with the numbers of the GPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (f"{size / 2**30:.1f}" for size in torch.cuda.mem_get_info(device))
        raise ConfigError(
            f"{what} not fit on {device}: {free} of {total} GiB are free; {advice} ({_first_line(error)})"
        ) from error


def _build_runner_in_free_memory(model: Any, kv_memory: int | None, device: torch.device) -> ModelRunner:
    """A runner whose cache has `kv_memory` bytes; None: a share of the free memory.

    Another process may take that memory between the measurement and the allocation: then the share is that of what is
    left, a few times.
    """
    for _ in range(CACHE_ATTEMPTS - 1 if kv_memory is None else 0):
        try:
            return _build_runner(model, default_cache_bytes(device), device.type == "cuda")
        except torch.OutOfMemoryError as error:
            _LOG.warning("the KV cache did not fit, trying with what is free now: %s", _first_line(error))
        torch.cuda.empty_cache()
    size = kv_memory or default_cache_bytes(device)
    advice = "end another process, or give the cache less: kv_memory, in bytes (backend.kv_memory=…, --kv-memory 2GiB)"
    with _explain_out_of_memory(f"a KV cache of {size / 2**30:.1f} GiB does", device, advice):
        return _build_runner(model, size, device.type == "cuda")


def _build_runner(model: Any, memory: int, gpu: bool) -> ModelRunner:
    if not supports_packing(model):
        _LOG.warning("%s is run one sequence at a time: its attention cannot be replaced", type(model).__name__)
        return SequentialRunner(model, memory)
    if not gpu or not loading.graphs(model):
        return ModelRunner(model, memory)
    from agentfly.backends.engine.cuda_graphs import GraphRunner  # Triton comes with torch for GPUs only

    return GraphRunner(model, memory)
