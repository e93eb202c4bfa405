"""Mounts of a session: a Python, its libraries and the system's programs, all read-only.

The interpreter keeps its path on the host. Libraries of a virtual environment are bound below `/opt/site`. A session
sees no other file of the host, and of AgentFly only the programs in `inside`: its other files may hold answers to
tasks.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentfly.sandbox.base import SandboxUnavailable

WORK = "/session"
"""Working folder of a session with mounts of its own."""
TASK_FOLDERS = ("/app", "/logs", "/solution", "/tests")
"""Absolute paths that task folders use, as links into the working folder: `/app` is `/session/app`."""
INSIDE = Path(__file__).resolve().parent / "inside"
"""The trusted programs on the host."""
_TRUSTED = "/opt/agentfly/inside"
_SITE = "/opt/site"
_MASK = "/dev/null"
_EDITABLE = (
    "*.pth", "*.egg-link", "__editable__*.py", "__pycache__/__editable__*", "*.dist-info/direct_url.json",
)  # fmt: skip
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/fonts")
_INSPECT = """
import json, os, sys, sysconfig
paths = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
own = sys.prefix != sys.base_prefix
exe = os.path.realpath(sys.executable)
print(json.dumps({"prefix": sys.base_prefix, "python": exe, "sites": sorted(set(paths)) if own else [],
                  "version": sys.version_info[:2]}))
"""


@dataclass(frozen=True)
class Python:
    """A Python interpreter of the host that sessions run."""

    python: str
    prefix: str
    sites: tuple[str, ...]
    """Library folders outside the prefix."""
    version: tuple[int, int]


@cache
def find_python(path: str | None) -> Python:
    """Inspect the interpreter at `path`, or the one that runs this process. Raises SandboxUnavailable."""
    command = [path or sys.executable, "-I", "-c", _INSPECT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=True)
        description = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"{command[0]} is not a Python that starts: {error}") from error
    major, minor = description["version"]
    if (major, minor) < (3, 9):
        raise SandboxUnavailable(f"{command[0]} is Python {major}.{minor}; sessions need 3.9 or later")
    return Python(
        description["python"], description["prefix"], sites=tuple(description["sites"]), version=(major, minor)
    )


@dataclass(frozen=True)
class MountPlan:
    """Mounts of the zygote's root file system, which all sessions share."""

    binds: tuple[tuple[str, str], ...]
    """Read-only bind mounts: path of the host, path in the session."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links: target, path."""
    sites: tuple[str, ...]
    """Library folders, as the session sees them."""
    trusted: str
    """Folder to copy the trusted programs to. They are not bound: a session could see the source of the mount."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Paths of the host that are bound."""
        return tuple(source for source, _ in self.binds)


def plan_mounts(python: Python) -> MountPlan:
    """Plan the mounts for sessions of this interpreter."""
    links = [(os.readlink(path), path) for path in _SYSTEM if os.path.islink(path)]
    links += [(WORK + path, path) for path in TASK_FOLDERS if not _is_within(python.prefix, [path])]
    visible = ["/usr", *(path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path))]
    visible += [path for path in _SETTINGS if os.path.exists(path)]
    if not _is_within(python.prefix, visible):
        if _is_within(python.prefix, [WORK, "/tmp", "/proc", "/dev", _SITE]) or python.prefix == "/":
            raise SandboxUnavailable(f"the interpreter's prefix {python.prefix} lies where a session has its own files")
        visible.append(python.prefix)
    binds = [(path, path) for path in visible]
    sites = [(path, f"{_SITE}/{number}") for number, path in enumerate(python.sites) if os.path.isdir(path)]
    binds += sites
    # Where the folder of AgentFly itself would be visible, only its trusted programs are.
    binds += [(str(INSIDE), target) for target in _map_into_session(str(INSIDE.parents[1]), binds)]
    binds += [
        (_MASK, target) for path in _find_install_records(python, visible) for target in _map_into_session(path, binds)
    ]
    return MountPlan(tuple(binds), tuple(links), sites=tuple(target for _, target in sites), trusted=_TRUSTED)


def _map_into_session(path: str, binds: Iterable[tuple[str, str]]) -> list[str]:
    """Return the paths at which a session would see a path of the host."""
    roots = [(os.path.realpath(source), target) for source, target in binds]
    return [target + path[len(root) :] for root, target in roots if path.startswith(root + "/")]


def _find_install_records(python: Python, visible: list[str]) -> Iterator[str]:
    """Find files that reveal from which path of the host a package was installed: editable and local installs."""
    bases = {"/usr", "/usr/local", python.prefix}
    installed = [folder for base in bases for folder in Path(base).glob("lib/python3*/*-packages")]
    for folder in {site.resolve() for site in (*installed, *map(Path, python.sites))}:
        for path in [path for pattern in _EDITABLE for path in folder.glob(pattern) if _is_readable(path, folder)]:
            text = path.read_text(errors="replace")
            if path.suffix == ".pth":
                absolute = [line.strip() for line in text.splitlines() if line.startswith("/")]
                reveals = "__editable__" in text or not all(_is_within(line, visible) for line in absolute)
            else:
                reveals = path.name != "direct_url.json" or "file:" in text
            if reveals:
                yield str(path)


def _is_readable(path: Path, folder: Path) -> bool:
    """Whether a session could read a file below a library folder."""
    if os.getuid() != 0:
        return os.access(path, os.R_OK)
    searchable = all(parent.stat().st_mode & stat.S_IXOTH for parent in (folder, path.parent))
    return searchable and bool(path.stat().st_mode & stat.S_IROTH)


def _is_within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def is_closed_to_others(path: str) -> bool:
    """Whether file permissions keep other users from reading `path`."""
    resolved = Path(path).resolve()
    folders = [ancestor for ancestor in (resolved, *resolved.parents) if ancestor.is_dir()]
    return (
        any(not folder.stat().st_mode & stat.S_IXOTH for folder in folders)
        or not resolved.stat().st_mode & stat.S_IROTH
    )


def session_environment(work: str) -> dict[str, str]:
    """Return the environment variables of every session; it inherits none of the host's."""
    return {
        "HOME": work,
        "USER": "agent",
        "LOGNAME": "agent",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "MPLBACKEND": "agg",
        "MPLCONFIGDIR": "/tmp/matplotlib",
        **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }
