"""Decodes, checks and normalizes images, so that every part of a run sees the same pixels.

A normalized image is a PNG of one frame in RGB with at most `MAX_PIXELS` pixels, as a `data:` URI. Images are
normalized once, when they enter the record; equal pixels then have equal URLs, and normalizing again changes nothing.
"""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

from agentfly.errors import ConfigError, DataError, describe, require_extra
from agentfly.types import Content, Image
from agentfly.validation import record

COORDINATE_MAX = 1000
"""Tools take coordinates from 0 (left, top) to this (right, bottom), whatever the size of the image in pixels."""
MAX_PIXELS = 4_194_304
"""Larger images are scaled down to this many pixels (2048 x 2048)."""
MAX_DECODED_PIXELS = 64_000_000
"""Larger images are rejected before they are decoded: a file of some kilobytes can claim gigabytes of pixels."""
MAX_ASPECT_RATIO = 200
"""Narrower images are rejected, as the processors of Qwen models do."""
FETCH_SECONDS = 20.0
"""Limit for connecting to a server, for each part of its response, and for the body of the response as a whole."""
MAX_FETCHED_BYTES = 32 << 20


@record(prefix="image_config: ")
class ImageConfig:
    """How an agent treats images."""

    fetch: bool = False
    """Whether images given by an http(s) address are downloaded for a model in this process."""

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> ImageConfig:
        """The configuration of an agent's `image_config`. Raises ConfigError for an unknown or invalid setting."""
        names = [field.name for field in fields(cls)]
        if unknown := set(settings) - set(names):
            raise ConfigError(f"image_config has no setting {sorted(unknown)[0]!r}; it has {', '.join(names)}")
        return cls(**settings)


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of a model folder that describe its image processor."""
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")


@contextlib.contextmanager
def _explain_damage() -> Iterator[None]:
    """Turn what Pillow raises for damaged files, some of it by accident, into a DataError."""
    with require_extra("decoding an image", "vision"):
        import PIL.Image

    try:
        yield
    except DataError:
        raise
    except PIL.UnidentifiedImageError as error:
        raise DataError(
            "an image cannot be decoded: it is not a PNG, JPEG, GIF or WebP file, or it is damaged"
        ) from error
    except (
        OSError, ValueError, SyntaxError, LookupError, EOFError, struct.error, PIL.Image.DecompressionBombError
    ) as error:  # fmt: skip
        raise DataError(f"an image cannot be decoded: {describe(error):.200}") from error


def _read_header(image: Image) -> Any:
    """The Pillow image of a `data:` URI, of which no pixels are decoded yet."""
    import PIL.Image

    if not image.url.startswith("data:"):
        raise DataError(
            f"the image {image.url!r:.120} is not a data: URI; image_config={{'fetch': True}} lets an agent fetch it"
        )
    _, comma, data = image.url.partition(";base64,")
    if not comma:
        raise DataError(f"the image {image.url!r:.120} is a data: URI without ';base64,'; encode its file as base64")
    return PIL.Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=_FORMATS)


def count_pixels(image: Image) -> int:
    """The number of pixels that the file of a `data:` URI claims, without decoding them; 0 without Pillow."""
    if find_spec("PIL") is None:
        return 0
    with _explain_damage():
        header = _read_header(image)
        return int(header.width * header.height)


def open_image(image: Image) -> Any:
    """Decode an image to a Pillow image in RGB. Raises DataError if it is broken, too large, too narrow or animated."""
    with _explain_damage():
        import PIL.Image
        import PIL.ImageOps

        opened: PIL.Image.Image = _read_header(image)
        width, height = opened.size
        frames = getattr(opened, "n_frames", 1)
        problem = ""
        if width * height > MAX_DECODED_PIXELS:
            problem = f"at most {MAX_DECODED_PIXELS:,} pixels are decoded"
        elif max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            problem = f"one side may be at most {MAX_ASPECT_RATIO} times the other"
        elif frames > 1:
            problem = f"it has {frames} frames; give one of them"
        if problem:
            raise DataError(f"an image of {width} x {height} pixels is rejected: {problem}")
        with contextlib.suppress(SyntaxError, LookupError, struct.error, TypeError):  # a damaged orientation is ignored
            PIL.ImageOps.exif_transpose(opened, in_place=True)
        if opened.mode.startswith("I"):  # 16 bits of gray, which `convert` would clip to white
            opened = opened.point(lambda value: value * (255 / 65535)).convert("L")
            opened.info.pop("transparency", None)
        if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
            layer = opened.convert("RGBA")
            opened = PIL.Image.new("RGBA", layer.size, "white")
            opened.alpha_composite(layer)
        return opened.convert("RGB")


def encode_image(pixels: Any) -> Image:
    """Encode a Pillow image as a PNG without metadata."""
    buffer = io.BytesIO()
    pixels.info = {}
    pixels.save(buffer, format="PNG")
    return Image(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")


_NORMALIZED: WeakKeyDictionary[Image, Image | None] = WeakKeyDictionary()
"""Normalized images by original, as long as the original is used, as that of a task by all its chains.

None stands for the image itself, which could not end otherwise.
"""


def normalize_image(image: Image) -> Image:
    """Decode, check and scale down an image; an address that is not a `data:` URI stays as it is.

    Without Pillow, which only vision models need, images stay as they are.
    """
    if not image.url.startswith("data:") or find_spec("PIL") is None:
        return image
    with contextlib.suppress(KeyError):
        return _NORMALIZED[image] or image
    normalized = _normalize_pixels(image)
    _NORMALIZED[image] = None if normalized == image else normalized
    _NORMALIZED.setdefault(normalized, None)
    return normalized


def _normalize_pixels(image: Image) -> Image:
    pixels = open_image(image)
    excess = pixels.width * pixels.height / MAX_PIXELS
    if excess > 1:
        size = max(int(pixels.width / excess**0.5), 1), max(int(pixels.height / excess**0.5), 1)
        pixels = pixels.resize(size)  # bicubic
    return encode_image(pixels)


def normalize_content(content: Content) -> Content:
    """Normalize the images of a message."""
    if isinstance(content, str):
        return content
    return tuple(normalize_image(block) if isinstance(block, Image) else block for block in content)


def fetch_image(image: Image) -> Image:
    """Download an image from an http(s) address. Raises DataError if that fails, takes too long or is too large."""
    import httpx

    if not image.url.startswith(("http://", "https://")):
        raise DataError(f"the image {image.url!r:.120} cannot be fetched: its address is not http or https")
    data = bytearray()
    try:
        # No compression: an image gains nothing from it, and some bytes of it can become gigabytes.
        headers = {"accept-encoding": "identity"}
        with httpx.stream("GET", image.url, headers=headers, timeout=FETCH_SECONDS, follow_redirects=True) as response:
            response.raise_for_status()
            if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
                raise DataError(f"the image {image.url!r:.120} was sent with the encoding {encoding}; it must be plain")
            deadline = time.monotonic() + FETCH_SECONDS
            for chunk in response.iter_raw():
                data += chunk
                if len(data) > MAX_FETCHED_BYTES:
                    raise DataError(f"the image {image.url!r:.120} is larger than {MAX_FETCHED_BYTES >> 20} MiB")
                if time.monotonic() > deadline:
                    raise DataError(f"the image {image.url!r:.120} was not complete after {FETCH_SECONDS:g} seconds")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise DataError(f"the image {image.url!r:.120} cannot be fetched: {describe(error):.200}") from error
    return Image.of(bytes(data))
