"""Models run over batches of sequences: `Backbone` (hidden states), `Policy` (log-probabilities), `Critic` (values).

Sequences are packed into one row without padding, and attention is computed per sequence. A model whose attention
cannot be replaced gets rows padded on the right, where causal attention makes padding without effect.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from agentfly.algorithms.base import SegmentArrays
from agentfly.backends.engine.attention import attend_dense, register_attention
from agentfly.backends.engine.loading import bfloat16_is_fast
from agentfly.backends.engine.model_runner import compile_layers, share_weights, supports_packing
from agentfly.backends.engine.vision import (
    FeatureCache,
    FeatureOverlay,
    compute_features,
    rotary_positions,
    tower_parameters,
)
from agentfly.errors import ConfigError, DataError, RecordError, describe
from agentfly.segment import Floats
from agentfly.training.batch import Sample, gather_field, require_finite, to_device
from agentfly.training.logprobs import Head, score, score_logits
from agentfly.training.lora import has_adapters
from agentfly.training.optimizer import Optimizer
from agentfly.vision.processor import EncodedImage, ImageProcessor, load_image_processor

_LOG = logging.getLogger(__name__)
ATTENTION = "agentfly-training"
_ONE_SEQUENCE_PER_ROW: ContextVar[bool] = ContextVar("one_sequence_per_row", default=False)
_find_packed_sequences = masking_utils.find_packed_sequence_indices


def _find_packed_unless_padded(position_ids: Tensor) -> Tensor | None:
    """None where every row has one sequence, else what transformers finds: its search waits for the GPU."""
    # A compiler cannot trace a context variable, and the models that are compiled whole are not ours.
    one_per_row = not torch.compiler.is_compiling() and _ONE_SEQUENCE_PER_ROW.get()
    return None if one_per_row else _find_packed_sequences(position_ids)


masking_utils.find_packed_sequence_indices = _find_packed_unless_padded
Precision = Literal["auto", "float32", "bfloat16"]


def copy_trainable(model: Any) -> Any:
    """A copy of a model that shares the frozen weights with it."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters() if not weight.requires_grad})


def set_tower_trainable(model: Any, trainable: bool) -> None:
    """Train or freeze the vision tower of a model. Raises ConfigError where there is none to train."""
    tower = tower_parameters(model)
    if trainable and not tower:
        raise ConfigError(f"train_tower=True, but {type(model).__name__} has no vision tower; leave it out")
    if trainable and has_adapters(model):
        raise ConfigError("vision.train_tower=true trains all weights of the tower; leave lora_rank out")
    for weight in tower:
        weight.requires_grad_(trainable)


