"""Images in a forward pass: features of the vision tower take the place of embeddings, at positions known in advance.

No pixels go through `model.forward`, so that packed batches, prompts in chunks and cached prefixes work as for text,
and a placeholder that the model sampled stays a token. Features and rotary positions are computed by the model itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from agentfly.backends.base import Tokens
from agentfly.vision.processor import EncodedImage

FEATURE_BYTES = 1 << 29
"""Size of the cache of features."""
VARLEN_ATTENTION = "flash_varlen_of_torch"
"""Towers of transformers call an attention with "flash" in its name once for all windows and images of a batch, any
other once for each window: for a screenshot of 504 x 504 pixels 25 times per layer."""
Ints = npt.NDArray[np.int64]


def takes_images(model: Any) -> bool:
    """Whether a model has a vision tower."""
    return hasattr(model, "get_image_features")


def tower_parameters(model: Any) -> list[torch.nn.Parameter]:
    """All weights outside of the language model and its head: the vision tower and what connects it."""
    if not takes_images(model):
        return []
    modules = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    language = {id(parameter) for module in modules for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in language]


class FeatureOverlay:
    """Hooks of one model object that write features over the output of its embedding layer.

    Features that a model adds to the hidden states after its first layers (DeepStack of Qwen3-VL) follow in the same
    row: [token, width * (1 + layers)].
    """

    def __init__(self, model: Any) -> None:
        self._features: Tensor | None = None
        self._indices: Tensor | None = None
        if takes_images(model):
            model.get_input_embeddings().register_forward_hook(self._overwrite)
            model.get_decoder().register_forward_pre_hook(self._add_deepstack, with_kwargs=True)

    @contextmanager
    def use(self, features: Tensor | None, indices: Tensor | None) -> Iterator[None]:
        """During one forward pass, put features at these ascending indices of the flattened batch."""
        self._features = features
        self._indices = indices
        try:
            yield
        finally:
            self._features = self._indices = None

    def _overwrite(self, _: Any, __: Any, embeddings: Tensor) -> Tensor | None:
        if self._features is None or self._indices is None:
            return None
        width = embeddings.shape[-1]
        rows = self._features[:, :width].to(embeddings.dtype)
        return embeddings.flatten(0, 1).index_copy(0, self._indices, rows).view(embeddings.shape)

    def _add_deepstack(self, _: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._features is None or self._indices is None:
            return None
        embeddings: Tensor = named["inputs_embeds"]
        width = embeddings.shape[-1]
        if self._features.shape[-1] == width:
            return None
        mask = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
        mask.view(-1)[self._indices] = True
        layers = [features.to(embeddings.dtype) for features in self._features.split(width, -1)[1:]]
        return args, {**named, "visual_pos_masks": mask, "deepstack_visual_embeds": layers}


class FeatureCache:
    """Features by image, until the weights change."""

    def __init__(self) -> None:
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0
        self.computed = 0
        """Images that went through the tower so far."""

    def clear(self) -> None:
        """Drop all features. Called on every weight update: they belong to the old weights."""
        self._features.clear()
        self._bytes = 0

    def load(self, model: Any, images: Sequence[EncodedImage]) -> dict[bytes, Tensor]:
        """The features of the images by digest; those that are missing are computed together."""
        missing = {image.digest: image for image in images if image.digest not in self._features}
        loaded = compute_features(model, list(missing.values()))
        self.computed += len(missing)
        for digest, features in loaded.items():
            self._features[digest] = features
            self._bytes += features.nbytes
        for image in images:
            self._features.move_to_end(image.digest)
            loaded[image.digest] = self._features[image.digest]
        while self._bytes > FEATURE_BYTES:  # `loaded` keeps what this pass needs, also where the cache drops it
            self._bytes -= self._features.popitem(last=False)[1].nbytes
        return loaded


def compute_features(model: Any, images: Sequence[EncodedImage]) -> dict[bytes, Tensor]:
    """[token, width] features of each image by digest, from the model's own tower. Images of equal shape run together.

    DeepStack features are concatenated behind the others, see `FeatureOverlay`.
    """
    if images:
        select_attention(model)
    batches: dict[Any, list[EncodedImage]] = {}
    for image in {image.digest: image for image in images}.values():
        shape = tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(image.inputs.items()))
        batches.setdefault(shape, []).append(image)
    features: dict[bytes, Tensor] = {}
    for batch in batches.values():
        names = batch[0].inputs
        inputs = {name: torch.cat([image.inputs[name] for image in batch]).to(model.device) for name in names}
        out = model.get_image_features(**inputs, return_dict=True)
        layers = []
        for output in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ())):
            # One tensor of all images, or one tensor per image, depending on the family.
            tensors = output if isinstance(output, list | tuple) else [output]
            layers.append(torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]))
        rows = torch.cat(layers, -1)
        for image, image_rows in zip(batch, rows.split([image.num_tokens for image in batch]), strict=True):
            features[image.digest] = image_rows
    return features


def select_attention(model: Any) -> None:
    """Let the tower attend to all windows at once, where it has windows and runs in 16 bits on a GPU."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else model.dtype
    possible = model.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if possible and any(_takes_windows(module.__class__) for module in model.modules()):
        # For good: layers that are recomputed in the backward pass must attend in the same way.
        model.config.vision_config._attn_implementation = VARLEN_ATTENTION


