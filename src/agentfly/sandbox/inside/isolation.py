"""Isolation of one session: mounts of its own, then the permanent loss of every privilege.

`mount_session` runs in the first process of the session, which may still mount in its own namespace. `drop_privileges`
takes every privilege away, before the first process with user code exists.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
from typing import Any

from . import kernel, seccomp

USER = 1000
# The kernel counts these per user of the host, so all sessions of an ordinary user share them with each other and with
# the host's own programs. File descriptors in flight over UNIX sockets have RLIMIT_NOFILE as their limit, plus the 253
# of one message. Pairs of files and epoll instances share fs.epoll.max_user_watches. Most programs may open 1024 files.
_OPEN_FILES = 256
_PENDING_SIGNALS = 256
_TERMINALS = 32
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
# Landlock access rights of files, and its system calls, whose numbers are the same on every machine
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def mount_session(limits: dict[str, Any], work: str) -> None:
    """Mount a tmpfs for the working folder, /tmp and /dev/shm, a new /proc and /dev/pts; bring loopback up."""
    kernel.map_user(USER, USER, USER)
    kernel.make_private()
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    options = f"size={limits['disk']},nr_inodes={limits['inodes'] + 4},mode=755"
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, options)
    for name, target in (("work", work), ("shm", "/dev/shm"), ("tmp", "/tmp")):
        os.mkdir(f"/tmp/{name}")
        os.chmod(f"/tmp/{name}", 0o1777)
        kernel.bind(f"/tmp/{name}", target)
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    # newinstance: without it a session could open the terminals of others
    options = f"newinstance,ptmxmode=0666,mode=620,max={_TERMINALS}"
    kernel.mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    socket.sethostname("sandbox")
    os.chdir(work)


def drop_privileges(confine: str, readable: list[str], work: str, inet: bool, capabilities: bool = False) -> None:
    """Give up every privilege permanently, as far as the mechanism `confine` goes.

    inet: allow TCP and UDP sockets. capabilities: keep those that the container engine gives.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    if confine == "none":
        return
    kernel.forbid_new_privileges()
    if confine == "namespaces" and os.path.exists("/proc/self/ns/cgroup"):
        kernel.unshare(kernel.NEWCGROUP)  # names of cgroups reveal pids of the host
    if confine in ("namespaces", "container"):
        if not capabilities:
            kernel.drop_capabilities()
        kernel.set_dumpable(False)
        if confine == "namespaces" or kernel.MACHINE in kernel.SUPPORTED:  # a container engine has its own filter too
            kernel.filter_syscalls(seccomp.build_filter(inet=inet, own_mounts=True))
        return
    _restrict_by_landlock(readable, work)
    # The session init will kill every process it may signal: these must be its own children only.
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        kernel.filter_syscalls(seccomp.build_filter(inet=False, own_mounts=False))
    else:
        raise OSError(1, "Landlock of this kernel does not scope signals")


def _restrict_by_landlock(readable: list[str], writable: str) -> None:
    """Allow this process to open these paths only, and no TCP and no signals to processes outside."""
    version = kernel.syscall("landlock version", _CREATE_RULESET, None, 0, 1)
    handled = (1 << 13) - 1
    handled |= 1 << 13 if version >= 2 else 0
    handled |= _TRUNCATE if version >= 3 else 0
    handled |= _IOCTL if version >= 5 else 0
    network = 3 if version >= 4 else 0
    scoped = 3 if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = kernel.syscall("landlock ruleset", _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    allowed = [(path, _EXECUTE | _READ | _LIST) for path in readable]
    allowed += [(writable, handled), ("/dev/null", _READ | _WRITE)]
    for path, access in allowed:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            access &= _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
        rule = struct.pack("=Qi", access & handled, fd)
        kernel.syscall(f"landlock rule {path}", _ADD_RULE, rules, 1, rule, 0)
        os.close(fd)
    kernel.syscall("landlock restrict", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def set_rlimits(limits: dict[str, Any], confine: str) -> None:
    """Set the resource limits of a process that runs user code; its children inherit them."""
    rlimits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_FSIZE: limits["disk"],
        resource.RLIMIT_SIGPENDING: _PENDING_SIGNALS,
    }
    if confine == "namespaces":
        rlimits[resource.RLIMIT_NPROC] = limits["processes"] + 1  # per user namespace, session init included
    if confine != "none":
        # Below the limit of the tree, so that one greedy process gets a MemoryError and survives.
        try:
            with open("/proc/self/statm") as file:
                inherited = int(file.read().split()[5]) * resource.getpagesize()
        except OSError:
            inherited = 1 << 28
        rlimits[resource.RLIMIT_DATA] = inherited + limits["memory"] * 9 // 10
    for number, limit in rlimits.items():
        hard = resource.getrlimit(number)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (value, value))
    with contextlib.suppress(OSError):  # the kernel shall kill user code before the session init
        kernel.write("/proc/self/oom_score_adj", "1000")
