"""How a vision model takes images: the placeholder tokens in the prompt, and the inputs of the vision tower.

Every image is processed once, alone. Its placeholder in the rendered text is expanded before the text is encoded, so
that the tokens are those of the model's own processor for the whole conversation. Processing an image alone equals
processing it with others for the model types in `SUPPORTED`; others are refused with the reason.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import snapshot_download

from agentfly.errors import ConfigError, DataError, TemplateError, describe, require_extra
from agentfly.segment import Ids
from agentfly.types import Image
from agentfly.vision.images import PROCESSOR_FILES, encode_image, open_image

SUPPORTED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "idefics3", "smolvlm", "internvl")
"""Model types whose prompts with images are append-only and whose attention is causal."""
_REASONS = {
    "gemma3": "the tokens of one image attend to each other in both directions, and attention here is causal",
    "gemma3n": "the tokens of one image attend to each other in both directions, and attention here is causal",
    "paligemma": "its attention over the prompt is not causal, so a prompt cannot be extended",
    "llava_onevision": "a second image changes the tokens of the first, so a prompt cannot be extended",
}
MIN_TRANSFORMERS = (5, 17)
CACHE_BYTES = 1 << 29
"""Size of the cache of processed images."""
_TEXT_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """One image as the model takes it."""

    digest: bytes
    """Identifies the pixels."""
    text: str
    """What the placeholder of the template becomes: control tokens, with whitespace between them in some families."""
    ids: tuple[int, ...]
    """The tokens of this text."""
    num_tokens: int
    """How many of them get a feature of the vision tower."""
    inputs: dict[str, Any]
    """Inputs of the vision tower by name: tensors that are concatenated along their first dimension."""


class ImageProcessor:
    """The image processor of a model."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.placeholder: str = processor.image_token
        """What a chat template writes in place of an image."""
        self.token_id: int = processor.image_token_id
        """The token whose embedding a feature replaces."""
        self._cache: OrderedDict[str, EncodedImage] = OrderedDict()
        """By URL: a string computes its hash once, a digest of a screenshot would be computed at every turn."""
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def encode(self, image: Image) -> EncodedImage:
        """Process an image; raises DataError if it cannot be decoded."""
        with self._lock:
            if image.url in self._cache:
                self._cache.move_to_end(image.url)
                return self._cache[image.url]
        digest = hashlib.blake2b(image.url.encode(), digest_size=16).digest()
        encoded = self._process(open_image(image), digest)  # not under the lock: other threads need the cache
        with self._lock:
            if image.url not in self._cache:
                self._cache[image.url] = encoded
                self._cached_bytes += _num_bytes(image.url, encoded)
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= _num_bytes(*self._cache.popitem(last=False))
        return encoded

    def fit(self, image: Image) -> Image:
        """Resize an image with Pillow to the size at which the tower takes it, where that is one size for the image.

        Otherwise the processor of another library, such as torchvision, would compute slightly other pixels. Called
        outside of the event loop, it also does the work of `encode`, which then finds the image in its cache.
        """
        grid = self.encode(image).inputs.get("image_grid_thw")
        if grid is None:
            return image
        patch: int = self._processor.image_processor.patch_size
        _, rows, columns = grid[0].tolist()
        pixels = open_image(image)
        size = (columns * patch, rows * patch)
        if pixels.size == size:
            return image
        fitted = encode_image(pixels.resize(size))  # bicubic, as the processor does
        self.encode(fitted)
        return fitted

    def expand(self, text: str, images: Sequence[Image]) -> str:
        """Replace the placeholders in rendered text by what the processor writes for each image.

        Raises TemplateError if there are more or fewer placeholders than images.
        """
        first, *following = text.split(self.placeholder)
        if len(following) != len(images):
            raise TemplateError(
                f"the messages have {len(images)} images, but the template writes {len(following)} placeholders "
                f"{self.placeholder!r}"
            )
        return first + "".join(self.encode(image).text + gap for image, gap in zip(images, following, strict=True))

    def collapse(self, prompt: Sequence[int], positions: Sequence[int] | Ids, images: Sequence[Image]) -> list[int]:
        """The prompt with one placeholder token per image, as vLLM takes it: the inverse of `expand`, for tokens.

        `positions`: those of the tokens with a feature. Raises DataError if the tokens there are not those of the
        images, or if the model sampled a placeholder, which vLLM would take for another image.
        """
        out: list[int] = []
        copied = first = 0
        for image in map(self.encode, images):
            if first >= len(positions):
                raise DataError(f"the prompt has {len(positions)} image tokens, too few for its {len(images)} images")
            start = int(positions[first]) - image.ids.index(self.token_id)
            end = start + len(image.ids)
            if tuple(prompt[start:end]) != image.ids:
                raise DataError(f"the tokens {start} to {end} of the prompt are not those of its image")
            out += [*prompt[copied:start], self.token_id]
            copied = end
            first += image.num_tokens
        out += prompt[copied:]
        if out.count(self.token_id) != len(images):
            raise DataError("the model sampled an image placeholder, which vLLM would take for an image")
        return out

    def _process(self, pixels: Any, digest: bytes) -> EncodedImage:
        try:
            out = self._processor(
                images=[pixels], text=[self.placeholder], add_special_tokens=False, return_tensors="pt"
            )
        except ValueError as error:
            raise DataError(f"the model's processor rejects an image of {pixels.size}: {describe(error)}") from error
        ids = out["input_ids"][0].tolist()
        return EncodedImage(
            digest,
            text=self._processor.tokenizer.decode(ids, skip_special_tokens=False),
            ids=tuple(ids),
            num_tokens=ids.count(self.token_id),
            inputs={name: value for name, value in out.items() if name not in _TEXT_INPUTS},
        )


