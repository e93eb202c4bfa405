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
    """Opens and ends sessions as the host says on the control socket."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.control = socket.socket(fileno=config["control"])
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
        poller.register(self.control, select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while True:
            ready = {file for file, _ in poller.poll()}
            if self.wake in ready:
                self.reap()
            if self.control.fileno() in ready:
                message, files, _, _ = socket.recv_fds(self.control, 65536, 4)
                if not message:
                    return
                self.obey(json.loads(message), files)

    def obey(self, order: dict[str, Any], files: list[int]) -> None:
        if order["do"] == "open":
            self.open(order, files[0])
        elif order["id"] in self.sessions:
            self.kill(self.sessions[order["id"]])
        else:
            self.tell(order["id"], None)

    def open(self, order: dict[str, Any], file: int) -> None:
        try:
            pid = kernel.clone_into(kernel.OWN_ROOM) if self.confined else os.fork()
        except OSError as error:
            os.write(file, frames.pack(frames.ANSWER, json.dumps({"failed": str(error)}).encode()))
            os.close(file)
            self.tell(order["id"], None)
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            keeper.main(socket.socket(fileno=file), {file}, order["limits"], self.config)
        os.close(file)
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
