"""The launcher: from the host's rights to a zygote in the outer room. It becomes bwrap, or waits for the zygote.

Started by root, it first drops to a uid of its own: a process that is root on the host may write root's files in
/proc/sys even without one capability, inside any namespace. What only root can read is bound to a readable place before
that, in a mount namespace nobody else sees.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

from . import kernel, room

_STAGE, _ROOT = "/tmp", "/tmp"  # exist everywhere; covered in our own mount namespace only
_DEVICES = ("null", "zero", "full", "random", "urandom")


def main(config: dict[str, Any]) -> NoReturn:
    """Drop, build, start; say on stderr what went wrong."""
    try:
        own = os.path.dirname(os.path.abspath(__file__))  # read before the uid that can read it is gone
        programs = {name: _read(f"{own}/{name}") for name in os.listdir(own) if name.endswith(".py")}
        if config["uid"] is not None:
            _become(config)
        if config["bwrap"]:
            _run_bwrap(config, programs)
        elif config["zygote"]["confine"] == "namespaces":
            _run_in_namespaces(config, programs)
        else:
            os.execv(config["python"], _zygote_line(config))
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
    os._exit(1)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _zygote_line(config: dict[str, Any]) -> list[str]:
    return [
        config["python"],
        "-I",
        "-B",
        "-X",
        "utf8",
        config["trusted"] + "/__main__.py",
        "zygote",
        config["argument"],
    ]


def _become(config: dict[str, Any]) -> None:
    """Be the sandbox's own user. Sources below folders closed to others are bound to open places first."""
    if config["stage"]:
        _stage(config)
    os.setgroups([])
    os.setresgid(config["uid"], config["uid"], config["uid"])
    os.setresuid(config["uid"], config["uid"], config["uid"])
    kernel.set_dumpable(True)  # or this process's own /proc files stay root's


def _stage(config: dict[str, Any]) -> None:
    kernel.unshare(kernel.NEWNS)
    kernel.make_private()
    home = config["bwrap_home"]  # a folder: the wheel's program looks for its libraries beside it
    sources = [source for source, _ in config["binds"]] + ([home] if home else [])
    opened = [(source, os.open(source, os.O_PATH)) for source in sources]
    kernel.mount("tmpfs", _STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    staged = {}
    for number, (source, file) in enumerate(opened):
        target = staged[source] = f"{_STAGE}/{number}"
        os.mkdir(target) if os.path.isdir(f"/proc/self/fd/{file}") else os.close(os.open(target, os.O_CREAT, 0o644))
        kernel.bind(f"/proc/self/fd/{file}", target)
        os.close(file)
    config["binds"] = [(staged[source], target) for source, target in config["binds"]]
    if home:
        config["bwrap"] = staged[home] + config["bwrap"][len(home) :]


def _run_bwrap(config: dict[str, Any], programs: dict[str, bytes]) -> None:
    user = str(room.USER)
    line = [config["bwrap"], "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    line += ["--cap-drop", "ALL", "--uid", user, "--gid", user, "--hostname", "sandbox"]
    for source, target in config["binds"]:
        line += ["--ro-bind", source, target]
    for name, content in programs.items():
        file = os.memfd_create(name, 0)  # inherited by bwrap, which copies it
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
        line += ["--file", str(file), f"{config['trusted']}/{name}"]
    for target, path in config["links"]:
        line += ["--symlink", target, path]
    line += ["--proc", "/proc", "--dev", "/dev", "--size", "1048576", "--tmpfs", "/tmp"]
    # bwrap's /dev is a file system without a size that the user may write to, and all sessions would share it
    line += ["--dir", config["work"], "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--"]
    os.execv(config["bwrap"], line + _zygote_line(config))


def _run_in_namespaces(config: dict[str, Any], programs: dict[str, bytes]) -> None:
    uid, gid, host = os.getuid(), os.getgid(), os.getppid()
    kernel.die_with_parent()
    if os.getppid() != host:
        os._exit(1)
    kernel.unshare(kernel.OWN_ROOM)
    kernel.map_user(room.USER, uid, gid)
    child = os.fork()  # the first process of the new pid namespace
    if child == 0:
        kernel.die_with_parent()
        _build_root(config, programs)
        kernel.forbid_new_privileges()
        kernel.drop_capabilities()
        os.execv(config["python"], _zygote_line(config))
    for inherited in ("control", "listener"):
        os.close(config["zygote"][inherited])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os._exit(os.waitpid(child, 0)[1] and 1)


def _build_root(config: dict[str, Any], programs: dict[str, bytes]) -> None:
    """A read-only root of what may be read, devices without power, and a /proc of this pid namespace."""
    kernel.make_private()
    opened = [(os.open(source, os.O_PATH), target) for source, target in config["binds"]]
    opened += [(os.open(f"/dev/{name}", os.O_PATH), f"/dev/{name}") for name in _DEVICES]
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", _ROOT, "tmpfs", flags, "mode=755,size=1m")
    for file, target in opened:
        place = _ROOT + target
        os.makedirs(os.path.dirname(place), exist_ok=True)
        is_folder = os.path.isdir(f"/proc/self/fd/{file}")
        os.makedirs(place, exist_ok=True) if is_folder else os.close(os.open(place, os.O_CREAT, 0o644))
        kernel.bind(f"/proc/self/fd/{file}", place)
        os.close(file)
        if not target.startswith("/dev/"):
            kernel.make_readonly(place)
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
