"""What a session sees of the host: a Python, its libraries, the system's programs, all read-only.

The interpreter keeps the paths it has on the host, so whatever starts there starts here. Libraries of a virtual
environment are bound below `/opt/site`. Nothing else of the host's files is there; of AgentFly itself only what runs
inside, for the answers to a task may be among its files.
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

from agentfly.resources.sandbox.contract import SandboxUnavailable

WORK = "/session"
_TRUSTED, _SITE = "/opt/agentfly/inside", "/opt/site"
INSIDE = Path(__file__).resolve().parent / "inside"
_MASK = "/dev/null"
_EDITABLE = (
    "*.pth", "*.egg-link", "__editable__*.py", "__pycache__/__editable__*", "*.dist-info/direct_url.json",
)  # fmt: skip
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/fonts")
_ASK = """
import json, os, sys, sysconfig
paths = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
own = sys.prefix != sys.base_prefix
exe = os.path.realpath(sys.executable)
print(json.dumps({"prefix": sys.base_prefix, "python": exe, "sites": sorted(set(paths)) if own else [],
                  "version": sys.version_info[:2]}))
"""


@dataclass(frozen=True)
class Python:
    """An interpreter of the host that sessions run."""

    python: str
    prefix: str
    sites: tuple[str, ...]
    """Folders of libraries outside the prefix."""
    version: tuple[int, int]


@cache
def find_python(path: str | None) -> Python:
    """The interpreter at `path`, or the one that runs this process."""
    line = [path or sys.executable, "-I", "-c", _ASK]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=True)
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"{line[0]} is no Python that starts: {error}") from error
    found = Python(told["python"], told["prefix"], tuple(told["sites"]), (told["version"][0], told["version"][1]))
    if found.version < (3, 9):
        raise SandboxUnavailable(
            f"{line[0]} is Python {found.version[0]}.{found.version[1]}; sessions need 3.9 or later"
        )
    return found


@dataclass(frozen=True)
class View:
    """The outer room: what is bound where."""

    binds: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]
    sites: tuple[str, ...]
    """The library folders, as the session sees them."""
    trusted: str
    """Where the programs that run inside are copied to. Not bound: a session can see from where a folder is bound."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The host's paths that are bound."""
        return tuple(source for source, _ in self.binds)


def make_view(python: Python) -> View:
    """The outer room for sessions of this interpreter."""
    links = [(os.readlink(path), path) for path in _SYSTEM if os.path.islink(path)]
    shown = ["/usr", *(path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path))]
    shown += [path for path in _SETTINGS if os.path.exists(path)]
    if not _within(python.prefix, shown):
        if _within(python.prefix, [WORK, "/tmp", "/proc", "/dev", "/opt/site"]) or python.prefix == "/":
            raise SandboxUnavailable(f"the interpreter's prefix {python.prefix} lies where a session has its own files")
        shown.append(python.prefix)
    binds = [(path, path) for path in shown]
    sites = [(path, f"{_SITE}/{number}") for number, path in enumerate(python.sites) if os.path.isdir(path)]
    binds += sites
    binds += _instead_of_agentfly(binds)
    binds += [(_MASK, place) for path in _find_host_paths(python, shown) for place in _places(path, binds)]
    return View(tuple(binds), tuple(links), tuple(target for _, target in sites), _TRUSTED)


def _instead_of_agentfly(binds: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Where AgentFly would be seen, and what is bound over it: that part of it which is seen anyway."""
    return [(str(INSIDE), place) for place in _places(str(INSIDE.parents[2]), binds)]


def _places(path: str, binds: Iterable[tuple[str, str]]) -> list[str]:
    """Where a session would see a path of the host."""
    roots = [(os.path.realpath(source), target) for source, target in binds]
    return [target + path[len(root) :] for root, target in roots if path.startswith(root + "/")]


def _find_host_paths(python: Python, shown: list[str]) -> Iterator[str]:
    """Files that tell where on the host packages were installed from: editable installs and local archives."""
    bases = {"/usr", "/usr/local", python.prefix}
    installed = [folder for base in bases for folder in Path(base).glob("lib/python3*/*-packages")]
    for folder in {each.resolve() for each in (*installed, *map(Path, python.sites))}:
        for path in [path for pattern in _EDITABLE for path in folder.glob(pattern) if _is_readable(path, folder)]:
            text = path.read_text(errors="replace")
            if path.suffix == ".pth":
                absolute = [line.strip() for line in text.splitlines() if line.startswith("/")]
                tells = "__editable__" in text or not all(_within(line, shown) for line in absolute)
            else:
                tells = path.name != "direct_url.json" or "file:" in text
            if tells:
                yield str(path)


def _is_readable(path: Path, folder: Path) -> bool:
    """Whether a session could read a file below a library folder."""
    if os.getuid() != 0:
        return os.access(path, os.R_OK)
    ways = all(each.stat().st_mode & stat.S_IXOTH for each in (folder, path.parent))
    return ways and bool(path.stat().st_mode & stat.S_IROTH)


def _within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def is_closed_to_others(path: str) -> bool:
    """Whether some other user could not reach `path`."""
    place = Path(path).resolve()
    folders = [each for each in (place, *place.parents) if each.is_dir()]
    return any(not each.stat().st_mode & stat.S_IXOTH for each in folders) or not place.stat().st_mode & stat.S_IROTH


def environment(work: str) -> dict[str, str]:
    """The environment variables of every session; none of the host's."""
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
