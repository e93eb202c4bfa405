"""Shared by the servers of this package: where they listen, keys, which requests they refuse, limits of a body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentfly.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

ANY_HOST = "*"


class RequestError(ValueError):
    """A request is answered with an HTTP status; the rest of it is not read."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def read_request(receive: Receive, max_bytes: int, seconds: float) -> bytearray:
    """Read the body of a request. RequestError: it is too large or slow. ConnectionError: the client is gone."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError("the client closed the connection")
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise RequestError(f"a request has at most {max_bytes:,} bytes", 413)
                if not message.get("more_body", False):
                    return body
    except TimeoutError:
        raise RequestError(f"the request was not complete after {seconds:g} s", 408) from None


def read_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key of a request: its bearer token, or x-api-key. Bytes, since a header may have any; clients send UTF-8."""
    header_values = dict(headers)
    scheme, _, token = header_values.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else header_values.get(b"x-api-key", b"")


def digest_key(key: bytes | str) -> bytes:
    """A digest under which a key can be looked up: the time of a lookup says nothing about the keys that exist."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key).digest()


def equals_key(received: bytes, key: str) -> bool:
    """Whether a client has sent this key, in a time that depends on neither."""
    return hmac.compare_digest(digest_key(received), digest_key(key))


class BrowserGuard:
    """ASGI middleware that answers 403 to requests which a web page makes a browser send.

    A server on a private address is reachable from every page that a user of that network opens. Such a request carries
    the page's Origin (cross-site) or, after DNS rebinding, the page's own name as Host. Programs send no Origin, and
    use an IP address, localhost or an allowed name as Host. starlette's TrustedHostMiddleware checks no Origin, and
    cannot allow every IP address, by which other machines reach a server that listens on 0.0.0.0.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str] = (), hint: str = "") -> None:
        """`allowed_hosts`: names without a port, allowed as Host and as Origin; `*` allows all.

        `hint`: ends the message of a rejection and says how to allow more.
        """
        self._app = app
        self._hint = hint
        self._allowed = {name.lower() for name in allowed_hosts}
        for name in sorted(self._allowed - {ANY_HOST}):
            if not name or _parse_host(f"//{name}") != (name, name):
                raise ConfigError(f"an allowed host is a name such as search.example.com, without a port, not {name!r}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import JSONResponse

        checked = scope["type"] in ("http", "websocket")
        problem = self.reject_reason(Headers(scope=scope)) if checked else ""
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await JSONResponse({"error": problem}, 403)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": problem})  # answers 403

    def reject_reason(self, headers: Mapping[str, str]) -> str:
        """Why a request with these headers is rejected; empty if it is accepted."""
        if ANY_HOST in self._allowed:
            return ""
        netloc, host = _parse_host(f"//{headers.get('host', '')}")
        if not (host in self._allowed or host == "localhost" or is_address(host)):
            return f"the Host {netloc[:100]!r} is not allowed{self._hint}"
        origin = headers.get("origin")
        if origin is not None:
            origin_netloc, origin_host = _parse_host(origin)
            if origin_host not in self._allowed and origin_netloc != netloc:
                return f"the Origin {origin[:100]!r} is not allowed{self._hint}"
        return ""


def _parse_host(address: str) -> tuple[str, str]:
    """Return host with port, and host, in lower case; both empty for a malformed address."""
    try:
        url = urlsplit(address)
        return url.netloc.lower(), url.hostname or ""
    except ValueError:
        return "", ""


def is_address(host: str) -> bool:
    """Whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def require_key(host: str, api_key: str | None) -> None:
    """Raise ConfigError if other machines could use a server without a key."""
    if not api_key and not is_loopback(host):
        raise ConfigError(f"host={host!r} is reachable from other machines: give an api_key, or listen on 127.0.0.1")


def format_url(host: str, port: int) -> str:
    """The address of a server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on an address. Raises ConfigError if it is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), backlog=2048, family=family)
    except OSError as error:
        raise ConfigError(f"{host}:{port} is not available ({error.strerror or error}); choose another port") from error
