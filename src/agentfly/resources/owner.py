"""Whose something is that may outlive its process: it is named after the process, so that the next one can tell."""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "agentfly"


def process_name(pid: int) -> str | None:
    """A name that no other process, earlier or later, has; None where there is no such process."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
    return f"{PREFIX}-{pid}-{started}-{_namespace()}"


def _namespace() -> str:
    """Where pids mean what they mean here: a container's neighbours may share folders, not pids."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def is_leftover(name: str) -> bool:
    """Whether something is named after a process that is gone."""
    parts = name.split("-")
    if len(parts) < 4 or parts[0] != PREFIX or not parts[1].isdigit() or parts[3] != _namespace():
        return False
    return process_name(int(parts[1])) != "-".join(parts[:4])
