"""From what came over the wire to an outcome, with words a model can act on."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from agentfly.resources.sandbox import wire
from agentfly.resources.sandbox.limits import Limits
from agentfly.resources.sandbox.outcome import End, Outcome

REASONS = ("died", "killed", "flooded", "memory", "forged", "closed")
"""Why a keeper had to start a fresh interpreter."""
_GONE = "All variables are gone; files are kept."
_ALL_GONE = "The session is over: variables and files are gone."


def refused(words: str) -> Outcome:
    """A call that was not made."""
    return Outcome(End.ERROR, words=words, error=words)


@dataclass
class Call:
    """One call, while it is being answered."""

    do: str
    seconds: float
    limits: Limits
    output: bytearray = field(default_factory=bytearray)
    said: dict[str, Any] = field(default_factory=dict)
    reply: wire.Reply | None = None
    memory_kills: int = 0
    """Processes the kernel killed for memory during the call."""
    started: float = field(default_factory=time.monotonic)

    @property
    def went_wrong(self) -> bool:
        """Whether there is a reason to look for the cause."""
        return (
            "ended" in self.said
            or bool(self.said.get("status"))
            or (self.reply is not None and self.reply.status != "ok")
        )

    def outcome(self, late: bool) -> Outcome:
        """What came of the call; `late` when its time was over before its answer came."""
        if "ended" in self.said:
            return self._restarted(late)
        if self.reply is None:
            return self._command(late)
        return self._cell(self.reply, late)

    def over(self, error: wire.WireError, status: int | None, late: bool) -> Outcome:
        """What came of the call that the session did not survive."""
        if self.memory_kills:
            end, words = End.OUT_OF_MEMORY, self._memory_words
        elif isinstance(error, wire.WireFlooded):
            end, words = End.FLOODED, f"The session sent more than it may ({error}) and was killed."
        elif late:
            end, words = (
                End.TIMEOUT,
                f"Nothing could stop it after {self.seconds:g} seconds; the session was killed.",
            )
        elif isinstance(error, wire.WireBroken):
            end, words = End.DIED, f"The session broke its protocol ({error}) and was killed."
        else:
            end, words = End.DIED, f"The session died ({how_ended(status)})."
        return self._made(end, words=f"{words} {_ALL_GONE}", error=words, state_kept=False, files_kept=False)

    def _cell(self, reply: wire.Reply, late: bool) -> Outcome:
        end, words = End.ERROR, ""
        if reply.status == "ok":
            end = End.OK
        elif reply.status == "interrupted" and late:
            end = End.TIMEOUT
            words = (
                f"The code was stopped after {self.seconds:g} seconds. Variables set before that are kept. "
                "Do less work in one call, or find a faster way."
            )
        elif reply.status == "memory":
            end = End.OUT_OF_MEMORY
            words = f"One process may use {_megabytes(self.limits.memory)}. Variables are kept; work on smaller pieces."
        elif reply.status == "exit":
            words = f"The code ended itself ({reply.error}). Variables are kept."
        if self.memory_kills and not words:
            words = f"{self._memory_words} It was a child process; variables are kept."
        return self._made(end, reply=reply, words=words, error=reply.error)

    def _command(self, late: bool) -> Outcome:
        status = exit_code(self.said.get("status") or 0)
        if late and status < 0:
            end, error = End.TIMEOUT, f"The command was killed after {self.seconds:g} seconds."
        elif self.memory_kills:
            end, error = End.OUT_OF_MEMORY, self._memory_words
        elif status:
            end, error = End.ERROR, f"The command ended with {how_ended(self.said['status'])}."
        else:
            end, error = End.OK, ""
        gone = bool(self.said.get("gone"))  # it killed the interpreter
        kept = _GONE if gone else "Variables and files are kept." if end in (End.TIMEOUT, End.OUT_OF_MEMORY) else ""
        words = f"{error} {kept}".strip()
        return self._made(end, words=words, error=error or None, status=status, state_kept=not gone)

    def _restarted(self, late: bool) -> Outcome:
        reason, status = self.said["ended"], self.said.get("status")
        if reason == "memory" or self.memory_kills:
            end, words = End.OUT_OF_MEMORY, self._memory_words
        elif reason == "killed" or (late and reason == "died"):
            end = End.TIMEOUT
            words = f"The code did not stop when it was interrupted after {self.seconds:g} seconds, and was killed."
        elif reason == "flooded":
            end, words = (
                End.FLOODED,
                "It wrote output without end and was killed. Write to a file, or print less.",
            )
        elif reason in ("forged", "closed"):
            end, words = (
                End.DIED,
                "The code used a file descriptor that the session needs; its process was killed.",
            )
        else:
            end, words = End.DIED, f"The Python process ended with {how_ended(status)}."
        if self.said.get("ran") is False:
            words += " That was before this call, whose code was not run."
        return self._made(end, words=f"{words} {_GONE}", error=words, state_kept=False)

    @property
    def _memory_words(self) -> str:
        return f"The session used more than its {_megabytes(self.limits.memory)} of memory, and a process was killed."

    def _made(self, end: End, reply: wire.Reply | None = None, **rest: Any) -> Outcome:
        output = bytes(self.output).decode("utf-8", "replace")
        kept = output[: self.limits.output]
        dropped = len(output) - len(kept) + self.said.get("dropped", 0) + (reply.dropped if reply else 0)
        if reply:
            rest.update(value=reply.value, traceback=reply.traceback, figures=reply.figures)
        return Outcome(end, output=kept, dropped=dropped, seconds=time.monotonic() - self.started, **rest)


def exit_code(status: int) -> int:
    """A wait status as an exit code, negative for a signal; one that means nothing stays as it is."""
    try:
        return os.waitstatus_to_exitcode(status)
    except (ValueError, OverflowError):
        return status


def how_ended(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "an unknown status"
    code = exit_code(status)
    if code >= 0:
        return f"status {code}"
    try:
        return f"signal {-code}, {signal.strsignal(-code) or signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _megabytes(size: int) -> str:
    return f"{size / (1 << 20):g} MB"
