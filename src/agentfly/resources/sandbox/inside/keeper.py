"""The keeper: first process of a session. It owns the channel to the host, and user code never does.

    host ──frames── keeper ──frames── interpreter (user code)
                      └──── pipe ◄─── fd 1 and 2 of the interpreter, of its children and of shell commands

One call at a time. A call ends with exactly one ANSWER, written here; an interpreter's REPLY follows one that says so.
When the interpreter dies, everything user code left running is killed and a fresh interpreter starts: variables are
gone, files stay. A shell command that runs meanwhile is let go on to its end first.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import time
from typing import Any, NoReturn

from . import files, frames, interpreter, kernel, room, tree
from .output import GATHER, Output

MOST_QUESTION, MOST_REPLY = 16 << 20, 24 << 20
_GOODBYE = 0.2  # seconds between an interpreter's closing its channel and its end, where it is ending
_SHELLS = ("/bin/bash", "/bin/sh")  # the first that is there


def main(host: frames.Channel, keep: set[int], limits: dict[str, Any], config: dict[str, Any]) -> NoReturn:
    """Be a session until the host's end of the channel closes; `keep` are the files that the channel uses."""
    locked = False
    try:
        _drop_files(keep)
        work = limits.get("work", config["work"])
        if config["confine"] == "namespaces":
            room.furnish(limits, work)
        else:
            os.chdir(work)
        host.sendall(frames.pack(frames.ANSWER, b'{"hello": 1}'))
        frames.receive(host, MOST_QUESTION)  # the host has put this process where it belongs
        room.lock(config["confine"], config["readable"], work, inet=limits["inet"])
        locked = True
        Keeper(host, limits, config["confine"], work).serve()
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        said = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        with contextlib.suppress(OSError):
            host.sendall(frames.pack(frames.ANSWER, said.encode()))
    finally:
        if locked:
            _end_others(config["confine"])
        os._exit(0)


def _end_others(confine: str) -> None:
    """Kill every process of this session but this one."""
    if confine == "none":
        tree.kill_below(os.getpid())
    else:  # all it may signal: its pid namespace, or its Landlock domain
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)


