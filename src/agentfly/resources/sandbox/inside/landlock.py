"""Landlock: the file system, TCP and signals of a process that could not be given namespaces of its own."""

from __future__ import annotations

import ctypes
import os
import struct

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every machine
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, *arguments: object) -> int:
    result: int = _libc.syscall(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock {what}: {os.strerror(number)}")
    return result


def version() -> int:
    """What the kernel offers; an OSError where it offers nothing."""
    return _call("version", _CREATE, None, 0, 1)


def restrict(readable: list[str], writable: list[str]) -> None:
    """From here on only these paths can be opened, no TCP, no signals to others."""
    abi = version()
    everything = (1 << 13) - 1 | (1 << 13 if abi >= 2 else 0)
    everything |= (_TRUNCATE if abi >= 3 else 0) | (_IOCTL if abi >= 5 else 0)
    network, scoped = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attributes = struct.pack("QQQ", everything, network, scoped)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _call("ruleset", _CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    for paths, access in ((readable, _EXECUTE | _READ | _LIST), (writable, everything)):
        for path in paths:
            _allow(rules, path, access, everything)
    _allow(rules, "/dev/null", _READ | _WRITE, everything)
    _call("restrict", _RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, access: int, everything: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        access &= _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
    _call(f"rule {path}", _ADD, rules, 1, struct.pack("=Qi", access & everything, place), 0)
    os.close(place)
