"""`agentfly view`: a local web page over runs, evaluations and saved trajectories."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from agentfly.errors import ConfigError

Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter", help="With --export: chains to write, such as step=3, held_out=1 or text=WORDS; may be repeated."
    ),
]


def view(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories, folders of runs, outputs of `agentfly eval`, files of saved trajectories."
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the default browser.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write one static HTML file of at most 50 MB instead of serving.")
    ] = None,
    filter: Filters = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer shows the tokens; default: the run's own.")
    ] = None,
) -> None:
    """Show runs and their chains in a browser: curves, conversations, tokens, and why each one is trained or not."""
    from agentfly.view.chains import Tokenizers
    from agentfly.view.export import write_export
    from agentfly.view.index import ChainIndex, build_condition
    from agentfly.view.server import ViewData, ViewServer
    from agentfly.view.sources import find_sources

    if filter and export is None:
        raise ConfigError("--filter selects the chains of --export; without it, filter on the page")
    chosen = {}
    for condition in filter or ():
        name, separator, value = condition.partition("=")
        if not separator:
            raise ConfigError(f"--filter {condition!r}: write NAME=VALUE, such as step=3")
        chosen[name] = value
    build_condition(chosen)
    with ChainIndex(find_sources(paths)) as index:
        data = ViewData(index, Tokenizers(tokenizer))
        if export is not None:
            index.update()
            left_out = write_export(data, export, chosen)
            print(f"{export} ({export.stat().st_size / 1e6:.1f} MB). {left_out}")
            return
        ended = threading.Event()
        previous_handlers = [
            (number, signal.signal(number, lambda *_: ended.set())) for number in (signal.SIGINT, signal.SIGTERM)
        ]
        try:
            with ViewServer(data, port) as server:
                print(f"agentfly: open {server.url} (Ctrl-C ends the server)", flush=True)
                if open_browser:
                    import webbrowser

                    webbrowser.open(server.url)
                ended.wait()
        finally:
            for number, handler in previous_handlers:
                signal.signal(number, handler)
