"""What one session may use."""

from __future__ import annotations

from dataclasses import dataclass, fields

from agentfly.errors import ConfigError

_MB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of one session: of every call in it, and of all its processes together."""

    seconds: float = 30.0
    """Wall-clock seconds of one call; the call's own `timeout` may only shorten it."""
    memory: int = 512 * _MB
    """Bytes of all its processes and files together. With cgroup v1 network buffers may take an eighth more."""
    processes: int = 64
    """Processes and threads at once."""
    disk: int = 64 * _MB
    """Bytes of all its files; they live in memory. `landlock` limits each file alone."""
    inodes: int = 10_000
    """Files and folders. `landlock` does not limit them."""
    output: int = 64 << 10
    """Characters kept of one call's output; what is dropped is counted."""
    cpus: float | None = None
    """Processors' worth of time, enforced where a control group can; None means no limit."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ConfigError(f"Limits({field.name}={value!r}): it must be above zero")
        if self.memory < 16 * _MB:
            raise ConfigError(f"Limits(memory={self.memory}): an interpreter needs {16 * _MB} bytes or more")