def _num_bytes(url: str, image: EncodedImage) -> int:
    pixels: int = sum(tensor.nbytes for tensor in image.inputs.values())
    return len(url) + pixels


def has_processor(folder: str) -> bool:
    """Whether a model folder has an image processor or claims to be a vision model."""
    if any((Path(folder) / name).is_file() for name in PROCESSOR_FILES):
        return True
    config = Path(folder) / "config.json"
    return config.is_file() and '"vision_config"' in config.read_text(errors="replace")


@lru_cache(maxsize=4)
def load_image_processor(folder: str) -> ImageProcessor:
    """Load the image processor of a model folder. Raises ConfigError with the reason if the model cannot see."""
    with require_extra("a vision model", "vision"):
        import PIL.Image  # noqa: F401
    with require_extra("a vision model", "train"):
        import transformers
        from transformers import PROCESSOR_MAPPING, AutoConfig
    if not Path(folder).is_dir():  # a hub name, which was downloaded before
        try:
            folder = snapshot_download(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no files of {folder!r} in the hub cache: {describe(error):.200}") from error
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model in {folder!r} has no readable config.json: {describe(error):.200}") from error
    kind = config.model_type
    if not hasattr(config, "vision_config"):
        raise ConfigError(f"a model of type {kind!r} has no vision tower")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < MIN_TRANSFORMERS:
        minimum = ".".join(map(str, MIN_TRANSFORMERS))
        raise ConfigError(f"images need transformers {minimum} or later, not {transformers.__version__}")
    if kind not in SUPPORTED:
        reason = _REASONS.get(kind, "its prompts with images have not been checked")
        raise ConfigError(f"images of a {kind!r} model are not supported: {reason}. Supported: {', '.join(SUPPORTED)}")
    if not any((Path(folder) / name).is_file() for name in PROCESSOR_FILES[:2]):
        raise ConfigError(f"{folder!r} has no processor ({' or '.join(PROCESSOR_FILES[:2])}), so it takes no images")
    try:
        return ImageProcessor(_processor_class(PROCESSOR_MAPPING[type(config)]).from_pretrained(folder))
    except (OSError, ValueError, ImportError, TypeError, AttributeError) as error:
        raise ConfigError(f"the processor in {folder!r} cannot be loaded: {describe(error):.300}") from error


def _processor_class(base: Any) -> Any:
    """A processor class for images only.

    Processors that also take videos cannot be created without torchvision, whatever they are used for. This subclass
    loads the Pillow version of the image processor and has no video processor.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    class ImageOnlyProcessor(base):  # type: ignore[misc]
        @classmethod
        def _get_arguments_from_pretrained(cls, folder: str, *_: Any, **__: Any) -> list[Any]:
            components: dict[str, Any] = {
                "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil"),
                "tokenizer": AutoTokenizer.from_pretrained(folder),
                "video_processor": SimpleNamespace(
                    model_input_names=(), num_frames=1, fps=1, merge_size=1, temporal_patch_size=1
                ),
            }
            return [components[name] for name in inspect.signature(base.__init__).parameters if name in components]

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument)

        def __repr__(self) -> str:  # transformers logs it, and its own fails without a video processor
            return type(self).__name__

    ImageOnlyProcessor.__name__ = base.__name__
    return ImageOnlyProcessor
