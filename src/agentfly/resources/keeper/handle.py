"""This process's handle on its keeper: started at the first need, and again should it have died."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import agentfly
from agentfly.resources.owner import process_name
from agentfly.resources.remote.serving import OWNER
from agentfly.resources.sandbox.endings import how_ended

END_SECONDS = 10.0
_SEND_SECONDS = 5.0
_PROGRAM = "import sys; sys.path[:0] = {path!r}; from agentfly.resources.keeper.process import main; main({0}, {1})"


class Keeper:
    """Starts workers, ends them, and remembers what must not outlive this process. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._running: _Running | None = None
        self._remembered: dict[tuple[str, str], None] = {}

    @property
    def pid(self) -> int | None:
        """The keeper's process; None while there is none."""
        return self._running.process.pid if self._running else None

    def open(self, load: str = "agentfly") -> Worker:
        """A worker that waits for requests on `worker.line`, with one of AgentFly's modules loaded."""
        ours, theirs = socket.socketpair()
        fate, told = os.pipe()
        try:
            number = next(self._numbers)
            with theirs:
                running = self._tell({"do": "open", "number": number, "load": load}, theirs.fileno(), told)
            return Worker(running, number, ours, fate)
        except BaseException:
            ours.close()
            os.close(fate)
            raise
        finally:
            os.close(told)

    def remember(self, kind: str, what: str) -> None:
        """Have a `folder`, or a `container` (`<address of the Docker API> <id>`), removed when this process is gone.

        Said before it is made, nothing can come between; one that was never made is no trouble.
        """
        if kind not in ("folder", "container"):
            raise ValueError(f"a keeper removes a folder or a container, not a {kind!r}")
        what = os.path.abspath(what) if kind == "folder" else what
        with self._lock:
            self._tell({"do": "remember", "kind": kind, "what": what})
            self._remembered[kind, what] = None

    def forget(self, kind: str, what: str) -> None:
        """It is removed already."""
        what = os.path.abspath(what) if kind == "folder" else what
        with self._lock:
            if (kind, what) in self._remembered:
                del self._remembered[kind, what]
                if self._running is not None:
                    self._running.tell({"do": "forget", "kind": kind, "what": what})

    def close(self) -> None:
        """End the keeper, and with it all it keeps; the next need starts another."""
        with self._lock:
            if self._running is not None:
                self._running.close()
                self._running = None
            self._remembered.clear()

    def abandon(self) -> None:
        """Let go of a keeper that is another process's: this one is a fork of it."""
        if self._running is not None:
            self._running.control.close()
            self._running.process.returncode = 0  # not our child, and nothing to wait for

    def _tell(self, order: dict[str, Any], *files: int) -> _Running:
        """Give an order to a keeper that takes it."""
        with self._lock:
            for _ in range(2):
                if self._running is None or not self._running.alive:
                    self._start()
                running = self._running
                if running is not None and running.tell(order, *files):
                    return running
                if running is not None:
                    running.close(kill=True)
            raise OSError("the keeper of worker processes ends as soon as it is started; its words are on stderr")

    def _start(self) -> None:
        if self._running is not None:
            self._running.close(kill=True)
        self._running = _Running.start()
        for kind, what in self._remembered:
            self._running.tell({"do": "remember", "kind": kind, "what": what})


class _Running:
    """One keeper process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.process, self.control = process, control

    @classmethod
    def start(cls) -> _Running:
        # Kinds that keep orders apart; only the first, which only Linux has, also tells that the other end is gone.
        kind = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        ours.settimeout(_SEND_SECONDS)
        path = [str(Path(agentfly.__file__).parents[1]), *(os.path.abspath(each) for each in sys.path)]
        with theirs:
            program = _PROGRAM.format(theirs.fileno(), os.getpid(), path=path)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=2,
                cwd="/",
                env={**os.environ, OWNER: process_name(os.getpid()) or ""},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the program, which decides what becomes of its workers
            )
        return cls(process, ours)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tell(self, order: dict[str, Any], *files: int) -> bool:
        """Give an order; whether it was taken."""
        try:
            socket.send_fds(self.control, [json.dumps(order).encode()], files)
        except OSError:
            return False
        return True

    def close(self, kill: bool = False) -> None:
        """Have it end. Where it is in the middle of removing things it is left to it."""
        self.control.close()
        if kill:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)


class Worker:
    """One worker process, with all that is below it."""

    def __init__(self, keeper: _Running, number: int, line: socket.socket, fate: int) -> None:
        self.line = line
        """Connected to the worker. Whoever takes it closes it."""
        self._keeper, self._number, self._fate = keeper, number, fate
        os.set_blocking(fate, False)
        self._told, self._asked = b"", False
        self._over: str | None = None

    @property
    def guardian(self) -> int | None:
        """The process that all of the worker's are below; None before it has begun, and once all have ended."""
        over = self.ended()
        first = self._told.partition(b"\n")[0]
        return int(first) if over is None and first.isdigit() else None

    def ended(self) -> str | None:
        """How the worker ended, once nothing of it is left; None while something is."""
        while self._over is None:
            try:
                data = os.read(self._fate, 4096)
            except BlockingIOError:
                break
            self._told += data
            if not data or self._told.count(b"\n") == 2:
                self._finish(self._words())
        return self._over

    def _words(self) -> str:
        lines = self._told.decode(errors="replace").splitlines()
        if self._asked:
            return "its process was ended"
        if len(lines) == 2 and lines[1].isdigit():
            return f"its process ended with {how_ended(int(lines[1]))}"
        if lines and not lines[0].isdigit():
            return lines[0]
        return "its process was killed" if self._keeper.alive else "the process that keeps its process was killed"

    def _finish(self, words: str) -> None:
        self._over = words
        os.close(self._fate)

    def end(self) -> None:
        """Have everything of it killed. It is under way when this returns."""
        if self.ended() is None:
            self._asked = True
            self._keeper.tell({"do": "end", "number": self._number})

    def drop(self) -> None:
        """Have it killed, and let go of it: nobody asks any more how it ended."""
        if self.ended() is None:
            self.end()
            self._finish(self._words())

    async def over(self) -> str:
        """Wait until nothing of it is left, but not for ever; how it ended."""
        deadline = time.monotonic() + END_SECONDS
        while (words := self.ended()) is None and time.monotonic() < deadline:  # noqa: ASYNC110, any loop may ask
            await asyncio.sleep(0.005)
        if words is None:  # nobody does as told: its guardian ends, and it with its guardian
            if (pid := self.guardian) is not None:
                os.kill(pid, signal.SIGKILL)
            self._finish(words := "its process did not end in time and was killed")
        return words


_KEEPER = Keeper()


def keeper() -> Keeper:
    """The keeper of this process."""
    return _KEEPER


def _start_afresh() -> None:
    """In a forked child: the keeper is its parent's."""
    global _KEEPER
    _KEEPER.abandon()
    _KEEPER = Keeper()


os.register_at_fork(after_in_child=_start_afresh)
atexit.register(lambda: _KEEPER.close())
