"""Memory of a training run: what each part takes on the device, whether it fits, and what is left for the KV cache.

`plan_memory` computes a plan from the model's configuration, without its weights. On a GPU the activations of an update
are then measured by a dry run (`fit_cache`), and the KV cache gets what the update does not need.

Everything is in bytes. Per trained weight: 4 for the weight, 4 for its gradient, 8 for AdamW's moments; beside them the
engine's copy in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from agentfly.backends.engine.kv_cache import default_cache_bytes, free_memory
from agentfly.backends.engine.loading import auto_class, config_shape, load_config, max_positions, resolve_dtype
from agentfly.backends.engine.scheduler import GPU_ROWS, GPU_TOKENS
from agentfly.backends.engine.vision import FEATURE_BYTES, takes_images, tower_parameters
from agentfly.errors import ConfigError
from agentfly.models import resolve
from agentfly.training.config import TrainConfig
from agentfly.training.logprobs import LOGITS

if TYPE_CHECKING:
    from agentfly.training.local_learner import LocalLearner

GIB = 2**30
MARGIN = 0.04
"""Share of the device that a plan leaves free: CUDA context, library workspaces, fragmentation of the allocator."""
MIN_CACHE_TOKENS = 8192
"""Tokens that the KV cache has room for at least, where the longest chain is not known to be longer."""
NO_CHANGE_FITS = (
    "Neither gradient checkpointing nor a smaller micro-batch nor LoRA makes it fit: take a smaller model or a larger "
    "device"
)


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a model that its memory depends on."""

    parameters: int
    """Weights of the language model."""
    linear_width: int
    """Sum of the input and output widths of the language model's linear layers but the head: adapters have as many
    weights per rank."""
    layers: int
    width: int
    """Width of the hidden states."""
    inner: int
    """Width inside the feed-forward layers, of all experts that one token uses."""
    kv_width: int
    """Width of the keys of a token, as wide as its values."""
    vocab: int
    positions: int
    tower: int = 0
    """Weights of the vision tower and its connector."""

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer."""
        return (self.parameters - self.vocab * self.width) // self.layers

    @classmethod
    def from_config(cls, config: Any) -> ModelSize:
        """Count the weights of a transformers configuration, without allocating them."""
        with torch.device("meta"):
            model: Any = auto_class(config).from_config(config)
        head = model.get_output_embeddings()
        language = model.get_decoder() if takes_images(model) else model
        linear = [module for module in language.modules() if isinstance(module, torch.nn.Linear) and module is not head]
        tower = sum(weight.numel() for weight in tower_parameters(model))
        text = config.get_text_config()
        layers, heads, head_width = config_shape(text)
        inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
        if experts := getattr(text, "num_experts_per_tok", None):
            inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
        return cls(
            parameters=sum(weight.numel() for weight in model.parameters()) - tower,
            linear_width=sum(layer.in_features + layer.out_features for layer in linear),
            layers=layers,
            width=text.hidden_size,
            inner=inner,
            kv_width=heads * head_width,
            vocab=model.get_input_embeddings().weight.shape[0],
            positions=min(max_positions(text), 1 << 20),
            tower=tower,
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, of the bytes that the process may use on the device."""

    total: int
    parts: Mapping[str, int]
    """In the order they are allocated: weights, gradients, optimizer, …, activations, kv_cache."""
    tokens: int
    """Tokens of the largest forward and backward pass."""
    measured: bool = False
    """Whether the activations were measured; otherwise they are computed by `activation_bytes`."""
    fitting: tuple[str, ...] = field(default=(), compare=False)
    """Changes of the configuration with which the plan would fit."""

    @property
    def left(self) -> int:
        """Bytes that no part takes; negative where the parts do not fit."""
        return self.total - sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {format_gib(size)}" for name, size in self.parts.items() if size)
        how = "measured" if self.measured else "estimated"
        remainder = f"{format_gib(self.left)} left of {format_gib(self.total)}"
        if self.left < 0:
            remainder = f"{format_gib(-self.left)} more than the {format_gib(self.total)} available"
            if not self.measured and self.left + self.parts["activations"] >= 0:
                remainder += " if a pass has that many tokens; a smaller micro_batch_tokens needs less"
        return f"Memory in GiB: {parts} (activations {how} for {self.tokens:,} tokens); {remainder}"

    def to_json(self) -> dict[str, Any]:
        """The plan for the run directory, sizes in bytes."""
        return {"total": self.total, **self.parts, "left": self.left, "tokens": self.tokens, "measured": self.measured}

    def require_fit(self) -> None:
        """Raise ConfigError with the numbers, and what to change, if the parts do not fit.

        Estimated activations are no reason: they are those of a full micro-batch, which may never occur.
        """
        if self.left + (0 if self.measured else self.parts["activations"]) >= 0:
            return
        change = f"It would fit with one of these: {'; '.join(self.fitting)}" if self.fitting else NO_CHANGE_FITS
        raise ConfigError(f"this run does not fit into memory. {self}. {change}")


