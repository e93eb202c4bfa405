"""Read HTTP response bodies within a size limit.

The limit holds for the bytes on the wire and for the decompressed bytes, and is enforced while the body arrives:
neither an endless response nor a gzip bomb takes more memory than the limit allows. Clients send `HEADERS`, so that a
server compresses with gzip or not at all.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
from pydantic_core import from_json

HEADERS = {"accept-encoding": "gzip"}
"""Request headers that ask for no compression but gzip; any other in a response is a BodyError."""
ERROR_BYTES = 1 << 20
"""Limit for the body of a response with an error status, which is only quoted."""


class BodyError(ValueError):
    """A body that is too large, corrupt, or not JSON."""


class _BodyDecoder:
    """Decompresses a body chunk by chunk and enforces the limit."""

    def __init__(self, response: httpx.Response, max_bytes: int) -> None:
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            raise BodyError(f"the response has the content-encoding {encoding[:80]!r}; only gzip is accepted")
        self._gzip = zlib.decompressobj(wbits=31) if "gzip" in encoding else None
        self._max_bytes = max_bytes
        self._received = 0
        self._decoded = 0

    def decode(self, chunk: bytes) -> bytes:
        self._received += len(chunk)
        if self._gzip is not None:
            try:
                # One byte more than allowed tells a body that is too large from one that just fits.
                chunk = self._gzip.decompress(chunk, self._max_bytes - self._decoded + 1)
            except zlib.error as error:
                raise BodyError(f"the response's gzip data is corrupt: {error}") from error
        self._decoded += len(chunk)
        overhead = self._max_bytes // 1000 + 100 if self._gzip is not None else 0  # of gzip, where nothing compresses
        if self._decoded > self._max_bytes or self._received > self._max_bytes + overhead:
            raise BodyError(f"the response is larger than max_response_bytes={self._max_bytes:,}")
        return chunk

    def finish(self) -> None:
        if self._gzip is not None and self._received and not self._gzip.eof:
            raise BodyError("the response's gzip data is incomplete")


async def stream_body(response: httpx.Response, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the decompressed chunks of a response that has not been read. Raises BodyError."""
    decoder = _BodyDecoder(response, max_bytes)
    async for chunk in response.aiter_raw():
        yield decoder.decode(chunk)
    decoder.finish()


async def read_body(response: httpx.Response, max_bytes: int) -> bytearray:
    """Read a response that has not been read. Raises BodyError."""
    body = bytearray()
    async with aclosing(stream_body(response, max_bytes)) as chunks:
        async for chunk in chunks:
            body += chunk
    return body


def read_body_sync(response: httpx.Response, max_bytes: int) -> bytearray:
    """`read_body` for a synchronous client."""
    decoder = _BodyDecoder(response, max_bytes)
    body = bytearray()
    for chunk in response.iter_raw():
        body += decoder.decode(chunk)
    decoder.finish()
    return body


async def read_error_text(response: httpx.Response) -> str:
    """Read the body of a response with an error status; one that cannot be read does not hide the status."""
    try:
        return (await read_body(response, ERROR_BYTES)).decode(errors="replace").strip()
    except BodyError as error:
        return f"({error})"


def read_error_text_sync(response: httpx.Response) -> str:
    """`read_error_text` for a synchronous client."""
    try:
        return read_body_sync(response, ERROR_BYTES).decode(errors="replace").strip()
    except BodyError as error:
        return f"({error})"


def parse_json(data: bytes | bytearray | str) -> Any:
    """Parse JSON from a remote server. Raises BodyError, also for JSON nested deeper than 200 levels."""
    try:
        return from_json(data)
    except ValueError as error:
        quoted = data[:200] if isinstance(data, str) else data[:200].decode(errors="replace")
        raise BodyError(f"not JSON ({error}): {quoted!r}") from error
