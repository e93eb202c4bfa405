"""Types and errors of the sandbox: limits of a session, the outcome of a call, what a mechanism enforces.

AgentFlyError
├── ConfigError
│   └── SandboxUnavailable   no safe mechanism works here; the message lists what was tried and what to install
├── EnvironmentFault
│   └── SessionClosed        the session can no longer be used: reset it, or open another
└── FileAccessError          wrong path, file too large, disk full: an error of the caller (the model)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from agentfly.errors import AgentFlyError, ConfigError, EnvironmentFault
from agentfly.types import number, validate_numbers

_MB = 1 << 20


class SandboxUnavailable(ConfigError):
    """No sufficiently safe mechanism works on this machine."""


class SessionClosed(EnvironmentFault):
    """The session has ended."""


class FileAccessError(AgentFlyError):
    """The session's file system refused an operation; the message is meant for the model."""


@dataclass(frozen=True)
class Limits:
    """Limits of one session: of each call, and of all its processes together."""

    seconds: float = number(30.0, gt=0)
    """Wall-clock seconds per call; the `timeout` of a call can only lower it."""
    memory: int = number(512 * _MB, ge=16 * _MB)
    """Bytes of all processes and files together, of which an interpreter needs 16 MiB.

    With cgroup v1, network buffers may use an eighth more.
    """
    processes: int = number(64, gt=0)
    """Maximum number of processes and threads."""
    disk: int = number(64 * _MB, gt=0)
    """Bytes of all files, which live in memory. `landlock` limits the size of each file only."""
    inodes: int = number(10_000, gt=0)
    """Maximum number of files and folders. Not enforced by `landlock`."""
    output: int = number(64 << 10, gt=0)
    """Characters of output kept per call, the first and the last half; what is between is dropped and counted."""
    cpus: float | None = number(None, gt=0)
    """CPU quota in processors, enforced where a cgroup can be created. None: no limit."""

    def __post_init__(self) -> None:
        validate_numbers(self, "Limits: ", optional=("cpus",), infinite=True)


class EndReason(Enum):
    """Why a call ended."""

    OK = "ok"
    ERROR = "error"
    """The code raised, or the exit status of the command was not 0."""
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out of memory"
    DIED = "died"
    """The process ended, or user code broke the protocol."""
    FLOODED = "flooded"
    """The call wrote so much output that it was killed."""


@dataclass(frozen=True)
class Outcome:
    """Result of one call, as a user at a terminal would see it."""

    end: EndReason
    output: str = ""
    """Interleaved stdout and stderr of all processes, in the order of writing."""
    value: str | None = None
    """`repr` of the last expression. None if there is none, or if its value is None."""
    error: str | None = None
    """The exception in one line, or how the process ended. None on success."""
    traceback: str | None = None
    """Traceback reduced to the user's own lines. None if nothing was raised."""
    figures: tuple[bytes, ...] = ()
    """Open matplotlib figures as PNG; the session closes them."""
    dropped: int = 0
    """Characters dropped from the middle of an output beyond the limit (bytes, where it was not ASCII)."""
    status: int | None = None
    """Exit status of a shell command, negative for a signal. None for Python."""
    message: str = ""
    """Explanation for the model: why the call ended and what to do. Empty if there is nothing to explain."""
    state_kept: bool = True
    """Whether variables and running processes of the session still exist."""
    files_kept: bool = True
    """Whether the files of the session still exist. False means that the session is closed."""
    seconds: float = 0.0
    """Wall-clock time of the call."""

    @property
    def ok(self) -> bool:
        """Whether the call ended by itself and without an error."""
        return self.end is EndReason.OK

    @property
    def text(self) -> str:
        """Output, value, traceback and message as one text for the model."""
        head, tail = self.output, ""
        if self.dropped:
            middle = len(self.output) // 2
            head, tail = self.output[:middle], self.output[middle:]
            head += f"\n[{self.dropped} more characters of output were dropped here]"
        sections = (head, tail, self.value, self.traceback, f"[{self.message}]" if self.message else "")
        return "\n".join(section.rstrip("\n") for section in sections if section)


@dataclass(frozen=True)
class Entry:
    """One directory entry of a session."""

    path: str
    """Relative to the working folder of the session."""
    kind: str
    """`file`, `folder`, `link` or `other`."""
    size: int


@dataclass(frozen=True)
class Capabilities:
    """How a mechanism enforces each limit; `none` where it does not."""

    network: str
    memory: str
    """How the memory of the whole process tree is limited."""
    processes: str
    disk: str
    inodes: str
    cpu: str
    boundary: str
    """What separates user code from the host."""

    @property
    def unenforced_limits(self) -> tuple[str, ...]:
        """Limits of the session as a whole that this mechanism does not enforce."""
        names = ("memory", "processes", "disk", "inodes", "cpu")
        return tuple(name for name in names if getattr(self, name).startswith(("none", "each ")))
