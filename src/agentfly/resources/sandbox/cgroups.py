"""Control groups, version 1 and 2, below this process's own group: the cap on what a session's whole tree uses.

Every group is named after the process that made it. What a killed process left behind is removed by the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.owner import PREFIX, is_leftover, process_name
from agentfly.resources.sandbox.limits import Limits

_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD = 100_000
_TCP_LIMIT = "memory.kmem.tcp.limit_in_bytes"


@dataclass(frozen=True)
class Group:
    """The groups of one session, one folder for each hierarchy."""

    folders: dict[str, Path]

    def admit(self, pid: int) -> None:
        """Move a process in; its later children follow."""
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """How many processes the kernel killed here for memory."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                words = (self.folders["memory"] / name).read_text().split()
                return int(words[words.index("oom_kill") + 1])
        return 0

    def usage(self) -> int | None:
        """Bytes held by its processes and files; None where the kernel does not tell."""
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError):
                return int((self.folders["memory"] / name).read_text())
        return None

    async def remove(self) -> None:
        """Remove the groups; their processes have ended, but the kernel may need a moment."""
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
    """Where this process may make groups, for which controllers."""

    def __init__(self, version: int, parents: dict[str, Path]) -> None:
        self.version = version
        self.parents = parents
        self._made = 0

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> Cgroups | str:
        """What can be used, or why nothing can. Tried by making a group."""
        parents = _own_groups(proc)
        if "memory" not in parents:
            return "no memory controller in /proc/self/cgroup is mounted"
        version = 2 if (parents["memory"] / "cgroup.controllers").exists() else 1
        try:
            if version == 2:
                _enable(parents["memory"])
                enabled = (parents["memory"] / "cgroup.subtree_control").read_text().split()
                parents = {name: parents["memory"] for name in _CONTROLLERS if name in enabled}
            found = cls(version, parents)
            found._sweep()
            trial = found._make_folders()
            for folder in set(trial.folders.values()):
                folder.rmdir()
        except OSError as error:
            return f"no control group can be made below {parents.get('memory', '?')}: {error.strerror}"
        return found

    @property
    def limits_socket_memory(self) -> bool:
        """Whether buffers of TCP and UDP sockets have a limit too: part of `memory.max` in version 2, apart in 1."""
        return self.version == 2 or (self.parents["memory"] / _TCP_LIMIT).exists()

    def make(self, limits: Limits) -> Group:
        """A group with these limits set."""
        group = self._make_folders()
        for controller, folder in group.folders.items():
            for name, value in self._settings(controller, limits).items():
                if (folder / name).exists():
                    (folder / name).write_text(value)
        return group

    def _make_folders(self) -> Group:
        self._made += 1
        name = f"{process_name(os.getpid())}-{self._made}"  # asked each time: a fork of this process is another
        folders = {controller: parent / name for controller, parent in self.parents.items()}
        for folder in set(folders.values()):
            folder.mkdir()
        return Group(folders)

    def _settings(self, controller: str, limits: Limits) -> dict[str, str]:
        if controller == "pids":
            return {"pids.max": str(limits.processes + 1)}
        if controller == "cpu":
            if limits.cpus is None:
                return {}
            quota = max(int(limits.cpus * _PERIOD), 1000)
            return {"cpu.max": f"{quota} {_PERIOD}"} if self.version == 2 else {"cpu.cfs_quota_us": str(quota)}
        if self.version == 2:
            return {"memory.max": str(limits.memory), "memory.swap.max": "0", "memory.oom.group": "0"}
        return {
            "memory.limit_in_bytes": str(limits.memory),
            "memory.memsw.limit_in_bytes": str(limits.memory),
            _TCP_LIMIT: str(limits.memory // 8),  # version 1 counts no socket buffer above; this covers UDP as well
        }

    def _sweep(self) -> None:
        for parent in set(self.parents.values()):
            for folder in parent.glob(f"{PREFIX}-*"):
                if is_leftover(folder.name):
                    _empty(folder)


def _empty(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        for pid in map(int, (folder / "cgroup.procs").read_text().split()):
            if pid > 1:  # 0 stands for a process of another namespace, and to kill(2) for our own group
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _own_groups(proc: Path) -> dict[str, Path]:
    """Controller to the folder of this process's own group."""
    mounts = _mounts(proc)
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            for name in names.split(",") if names else _CONTROLLERS:
                mounted = mounts.get("" if number == "0" else name)
                folder = mounted and _below(mounted, path)
                if name in _CONTROLLERS and folder and folder.is_dir() and (names or _offers(folder, name)):
                    found.setdefault(name, folder)
    return found


def _offers(folder: Path, controller: str) -> bool:
    with contextlib.suppress(OSError):
        return controller in (folder / "cgroup.controllers").read_text().split()
    return False


def _below(mounted: tuple[str, str], path: str) -> Path:
    root, place = mounted
    inner = path[len(root) :] if root != "/" and path.startswith(root) else path
    return Path(place) / inner.strip("/")


def _mounts(proc: Path) -> dict[str, tuple[str, str]]:
    """Controller (empty for version 2) to the root and place of its hierarchy."""
    found: dict[str, tuple[str, str]] = {}
    with contextlib.suppress(OSError):
        for line in (proc / "mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            root, place = before.split()[3:5]
            if kind == "cgroup2":
                found.setdefault("", (root, place))
            elif kind == "cgroup":
                for name in options.split(","):
                    found.setdefault(name, (root, place))
    return found


def _enable(folder: Path) -> None:
    """Version 2: let children have controllers. A group with processes may not, so this one's move to a leaf."""
    wanted = " ".join(f"+{name}" for name in _CONTROLLERS if _offers(folder, name))
    try:
        (folder / "cgroup.subtree_control").write_text(wanted)
    except OSError:
        pids = (folder / "cgroup.procs").read_text().split()
        if pids != [str(os.getpid())]:
            raise
        leaf = folder / f"{PREFIX}-leaf"
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(pids[0])
        (folder / "cgroup.subtree_control").write_text(wanted)
