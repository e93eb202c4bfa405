"""System calls that Python does not wrap. Each raises OSError with the name of the call."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct

MACHINE = platform.machine()
_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "mount_setattr": 442},
}
SUPPORTED = tuple(_NUMBERS)
_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)  # a fork must hold the GIL

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NEWCGROUP = 0x2000000
NEW_NAMESPACES = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4  # of mount_setattr
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MADV_COLLAPSE, _HUGE_PAGE = 25, 1 << 21
_PDEATHSIG, _DUMPABLE, _BOUNDING_DROP, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 24, 22, 36, 38


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """Make a system call by its number and return its result. what: its name in the OSError."""
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), what)


def clone_into(flags: int) -> int:
    """Fork into the new namespaces of `flags`; returns 0 in the child. The caller must have one thread."""
    number = ctypes.c_long(_NUMBERS[MACHINE]["clone"])
    ctypes.pythonapi.PyOS_BeforeFork()
    child = _libc_with_gil.syscall(number, ctypes.c_ulong(flags | signal.SIGCHLD), None, None, None, None)
    if child == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check(child, "clone")


def unshare(flags: int) -> None:
    """Move this process to the new namespaces of `flags`."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str | None, target: str, fs_type: str | None, flags: int, options: str = "") -> None:
    """Mount, bind or change propagation."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, fs_type)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None)
    _check(result, f"mount {fs_type or 'bind'} {target}")


def make_private() -> None:
    """Keep later mounts within this mount namespace."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)


def bind(source: str, target: str) -> None:
    """Bind a file or folder with everything mounted below it."""
    mount(source, target, None, MS_BIND | MS_REC)


def make_readonly(target: str, recursive: bool = True) -> None:
    """Make a mount, and all mounts below it, read-only, without devices and setuid."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    syscall(
        "mount_setattr",
        _NUMBERS[MACHINE]["mount_setattr"],
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def enter_root(folder: str) -> None:
    """Make `folder`, a mount point, the root, and unmount the old root."""
    os.chdir(folder)
    syscall("pivot_root", _NUMBERS[MACHINE]["pivot_root"], b".", b".")
    _check(_libc.umount2(b".", 2), "umount the old root")
    os.chdir("/")


def collapse_heap() -> None:
    """Move this process's memory to huge pages, of which a fork copies one entry instead of 512.

    Memory that the kernel does not move (before Linux 6.1: all of it) stays as it is. Forks then take longer.
    """
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        fields = line.split()
        if fields[1] == "rw-p" and fields[4] == "0":  # anonymous memory
            start, end = (int(address, 16) for address in fields[0].split("-"))
            for page in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                _libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)


def write(path: str, text: str) -> None:
    """Write to a file of the kernel with one system call."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def map_user(inside: int, uid: int, gid: int) -> None:
    """Map user and group `inside` of a new user namespace to `uid` and `gid` outside."""
    write("/proc/self/setgroups", "deny")
    write("/proc/self/gid_map", f"{inside} {gid} 1")
    write("/proc/self/uid_map", f"{inside} {uid} 1")


def _prctl(option: int, value: int, what: str) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), what)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    _prctl(_PDEATHSIG, signal.SIGKILL, "prctl PDEATHSIG")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _prctl(_SUBREAPER, 1, "prctl SUBREAPER")


def set_dumpable(allowed: bool) -> None:
    """Set whether processes of the same user may inspect this one."""
    _prctl(_DUMPABLE, int(allowed), "prctl DUMPABLE")


def forbid_new_privileges() -> None:
    """Keep programs started from here on from gaining privileges."""
    _prctl(_NO_NEW_PRIVS, 1, "prctl NO_NEW_PRIVS")


def drop_capabilities() -> None:
    """Give up every capability permanently."""
    for capability in range(64):
        if _libc.prctl(_BOUNDING_DROP, capability, 0, 0, 0):
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def filter_syscalls(program: bytes) -> None:
    """Install a classic BPF program as the seccomp filter of this process."""
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    _check(_libc.prctl(_SECCOMP, 2, described, 0, 0), "prctl SECCOMP")
