"""The zygote: loads the libraries once, then clones a keeper for each session. It never runs user code.

It has one thread, or the clone would not be safe. When the host's end of the control socket closes, it ends all.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from . import frames, interpreter, keeper, kernel, room, tree


class Zygote:
    """Opens a session for each connection, and ends sessions as the host says on the control socket."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.control = socket.socket(fileno=config["control"])
        self.listener = socket.socket(fileno=config["listener"])
        self.listener.setblocking(False)
        self.sessions: dict[int, int] = {}
        """Session number to process."""
        self.wake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self.wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.confined = config["confine"] == "namespaces"

    def serve(self) -> None:
        """Answer the host until it is gone."""
        poller = select.poll()
        poller.register(self.listener, select.POLLIN)
        poller.register(self.control, select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while True:
            ready = {file for file, _ in poller.poll()}
            if self.wake in ready:
                self.reap()
            self.accept()  # before the control socket: a session is ended after it was asked for
            if self.control.fileno() in ready:
                message = self.control.recv(65536)
                if not message:
                    return
                session = json.loads(message)["end"]
                if session in self.sessions:
                    self.kill(self.sessions[session])
                else:
                    self.tell(session, None)

    def accept(self) -> None:
        """Open all sessions that were asked for."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                return
            with connection, contextlib.suppress(EOFError, ConnectionError):  # the host has given it up
                connection.setblocking(True)
                self.open(connection)

    def open(self, host: socket.socket) -> None:
        """Clone a keeper that speaks on this connection, whose first frame says what is asked for."""
        order = json.loads(frames.receive(host, keeper.MOST_QUESTION)[1])
        try:
            pid = kernel.clone_into(kernel.OWN_ROOM) if self.confined else os.fork()
        except OSError as error:
            self.tell(order["id"], None)
            host.sendall(frames.pack(frames.ANSWER, json.dumps({"failed": str(error)}).encode()))
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            keeper.main(host, {host.fileno()}, order["limits"], self.config)
        self.sessions[order["id"]] = pid

    def kill(self, pid: int) -> None:
        """End a session with all that runs in it; its end is told when it is reaped."""
        if not self.confined:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            tree.kill_below(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        for pid, status in tree.ended(self.wake):
            for session in [number for number, each in self.sessions.items() if each == pid]:
                del self.sessions[session]
                self.tell(session, status)

    def tell(self, session: int, status: int | None) -> None:
        with contextlib.suppress(OSError):
            self.control.send(json.dumps({"ended": session, "status": status}).encode())

    def end_all(self) -> None:
        for pid in list(self.sessions.values()):
            self.kill(pid)
        if not self.confined:  # and what a keeper that ended by itself left to this process
            tree.kill_below(os.getpid())


def _preload(names: list[str]) -> list[str]:
    loaded = []
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            loaded.append(name)
    return loaded


def main(config: dict[str, Any]) -> None:
    """Load, say what was loaded, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    sys.path[:0] = config["sites"]
    loaded = _preload(config["preload"])
    interpreter.warm_up()
    zygote = Zygote(config)
    if not zygote.confined:
        kernel.adopt_orphans()
    gc.collect()
    gc.freeze()
    zygote.control.send(json.dumps({"ready": loaded, "user": room.USER}).encode())
    try:
        zygote.serve()
    finally:
        zygote.end_all()
        os._exit(0)
