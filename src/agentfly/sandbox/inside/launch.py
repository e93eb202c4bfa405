"""The launcher: starts with the host's privileges and ends as a zygote in its own root. It becomes bwrap, or waits for
the zygote.

Started by root, it first switches to a user id of its own: a process that is root on the host may write root's files in
/proc/sys even without capabilities, inside any namespace. Sources that only root can read are bound to a readable place
before that, in a private mount namespace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

from . import isolation, kernel

_STAGE, _ROOT = "/tmp", "/tmp"  # exist everywhere. Covered only in our own mount namespace
_DEVICES = ("null", "zero", "full", "random", "urandom")


def main(config: dict[str, Any]) -> NoReturn:
    """Switch the user, build the root, start the zygote. Errors go to stderr."""
    try:
        # Read before the user changes to one that may not read them.
        folder = os.path.dirname(os.path.abspath(__file__))
        programs = {}
        for name in os.listdir(folder):
            if name.endswith(".py"):
                with open(f"{folder}/{name}", "rb") as file:
                    programs[name] = file.read()
        if config["uid"] is not None:
            _switch_user(config)
        command = [config["python"], "-I", "-B", "-X", "utf8"]
        command += [config["trusted"] + "/__main__.py", "zygote", config["argument"]]
        if config["bwrap"]:
            _exec_bwrap(config, programs, command)
        elif config["zygote"]["confine"] == "namespaces":
            _run_in_namespaces(config, programs, command)
        else:
            os.execv(config["python"], command)
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
    os._exit(1)


def _switch_user(config: dict[str, Any]) -> None:
    """Become the sandbox's own user. If `stage` is set, first bind all sources to places that other users can reach."""
    if config["stage"]:
        kernel.unshare(kernel.NEWNS)
        kernel.make_private()
        home = config["bwrap_home"]  # a folder: the wheel's program looks for its libraries beside it
        sources = [source for source, _ in config["binds"]] + ([home] if home else [])
        opened = [(source, os.open(source, os.O_PATH)) for source in sources]
        kernel.mount("tmpfs", _STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
        staged = {}
        for number, (source, fd) in enumerate(opened):
            staged[source] = f"{_STAGE}/{number}"
            _bind_fd(fd, staged[source])
        config["binds"] = [(staged[source], target) for source, target in config["binds"]]
        if home:
            config["bwrap"] = staged[home] + config["bwrap"][len(home) :]
    os.setgroups([])
    os.setresgid(config["uid"], config["uid"], config["uid"])
    os.setresuid(config["uid"], config["uid"], config["uid"])
    kernel.set_dumpable(True)  # otherwise root keeps owning this process's /proc files


def _bind_fd(fd: int, target: str) -> None:
    """Create `target` as a file or folder, bind the file or folder behind `fd` to it, and close `fd`."""
    source = f"/proc/self/fd/{fd}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT, 0o644))
    kernel.bind(source, target)
    os.close(fd)


def _exec_bwrap(config: dict[str, Any], programs: dict[str, bytes], command: list[str]) -> None:
    user = str(isolation.USER)
    line = [config["bwrap"], "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    line += ["--cap-drop", "ALL", "--uid", user, "--gid", user, "--hostname", "sandbox"]
    for source, target in config["binds"]:
        line += ["--ro-bind", source, target]
    for name, content in programs.items():
        fd = os.memfd_create(name, 0)  # inherited by bwrap, which copies it
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        line += ["--file", str(fd), f"{config['trusted']}/{name}"]
    for target, path in config["links"]:
        line += ["--symlink", target, path]
    line += ["--proc", "/proc", "--dev", "/dev", "--size", "1048576", "--tmpfs", "/tmp"]
    # bwrap's /dev is a writable file system without a size limit, and all sessions would share it
    line += ["--dir", config["work"], "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--"]
    os.execv(config["bwrap"], line + command)


def _run_in_namespaces(config: dict[str, Any], programs: dict[str, bytes], command: list[str]) -> None:
    """Start the zygote as the first process of a new pid namespace, and wait for it."""
    uid, gid, host = os.getuid(), os.getgid(), os.getppid()
    kernel.die_with_parent()
    if os.getppid() != host:
        os._exit(1)
    kernel.unshare(kernel.NEW_NAMESPACES)
    kernel.map_user(isolation.USER, uid, gid)
    child = os.fork()
    if child == 0:
        kernel.die_with_parent()
        _build_root(config, programs)
        kernel.forbid_new_privileges()
        kernel.drop_capabilities()
        os.execv(config["python"], command)
    for inherited in ("control", "listener"):
        os.close(config["zygote"][inherited])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os._exit(os.waitpid(child, 0)[1] and 1)


def _build_root(config: dict[str, Any], programs: dict[str, bytes]) -> None:
    """Build and enter a read-only root: the bind mounts, harmless devices, and the /proc of this pid namespace."""
    kernel.make_private()
    opened = [(os.open(source, os.O_PATH), target) for source, target in config["binds"]]
    opened += [(os.open(f"/dev/{name}", os.O_PATH), f"/dev/{name}") for name in _DEVICES]
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", _ROOT, "tmpfs", flags, "mode=755,size=1m")
    for fd, target in opened:
        os.makedirs(os.path.dirname(_ROOT + target), exist_ok=True)
        _bind_fd(fd, _ROOT + target)
        if not target.startswith("/dev/"):
            kernel.make_readonly(_ROOT + target)
    os.makedirs(_ROOT + config["trusted"])
    for name, content in programs.items():
        with open(f"{_ROOT}{config['trusted']}/{name}", "wb") as program:
            program.write(content)
    for target, path in config["links"]:
        with contextlib.suppress(FileExistsError):
            os.symlink(target, _ROOT + path)
    for name in ("/proc", "/tmp", "/dev/shm", "/dev/pts", config["work"]):
        os.makedirs(_ROOT + name, exist_ok=True)
    kernel.mount("proc", _ROOT + "/proc", "proc", flags | kernel.MS_NOEXEC)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{_ROOT}/dev/{name}")
    os.symlink("/proc/self/fd", f"{_ROOT}/dev/fd")
    os.symlink("pts/ptmx", f"{_ROOT}/dev/ptmx")
    kernel.enter_root(_ROOT)
    kernel.make_readonly("/", recursive=False)
