"""Refuse requests that a web page makes a browser send: by their Host (DNS rebinding) and their Origin (cross-site).

A server on a private address is reachable from every page that a user of that network opens. Such a request carries the
page's Origin, or, after DNS rebinding, the page's own name as Host. Programs send no Origin, and name the server by an
IP address, by localhost, or by a name that is allowed here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentfly.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

ANY = "*"


class BrowserGuard:
    """ASGI middleware that answers 403 to a foreign Host or Origin.

    Not starlette's TrustedHostMiddleware: it checks no Origin, and cannot allow every IP address, by which other
    machines name a server that listens on 0.0.0.0.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str] = ()) -> None:
        """`allowed_hosts` are names without a port, allowed as Host and as Origin; `*` allows all."""
        self._app = app
        self._allowed = {name.lower() for name in allowed_hosts}
        if wrong := sorted(name for name in self._allowed - {ANY} if not name or _parse(f"//{name}") != (name, name)):
            raise ConfigError(f"an allowed host is a name such as search.example.com, without a port, not {wrong[0]!r}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import JSONResponse

        if scope["type"] == "http" and (wrong := self._find_fault(Headers(scope=scope))):
            await JSONResponse({"error": wrong}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _find_fault(self, headers: Mapping[str, str]) -> str:
        """Why a request with these headers is refused; empty where it is not."""
        if ANY in self._allowed:
            return ""
        place, host = _parse(f"//{headers.get('host', '')}")
        if not (host in self._allowed or host == "localhost" or is_address(host)):
            return f"the Host {place[:100]!r} is not allowed; `agentfly search serve --allow-host NAME` allows more"
        if (origin := headers.get("origin")) is None:
            return ""
        from_place, from_host = _parse(origin)
        if from_host in self._allowed or from_place == place:
            return ""
        return f"the Origin {origin[:100]!r} is not allowed; `agentfly search serve --allow-host NAME` allows more"


def _parse(address: str) -> tuple[str, str]:
    """The host with its port, and the host alone, in lower case; both empty where there is none."""
    try:
        parts = urlsplit(address)
        return parts.netloc.lower(), parts.hostname or ""
    except ValueError:
        return "", ""


def is_address(host: str) -> bool:
    """Whether a host is an IP address. No page has one as its name unless it is served from there."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
