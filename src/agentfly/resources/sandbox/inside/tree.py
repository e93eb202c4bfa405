"""The processes of a session: ending them all, noticing that they ended, and what they hold in memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

_EXITING = 0x4  # PF_EXITING, among the flags in `stat`
_MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def ended(wake: int) -> Iterator[tuple[int, int]]:
    """Every child that has ended, with its wait status; `wake` is the pipe that a SIGCHLD writes to."""
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, status


def _stat(pid: int) -> list[bytes]:
    """What the kernel says of a process, from its state on (the third field of proc(5)'s `stat`)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def is_dying(pid: int) -> bool:
    """Whether a child has been killed or is ending, however long that still takes; False where nobody can tell."""
    try:
        said = _stat(pid)
    except OSError:
        return False
    killed = int(said[28]) >> (signal.SIGKILL - 1) & 1
    return bool(said[0] in b"ZX" or int(said[6]) & _EXITING or killed)


def _parents() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                found[int(name)] = int(_stat(int(name))[1])
    return found


def descendants(root: int) -> list[int]:
    """All processes below `root`."""
    parents = _parents()
    below, found = [root], []
    while below:
        parent = below.pop()
        children = [pid for pid, its_parent in parents.items() if its_parent == parent]
        found += children
        below += children
    return found


def kill_below(root: int) -> None:
    """End all processes below `root`, also those that fork while we look. `root` adopts orphans."""
    for _ in range(100):
        alive = [pid for pid in descendants(root) if not _is_zombie(pid)]
        if not alive:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _is_zombie(pid: int) -> bool:
    try:
        return _stat(pid)[0] in b"ZX"
    except OSError:
        return True


def memory_kills() -> int:
    """How many processes of this container the kernel killed for memory; 0 where it does not tell."""
    for path in _MEMORY_EVENTS:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            words = file.read().split()
            return int(words[words.index("oom_kill") + 1])
    return 0


def memory(pids: list[int], enough: int) -> int:
    """Bytes held by these processes, page tables included; shared pages are counted once only when over `enough`."""
    rough = sum(_status(pid, b"VmRSS:", b"VmPTE:") for pid in pids)
    return rough if rough <= enough else sum(_proportional(pid) + _status(pid, b"VmPTE:") for pid in pids)


def count_sockets() -> int:
    """Sockets of every kind in this network namespace, those in flight included."""
    with open("/proc/self/net/sockstat") as file:
        return int(file.readline().split()[2])


def _status(pid: int, *names: bytes) -> int:
    """Bytes in these lines of a process's `status`; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except ProcessLookupError:
        return 0
    except (OSError, StopIteration):  # it hides: then all it maps is its own
        return _status(pid, b"VmRSS:")
