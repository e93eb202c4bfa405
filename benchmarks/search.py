"""Cost of searching: the environment with 1, 16 and 64 instances, the index compared with simpler ones, the server.

    python -m benchmarks.search [--quick]

The index is compared with `rank_bm25`, which scores all passages for each query (if it is installed), and with plain
bm25s. The server gets queries of 64 concurrent clients, in batches and one at a time, as a simple retrieval server
processes them.
"""

import argparse
import asyncio
import importlib.util
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from agentfly import Task
from agentfly.environments.search import Encyclopedia, Search
from agentfly.environments.search.engines import Cache
from agentfly.environments.search.index import BM25Index
from agentfly.environments.search.server import QueryBatcher
from agentfly.resources import ResourceManager
from benchmarks.table import print_table

INSTANCES = (1, 16, 64)


async def measure_environment(instances: int, chains: int) -> list[str]:
    """Run chains of a lease, a reset and four searches, `instances` at once; return a row of the table."""
    rows = [Task.of(row) for row in Search.draw_tasks("train", 50)]
    manager = ResourceManager()
    places, spent = asyncio.Semaphore(instances), {"reset": 0.0, "search": 0.0}

    async def chain(number: int) -> None:
        task = rows[number % len(rows)]
        async with places, manager.leases(task, [Search]) as leases:
            started = time.perf_counter()
            environment = await leases.get(Search)
            between = time.perf_counter()
            for title in task.columns["start"], *task.columns["path"]:
                await environment.search(query=title)  # type: ignore[attr-defined]
            spent["reset"] += between - started
            spent["search"] += time.perf_counter() - between

    started, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(chain(number) for number in range(chains)))
    wall, used = time.perf_counter() - started, time.process_time() - used
    steps = sum(1 + rows[number % len(rows)].columns["hops"] for number in range(chains))
    await manager.close()
    memory = await _memory(rows, instances)
    return [
        str(instances),
        f"{steps / wall:,.0f}",
        f"{chains / wall:,.0f}",
        f"{used / steps * 1e3:.2f}",
        f"{memory:.1f}",
    ]


async def _memory(rows: list[Task], instances: int) -> float:
    """KiB per instance after a search, without the shared indexes."""
    tracemalloc.start()
    held = []
    for number in range(instances):
        held.append(Search())
        await held[-1].reset(rows[number % len(rows)])
        await held[-1].search(query=rows[number % len(rows)].columns["start"])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / instances / 1024


def indexes(articles: int, queries: int) -> list[list[str]]:
    passages = Encyclopedia.draw("train", 1, articles).passages
    texts = [f"{passage.title} {passage.text}" for passage in passages]
    queried = [passage.title for passage in passages[:: max(1, articles // queries)]][:queries]
    rows = [_time_index("ours", lambda: BM25Index(passages), lambda index, query: index.search([query], 3), queried)]
    import bm25s

    def plain() -> Any:
        index = bm25s.BM25()
        index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
        return index

    def retrieve(index: Any, query: str) -> Any:
        tokens = bm25s.tokenize([query], show_progress=False, return_ids=False)
        return index.retrieve(tokens, k=3, show_progress=False)

    rows.append(_time_index("bm25s as it comes", plain, retrieve, queried))
    if importlib.util.find_spec("rank_bm25") is not None:
        from rank_bm25 import BM25Okapi

        words = [text.lower().split() for text in texts]
        rows.append(
            _time_index(
                "rank_bm25", lambda: BM25Okapi(words), lambda i, q: i.get_top_n(q.lower().split(), texts, 3), queried
            )
        )
    return rows


def _time_index(name: str, make: Callable[[], Any], ask: Callable[[Any, str], Any], queried: list[str]) -> list[str]:
    started = time.process_time()
    index = make()
    built = time.process_time()
    for query in queried:
        ask(index, query)
    return [name, f"{built - started:.2f}", f"{(time.process_time() - built) / len(queried) * 1e3:.2f}"]


async def serve(articles: int, queries: int, batch: int, *, repeated: bool) -> float:
    """Queries per second of 64 clients through the server's query batcher."""
    passages = Encyclopedia.draw("train", 1, articles).passages
    batcher = QueryBatcher(BM25Index(passages), Cache(100_000 if repeated else 0), batch=batch)
    queried = [passages[(n % 50 if repeated else n) % articles].title for n in range(queries)]

    async def client(titles: list[str]) -> None:
        for query in titles:
            await batcher.search(query, 3)

    started = time.perf_counter()
    await asyncio.gather(*(client(queried[n::64]) for n in range(64)))
    return queries / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    chains, articles, queries = (64, 300, 50) if quick else (2000, 6000, 500)
    asyncio.run(measure_environment(64, 64))  # draws and indexes the encyclopedias
    rows = [asyncio.run(measure_environment(instances, chains)) for instances in INSTANCES]
    header = ["instances", "searches/s", "chains/s", "CPU-ms a search", "KiB an instance"]
    print_table("The environment: a lease, a reset and one to five searches", header, rows)
    header = ["index", "built, CPU-s", "a query, CPU-ms"]
    print_table(f"BM25 over {articles:,} articles", header, indexes(articles, queries))
    rows = [
        [name, f"{asyncio.run(serve(articles, 4 * queries, batch, repeated=repeated)):,.0f}"]
        for name, batch, repeated in (("one at a time", 1, False), ("in batches", 64, False), ("cached", 64, True))
    ]
    print_table("The server's query batcher, 64 clients", ["", "queries/s"], rows)


if __name__ == "__main__":
    main()
