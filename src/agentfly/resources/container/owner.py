"""Whose a container is: labels that tell the process that made it, and whether that process is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from agentfly.resources.owner import is_leftover, process_name

PROCESS, BOOT = "agentfly.owner", "agentfly.boot"
"""The labels: the process, and the start of the machine that it runs on."""


def labels() -> dict[str, str]:
    """For a container of this process."""
    return {PROCESS: process_name(os.getpid()) or "", BOOT: _boot()}


def is_gone(found: Mapping[str, str], stopped: bool) -> bool:
    """Whether the process with these labels is gone.

    Of another machine, another start of this one, or another pid namespace nothing can be known. A container of theirs
    that has `stopped` is of no use to anybody: it counts as left behind.
    """
    process = found[PROCESS]
    if found.get(BOOT) == _boot() and process:
        pid = process.split("-")[1:2]
        if pid and pid[0].isdigit() and process_name(int(pid[0])) == process:
            return False
        return stopped or is_leftover(process)
    return stopped


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
