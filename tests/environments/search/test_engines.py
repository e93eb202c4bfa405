"""Search engines, against a local server with their response formats."""

import gzip
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentfly.environments.search import engines as search_engines
from agentfly.environments.search.engines import ENGINES, Cache, Provider, SearchFailed, open_retriever
from agentfly.environments.search.engines import server as retrieval_server
from agentfly.errors import ConfigError
from agentfly.tools import google_search, wikipedia_search
from tests.environments.search.engines import Engines, engines

Open = Callable[..., Provider]


@pytest.fixture(scope="module")
def running() -> Iterator[Engines]:
    with engines() as running:
        yield running


@pytest.fixture
def server(running: Engines, monkeypatch: pytest.MonkeyPatch) -> Engines:
    running.asked.clear()
    running.failures.clear()
    running.body, running.slow = None, 0.0
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name, engine in ENGINES.items():
        monkeypatch.setenv(f"AGENTFLY_{name.upper()}_URL", f"{running.address}/{name}")
        if engine.key:
            monkeypatch.setenv(engine.key, "secret")
    return running


@pytest.fixture
def open_provider(server: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr("agentfly.environments.search.engines.MAX_RETRY_DELAY", 0.05)
    providers: list[Provider] = []

    def provider(name: str, **settings: Any) -> Provider:
        providers.append(Provider(ENGINES[name], **{"per_second": 1000.0, **settings}))
        return providers[-1]

    yield provider
    for opened in providers:
        opened.close()


def search(provider: Provider, query: str, k: int = 3) -> list[tuple[str, str, str]]:
    (hits,) = provider.search([query], k)
    return [(hit.passage.title, hit.passage.text, hit.passage.id) for hit in hits]


def test_request_and_response_format_of_each_engine(server: Engines, open_provider: Open) -> None:
    pages = search(open_provider("wikipedia"), "Ed Wood", 2)
    assert pages[0] == ("Ed Wood 1", "Ed Wood 1 is a page.", "https://en.wikipedia.org/wiki/Ed%20Wood%201")
    assert [title for title, _, _ in pages] == ["Ed Wood 1", "Ed Wood 2"]
    assert search(open_provider("serper"), "Ed", 2) == [("Box", "42", ""), ("R0", "About Ed.", "http://r/0")]
    assert search(open_provider("brave"), "Ed") == [("B & C", "About Ed.", "http://b")]
    assert search(open_provider("tavily"), "Ed") == [("T", "Text.", "http://t")]
    headers = {request["path"]: request["headers"] for request in server.asked}
    assert headers["/serper"]["X-API-KEY"] == headers["/brave"]["X-Subscription-Token"] == "secret"
    assert headers["/tavily"]["Authorization"] == "Bearer secret"


def test_missing_key_is_reported(server: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRAVE_API_KEY")
    with pytest.raises(ConfigError, match="brave needs a key: set the environment variable BRAVE_API_KEY"):
        Provider(ENGINES["brave"])


def test_transient_failure_is_retried(server: Engines, open_provider: Open) -> None:
    server.failures[:] = [(429, {"retry-after": "0.3"}), (503, {}), (500, {"retry-after": "soon"})]
    assert len(search(open_provider("wikipedia"), "x")) == 3
    assert len(server.asked) == 4
    assert server.asked[1]["at"] - server.asked[0]["at"] < 0.25  # what an engine may make us wait is limited


def test_permanent_failure_is_reported(server: Engines, open_provider: Open) -> None:
    server.failures[:] = [(401, {})]
    with pytest.raises(SearchFailed, match=r"serper at .* status 401.*is SERPER_API_KEY right\?") as caught:
        search(open_provider("serper"), "x")
    assert "secret" not in str(caught.value)
    assert len(server.asked) == 1
    server.failures[:] = [(503, {})] * 9
    with pytest.raises(SearchFailed, match="status 503"):
        search(open_provider("serper", retries=2), "x")
    assert len(server.asked) == 4


@pytest.mark.parametrize("status", [401, 403])
def test_denied_access_without_a_key_is_reported(server: Engines, open_provider: Open, status: int) -> None:
    server.failures[:] = [(status, {})]
    with pytest.raises(SearchFailed, match="refuses access, and is asked without a key") as caught:
        search(open_provider("wikipedia"), "x")
    assert "None" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "<html>",
        "[]",
        '{"organic": [5]}',
        '{"organic": 5}',
        "null",
        '{"organic": [{"title": "T", "snippet": "S", "link": 5}]}',
        '{"answerBox": {"title": {"a": 1}, "answer": "A"}}',
        pytest.param('{"organic": ' + "[" * 500_000, id="deep"),
        pytest.param(" " * 2_000, id="blank"),
    ],
)
def test_reply_that_cannot_be_read_is_retried_and_reported(server: Engines, open_provider: Open, body: str) -> None:
    server.body = body
    with pytest.raises(SearchFailed, match="serper"):
        search(open_provider("serper", retries=2, max_response_bytes=1_000_000), "x")
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b"not gzip", {"content-encoding": "gzip"}, "corrupt"),
        (gzip.compress(bytes(50 << 20)), {"content-encoding": "gzip"}, "larger than max_response_bytes=1,000,000"),
        (bytes(2_000_000), {}, "larger than max_response_bytes=1,000,000"),
    ],
)
def test_response_is_decompressed_within_a_limit(
    server: Engines, open_provider: Open, body: bytes, headers: dict[str, str], words: str
) -> None:
    server.body, server.failures[:] = body, [(200, headers)] * 2
    with pytest.raises(SearchFailed, match=words):
        search(open_provider("serper", retries=1, max_response_bytes=1_000_000), "x")
    assert len(server.asked) == 2


