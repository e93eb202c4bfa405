"""What came of one call in a session."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class End(Enum):
    """What ended a call."""

    OK = "ok"
    ERROR = "error"
    """It raised, or the command's status was not 0."""
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out of memory"
    DIED = "died"
    """The process ended, or user code broke the protocol."""
    FLOODED = "flooded"
    """It wrote so much that it was stopped."""


@dataclass(frozen=True)
class Outcome:
    """What came of one call, as a person at a terminal would have seen it."""

    end: End
    output: str = ""
    """What was written to stdout and stderr, by whatever process, in the order it was written."""
    value: str | None = None
    """The last expression's value; None where there is none, or it is None."""
    error: str | None = None
    """The exception in one line, or how the process ended; None when all went well."""
    traceback: str | None = None
    """The traceback through the user's own lines; None where nothing raised."""
    figures: tuple[bytes, ...] = ()
    """The matplotlib figures left open, as PNG; the session closed them."""
    dropped: int = 0
    """Characters of output beyond the limit (bytes, where they were no text); they are gone."""
    status: int | None = None
    """A shell command's exit status, negative for a signal; None for Python."""
    words: str = ""
    """For the model: what ended the call and what to do; empty when there is nothing to say."""
    state_kept: bool = True
    """Whether variables and running processes of this session still exist."""
    files_kept: bool = True
    """Whether the session's files still exist; False means the session is over."""
    seconds: float = 0.0
    """Wall-clock time."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and well."""
        return self.end is End.OK

    @property
    def text(self) -> str:
        """All of it in one text, for the model."""
        dropped = f"[{self.dropped} more characters of output were dropped]" if self.dropped else ""
        parts = (self.output, dropped, self.value, self.traceback, f"[{self.words}]" if self.words else "")
        return "\n".join(part.rstrip("\n") for part in parts if part)
