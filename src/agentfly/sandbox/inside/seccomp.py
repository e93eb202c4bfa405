"""The seccomp filter of a session as classic BPF, without libseccomp.

Namespaces do not block vsock, netlink, ptrace between processes of a session, io_uring or the kernel's keyring. This
filter does. It is a deny list of system calls that programs of a model do not need and that expose much of the kernel.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from functools import cache

from . import kernel

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _FIRST, _SECOND, _THIRD = 0, 4, 16, 24, 32  # offsets in seccomp_data. Arguments count from one
_NEW_NAMESPACES = 0x7E020000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_F_SETPIPE_SZ = 1031
_UNIX, _INET, _INET6 = 1, 2, 10
_STREAM, _SEQPACKET, _SOCKET_TYPE = 1, 5, 0xF  # a mask without SOCK_CLOEXEC and SOCK_NONBLOCK
_SO_SNDBUF, _SO_SNDBUFFORCE, _SO_PASSPIDFD, _SO_PEERPIDFD = 7, 32, 76, 77

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64). None if the machine has no such call
_SPECIAL = {
    "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "socketpair": (53, 199), "ioctl": (16, 29),
    "setsockopt": (54, 208), "getsockopt": (55, 209), "prlimit64": (302, 261), "fcntl": (72, 25),
}  # fmt: skip
_UNAVAILABLE: Mapping[str, tuple[int, int | None]] = {  # ENOSYS, so that libraries fall back
    "clone3": (435, 435), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190),
    "vmsplice": (278, 75),  # leaves memory in a pipe that belongs to no process
    # shared by all processes of a user, or of the machine
    "inotify_init": (253, None), "inotify_init1": (294, 26), "io_setup": (206, 0), "mq_open": (240, 180),
}  # fmt: skip
_REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "perf_event_open": (298, 241), "bpf": (321, 280),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "quotactl": (179, 60), "quotactl_fd": (443, 443), "fanotify_init": (300, 262),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "personality": (135, 92), "vhangup": (153, 58), "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42), "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None), "_sysctl": (156, None),
    "modify_ldt": (154, None), "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235),
    "set_mempolicy": (238, 237),
}  # fmt: skip
# Without a mount namespace these would reach files of the same user that Landlock does not protect.
_METADATA = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "utimensat": (280, 88), "futimesat": (261, None), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip


class _FilterProgram:
    """A BPF program under construction. A rule that loads an argument returns, so the next finds the call number."""

    def __init__(self) -> None:
        self.column = kernel.SUPPORTED.index(kernel.MACHINE)
        self.code: list[bytes] = []

    def add(self, operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        """Append one instruction. if_true, if_false: instructions to skip."""
        self.code.append(struct.pack("HBBI", operation, if_true, if_false, value & 0xFFFFFFFF))

    def refuse(self, calls: Mapping[str, tuple[int, int | None]], number: int) -> None:
        """Answer these calls with the error `number`."""
        for numbers in calls.values():
            if numbers[self.column] is not None:
                self.add(_EQUAL, numbers[self.column] or 0, 0, 1)
                self.add(_RETURN, _ERRNO | number)

    def allow_only(
        self,
        call: str,
        offset: int,
        values: tuple[int, ...],
        *,
        mask: int = 0xFFFFFFFF,
        error: int = errno.EAFNOSUPPORT,
    ) -> None:
        """Allow this call only if one argument, after `mask`, is one of these values; else it fails with `error`."""
        self.add(_EQUAL, _SPECIAL[call][self.column], 0, len(values) + 4)
        self.add(_LOAD, offset)
        self.add(_AND, mask)
        for index, value in enumerate(values):
            self.add(_EQUAL, value, len(values) - index, 0)
        self.add(_RETURN, _ERRNO | error)
        self.add(_RETURN, _ALLOW)

    def refuse_values(self, call: str, offset: int, test: int, values: tuple[int, ...]) -> None:
        """Answer this call with EPERM if `test` of one argument holds for one of these values."""
        self.add(_EQUAL, _SPECIAL[call][self.column], 0, len(values) + 3)
        self.add(_LOAD, offset)
        for index, value in enumerate(values):
            self.add(test, value, len(values) - index, 0)
        self.add(_RETURN, _ALLOW)
        self.add(_RETURN, _ERRNO | errno.EPERM)


@cache  # the zygote builds it once
def build_filter(inet: bool, own_mounts: bool) -> bytes:
    """Build the filter of a session. inet: allow TCP and UDP sockets. own_mounts: it has a mount namespace."""
    program = _FilterProgram()
    program.add(_LOAD, _ARCH)
    program.add(_EQUAL, _ARCHES[kernel.MACHINE], 1, 0)
    program.add(_RETURN, _KILL)
    program.add(_LOAD, _NUMBER)
    program.add(_AT_LEAST, 0x40000000, 0, 1)  # the x32 calls, which have numbers of their own
    program.add(_RETURN, _KILL)
    program.refuse(_UNAVAILABLE, errno.ENOSYS)
    program.refuse(_REFUSED, errno.EPERM)
    if not own_mounts:
        program.refuse(_METADATA, errno.EPERM)
    program.refuse_values("clone", _FIRST, _ANY_BIT, (_NEW_NAMESPACES,))
    if own_mounts:
        program.allow_only("socket", _FIRST, (_UNIX, _INET, _INET6) if inet else (_UNIX,))
        program.allow_only("socketpair", _FIRST, (_UNIX,))
    else:
        # A new socket, or a pair that sends datagrams, would reach the host's UNIX sockets.
        program.refuse({"socket": _SPECIAL["socket"]}, errno.EAFNOSUPPORT)
        program.allow_only("socketpair", _SECOND, (_STREAM, _SEQPACKET), mask=_SOCKET_TYPE)
    # The interpreter has a connection to the host: no handle of the process at its other end.
    program.refuse_values("getsockopt", _THIRD, _EQUAL, (_SO_PEERPIDFD,))
    # Where no cgroup counts buffers, each keeps the size that the watchdog assumes.
    sizes = () if inet else (_SO_SNDBUF, _SO_SNDBUFFORCE)
    program.refuse_values("setsockopt", _THIRD, _EQUAL, (_SO_PASSPIDFD, *sizes))
    # A process changes its own limits only, not those of another process of the session (such as a judge).
    program.allow_only("prlimit64", _FIRST, (0,), error=errno.EPERM)
    program.refuse_values("ioctl", _SECOND, _EQUAL, (_TIOCSTI, _TIOCLINUX))
    # 64 pipes of 1 MiB would use up what the kernel grants all pipes of a user; those of the host would shrink.
    program.refuse_values("fcntl", _SECOND, _EQUAL, (_F_SETPIPE_SZ,))
    program.add(_RETURN, _ALLOW)
    return b"".join(program.code)