def _drop_files(keep: set[int]) -> None:
    """Nothing that was open comes along: only nothing at 0, 1, 2 and the channel to the host."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {0, 1, 2} | keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    nothing = os.open("/dev/null", os.O_RDWR)
    for place in (0, 1, 2):
        os.dup2(nothing, place)
    os.close(nothing)


class Keeper:
    """What runs in the session, and the call that is being answered."""

    def __init__(self, host: frames.Channel, limits: dict[str, Any], confine: str, work: str) -> None:
        self.host, self.limits, self.confine, self.work = host, limits, confine, work
        self.call: dict[str, Any] | None = None
        self.shell = 0
        """The process of the running shell command, or 0."""
        self.lost: dict[str, Any] | None = None
        """The answer that tells how the interpreter ended between two calls, until a call gets it."""
        self.output = Output(limits["output"])
        self.watched = self.deaf = 0.0
        self.dead: int | None = None
        """The wait status of an interpreter that has died, until there is another."""
        self.listen()
        self.start_interpreter()

    def listen(self) -> None:
        """Be woken by the host, by output and by the end of a child."""
        kernel.adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self.wake, self.wake_in = os.pipe()
        for end in (self.wake, self.wake_in):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_in, warn_on_full_buffer=False)
        self.poller = select.poll()
        for file in (self.host.fileno(), self.wake, self.output.reading):
            self.poller.register(file, select.POLLIN)

    def start_interpreter(self) -> None:
        """Fork a fresh interpreter from this pristine process."""
        self.deaf, self.dead = 0.0, None
        mine, its = socket.socketpair()
        # A socket takes one more message, as large as its send buffer, when that buffer is nearly full.
        self.socket_size = 2 * mine.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                mine.close()
                os.setpgid(0, 0)
                self.become_user()
                interpreter.serve(its, self.output.writing, self.work)
            finally:
                os._exit(71)
        with contextlib.suppress(OSError):  # the child does it too: whoever is first
            os.setpgid(self.pid, self.pid)
        its.close()
        mine.setblocking(False)
        self.inner, self.inbox = mine, frames.Inbox(frames.REPLY, MOST_REPLY)
        self.poller.register(mine.fileno(), select.POLLIN)

    def become_user(self) -> None:
        """In a new child: what user code may have, and no more."""
        signal.set_wakeup_fd(-1)
        self.host.close()
        for file in (self.wake, self.wake_in, self.output.reading):
            os.close(file)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if self.confine in ("namespaces", "container"):
            kernel.set_dumpable(True)
        room.limit(self.limits, self.confine)

    def serve(self) -> None:
        """Answer the host until it is gone (EOFError)."""
        self.answer({"ready": 1})
        while True:
            ready = {file for file, _ in self.poller.poll(self.patience())}
            if self.output.reading in ready:
                self.gather()
            if self.inner.fileno() in ready and not self.deaf:
                self.hear()
            if self.wake in ready:
                self.reap()
            if self.host.fileno() in ready:
                self.obey()
            if self.call and self.output.due():
                self.pass_on()
            if self.deaf and not self.shell and time.monotonic() - self.deaf > _GOODBYE:
                self.restart("closed", None)
            if self.limits["watch"]:
                self.watch()

    def patience(self) -> int | None:
        """Milliseconds to wait for something to happen; None for ever."""
        if self.call and self.output.kept:
            return int(GATHER * 1000)
        if self.deaf and not self.shell:
            return int(_GOODBYE * 1000)
        if self.limits["watch"]:
            return 50 if self.call else 2000
        return None

    # Questions of the host

    def obey(self) -> None:
        _, payload = frames.receive(self.host, MOST_QUESTION)
        question = json.loads(payload)
        do = question["do"]
        if do == "interrupt":
            self.interrupt()
        elif do == "restart":
            if self.call:  # or the answer is under way already, and there is nothing to end
                self.restart("killed", None)
        elif do in ("run", "shell"):
            self.call = question
            self.output.begin()
            self.run(question) if do == "run" else self.start_shell(question)
        else:
            files.answer(self.host, question, self.work)

    def run(self, question: dict[str, Any]) -> None:
        if self.lost is not None:
            lost, self.lost = self.lost, None
            self.finish(lost)
            return
        head = struct.pack(">QI", question["id"], self.limits["output"])
        self.inner.setblocking(True)  # it is reading: one call at a time
        try:
            self.inner.sendall(frames.pack(frames.QUESTION, head + question["code"].encode("utf-8", "surrogatepass")))
        except OSError:
            self.restart("died", None)
        else:
            self.inner.setblocking(False)

    def start_shell(self, question: dict[str, Any]) -> None:
        try:
            self.shell = os.fork()
        except OSError as error:  # user code uses up all processes it may have
            self.output.kept += f"cannot start a process: {error.strerror}\n".encode()
            self.finish({"status": 126 << 8})
            return
        if self.shell == 0:
            shell = ""
            try:
                self.become_user()
                self.inner.close()
                for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # a shell cannot undo what is ignored
                    signal.signal(number, signal.SIG_DFL)
                os.setpgid(0, 0)
                os.chdir(self.work)
                for place in (1, 2):
                    os.dup2(self.output.writing, place)
                shell = next(filter(os.path.exists, _SHELLS), _SHELLS[-1])
                os.execve(shell, [shell, "-c", question["command"]], os.environ)
            except OSError as error:
                os.write(2, f"{shell}: {error.strerror}\n".encode())
            finally:
                os._exit(127)
        with contextlib.suppress(OSError):
            os.setpgid(self.shell, self.shell)

    def interrupt(self) -> None:
        """The call has run long enough: ask the interpreter to stop, or end the shell command."""
        with contextlib.suppress(ProcessLookupError):
            if self.shell:
                os.killpg(self.shell, signal.SIGKILL)
            elif self.call:
                os.killpg(self.pid, signal.SIGINT)  # as a terminal does: its children too

    # What the session's processes do

    def gather(self) -> None:
        self.output.gather()
        if self.output.flooded():
            self.restart("flooded", None)

    def pass_on(self) -> None:
        if self.output.kept:
            self.host.sendall(frames.pack(frames.OUTPUT, self.output.take()))

    def hear(self) -> None:
        """Read what the interpreter says; it is user code's process, so it may say anything."""
        try:
            while True:
                try:
                    data = self.inner.recv(1 << 20)
                except ConnectionError:
                    data = b""
                if not data:
                    self.poller.unregister(self.inner.fileno())
                    self.deaf = time.monotonic()
                    return
                self.inbox.feed(data)
                frame = self.inbox.next()
                while frame:
                    if not self.call or self.shell:
                        raise frames.BrokenFrame("a reply nobody asked for")
                    self.finish({"reply": True}, frame[1])
                    frame = self.inbox.next()
        except BlockingIOError:
            pass
        except frames.BrokenFrame:
            self.restart("forged", None)

    def reap(self) -> None:
        ended = dict(tree.ended(self.wake))
        self.dead = ended.get(self.pid, self.dead)
        if self.shell in ended:
            status, self.shell = ended[self.shell], 0
            if self.dead is None and tree.is_dying(self.pid):  # of this command, and no later one is to be told so
                _, self.dead = os.waitpid(self.pid, 0)
            self.finish({"status": status, "gone": self.dead is not None or bool(self.deaf)})
        if self.dead is not None and not self.shell:
            self.restart("died", self.dead)

    def restart(self, reason: str, status: int | None) -> None:
        """Kill all that user code runs, start a fresh interpreter, and say why."""
        _end_others(self.confine)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, its_status = os.waitpid(-1, 0)
                status = its_status if pid == self.pid and status is None else status
        with contextlib.suppress(KeyError):
            self.poller.unregister(self.inner.fileno())
        self.inner.close()
        self.shell = 0
        self.start_interpreter()
        answer = {"ended": reason, "status": status, "ran": self.call is not None}
        if self.call:
            self.finish(answer)
        else:
            self.lost = answer

    def watch(self) -> None:
        """Where no control group caps the tree's memory, look at it often and end what is over.

        A socket counts as a full buffer, because nothing tells how much it holds.
        """
        now = time.monotonic()
        if now - self.watched < 0.04:
            return
        self.watched = now
        pids = tree.descendants(os.getpid())
        disk = os.statvfs(self.work)
        held = (disk.f_blocks - disk.f_bfree) * disk.f_frsize + tree.count_sockets() * self.socket_size
        if held + tree.memory(pids, self.limits["memory"] - held) > self.limits["memory"]:
            self.restart("memory", None)

    # Answers

    def finish(self, answer: dict[str, Any], reply: bytes | None = None) -> None:
        """End the call: all output that was written before its end goes first."""
        call, self.call = self.call, None
        if call is None:
            return
        self.output.gather()
        self.pass_on()
        if self.confine == "container":  # from outside nobody could tell
            answer["kills"] = tree.memory_kills()
        self.answer({"id": call["id"], "dropped": self.output.dropped, **answer}, reply)
        self.output.begin()

    def answer(self, answer: dict[str, Any], reply: bytes | None = None) -> None:
        frame = frames.pack(frames.ANSWER, json.dumps(answer).encode())
        self.host.sendall(frame if reply is None else frame + frames.pack(frames.REPLY, reply))
