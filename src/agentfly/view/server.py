"""HTTP for the page: on loopback, for one user, read-only.

Every address begins with a random token, so that other users of the machine and other web pages cannot read chains;
the Host header is checked, so that a foreign name which resolves to loopback (DNS rebinding) reaches nothing. The
policy of the page allows no script but its own files: text of a model is never executed.
"""

from __future__ import annotations

import json
import logging
import mimetypes
import secrets
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from agentfly.errors import AgentFlyError, ConfigError, DataError, describe
from agentfly.runs.files import replace_non_finite
from agentfly.view.chains import Tokenizers, show_chain
from agentfly.view.index import ChainIndex
from agentfly.view.sources import DAMAGE, Curve

_LOG = logging.getLogger(__name__)
STATIC = files("agentfly.view") / "static"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
POLL_SECONDS = 1.0
"""Interval at which files are looked at for new chains."""
MAX_ROWS = 1000
"""Maximum number of chains in one answer."""


class ViewData:
    """What the page asks for, by name; the same answers are embedded in an exported page."""

    def __init__(self, index: ChainIndex, tokenizers: Tokenizers) -> None:
        self.index = index
        self._tokenizers = tokenizers

    def runs(self, _: Mapping[str, str]) -> dict[str, Any]:
        """The sources, the values of filters, and how far the index is."""
        facets = self.index.facets()
        sources = []
        for source in self.index.sources.values():
            curves = source.curves()
            steps = facets["steps"].get(source.number, [])
            sources.append(
                {
                    "id": source.number,
                    "name": source.name,
                    "path": str(source.path),
                    "kind": source.kind,
                    "live": source.live,
                    "settings": source.settings,
                    "metrics": sorted(curves),
                    "last": {name: points[-1][1] for name, points in curves.items()},
                    "step": max((points[-1][0] for points in curves.values()), default=None),
                    "chains": sum(count for *_, count in steps),
                    "alarms": [
                        [alarm.step, alarm.kind, alarm.message, list(alarm.chains)] for alarm in source.alarms()
                    ],
                }
            )
        problem_lists = [self.index.problems, *(source.problems for source in self.index.sources.values())]
        problems = [
            f"{path} cannot be read: {problem}" for by_path in problem_lists for path, problem in list(by_path.items())
        ]
        return {"sources": sources, "facets": facets, "progress": self.index.progress, "problems": problems}

    def curves(self, query: Mapping[str, str]) -> dict[int, dict[str, Curve]]:
        """The points of metrics, given as `names` with line breaks between them: {source: {name: points}}."""
        names = query.get("names", "").split("\n")
        out = {}
        for source in self.index.sources.values():
            curves = source.curves()
            out[source.number] = {name: curves[name] for name in names if name in curves}
        return out

    def chains(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the table: `sort`, `descending`, `offset`, `limit`; everything else is a filter."""
        filters = dict(query)
        try:
            offset = int(filters.pop("offset", "0"))
            limit = int(filters.pop("limit", "100"))
        except ValueError as error:
            raise ConfigError(f"offset and limit are whole numbers: {error}") from error
        sort = filters.pop("sort", "order")
        descending = filters.pop("descending", "") == "1"
        total, rows = self.index.select(
            filters,
            sort=sort,
            descending=descending,
            offset=min(max(offset, 0), 2**62),
            limit=min(max(limit, 0), MAX_ROWS),
        )
        return {"total": total, "rows": rows}

    def chain(self, query: Mapping[str, str]) -> dict[str, Any]:
        """One chain with all of its tokens."""
        try:
            number = int(query.get("id", ""))
        except ValueError as error:
            raise ConfigError(f"a chain is asked for by its number, id=…: {error}") from error
        if abs(number) >= 2**63:
            raise ConfigError(f"there is no chain {query['id']:.20}…: the number is too large")
        try:
            return show_chain(self.index, number, self._tokenizers)
        except DAMAGE as error:
            raise DataError(f"chain {number} cannot be shown, its record is damaged: {describe(error)}") from error


class ViewServer:
    """Serves the page until it is closed, and follows the files in the background. Use `with`."""

    def __init__(self, data: ViewData, port: int = 0) -> None:
        """port: 0 takes a free one. Raises ConfigError if it is taken."""
        self.token = secrets.token_urlsafe(16)
        self._data = data
        self._closing = threading.Event()
        handler = type("Handler", (_Handler,), {"data": data, "token": self.token})
        try:
            self._http = _HTTPServer(("127.0.0.1", port), handler)
        except OSError as error:
            raise ConfigError(f"port {port} is not available ({error.strerror}); choose another --port") from error
        self.port = self._http.server_address[1]
        self._threads = [
            threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, name="view-http"),
            threading.Thread(target=self._follow, name="view-index"),
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def _follow(self) -> None:
        """Keep the index up to date. A failure, such as a full disk, is reported once; the next call tries again."""
        reported = ""
        while not self._closing.is_set():
            try:
                self._data.index.update()
                reported = ""
            except (OSError, sqlite3.Error) as error:
                if str(error) != reported:
                    _LOG.warning("the index cannot be updated: %s", error)
                    reported = str(error)
            self._closing.wait(POLL_SECONDS)

    def __enter__(self) -> ViewServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._data.index.stop()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what ended a connection; a browser that closes one, such as of a tab, is no error."""
        closed = isinstance(sys.exception(), ConnectionError)
        _LOG.log(logging.DEBUG if closed else logging.ERROR, "a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests. `data` and `token` are set in a subclass of each server."""

    data: ViewData
    token: str
    protocol_version = "HTTP/1.1"
    server_version = "agentfly"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        start = time.process_time()
        host = self.headers.get("Host", "").partition(":")[0]
        try:
            address = urlsplit(self.path)
        except ValueError:  # not an address
            address = urlsplit("")
        token, _, name = address.path.removeprefix("/").partition("/")
        if host not in ("127.0.0.1", "localhost") or not secrets.compare_digest(token.encode(), self.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, b"open the address that `agentfly view` printed\n", "text/plain")
            return
        answers: dict[str, Callable[[Mapping[str, str]], Any]] = {
            f"api/{answer.__name__}": answer
            for answer in (self.data.runs, self.data.curves, self.data.chains, self.data.chain)
        }
        if name in answers:
            try:
                value = answers[name](dict(parse_qsl(address.query)))
                status = HTTPStatus.OK
            except AgentFlyError as error:
                value = {"error": str(error)}
                status = HTTPStatus.BAD_REQUEST
            except (*DAMAGE, sqlite3.Error) as error:
                _LOG.warning("%s cannot be answered", self.path, exc_info=error)
                value = {"error": f"{type(error).__name__}: {error}"}
                status = HTTPStatus.INTERNAL_SERVER_ERROR
            body = json.dumps(replace_non_finite(value), ensure_ascii=True, separators=(",", ":")).encode()
            self._send(status, body, "application/json", milliseconds=1000 * (time.process_time() - start))
            return
        name = name or "index.html"
        if name not in {path.name for path in STATIC.iterdir()}:
            self._send(HTTPStatus.NOT_FOUND, f"there is no {name[:80]!a}\n".encode(), "text/plain")
            return
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        self._send(HTTPStatus.OK, (STATIC / name).read_bytes(), "text/javascript" if name.endswith(".js") else kind)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, milliseconds: float | None = None) -> None:
        self.send_response(status)
        headers = {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        if milliseconds is not None:
            headers["Server-Timing"] = f"cpu;dur={milliseconds:.1f}"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.debug(format, *args)
