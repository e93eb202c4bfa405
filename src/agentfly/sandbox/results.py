"""CallResult: turns the messages of one call into an Outcome with an explanation the model can act on."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from agentfly.sandbox import channel
from agentfly.sandbox.base import EndReason, Limits, Outcome

RESTART_REASONS = ("died", "killed", "flooded", "memory", "forged", "closed")
"""Why a session init restarts its interpreter."""
_STATE_LOST = "All variables are gone; files are kept."
_ALL_LOST = "The session is over: variables and files are gone."


def rejected_outcome(message: str) -> Outcome:
    """Outcome of a call that was rejected before it was sent."""
    return Outcome(EndReason.ERROR, message=message, error=message)


@dataclass
class CallResult:
    """Everything received for one call so far."""

    seconds: float
    """Time limit of the call."""
    limits: Limits
    output: bytearray = field(default_factory=bytearray)
    answer: dict[str, Any] = field(default_factory=dict)
    """Answer of the session init."""
    reply: channel.InterpreterReply | None = None
    memory_kills: int = 0
    """Processes killed by the kernel for memory during the call."""
    started: float = field(default_factory=time.monotonic)

    def outcome(self, expired: bool) -> Outcome:
        """Outcome of a call that was answered. expired: its time limit passed before the answer came."""
        if "ended" in self.answer:
            return self._restart_outcome(expired)
        if self.reply is None:
            return self._shell_outcome(expired)
        return self._python_outcome(self.reply, expired)

    def session_lost(self, error: channel.ChannelError, status: int | None, expired: bool) -> Outcome:
        """Outcome of a call that ended the session. status: wait status of the session's first process."""
        if self.memory_kills:
            end = EndReason.OUT_OF_MEMORY
            message = self._memory_message
        elif isinstance(error, channel.ChannelFlooded):
            end = EndReason.FLOODED
            message = f"The session sent more than it may ({error}) and was killed."
        elif expired:
            end = EndReason.TIMEOUT
            message = f"The call could not be stopped after {self.seconds:g} seconds; the session was killed."
        elif isinstance(error, channel.ProtocolViolation):
            end = EndReason.DIED
            message = f"The session broke its protocol ({error}) and was killed."
        else:
            end = EndReason.DIED
            message = f"The session died ({describe_exit(status)})."
        return self._outcome(end, message=f"{message} {_ALL_LOST}", error=message, state_kept=False, files_kept=False)

    def _python_outcome(self, reply: channel.InterpreterReply, expired: bool) -> Outcome:
        end = EndReason.ERROR
        message = ""
        if reply.status == "ok":
            end = EndReason.OK
        elif reply.status == "interrupted" and expired:
            end = EndReason.TIMEOUT
            message = (
                f"The code was stopped after {self.seconds:g} seconds. Variables set before that are kept. "
                "Do less work in one call, or find a faster way."
            )
        elif reply.status == "memory":
            end = EndReason.OUT_OF_MEMORY
            message = (
                f"One process may use {_megabytes(self.limits.memory)}. Variables are kept; work on smaller pieces."
            )
        elif reply.status == "exit":
            message = f"The code ended itself ({reply.error}). Variables are kept."
        if self.memory_kills and not message:
            message = f"{self._memory_message} It was a child process; variables are kept."
        return self._outcome(
            end,
            message=message,
            error=reply.error,
            value=reply.value,
            traceback=reply.traceback,
            figures=reply.figures,
            dropped=reply.dropped,
        )

    def _shell_outcome(self, expired: bool) -> Outcome:
        status = exit_code(self.answer.get("status") or 0)
        if expired and status < 0:
            end = EndReason.TIMEOUT
            error = f"The command was killed after {self.seconds:g} seconds."
        elif self.memory_kills:
            end = EndReason.OUT_OF_MEMORY
            error = self._memory_message
        elif status:
            end = EndReason.ERROR
            error = f"The command ended with {describe_exit(self.answer['status'])}."
        else:
            end = EndReason.OK
            error = ""
        interpreter_gone = bool(self.answer.get("gone"))  # the command killed the interpreter
        if interpreter_gone:
            kept = _STATE_LOST
        elif end in (EndReason.TIMEOUT, EndReason.OUT_OF_MEMORY):
            kept = "Variables and files are kept."
        else:
            kept = ""
        message = f"{error} {kept}".strip()
        return self._outcome(end, message=message, error=error or None, status=status, state_kept=not interpreter_gone)

    def _restart_outcome(self, expired: bool) -> Outcome:
        """Outcome of a call during which, or before which, the interpreter was restarted."""
        reason = self.answer["ended"]
        if reason == "memory" or self.memory_kills:
            end = EndReason.OUT_OF_MEMORY
            message = self._memory_message
        elif reason == "killed" or (expired and reason == "died"):
            end = EndReason.TIMEOUT
            message = f"The code did not stop when it was interrupted after {self.seconds:g} seconds, and was killed."
        elif reason == "flooded":
            end = EndReason.FLOODED
            message = "The code wrote output without end and was killed. Write to a file, or print less."
        elif reason in ("forged", "closed"):
            end = EndReason.DIED
            message = "The code used a file descriptor that the session needs; its process was killed."
        else:
            end = EndReason.DIED
            message = f"The Python process ended with {describe_exit(self.answer.get('status'))}."
        if self.answer.get("ran") is False:
            message += " That was before this call, whose code was not run."
        return self._outcome(end, message=f"{message} {_STATE_LOST}", error=message, state_kept=False)

    @property
    def _memory_message(self) -> str:
        return f"The session used more than its {_megabytes(self.limits.memory)} of memory, and a process was killed."

    def _outcome(self, end: EndReason, dropped: int = 0, **fields: Any) -> Outcome:
        """Add the output, what was dropped of it, and the duration. dropped: characters dropped by the interpreter."""
        decoded = bytes(self.output).decode("utf-8", "replace")
        output = decoded
        if excess := max(len(decoded) - self.limits.output, 0):
            middle = self.limits.output // 2
            output = decoded[:middle] + decoded[middle + excess :]
        dropped += excess + self.answer.get("dropped", 0)
        return Outcome(end, output=output, dropped=dropped, seconds=time.monotonic() - self.started, **fields)


def exit_code(status: int) -> int:
    """Convert a wait status to an exit code, negative for a signal; an invalid status is returned unchanged."""
    try:
        return os.waitstatus_to_exitcode(status)
    except (ValueError, OverflowError):
        return status


def describe_exit(status: int | None) -> str:
    """Describe a wait status, for example `status 1` or `signal 9, Killed`."""
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
