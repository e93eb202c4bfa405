"""The contract of a sandbox: isolated sessions that run what a model wrote.

AgentFlyError
├── ConfigError
│   └── SandboxUnavailable   nothing safe works on this machine; says what was tried and what to install
├── EnvironmentFault
│   └── SessionOver          the session cannot be used any more: reset it, or open another
└── FileRefused              a path is wrong, a file too large, the disk full: the model's to mend
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agentfly.errors import AgentFlyError, ConfigError, EnvironmentFault
from agentfly.resources.sandbox.limits import Limits
from agentfly.resources.sandbox.outcome import Outcome


class SandboxUnavailable(ConfigError):
    """No mechanism that is safe enough works here."""


class SessionOver(EnvironmentFault):
    """This session has ended."""


class FileRefused(AgentFlyError):
    """The session's file system refused; the message is for the model."""


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism enforces, in words; `none` where it does not."""

    network: str
    memory: str
    """How the memory of a session's whole tree is capped."""
    processes: str
    disk: str
    inodes: str
    cpu: str
    boundary: str
    """What stands between user code and the host."""

    @property
    def not_limited(self) -> tuple[str, ...]:
        """The limits of a session as a whole that this mechanism does not enforce."""
        names = ("memory", "processes", "disk", "inodes", "cpu")
        return tuple(name for name in names if getattr(self, name).startswith(("none", "each ")))


@dataclass(frozen=True)
class Entry:
    """A name in the session's folder."""

    path: str
    kind: str
    """`file`, `folder`, `link` or `other`."""
    size: int


class Session(Protocol):
    """One isolated session. State and files stay from call to call; one call at a time, others wait."""

    @property
    def folder(self) -> str:
        """Its working folder, as it sees it itself."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can be used, as far as can be told without a call."""
        ...

    async def run(self, code: str, timeout: float | None = None) -> Outcome:
        """Run Python. What the code does wrong is in the outcome, never raised."""
        ...

    async def shell(self, command: str, timeout: float | None = None) -> Outcome:
        """Run a shell command in the session's folder. Its status comes from outside user code's reach."""
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Write a file below the session's folder, with the folders on the way."""
        ...

    async def get(self, path: str, most: int = ...) -> bytes:
        """Read a file of at most `most` bytes."""
        ...

    async def listing(self, path: str = ".", deep: bool = False) -> list[Entry]:
        """The names in a folder, and with `deep` all below it; paths start at the session's folder."""
        ...

    async def reset(self) -> None:
        """Start over, with nothing of what was there."""
        ...

    async def close(self) -> None:
        """End every process and forget every file. Closing twice is fine."""
        ...


class Sandbox(Protocol):
    """Opens sessions, all of one mechanism."""

    @property
    def mechanism(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def open_session(self, limits: Limits = ...) -> Session:
        """A fresh session, ready to run."""
        ...

    async def close(self) -> None:
        """End every session."""
        ...
