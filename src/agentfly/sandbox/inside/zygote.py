"""The zygote: imports the libraries once, then clones a session init for each session. It never runs user code.

It has one thread, as a safe clone requires. When the host closes the control socket, it kills all sessions and exits.
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

from . import frames, interpreter, kernel, process_tree, seccomp, session_init


class Zygote:
    """Opens a session per connection, and kills sessions on request over the control socket."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.control = socket.socket(fileno=config["control"])
        self.listener = socket.socket(fileno=config["listener"])
        self.listener.setblocking(False)
        self.sessions: dict[int, int] = {}
        """Session number → pid."""
        self.wake = process_tree.wake_on_exit()
        self.own_namespaces = config["confine"] == "namespaces"

    def serve(self) -> None:
        """Serve the host until it closes the control socket."""
        poller = select.poll()
        poller.register(self.listener, select.POLLIN)
        poller.register(self.control, select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self.wake in ready:
                for pid, status in process_tree.reap(self.wake):
                    for session in [number for number, session_pid in self.sessions.items() if session_pid == pid]:
                        del self.sessions[session]
                        self.report_end(session, status)
            self.accept()  # before the control socket: a session is ended after it was requested
            if self.control.fileno() in ready:
                message = self.control.recv(65536)
                if not message:
                    return
                session = json.loads(message)["end"]
                if session in self.sessions:
                    self.kill(self.sessions[session])
                else:
                    self.report_end(session, None)

    def accept(self) -> None:
        """Open all requested sessions."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(True)
            try:
                request = json.loads(frames.receive(connection, session_init.MAX_QUESTION)[1])
            except (EOFError, ConnectionError):  # the host has given it up
                connection.close()
                continue
            with connection:
                self.open(connection, request)

    def open(self, host: socket.socket, request: dict[str, Any]) -> None:
        """Clone a session init for this connection."""
        try:
            pid = kernel.clone_into(kernel.NEW_NAMESPACES) if self.own_namespaces else os.fork()
        except OSError as error:
            self.report_end(request["id"], None)
            with contextlib.suppress(ConnectionError):
                host.sendall(frames.pack(frames.ANSWER, json.dumps({"failed": str(error)}).encode()))
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            session_init.run(host, {host.fileno()}, request["limits"], config=self.config)
        self.sessions[request["id"]] = pid

    def kill(self, pid: int) -> None:
        """Kill a session with all its processes; its end is reported when it is reaped."""
        if not self.own_namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            process_tree.kill_below(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def report_end(self, session: int, status: int | None) -> None:
        """Report the wait status of a session to the host. None if unknown."""
        with contextlib.suppress(OSError):
            self.control.send(json.dumps({"ended": session, "status": status}).encode())


def main(config: dict[str, Any]) -> None:
    """Import the libraries that exist, serve until the host is gone, kill all sessions."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    sys.path[:0] = config["sites"]
    for name in config["preload"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    interpreter.warm_up()
    zygote = Zygote(config)
    if zygote.own_namespaces:
        for inet in (True, False):  # cached, so that the sessions, which are forks, need not build it
            seccomp.build_filter(inet=inet, own_mounts=True)
    else:
        kernel.adopt_orphans()
    # The collector writes into the headers of the objects that it visits. Every session would get its own copy of the
    # pages that hold the libraries, and each would count toward its memory limit.
    gc.collect()
    gc.freeze()
    kernel.collapse_heap()
    zygote.control.send(b"ready")
    try:
        zygote.serve()
    finally:
        for pid in list(zygote.sessions.values()):
            zygote.kill(pid)
        if not zygote.own_namespaces:  # and what a session init that ended by itself left to this process
            process_tree.kill_below(os.getpid())
        os._exit(0)