class Backbone:
    """A model object of its own over the weights of the given model, without dropout."""

    def __init__(
        self,
        model: Any,
        device: torch.device | None = None,
        *,
        gradient_checkpointing: bool = False,
        features: FeatureCache | None = None,
    ) -> None:
        """
        Args:
            model: Its weights are used, not copied.
            device: Where it will compute, if its weights are moved there later; None: where they are.
            gradient_checkpointing: Recompute the activations of each layer in the backward pass.
            features: Cache of image features, shared with other models that have the same frozen vision tower.
        """
        self._image_processor: ImageProcessor | None = None
        computes_on = device or next(model.parameters()).device
        # On a GPU, launching many small kernels dominates.
        self.packed = computes_on.type == "cpu" and supports_packing(model)
        self.model = share_weights(model, ATTENTION if self.packed else None)
        self._overlay = FeatureOverlay(self.model)
        self._features = FeatureCache() if features is None else features
        tower = {id(weight) for weight in tower_parameters(self.model)}
        self._tower_is_trained = any(weight.requires_grad and id(weight) in tower for weight in self.model.parameters())
        if computes_on.type != "cpu":
            compile_layers(self.model)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # Layers checkpoint only in training mode. Their submodules stay in eval mode; dropout rates become 0.
            for layer in self.model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.training = True
                    for name, value in list(vars(layer).items()):
                        if "dropout" in name and isinstance(value, float):
                            setattr(layer, name, 0.0)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def hidden_states(self, segments: Sequence[SegmentArrays]) -> Tensor:
        """[sampled, width]: the head's input before the sampled tokens. The head itself is not computed."""

        def run(**model_inputs: Any) -> Tensor:
            captured: list[Tensor] = []

            def capture(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                captured.append(args[0])
                # The head gets no tokens: its logits would take more memory than all other activations.
                return (args[0][:, :0], *args[1:])

            hook = self.model.get_output_embeddings().register_forward_pre_hook(capture)
            try:
                self.model(**model_inputs)
            finally:
                hook.remove()
            return captured[0]

        return self._forward(segments, run)

    def logits(self, segments: Sequence[SegmentArrays]) -> Tensor:
        """[sampled, vocab]: the model's output before the sampled tokens."""
        return self._forward(segments, lambda **model_inputs: self.model(**model_inputs).logits)

    def _forward(self, segments: Sequence[SegmentArrays], run: Callable[..., Tensor]) -> Tensor:
        """The rows of what `run` returns, [rows, tokens, width or vocab], that predict the sampled tokens."""
        input_ids = [segment.input_ids for segment in segments]
        lengths = [len(ids) for ids in input_ids]
        extra: dict[str, Any] = {}
        images = self._encode_images(segments)
        # Rotary positions per sequence, [axes, tokens]: one axis, or three if a sequence has images under M-RoPE.
        rotary = [np.arange(len(ids))[None] for ids in input_ids]
        for number, (ids, (positions, sequence_images)) in enumerate(zip(input_ids, images, strict=True)):
            if (image_rotary := rotary_positions(self.model, ids, positions, sequence_images)) is not None:
                rotary[number] = image_rotary
        axes = max(map(len, rotary))
        rotary = [np.broadcast_to(row, (axes, row.shape[1])) for row in rotary]
        # starts: index of each sequence's first token in the flattened batch.
        if self.packed:
            # Without positions of its own, a sequence would continue those of the one before it.
            starts = np.cumsum([0, *lengths[:-1]])
            extra = {"position_ids": self._to_device(np.concatenate(rotary, 1))[:, None], "lengths": lengths}
            ids = np.concatenate(input_ids)[None]  # [1, tokens]
        else:
            starts = np.arange(len(lengths)) * max(lengths)
            ids = np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in input_ids])
            if len(rotary[0]) > 1:
                padded = [np.pad(row, ((0, 0), (0, max(lengths) - row.shape[1]))) for row in rotary]
                extra = {"position_ids": self._to_device(np.stack(padded, 1))}  # [3, rows, tokens]
        if "position_ids" in extra and len(extra["position_ids"]) == 1:
            extra["position_ids"] = extra["position_ids"][0]  # [1, tokens]
        with self._overlay.use(*self._image_features(images, starts)):
            token = _ONE_SEQUENCE_PER_ROW.set(not self.packed)
            try:
                out = run(input_ids=self._to_device(ids), use_cache=False, **extra)  # [rows, tokens, width or vocab]
            finally:
                _ONE_SEQUENCE_PER_ROW.reset(token)
        rows = [start + segment.positions for start, segment in zip(starts, segments, strict=True)]
        return out.flatten(0, 1).index_select(0, self._to_device(np.concatenate(rows)))

    def _encode_images(self, segments: Sequence[SegmentArrays]) -> list[tuple[npt.NDArray[Any], list[EncodedImage]]]:
        """Per sequence: the positions of image tokens, and the images; without those after the last sampled token."""
        if not any(segment.images for segment in segments):
            return [(np.empty(0, np.int64), []) for _ in segments]
        if self._image_processor is None:
            self._image_processor = load_image_processor(self.model.config.name_or_path)
        out = []
        for segment in segments:
            is_read = segment.image_positions < segment.num_input_tokens
            positions = segment.image_positions[is_read].astype(np.int64)
            images: list[EncodedImage] = []
            count = 0
            for image in segment.images:
                if count < len(positions):  # the others are shown after the last sampled token
                    images.append(self._image_processor.encode(image))
                    count += images[-1].num_tokens
            if count != len(positions):
                raise RecordError(f"a segment has {len(positions)} image tokens, its images need {count}")
            out.append((positions, images))
        return out

    def _image_features(
        self, images: Sequence[tuple[npt.NDArray[Any], list[EncodedImage]]], starts: npt.NDArray[Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The features of all images, and their indices in the flattened batch."""
        shown_images = [image for _, sequence_images in images for image in sequence_images]
        if not shown_images:
            return None, None
        if self._tower_is_trained:
            features = compute_features(self.model, shown_images)
        else:  # the tower never changes, so its features are computed once
            with torch.no_grad():
                features = self._features.load(self.model, shown_images)
        indices = np.concatenate([start + positions for start, (positions, _) in zip(starts, images, strict=True)])
        return torch.cat([features[image.digest] for image in shown_images]), self._to_device(indices)

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(array.astype(np.int64), self.device)


class Policy:
    """A causal language model that scores sampled tokens."""

    def __init__(self, model: Any, device: torch.device | None = None, **settings: Any) -> None:
        """The arguments are those of `Backbone`."""
        self.backbone = Backbone(model, device, **settings)
        self.has_plain_head = _has_plain_head(self.backbone)

    def __call__(self, segments: Sequence[SegmentArrays], temperatures: Floats) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the sampled tokens at their temperatures, [sampled] each."""
        targets = self._targets(segments, temperatures)
        if not self.has_plain_head:
            return score_logits(self.backbone.logits(segments), *targets)
        return score(self.backbone.hidden_states(segments), Head.from_model(self.backbone.model), *targets)[:2]

    def score_with_teacher(
        self, segments: Sequence[SegmentArrays], temperatures: Floats, teacher: Policy
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and the KL divergence of each token's distribution to the teacher's, a constant. Both models must
        have a plain head."""
        with torch.no_grad():  # before the student's pass, whose activations stay in memory
            teacher_hidden = teacher.backbone.hidden_states(segments)
        return score(
            self.backbone.hidden_states(segments),
            Head.from_model(self.backbone.model),
            *self._targets(segments, temperatures),
            teacher=(teacher_hidden, Head.from_model(teacher.backbone.model)),
        )

    def _targets(self, segments: Sequence[SegmentArrays], temperatures: Floats) -> tuple[Tensor, Tensor]:
        """The sampled tokens and their temperatures, [sampled] each."""
        device = self.backbone.device
        targets = np.concatenate([segment.tokens[segment.mask] for segment in segments]).astype(np.int64)
        return to_device(targets, device), to_device(temperatures.astype(np.float32), device)

    def logprobs(self, segments: Sequence[SegmentArrays], temperature: float) -> Tensor:
        """Log-probabilities of the sampled tokens, [sampled], all at one temperature."""
        count = sum(segment.num_sampled_tokens for segment in segments)
        return self(segments, np.full(count, temperature, np.float32))[0]


@torch.no_grad()
def _has_plain_head(backbone: Backbone) -> bool:
    """Whether `Head` reproduces the model's logits; tested on a probe sequence, not looked up by architecture."""
    probe = [SegmentArrays.from_tokens(np.arange(1, 10), prompt=1)]
    name = type(backbone.model).__name__
    try:
        # Not compiled: weights that are sharded later are still in host memory, and torch would build C++ kernels.
        with torch.compiler.set_stance("force_eager"):
            expected: Tensor = backbone.logits(probe)
            logits = Head.from_model(backbone.model).logits(backbone.hidden_states(probe))
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        _LOG.warning("the logits of %s are kept whole: its head cannot be run alone (%s)", name, describe(error))
        return False
    # `Head` computes in float32 what a model in 16 bits may round at every operation.
    tolerance = 2e-2 if expected.dtype.itemsize == 2 else 1e-3
    expected = expected.float()
    same = bool(torch.allclose(logits, expected, rtol=tolerance, atol=tolerance * float(expected.std())))
    if not same and expected.isfinite().all():
        _LOG.warning("the logits of %s are kept whole: its head is not a plain linear layer", name)
    return same


def computes_in_low_precision(precision: Precision, model: Any, device: torch.device) -> bool:
    """Whether the products of a model are computed in bfloat16, or its weights are not all float32."""
    # Not measured where it makes no difference: that starts a process.
    in_bfloat16 = precision != "float32" and bfloat16_is_fast(device)
    if precision == "bfloat16" and not in_bfloat16:
        raise ConfigError("precision='bfloat16', but this CPU is slower in it than in float32, or does not support it")
    return in_bfloat16 or any(weight.dtype != torch.float32 for weight in model.parameters())


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    lengths: list[int],
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of packed sequences; query, key and value are [1, heads, tokens, width]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        mask, count = None, q.shape[2]
        if sliding_window is not None and sliding_window < count:  # else no mask: the fast path
            mask = torch.ones(count, count, dtype=q.dtype, device=q.device).tril().triu(1 - sliding_window).log()
        outputs.append(attend_dense(q, k, v, mask, scaling, softcap, causal=mask is None).transpose(1, 2))
    return torch.cat(outputs, 1), None


register_attention(ATTENTION, packed_attention)


class Critic:
    """A value model: a backbone with a scalar head, and the optimizer of both.

    It starts as a copy of the policy with a head of zeros; frozen weights (under adapters the whole model, else the
    vision tower) are shared, not copied. The value of the state before a token is read at the position before it.
    """

    optimizer: Optimizer
    """Set by the learner, after it has placed the weights."""

    def __init__(self, model: Any, device: torch.device, **settings: Any) -> None:
        """The arguments are those of `Backbone`."""
        self.backbone = Backbone(copy_trainable(model), device, **settings)
        lm_head = self.backbone.model.get_output_embeddings().weight
        head = torch.nn.Linear(lm_head.shape[1], 1, device=lm_head.device, dtype=torch.float32)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        self.backbone.model.set_output_embeddings(head)

    def __call__(self, segments: Sequence[SegmentArrays]) -> Tensor:
        """[sampled]: the value of the state before each sampled token, in float32."""
        head = self.backbone.model.get_output_embeddings()
        states = self.backbone.hidden_states(segments)
        with torch.autocast(states.device.type, enabled=False):
            values = torch.nn.functional.linear(states.float(), head.weight.float(), head.bias.float())
        return values[:, 0]

    def loss(self, batch: Sequence[Sample], indices: list[int]) -> tuple[Tensor, Callable[[], float]]:
        """The loss of a micro-batch, Σ (V − return)² / (2 · tokens of the mini-batch `batch`), and what reads it."""
        samples = [batch[index] for index in indices]
        errors = self([sample.segment for sample in samples]) - gather_field(samples, "returns", self.backbone.device)
        loss = errors.square().sum() / (2 * sum(sample.num_sampled_tokens for sample in batch))
        return loss, partial(require_finite, loss.detach(), "the critic's loss", errors.detach(), samples)

    def state_dict(self) -> dict[str, Tensor]:
        weights = {f"weights/{name}": weight.detach() for name, weight in self.optimizer.weights.items()}
        return weights | {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.optimizer.weights.items():
            if f"weights/{name}" not in tensors:
                raise DataError(f"the checkpoint has no weight {name} of the critic")
            weight.copy_(tensors[f"weights/{name}"])
        self.optimizer.load_state_dict(strip_prefix("optimizer/", tensors))


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
