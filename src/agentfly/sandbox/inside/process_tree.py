"""The processes of a session: kill all of them, reap them, measure their memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

_PF_EXITING = 0x4  # among the flags in `stat`
_MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def wake_on_exit() -> int:
    """Return the read end of a pipe that is written to whenever a child ends or a handled signal arrives."""
    wake, writer = os.pipe()
    for end in (wake, writer):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return wake


def reap(wake_fd: int) -> Iterator[tuple[int, int]]:
    """Yield pid and wait status of every child that has ended. wake_fd: of `wake_on_exit`."""
    with contextlib.suppress(BlockingIOError):
        os.read(wake_fd, 4096)
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, status


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on (its third field, see proc(5))."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def is_dying(pid: int) -> bool:
    """Whether a child was killed or is exiting, however long that takes. False if unknown."""
    try:
        fields = _stat(pid)
    except OSError:
        return False
    killed = int(fields[28]) >> (signal.SIGKILL - 1) & 1
    return bool(fields[0] in b"ZX" or int(fields[6]) & _PF_EXITING or killed)


def descendants(root: int) -> list[int]:
    """Return the pids of all processes below `root`."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(name)] = int(_stat(int(name))[1])
    pending, pids = [root], []
    while pending:
        parent = pending.pop()
        children = [pid for pid, its_parent in parents.items() if its_parent == parent]
        pids += children
        pending += children
    return pids


def kill_below(root: int) -> None:
    """Kill all processes below `root`, including those forked meanwhile. `root` must adopt orphans."""
    for _ in range(100):
        alive = []
        for pid in descendants(root):
            with contextlib.suppress(OSError):
                if _stat(pid)[0] not in b"ZX":
                    alive.append(pid)
        if not alive:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def memory_kills() -> int:
    """Number of processes of this container killed by the kernel for memory. 0 if it does not report them."""
    for path in _MEMORY_EVENTS:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            words = file.read().split()
            return int(words[words.index("oom_kill") + 1])
    return 0


def memory(pids: list[int], enough: int) -> int:
    """Bytes used by these processes, page tables included. Shared pages are counted once only if above `enough`."""
    rough = sum(_read_status(pid, b"VmRSS:", b"VmPTE:") for pid in pids)
    if rough <= enough:
        return rough
    total = 0
    for pid in pids:
        total += _read_status(pid, b"VmPTE:")
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
        except ProcessLookupError:
            pass
        except (OSError, StopIteration):  # it is not readable: count all its pages
            total += _read_status(pid, b"VmRSS:")
    return total


def count_sockets() -> int:
    """Number of sockets of every kind in this network namespace, those in flight included."""
    with open("/proc/self/net/sockstat") as file:
        return int(file.readline().split()[2])


def _read_status(pid: int, *names: bytes) -> int:
    """Sum of these lines of /proc/PID/status in bytes. 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
    except OSError:
        return 0