def plan_run(model: str, config: TrainConfig, device: torch.device, *, ranks: int = 1) -> MemoryPlan:
    """Plan a run on this machine; raises ConfigError if it cannot fit. model: a folder or a hub name.

    ranks: number of processes that the learner is sharded over.
    """
    plan = estimate_run(model, config, device, ranks=ranks)
    plan.require_fit()
    return plan


def estimate_run(
    model: str, config: TrainConfig, device: torch.device, *, total: int | None = None, ranks: int | None = None
) -> MemoryPlan:
    """Plan a run on a device. total: bytes of a GPU that is not here; None: those of the device."""
    on_gpu = total is not None or device.type == "cuda"
    return plan_memory(
        ModelSize.from_config(load_config(model)),
        config,
        device_memory(device) if total is None else total,
        on_gpu=on_gpu,
        kv_cache=0 if on_gpu else default_cache_bytes(device),  # on a GPU what is left
        ranks=ranks,
        teacher=count_teacher(config),
    )


def plan_memory(
    size: ModelSize,
    config: TrainConfig,
    total: int,
    *,
    on_gpu: bool,
    kv_cache: int = 0,
    ranks: int | None = None,
    teacher: int = 0,
) -> MemoryPlan:
    """Plan a run by formula, for one of its ranks.

    total: bytes that the process may use on the device. kv_cache: bytes of the KV cache; 0 plans for the least.
    ranks: number of processes that the learner is sharded over; None is `config.gpus`. teacher: its weights.
    """
    ranks = ranks or config.gpus
    planned = partial(_plan, size, total=total, on_gpu=on_gpu, kv_cache=kv_cache, ranks=ranks, teacher=teacher)
    plan = planned(config)
    fitting = []
    for changes in _alternatives(config, plan.tokens):
        other = planned(config.override(changes))
        if other.left >= 0:
            written = " ".join(f"{name}={str(value).lower()}" for name, value in changes.items())
            fitting.append(f"{written} ({format_gib(total - other.left)} GiB)")
    return replace(plan, fitting=tuple(fitting))


