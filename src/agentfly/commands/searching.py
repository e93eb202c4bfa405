"""`agentfly search`: indexes of passages, built and served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Indexes of passages: built, served, asked.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Source = Annotated[
    str,
    typer.Argument(help="The folder of an index, the address of a retrieval server, or an engine such as wikipedia."),
]


@app.command()
def build(
    corpus: Annotated[
        str,
        typer.Argument(help="A file of rows with title and text, or contents; or `encyclopaedia`, a generated one."),
    ],
    out: Annotated[Path, typer.Option(help="The folder that the index is written to.")],
    kind: Annotated[str, typer.Option(help="bm25 (words), dense (meanings) or hybrid (both).")] = "bm25",
    model: Annotated[str, typer.Option(help="minilm, or any sentence-transformers model.")] = "minilm",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many passages.")] = None,
) -> None:
    """Index a corpus, so that it can be searched and served."""
    from itertools import islice

    from agentfly.environments.search.encyclopaedia import Encyclopaedia
    from agentfly.environments.search.index import build as built
    from agentfly.environments.search.passages import read_corpus
    from agentfly.errors import DataError

    if corpus == "encyclopaedia":
        passages = islice(Encyclopaedia.draw("train", 0, max(limit or 1000, 20)).passages, limit)
    elif Path(corpus).is_file():
        passages = islice(read_corpus(corpus), limit)
    else:
        raise DataError(f"no file {corpus}")
    built(passages, out, kind, model, progress=print)
    print(f"written to {out}; `agentfly search serve {out}` serves it")


@app.command()
def serve(
    source: Source,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8765,
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Passages for those who do not say how many.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Most queries that are searched at once.")] = 64,
    cache: Annotated[int, typer.Option(min=0, help="Searches that are remembered.")] = 100_000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that clients may use for this server, besides localhost, --host and IP addresses, and "
            "that web pages may come from; * allows all. May be repeated."
        ),
    ] = None,
) -> None:
    """Serve an index to any number of agents, as Search-R1 asks for it, until Ctrl-C."""
    from agentfly.environments.search.guard import is_address
    from agentfly.environments.search.service import application

    named = [] if host == "localhost" or is_address(host) else [host]
    desk, about = _desk(source, batch, cache)
    served = application(desk, about, top_k, [*named, *(allow_host or ())])
    import uvicorn

    print(
        f"{source} is served at http://{host}:{port}; agents find it with RETRIEVER_API_URL, or as a source", flush=True
    )
    uvicorn.run(served, host=host, port=port, log_level="warning")


def _desk(source: str, batch: int, cache: int) -> tuple[Any, dict[str, Any]]:
    from agentfly.environments.search.cache import Cache
    from agentfly.environments.search.index import about
    from agentfly.environments.search.opening import open_retriever
    from agentfly.environments.search.providers import Provider
    from agentfly.environments.search.service import Desk

    retriever = open_retriever(source)
    if isinstance(retriever, Provider):  # a search is a wait, and many can wait at once
        return Desk(retriever, Cache(cache), batch=1, workers=32), {"source": source}
    return Desk(retriever, Cache(cache), batch=batch), {"source": source, **about(Path(source))}


@app.command()
def ask(
    source: Source,
    query: Annotated[str, typer.Argument(help="What to look for.")],
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, max=100)] = 3,
) -> None:
    """Search once, and print what a model would be shown."""
    from agentfly.environments.search.opening import open_retriever
    from agentfly.environments.search.passages import shown
    from agentfly.runs.words import sanitize

    (hits,) = open_retriever(source).search([query], top_k)
    print(sanitize(shown(hits)))
