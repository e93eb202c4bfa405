"""Cgroups (v1 and v2) below this process's own group: limits for the whole process tree of a session.

Each cgroup is named after the process that created it. The next start removes those a killed process left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentfly.sandbox.base import Limits
from agentfly.sandbox.owner import PREFIX, is_leftover, process_name

_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD = 100_000  # microseconds
_TCP_LIMIT = "memory.kmem.tcp.limit_in_bytes"


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of one session."""

    folders: dict[str, Path]
    """Controller → folder; with cgroup v2 all folders are the same."""

    def add(self, pid: int) -> None:
        """Move a process in; its later children follow."""
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def memory_kills(self) -> int:
        """Number of processes of this cgroup killed by the kernel for memory."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                words = (self.folders["memory"] / name).read_text().split()
                return int(words[words.index("oom_kill") + 1])
        return 0

    def memory(self) -> int | None:
        """Bytes charged to processes and files. None if the kernel does not report them."""
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError):
                return int((self.folders["memory"] / name).read_text())
        return None

    async def remove(self) -> None:
        """Remove the cgroup. Its processes have ended, but the kernel may need a moment to notice."""
        for folder in set(self.folders.values()):
            for _ in range(100):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    await asyncio.sleep(0.01)


class Cgroups:
    """Creates cgroups for sessions, for the controllers this process may use."""

    def __init__(self, version: int, parents: dict[str, Path]) -> None:
        self.version = version
        self.parents = parents
        """Controller → folder in which this process may create cgroups."""
        self._created = 0

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> Cgroups | str:
        """Return the usable controllers, or the reason why there are none. Tests them by creating a cgroup."""
        parents = _own_cgroups(proc)
        if "memory" not in parents:
            return "no memory controller in /proc/self/cgroup is mounted"
        version = 2 if (parents["memory"] / "cgroup.controllers").exists() else 1
        try:
            if version == 2:
                _enable_controllers(parents["memory"])
                enabled = (parents["memory"] / "cgroup.subtree_control").read_text().split()
                parents = {name: parents["memory"] for name in _CONTROLLERS if name in enabled}
            cgroups = cls(version, parents)
            cgroups._remove_leftovers()
            for folder in set(cgroups._make_folders(parents).folders.values()):
                folder.rmdir()
        except OSError as error:
            return f"no control group can be made below {parents.get('memory', '?')}: {error.strerror}"
        return cgroups

    @property
    def limits_socket_memory(self) -> bool:
        """Whether TCP and UDP buffers are limited: by `memory.max` in version 2, by a limit of their own in 1."""
        return self.version == 2 or (self.parents["memory"] / _TCP_LIMIT).exists()

    def create(self, limits: Limits) -> Cgroup:
        """Create a cgroup with these limits."""
        settings = {"pids": {"pids.max": str(limits.processes + 1)}}
        if self.version == 2:
            settings["memory"] = {
                "memory.max": str(limits.memory),
                "memory.swap.max": "0",
                "memory.oom.group": "0",
            }
        else:
            settings["memory"] = {
                "memory.limit_in_bytes": str(limits.memory),
                "memory.memsw.limit_in_bytes": str(limits.memory),
                _TCP_LIMIT: str(limits.memory // 8),  # version 1 counts no socket buffers above. This covers UDP too
            }
        if limits.cpus is not None:
            quota = max(int(limits.cpus * _CPU_PERIOD), 1000)
            v2 = self.version == 2
            settings["cpu"] = {"cpu.max": f"{quota} {_CPU_PERIOD}"} if v2 else {"cpu.cfs_quota_us": str(quota)}

        group = self._make_folders(settings)
        for controller, folder in group.folders.items():
            for name, value in settings[controller].items():
                if (folder / name).exists():
                    (folder / name).write_text(value)
        return group

    def _make_folders(self, controllers: Iterable[str]) -> Cgroup:
        self._created += 1
        name = f"{process_name(os.getpid())}-{self._created}"  # not cached: a fork is another process
        folders = {
            controller: self.parents[controller] / name for controller in controllers if controller in self.parents
        }
        for folder in set(folders.values()):
            folder.mkdir()
        return Cgroup(folders)

    def _remove_leftovers(self) -> None:
        """Remove the cgroups of processes that are gone, and kill what still runs in them."""
        for parent in set(self.parents.values()):
            for folder in parent.glob(f"{PREFIX}-*"):
                if not is_leftover(folder.name):
                    continue
                with contextlib.suppress(OSError, ValueError):
                    for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                        if pid > 1:  # 0 is a process of another namespace here, and our own group to kill(2)
                            os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _own_cgroups(proc: Path) -> dict[str, Path]:
    """Map each controller to the folder of this process's own cgroup."""
    # Controller ("" for version 2) → root and mount point of its hierarchy.
    mounts: dict[str, tuple[str, str]] = {}
    folders: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in (proc / "mountinfo").read_text().splitlines():
            fields_before_dash, _, fields_after_dash = line.partition(" - ")
            fs_type, _, options = fields_after_dash.split(" ", 2)
            root, mount_point = fields_before_dash.split()[3:5]
            if fs_type == "cgroup2":
                mounts.setdefault("", (root, mount_point))
            elif fs_type == "cgroup":
                for name in options.split(","):
                    mounts.setdefault(name, (root, mount_point))
    with contextlib.suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            for name in names.split(",") if names else _CONTROLLERS:
                key = "" if number == "0" else name
                if name not in _CONTROLLERS or key not in mounts:
                    continue
                root, mount_point = mounts[key]
                inner = path[len(root) :] if root != "/" and path.startswith(root) else path
                folder = Path(mount_point) / inner.strip("/")
                if folder.is_dir() and (names or _has_controller(folder, name)):
                    folders.setdefault(name, folder)
    return folders


def _has_controller(folder: Path, controller: str) -> bool:
    with contextlib.suppress(OSError):
        return controller in (folder / "cgroup.controllers").read_text().split()
    return False


def _enable_controllers(folder: Path) -> None:
    """Version 2: enable controllers for children. A cgroup with processes cannot, so this process moves to a leaf."""
    enabled = " ".join(f"+{name}" for name in _CONTROLLERS if _has_controller(folder, name))
    try:
        (folder / "cgroup.subtree_control").write_text(enabled)
    except OSError:
        pids = (folder / "cgroup.procs").read_text().split()
        if pids != [str(os.getpid())]:
            raise
        leaf = folder / f"{PREFIX}-leaf"
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(pids[0])
        (folder / "cgroup.subtree_control").write_text(enabled)
