"""`agentfly report`: the report of a run, at any time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

_LOG = logging.getLogger(__name__)


def report(
    run: Annotated[Path, typer.Argument(help="Run directory; the run may be finished, under way or interrupted.")],
) -> None:
    """Write the report of a run and its reward curve, also while it trains."""
    from agentfly.errors import AgentFlyError
    from agentfly.runs import RunDirectory
    from agentfly.runs.report import write_report_files
    from agentfly.templates.codec import Codec
    from agentfly.templates.tokenizer import load_tokenizer
    from agentfly.view.chains import find_tokenizer

    directory = RunDirectory(run)
    decode = None
    try:
        decode = Codec(load_tokenizer(find_tokenizer(directory, directory.config.get("model")))).decode
    except AgentFlyError as error:
        _LOG.warning("the report shows messages instead of tokens: %s", error)
    print(f"wrote {' and '.join(map(str, write_report_files(directory, decode)))}")
