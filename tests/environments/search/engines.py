"""A server on loopback with the APIs of web search engines, which fails on demand."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


class Engines:
    """What was asked, and what is replied next."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: list[dict[str, Any]] = []
        self.failures: list[tuple[int, dict[str, str]]] = []
        """Statuses and headers that the next requests get instead of results."""
        self.body: str | bytes | None = None
        """A reply instead of results; None: results."""
        self.slow = 0.0


def _wikipedia(parameters: dict[str, Any]) -> dict[str, Any]:
    titles = [f"{parameters['gsrsearch']} {n}" for n in range(1, int(parameters["gsrlimit"]) + 1)]
    pages = [
        {"pageid": n, "ns": 0, "title": t, "index": n, "extract": f"{t} is a page."} for n, t in enumerate(titles, 1)
    ]
    return {"batchcomplete": True, "query": {"pages": pages[::-1]}}  # by page id, not by rank


def _serper(parameters: dict[str, Any]) -> dict[str, Any]:
    organic = [
        {"title": f"R{n}", "link": f"http://r/{n}", "snippet": f"About {parameters['q']}."}
        for n in range(parameters["num"])
    ]
    return {"searchParameters": parameters, "answerBox": {"title": "Box", "answer": "42"}, "organic": organic}


def _brave(parameters: dict[str, Any]) -> dict[str, Any]:
    rows = [{"title": "B &amp; C", "url": "http://b", "description": f"About <strong>{parameters['q']}</strong>."}]
    return {"web": {"results": rows}}


def _tavily(parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "query": parameters["query"],
        "results": [{"title": "T", "url": "http://t", "content": "Text.", "score": 0.9}],
    }


REPLIES = {"/wikipedia": _wikipedia, "/serper": _serper, "/brave": _brave, "/tavily": _tavily}


@contextmanager
def engines() -> Iterator[Engines]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(dict(parse_qsl(urlsplit(self.path).query)))

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _reply(self, parameters: dict[str, Any]) -> None:
            path = urlsplit(self.path).path
            engines_server.asked.append(
                {"path": path, "asked": parameters, "headers": dict(self.headers), "at": time.monotonic()}
            )
            time.sleep(engines_server.slow)
            status, headers = engines_server.failures.pop(0) if engines_server.failures else (200, {})
            body = engines_server.body or json.dumps(REPLIES[path](parameters) if status == 200 else {"error": "no"})
            data = body if isinstance(body, bytes) else body.encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # the client hangs up on a response that is too large
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    engines_server = Engines(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield engines_server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
