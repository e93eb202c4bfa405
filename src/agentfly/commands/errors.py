"""What a command writes to standard error: without control characters, which come from models, tools and servers."""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType


def print_error(text: str) -> None:
    """Print a message to standard error."""
    from agentfly.runs.words import sanitize  # a command that fails nowhere does not import it

    print(sanitize(text), file=sys.stderr)


def sanitize_logs() -> None:
    """Sanitize the log records that no configured handler takes: Python writes those to standard error."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        from agentfly.runs.words import sanitize

        return sanitize(super().format(record))


def print_traceback(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """Print an exception that ends the process, as `sys.excepthook` does."""
    print_error("".join(traceback.format_exception(kind, error, place)).rstrip("\n"))
