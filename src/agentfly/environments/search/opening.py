"""From a word to what it names: an index in a folder, a server, or an engine on the web."""

from __future__ import annotations

import threading
from pathlib import Path

from agentfly.environments.search.index import load
from agentfly.environments.search.passages import Retriever
from agentfly.environments.search.providers import ENGINES, Provider, server
from agentfly.errors import ConfigError

_OPEN: dict[str, Retriever] = {}
_OPENING = threading.Lock()


def open_retriever(source: str) -> Retriever:
    """The folder of an index, the address of a retrieval server, or the name of an engine. Opened once a process."""
    with _OPENING:
        if source not in _OPEN:
            _OPEN[source] = _opened(source)
        return _OPEN[source]


def _opened(source: str) -> Retriever:
    if source.startswith(("http://", "https://")):
        return Provider(server(source))
    if source in ENGINES:
        return Provider(ENGINES[source])
    if Path(source).is_dir():
        return load(Path(source))
    raise ConfigError(
        f"{source!r} is no folder of an index, no http address, and no engine; engines are {', '.join(ENGINES)}"
    )
