"""`agentfly search`: Build, serve and query passage indexes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Build, serve and query passage indexes.", no_args_is_help=True, rich_markup_mode=None)
Source = Annotated[
    str, typer.Argument(help="Index folder, URL of a retrieval server, or a search engine such as wikipedia.")
]


@app.command()
def build(
    corpus: Annotated[
        str,
        typer.Argument(help="File of rows with title and text, or contents; or `encyclopedia`, a generated corpus."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the index to.")],
    kind: Annotated[str, typer.Option(help="bm25 (lexical), dense (embeddings) or hybrid (both).")] = "bm25",
    model: Annotated[str, typer.Option(help="Embedding model: minilm, or any sentence-transformers model.")] = "minilm",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of passages to index.")] = None,
) -> None:
    """Build an index of a corpus."""
    from agentfly.environments.search.index import build_index, read_corpus
    from agentfly.environments.search.tasks import Encyclopedia
    from agentfly.errors import DataError

    if corpus == "encyclopedia":
        passages = iter(Encyclopedia.draw("train", 0, max(limit or 1000, 20)).passages[:limit])
    elif Path(corpus).is_file():
        passages = read_corpus(corpus, limit)
    else:
        raise DataError(f"no file {corpus}")
    build_index(passages, out, kind, model, progress=print)
    print(f"written to {out}; `agentfly search serve {out}` serves it")


@app.command()
def serve(
    source: Source,
    host: Annotated[str, typer.Option(help="Address to bind; 0.0.0.0 accepts other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8765,
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Passages per query, if the request does not set it.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Maximum number of queries per batch.")] = 64,
    cache: Annotated[int, typer.Option(min=0, help="Number of cached queries.")] = 100_000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name to accept in requests and as a web origin, besides localhost, --host and IP addresses; "
            "* accepts all. May be repeated."
        ),
    ] = None,
) -> None:
    """Serve an index over HTTP with the API of Search-R1, until Ctrl-C."""
    from agentfly.environments.search.engines import Cache, Provider, open_retriever
    from agentfly.environments.search.index import read_metadata
    from agentfly.environments.search.server import QueryBatcher, create_app
    from agentfly.gateway.http_server import is_address

    retriever = open_retriever(source)
    if isinstance(retriever, Provider):  # searches wait for the network: run them concurrently
        batcher, metadata = QueryBatcher(retriever, Cache(cache), batch=1, workers=32), {"source": source}
    else:
        batcher = QueryBatcher(retriever, Cache(cache), batch=batch)
        metadata = {"source": source, **read_metadata(Path(source))}
    own_names = [] if host == "localhost" or is_address(host) else [host]
    application = create_app(batcher, metadata, top_k, [*own_names, *(allow_host or ())])
    import uvicorn

    print(
        f"{source} is served at http://{host}:{port}; agents find it with RETRIEVER_API_URL, or as a source", flush=True
    )
    uvicorn.run(application, host=host, port=port, log_level="warning")


@app.command()
def ask(
    source: Source,
    query: Annotated[str, typer.Argument(help="Search query.")],
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, max=100)] = 3,
) -> None:
    """Run one query, and print the result as a model would see it."""
    from agentfly.environments.search.engines import open_retriever
    from agentfly.environments.search.index import format_hits
    from agentfly.errors import sanitize

    (hits,) = open_retriever(source).search([query], top_k)
    print(sanitize(format_hits(hits)))
