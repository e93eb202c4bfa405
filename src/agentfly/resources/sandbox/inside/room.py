"""The room of one session: namespaces and mounts of its own, then no way back to a right.

`furnish` runs in the session's first process, which still may mount in its own namespace; `lock` takes every right
away, before the first process that runs user code exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
from typing import Any

from . import kernel, landlock, seccomp

USER = 1000
# The kernel counts these per user of the host, so all sessions of an ordinary user share them with each other and with
# the host's own programs. File descriptors in flight over UNIX sockets have RLIMIT_NOFILE as their limit, plus the 253
# of one message; pairs of files and epoll instances share fs.epoll.max_user_watches. Most programs may open 1024 files.
_OPEN_FILES, _PENDING_SIGNALS, _TERMINALS = 256, 256, 32
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def furnish(limits: dict[str, Any], work: str) -> None:
    """Mount one small file system for the session's folder, /tmp and /dev/shm, a fresh /proc, and start loopback."""
    kernel.map_user(USER, USER, USER)
    kernel.make_private()
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, f"size={limits['disk']},nr_inodes={limits['inodes'] + 4},mode=755")
    for name, target in (("work", work), ("shm", "/dev/shm"), ("tmp", "/tmp")):
        os.mkdir(f"/tmp/{name}")
        os.chmod(f"/tmp/{name}", 0o1777)
        kernel.bind(f"/tmp/{name}", target)
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    options = f"newinstance,ptmxmode=0666,mode=620,max={_TERMINALS}"  # or a session could open others' terminals
    kernel.mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    _start_loopback()
    socket.sethostname("sandbox")
    os.chdir(work)


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def lock(confine: str, readable: list[str], work: str, inet: bool) -> None:
    """Give up every right for good; `confine` says how far this mechanism goes, `inet` allows TCP and UDP sockets."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    if confine == "none":
        return
    kernel.forbid_new_privileges()
    if confine == "namespaces" and os.path.exists("/proc/self/ns/cgroup"):
        kernel.unshare(kernel.NEWCGROUP)  # names of control groups tell the host's pids
    if confine in ("namespaces", "container"):
        kernel.drop_capabilities()
        kernel.set_dumpable(False)
        if confine == "namespaces" or kernel.MACHINE in kernel.SUPPORTED:  # an engine has a filter of its own too
            kernel.filter_syscalls(seccomp.build(inet=inet, own_mounts=True))
    else:
        landlock.restrict(readable, [work])
        _must_not_reach_parent()
        kernel.filter_syscalls(seccomp.build(inet=False, own_mounts=False))


def _must_not_reach_parent() -> None:
    """The keeper will kill all it may signal: that must be its own children and nobody else."""
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return
    raise OSError(1, "Landlock of this kernel does not scope signals")


def limit(limits: dict[str, Any], confine: str) -> None:
    """Set the limits of a process that runs user code; its children inherit them."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_FSIZE: limits["disk"],
        resource.RLIMIT_SIGPENDING: _PENDING_SIGNALS,
    }
    if confine == "namespaces":
        wanted[resource.RLIMIT_NPROC] = limits["processes"] + 1  # counted in this user namespace, the keeper too
    if confine != "none":
        # Below the tree's cap, so that one greedy process gets a MemoryError and lives.
        wanted[resource.RLIMIT_DATA] = _own_data() + limits["memory"] * 9 // 10
    for kind, most in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError):  # the kernel shall choose user code before the keeper
        kernel.write("/proc/self/oom_score_adj", "1000")


def _own_data() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 1 << 28