def fit_cache(
    plan: MemoryPlan, learner: LocalLearner, *, longest: int | None = None, kv_memory: int | None = None
) -> MemoryPlan:
    """Measure an update by a dry run, and give the KV cache what is left, at most half of the device.

    longest: tokens of the longest chain, if it is known. kv_memory: the size of the cache where the user has chosen it.
    On a CPU the plan is returned as it is.
    """
    if learner.device.type != "cuda":
        return plan
    needed, tokens = learner.measure_update(longest)
    # What is gathered is part of the measured peak, and would be counted twice.
    parts = {**plan.parts, "gathered_weights": 0, "activations": max(needed - plan.parts["gradients"], 0)}
    total = device_memory(learner.device)
    spare = total - sum(parts.values()) + parts["kv_cache"]
    parts["kv_cache"] = kv_memory or max(min(spare, total // 2), parts["kv_cache"])
    return replace(plan, total=total, parts=parts, tokens=tokens, measured=True)


def _alternatives(config: TrainConfig, tokens: int) -> Iterable[dict[str, Any]]:
    """Changes that need less memory, those that change the result last."""
    small: dict[str, Any] = {"micro_batch_tokens": min(4096, config.micro_batch_tokens)}
    checkpointing = {"gradient_checkpointing": True}
    if config.micro_batch_tokens > 4096:
        yield small
    if not config.gradient_checkpointing:
        yield checkpointing
        yield checkpointing | small
    if tokens > config.micro_batch_tokens:
        yield checkpointing | {"run_options.context_length": config.micro_batch_tokens}
    if config.lora_rank is None:
        yield {"lora_rank": 16}
        yield {"lora_rank": 16} | checkpointing | small


def _plan(
    size: ModelSize, config: TrainConfig, *, total: int, on_gpu: bool, kv_cache: int, ranks: int, teacher: int
) -> MemoryPlan:
    settings = config.backend_settings
    embedded = config.embeds_engine
    device = torch.device("cuda" if on_gpu else "cpu")
    # Bytes of one of the engine's weights; 0 where it runs in another process.
    item = resolve_dtype(settings.get("dtype"), device).itemsize if embedded else 0
    tower = size.tower if config.vision.train_tower else 0
    # An adapter of rank r on a matrix [out, in] has r · (out + in) weights.
    trained = size.parameters + tower if config.lora_rank is None else config.lora_rank * size.linear_width
    has_reference = bool(config.kl.coef) and config.lora_rank is None
    frozen = 0 if config.lora_rank is None else size.parameters
    frozen_tower = size.tower - tower  # whole on every rank
    frozen_item = frozen_weight_dtype(config, on_gpu=on_gpu).itemsize
    longest = config.run_options.get("context_length") or 0
    tokens = max(config.micro_batch_tokens, longest)  # a longer chain is a micro-batch of its own
    # Keys and values of every layer: a smaller cache would cut the longest chain.
    least_cache = 2 * size.layers * size.kv_width * item * max(MIN_CACHE_TOKENS, longest)
    separate = item < 4 or config.async_training.max_staleness > 0 or ranks > 1
    rows = settings.get("max_rows") or GPU_ROWS
    step_tokens = settings.get("max_batch_tokens") or GPU_TOKENS
    # What the engine's CUDA graphs hold: activations of its largest step, logits of all rows, and the slot table.
    graphs = (
        2 * step_tokens * (3 * size.inner + 8 * size.width) + rows * size.vocab * 14 + 4 * (rows + 1) * size.positions
    )
    parts = {
        # Weight 4, gradient 4 and AdamW's two moments 8 bytes per trained weight, all in float32.
        "weights": (4 * trained + frozen_item * frozen) // ranks + frozen_item * frozen_tower,
        "gradients": 4 * trained // ranks,
        "optimizer": 8 * trained // ranks,
        # Reference and critic share frozen weights with the policy.
        "reference": 4 * trained // ranks if has_reference else 0,
        "teacher": teacher_dtype(config, on_gpu=on_gpu).itemsize * teacher // ranks,
        "critic": 16 * trained // ranks if config.algorithm.needs_values else 0,
        # Gathered at a time: embeddings and head with their gradient, this layer and the next.
        "gathered_weights": 4 * (2 * size.vocab * size.width + 2 * size.layer_parameters) if ranks > 1 else 0,
        # In float32 the engine samples from the learner's weights, unless those change while it samples.
        "engine_weights": item * (size.parameters + size.tower) if separate else 0,
        # One cache in the engine, and one for all models of the learner with a frozen tower.
        "image_features": FEATURE_BYTES * (embedded + (has_reference or not tower)) if size.tower else 0,
        "engine_graphs": graphs if on_gpu and embedded else 0,
        "activations": activation_bytes(
            size,
            tokens,
            gradient_checkpointing=config.gradient_checkpointing,
            low_precision=on_gpu and config.precision != "float32",
            frozen_item=frozen_item,
        ),
        "kv_cache": max(settings.get("kv_memory") or kv_cache, least_cache) if embedded else 0,
        "margin": int(MARGIN * total) if on_gpu else 0,
    }
    return MemoryPlan(total, parts, tokens)


def frozen_weight_dtype(config: TrainConfig, *, on_gpu: bool) -> torch.dtype:
    """Data type of weights that are not trained: under LoRA in bfloat16, as they are published and multiplied."""
    low_precision = on_gpu and config.precision != "float32"
    return torch.bfloat16 if config.lora_rank is not None and low_precision else torch.float32


def count_teacher(config: TrainConfig) -> int:
    """Weights of the teacher that is loaded beside the learner; 0 where there is none."""
    if config.teacher.model is None or config.teacher.base_url is not None:
        return 0
    return ModelSize.from_config(load_config(resolve(config.teacher.model))).parameters


def teacher_dtype(config: TrainConfig, *, on_gpu: bool) -> torch.dtype:
    """Data type of the teacher's weights: bfloat16 where products are computed in it."""
    return torch.bfloat16 if on_gpu and config.precision != "float32" else torch.float32


def activation_bytes(
    size: ModelSize, tokens: int, *, gradient_checkpointing: bool, low_precision: bool, frozen_item: int = 4
) -> int:
    """Peak of a forward and backward pass over `tokens` tokens, beyond weights and gradients; an estimate.

    Autograd stores, per token and decoder layer (w the width, i the inner width, k that of the keys; the residual
    stream is float32, h the bytes of a product):

        norms        4 · 4w            input and output of both, in float32
        casts        5w · h            the inputs of q, k, v, gate and up, in low precision only
        attention    (3w + 2k) · h     queries, keys, values, output, and that as the input of the projection
        MLP          4i · h            gate, silu(gate), up, and their product

    and the weights as they were cast. With checkpointing, the input of each layer, and all of the above for one layer
    at a time. Beside them either the head with its chunk of logits, or the gradients of one layer's activations.
    """
    h = 2 if low_precision else 4
    w, i, k = size.width, size.inner, size.kv_width
    layer = 16 * w + (5 * w * h if low_precision else 0) + (3 * w + 2 * k) * h + 4 * i * h
    cast_weights = h * size.layer_parameters if low_precision and frozen_item == 4 else 0
    stored = tokens * layer + cast_weights
    if gradient_checkpointing:
        stored += 4 * w * tokens * size.layers
    else:
        stored *= size.layers
    logits = min(tokens * size.vocab, LOGITS["cuda" if low_precision else "cpu"])
    head = logits * (12 + h) + size.vocab * w * (2 * h + 4)
    layer_gradients = tokens * (8 * w + 3 * i * h)
    return stored + max(head, layer_gradients)


def device_memory(device: torch.device) -> int:
    """Bytes that this process may use: of the GPU what is free or already its own, of a machine what is available."""
    if device.type != "cuda":
        return free_memory()
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index  # torch.device("cuda") has none
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(index)
    reserved = torch.cuda.memory_reserved(device)
    return min(free + reserved, int(total * fraction))


def format_gib(size: int) -> str:
    """Format bytes as GiB."""
    return f"{size / GIB:.1f}" if abs(size) >= GIB / 10 else f"{size / GIB:.2g}"
