"""Names for resources that may outlive their process: they contain the process, so the next one can find leftovers."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from agentfly.errors import EnvironmentFault

PREFIX = "agentfly"


def process_name(pid: int) -> str | None:
    """Return a name unique to this process over time (pid, start time, pid namespace). None if it does not exist."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
    return f"{PREFIX}-{pid}-{started}-{_pid_namespace()}"


def _pid_namespace() -> str:
    """Identify the pid namespace: containers may share folders with each other, but not pids."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def is_leftover(name: str) -> bool:
    """Whether a name contains a process of this pid namespace that is gone."""
    fields = name.split("-")
    if len(fields) < 4 or fields[0] != PREFIX or not fields[1].isdigit() or fields[3] != _pid_namespace():
        return False
    return process_name(int(fields[1])) != "-".join(fields[:4])


def remove_leftover_folders() -> None:
    """Remove the temporary folders that carry the name of a process that is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        if is_leftover(folder.name):
            with contextlib.suppress(OSError, EnvironmentFault):  # it may belong to another user
                remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder, even if user code took permissions away from folders in it, or nested them very deeply.

    Raises OSError if it belongs to another user, and EnvironmentFault if it cannot be removed.
    """
    try:
        shutil.rmtree(folder)
        return
    except (OSError, RecursionError):
        if not os.path.lexists(folder):
            return
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or os.geteuid() not in (0, status.st_uid):
            raise
    if os.geteuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwx", "--", str(folder)], capture_output=True, stdin=subprocess.DEVNULL)
    done = subprocess.run(["rm", "-rf", "--", str(folder)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise EnvironmentFault(f"the folder {folder} cannot be removed: {done.stderr.strip()[-500:]}")