@cache
def _takes_windows(kind: type[torch.nn.Module]) -> bool:
    return "cu_seqlens" in signature(kind.forward).parameters


def attend_varlen(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **named: Any) -> tuple[Tensor, None]:
    """Attention within each sequence of a packed batch, [1, heads, token, width] -> [1, token, heads, width]."""
    width = query.shape[-1]
    query = query * (named["scaling"] * width**0.5)  # varlen_attn divides by the root of the width
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    lengths: Tensor = named["cu_seq_lens_q"].int()
    longest = int(named["max_length_q"])
    out: Any = varlen_attn(query, key, value, lengths, lengths, longest, longest)
    return out[None], None


AttentionInterface.register(VARLEN_ATTENTION, attend_varlen)


def rotary_positions(model: Any, tokens: Tokens, positions: Ints, images: Sequence[EncodedImage]) -> Ints | None:
    """[3, tokens] positions of a sequence with images under M-RoPE; None for a model whose positions simply count.

    The token after the sequence has the position `1 + maximum`.
    """
    if not images:
        return None
    owner = next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
    if owner is None:
        return None
    kinds = torch.zeros(1, len(tokens), dtype=torch.int)
    kinds[0, torch.from_numpy(np.asarray(positions, np.int64))] = 1
    grids = torch.cat([image.inputs["image_grid_thw"] for image in images])
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    rope_positions, _ = owner.get_rope_index(ids, kinds, image_grid_thw=grids)
    out: Ints = rope_positions[:, 0].numpy()
    return out


def mark_images(prompt: Tokens, positions: Ints, images: Sequence[EncodedImage]) -> Tokens:
    """The prompt with negative numbers made of each image's digest in place of its tokens.

    The prefix cache compares these: two images of one size have the same tokens, but not the same keys and values.
    """
    marked = prompt.copy()
    start = 0
    for image in images:
        image_positions = positions[start : start + image.num_tokens]
        # Below 0 as int32, so that no token of the vocabulary equals one.
        words = np.frombuffer(image.digest[:8], np.uint32).astype(np.int64) % (2**31 - 2)
        marked[image_positions] = -1 - words[np.arange(len(image_positions)) % 2]
        start += len(image_positions)
    return marked


class RequestImages:
    """The images of one request: where their features go, and the rotary positions of the prompt."""

    def __init__(self, images: Sequence[EncodedImage], positions: Ints) -> None:
        self.images = images
        self.positions = positions
        self._starts = np.cumsum([0, *(image.num_tokens for image in images)])
        self._rotary: Ints | None = None
        self._prompt_length = 0

    def within(self, start: int, count: int) -> list[tuple[EncodedImage, slice]]:
        """The images with tokens among `count` tokens from `start` on, with the part of their features."""
        low, high = np.searchsorted(self.positions, [start, start + count])
        out = []
        for image, first in zip(self.images, self._starts, strict=False):
            rows = slice(max(int(low - first), 0), min(int(high - first), image.num_tokens))
            if rows.start < rows.stop:
                out.append((image, rows))
        return out

    def indices(self, start: int, count: int) -> Ints:
        """Indices of image tokens among `count` tokens from `start` on, relative to `start`."""
        low, high = np.searchsorted(self.positions, [start, start + count])
        return self.positions[low:high] - start

    def prepare(self, model: Any, prompt: Tokens) -> None:
        """Compute the rotary positions of the prompt."""
        if not self._prompt_length:
            self._prompt_length = len(prompt)
            self._rotary = rotary_positions(model, np.maximum(prompt, 0), self.positions, self.images)

    @property
    def shift(self) -> int:
        """Rotary position minus position of the tokens after the prompt."""
        return 0 if self._rotary is None else int(self._rotary.max()) + 1 - self._prompt_length

    def rotary(self, start: int, count: int) -> Ints:
        """[3 or 1, count] rotary positions of tokens, also of those after the prompt."""
        shifted = np.arange(start, start + count) + self.shift
        if self._rotary is None:
            return shifted[None]
        in_prompt = self._rotary[:, start : start + count]
        num_sampled = count - in_prompt.shape[1]
        return np.concatenate([in_prompt, np.broadcast_to(shifted[count - num_sampled :], (3, num_sampled))], 1)