def test_passages_of_a_server_are_checked(server: Engines) -> None:
    provider = Provider(retrieval_server(f"{server.address}/retrieve"), retries=1)
    for body in ('{"result": [[{"document": 5}]]}', '{"result": [[{"document": {"text": 5}}]]}', '{"result": 5}'):
        server.body = body
        with pytest.raises(SearchFailed, match="cannot be read"):
            search(provider, "x")
    provider.close()


def test_wikipedia_error_is_reported_and_no_result_is_empty(server: Engines, open_provider: Open) -> None:
    server.body = '{"error": {"code": "x", "info": "Too many."}}'
    with pytest.raises(SearchFailed, match="Too many"):
        search(open_provider("wikipedia"), "x")
    server.body = '{"batchcomplete": true}'
    assert search(open_provider("wikipedia"), "x") == []


def test_query_is_cached_across_threads_and_processes(server: Engines, open_provider: Open, tmp_path: Path) -> None:
    server.slow, path = 0.05, tmp_path / "deep" / "cache.sqlite"
    provider = open_provider("wikipedia", cache=Cache(path=path))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: search(provider, "x"), range(8)))
    assert results == [results[0]] * 8
    assert len(server.asked) == 1
    assert search(provider, "x", 2) != results[0]
    assert len(server.asked) == 2
    assert search(open_provider("wikipedia", cache=Cache(path=path)), "x") == results[0]
    assert len(server.asked) == 2
    server.failures[:] = [(400, {})]
    with pytest.raises(SearchFailed):
        search(provider, "y")
    assert search(provider, "y")
    assert len(server.asked) == 4


def test_full_cache_evicts_the_least_recently_used(server: Engines, open_provider: Open) -> None:
    provider = open_provider("wikipedia", cache=Cache(size=2))
    for query in ("a", "b", "a", "c", "a", "b"):
        search(provider, query)
    assert [request["asked"]["gsrsearch"] for request in server.asked] == ["a", "b", "c", "b"]


def test_rate_limit_is_shared_by_threads(server: Engines, open_provider: Open) -> None:
    provider = open_provider("wikipedia", per_second=20.0)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda n: search(provider, str(n)), range(6)))
    times = sorted(request["at"] for request in server.asked)
    assert times[-1] - times[0] >= 0.2  # six evenly spaced ones take five times 0.05 s
    with pytest.raises(ConfigError, match="above 0"):
        open_provider("wikipedia", per_second=0)


async def test_search_tools_show_results_of_engines(server: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    providers: dict[str, Any] = {}
    monkeypatch.setattr(search_engines, "_RETRIEVERS", providers)
    assert (await wikipedia_search(query="Ed")).startswith("[1] Ed 1\nEd 1 is a page.\n\n[2] Ed 2\n")
    assert (await google_search(query="Ed")).startswith("[1] Box\n42\n\n[2] R0\nAbout Ed.")
    assert (await google_search(query=" ")).startswith("Error: the query is empty")
    for provider in providers.values():
        provider.close()


def test_unknown_source_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"'altavista' is not an index folder.*wikipedia, serper, brave, tavily"):
        open_retriever("altavista")
