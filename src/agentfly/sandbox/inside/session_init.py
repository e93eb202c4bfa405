"""The session init: first process of a session. It owns the channel to the host. User code never does.

    host ──frames── session init ──frames── interpreter (user code)
      └──────────────────│─────────frames────────┘
                         └──── pipe ◄─── fd 1 and 2 of the interpreter, of its children and of shell commands

One call at a time. A call to this process ends with exactly one ANSWER, written here. It announces whether a REPLY of
the interpreter follows. When the interpreter dies, everything user code left running is killed and a new interpreter
starts: variables are lost, files stay. A shell command that runs meanwhile may finish first.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import time
from typing import Any, NoReturn

from . import files, frames, interpreter, isolation, kernel, process_tree
from .output import FLUSH_SECONDS, OutputPipe

MAX_QUESTION = 16 << 20
_MAX_REPLY = 24 << 20
_EXIT_SECONDS = 0.2  # how long an interpreter that closed its channel may take to exit
_SHELLS = ("/bin/bash", "/bin/sh")  # the first that exists


def main(config: dict[str, Any]) -> NoReturn:
    """Become the session init as the first process of a container, connected to the host by stdin and stdout.

    The kernel protects the first process of a pid namespace from every signal of the others, SIGKILL included: user
    code of the same user id cannot kill it, and cannot read its memory, because it is not dumpable.
    """
    if os.getpid() != 1:
        raise SystemExit("the session init must be the first process of its container; run it without an init process")
    os.umask(0o022)
    interpreter.warm_up()
    gc.collect()
    gc.freeze()
    pipes = frames.PipeChannel(os.dup(0), os.dup(1))
    run(pipes, pipes.fds, config["limits"], config)


def run(host: frames.Channel, keep: set[int], limits: dict[str, Any], config: dict[str, Any]) -> NoReturn:
    """Run a session until the host closes the channel. keep: file descriptors of the channel."""
    locked = False
    try:
        # Inherit no open file but the channel; 0, 1 and 2 are /dev/null.
        kept = {0, 1, 2} | keep
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)

        work = limits.get("work", config["work"])
        host.sendall(frames.pack(frames.ANSWER, b'{"hello": 1}'))
        if config["confine"] == "namespaces":
            isolation.mount_session(limits, work)
        else:
            os.chdir(work)
        frames.receive(host, MAX_QUESTION)  # the host has moved this process into its cgroup
        isolation.drop_privileges(
            config["confine"],
            config["readable"],
            work,
            inet=limits["inet"],
            capabilities=config.get("capabilities", False),
        )
        locked = True
        SessionInit(host, limits, config["confine"], work=work).serve()
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        message = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        with contextlib.suppress(OSError):
            host.sendall(frames.pack(frames.ANSWER, message.encode()))
    finally:
        if locked:
            _kill_others(config["confine"])
        os._exit(0)


def _kill_others(confine: str) -> None:
    """Kill every process of this session but this one."""
    if confine == "none":
        process_tree.kill_below(os.getpid())
    else:  # all it may signal: its pid namespace, or its Landlock domain
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)


class SessionInit:
    """The processes of the session, and the current call."""

    def __init__(self, host: frames.Channel, limits: dict[str, Any], confine: str, *, work: str) -> None:
        self.host = host
        self.limits = limits
        self.confine = confine
        self.work = work
        self.call: dict[str, Any] | None = None
        """The question of the current call."""
        self.shell = 0
        """Pid of the running shell command, or 0."""
        self.pending_answer: dict[str, Any] | None = None
        """Reports that the interpreter ended between two calls; the answer to the next call."""
        self.output = OutputPipe(limits["output"])
        self.watched_at = 0.0
        self.hung_up_at = 0.0
        """When the interpreter closed its channel; 0.0 if it has not."""
        self.exit_status: int | None = None
        """Wait status of an interpreter that died and is not replaced yet."""

        # Wake up for the host, for output and for the end of a child.
        kernel.adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self.wake = process_tree.wake_on_exit()
        self.poller = select.poll()
        for fd in (self.host.fileno(), self.wake, self.output.read_fd):
            self.poller.register(fd, select.POLLIN)
        self.start_interpreter()

    def start_interpreter(self) -> None:
        """Fork an interpreter from this process, which never runs user code."""
        self.hung_up_at = 0.0
        self.exit_status = None
        self.interpreter, child_end = socket.socketpair()
        self.interpreter.setblocking(False)
        self.replies = frames.FrameBuffer({frames.REPLY: _MAX_REPLY})
        self.poller.register(self.interpreter.fileno(), select.POLLIN)
        # A socket takes one more message, as large as its send buffer, when that buffer is nearly full.
        self.socket_size = 2 * child_end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                self.become_user()
                interpreter.serve(child_end, self.output.write_fd, work=self.work)
            finally:
                os._exit(71)
        with contextlib.suppress(OSError):  # the child does it too: whichever is first
            os.setpgid(self.pid, self.pid)
        child_end.close()

    def become_user(self) -> None:
        """In a new child: close what user code must not have, and set its limits."""
        self.host.close()
        self.interpreter.close()
        for fd in (signal.set_wakeup_fd(-1), self.wake, self.output.read_fd):
            os.close(fd)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if self.confine in ("namespaces", "container"):
            kernel.set_dumpable(True)
        isolation.set_rlimits(self.limits, self.confine)

    def serve(self) -> None:
        """Serve the host until it is gone (EOFError)."""
        self.send({"ready": 1})
        while True:
            exiting = self.hung_up_at and not self.shell
            timeout = None  # milliseconds
            if self.call and self.output.buffer:
                timeout = int(FLUSH_SECONDS * 1000)
            elif exiting:
                timeout = int(_EXIT_SECONDS * 1000)
            elif self.limits["watch"]:
                timeout = 50 if self.call else 2000

            ready = {fd for fd, _ in self.poller.poll(timeout)}
            if self.output.read_fd in ready:
                self.output.read()
                if self.output.check_flood():
                    self.restart("flooded", None)
            if self.interpreter.fileno() in ready and not self.hung_up_at:
                self.read_replies()
            if self.wake in ready:
                self.reap()
            if self.host.fileno() in ready:
                self.handle_question()
            if self.call and self.output.flush_due():
                self.flush_output()
            if self.hung_up_at and not self.shell and time.monotonic() - self.hung_up_at > _EXIT_SECONDS:
                self.restart("closed", None)
            if self.limits["watch"]:
                self.watch_memory()

    def handle_question(self) -> None:
        """Read and execute one request of the host."""
        _, payload = frames.receive(self.host, MAX_QUESTION)
        question = json.loads(payload)
        do = question["do"]
        # Requests to stop a call may arrive after its end: they must not stop another one.
        is_running = self.call is not None
        if do == "interrupt":
            with contextlib.suppress(ProcessLookupError):
                if self.shell:
                    os.killpg(self.shell, signal.SIGKILL)
                elif is_running:
                    os.killpg(self.pid, signal.SIGINT)  # as a terminal does: its children too
        elif do == "restart":
            if is_running:  # otherwise the answer is on its way already
                self.restart(question["why"], None)
        elif do == "run":
            self.call = question
            self.output.start_call()
            self.run_python(question)
        elif do == "shell":
            self.call = question
            self.output.start_call()
            self.start_shell(question)
        else:
            files.handle(self.host, question, self.work)

    def run_python(self, question: dict[str, Any]) -> None:
        """Pass the code to the interpreter."""
        if self.pending_answer is not None:
            answer, self.pending_answer = self.pending_answer, None
            self.finish(answer)
            return
        header = struct.pack(">QI", question["id"], self.limits["output"])
        code = question["code"].encode("utf-8", "surrogatepass")
        self.interpreter.setblocking(True)  # it reads: one call at a time
        try:
            self.interpreter.sendall(frames.pack(frames.QUESTION, header + code))
        except OSError:
            self.restart("died", None)
        else:
            self.interpreter.setblocking(False)

    def start_shell(self, question: dict[str, Any]) -> None:
        """Start a shell command; `reap` answers when it ends."""
        try:
            self.shell = os.fork()
        except OSError as error:  # user code uses up all its processes
            self.output.buffer += f"cannot start a process: {error.strerror}\n".encode()
            self.finish({"status": 126 << 8})
            return
        if self.shell == 0:
            shell = ""
            try:
                self.become_user()
                for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # a shell cannot undo ignored signals
                    signal.signal(number, signal.SIG_DFL)
                os.setpgid(0, 0)
                os.chdir(self.work)
                for fd in (1, 2):
                    os.dup2(self.output.write_fd, fd)
                shell = next(filter(os.path.exists, _SHELLS), _SHELLS[-1])
                os.execve(shell, [shell, "-c", question["command"]], os.environ)
            except OSError as error:
                os.write(2, f"{shell}: {error.strerror}\n".encode())
            finally:
                os._exit(127)
        with contextlib.suppress(OSError):
            os.setpgid(self.shell, self.shell)

    def read_replies(self) -> None:
        """Read frames of the interpreter. It is a process of user code, so it may send anything."""
        try:
            while True:
                try:
                    data = self.interpreter.recv(1 << 20)
                except ConnectionError:
                    data = b""
                if not data:
                    self.poller.unregister(self.interpreter.fileno())
                    self.hung_up_at = time.monotonic()
                    return
                self.replies.feed(data)
                frame = self.replies.next()
                while frame:
                    if not self.call or self.shell:
                        raise frames.BrokenFrame("a reply without a call")
                    self.finish({"reply": True}, frame[1])
                    frame = self.replies.next()
        except BlockingIOError:
            pass
        except frames.BrokenFrame:
            self.restart("forged", None)

    def reap(self) -> None:
        """Handle the end of the interpreter and of the shell command."""
        ended = dict(process_tree.reap(self.wake))
        self.exit_status = ended.get(self.pid, self.exit_status)
        if self.shell in ended:
            status = ended[self.shell]
            self.shell = 0
            # If this command killed the interpreter, its own answer must report that, not a later one.
            if self.exit_status is None and process_tree.is_dying(self.pid):
                _, self.exit_status = os.waitpid(self.pid, 0)
            self.finish({"status": status, "gone": self.exit_status is not None or bool(self.hung_up_at)})
        if self.exit_status is not None and not self.shell:
            self.restart("died", self.exit_status)

    def restart(self, reason: str, status: int | None) -> None:
        """Kill all processes of user code, start a new interpreter, and answer with the reason."""
        _kill_others(self.confine)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, its_status = os.waitpid(-1, 0)
                status = its_status if pid == self.pid and status is None else status
        with contextlib.suppress(KeyError):
            self.poller.unregister(self.interpreter.fileno())
        self.interpreter.close()
        self.shell = 0
        self.start_interpreter()
        answer = {"ended": reason, "status": status, "ran": self.call is not None}
        if self.call:
            self.finish(answer)
        else:
            self.pending_answer = answer

    def watch_memory(self) -> None:
        """Where no cgroup limits memory, measure the tree often and restart the interpreter when it is over the limit.

        Each socket counts as one full buffer, because the kernel does not report how much it holds.
        """
        now = time.monotonic()
        if now - self.watched_at < 0.04:
            return
        self.watched_at = now
        limit = self.limits["memory"]
        disk = os.statvfs(self.work)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize + process_tree.count_sockets() * self.socket_size
        if used + process_tree.memory(process_tree.descendants(os.getpid()), limit - used) > limit:
            self.restart("memory", None)

    def flush_output(self) -> None:
        """Send the buffered output."""
        if self.output.buffer:
            self.host.sendall(frames.pack(frames.OUTPUT, self.output.take()))

    def finish(self, answer: dict[str, Any], reply: bytes | None = None) -> None:
        """End the call: send the output written before its end, then the answer and the reply."""
        call, self.call = self.call, None
        if call is None:
            return
        self.output.end_call()
        self.flush_output()
        if self.confine == "container":  # the host cannot see these
            answer["kills"] = process_tree.memory_kills()
        self.send({"id": call["id"], "dropped": self.output.dropped, **answer}, reply)
        self.output.start_call()

    def send(self, answer: dict[str, Any], reply: bytes | None = None) -> None:
        """Send an answer, and an interpreter's reply with it."""
        frame = frames.pack(frames.ANSWER, json.dumps(answer).encode())
        self.host.sendall(frame if reply is None else frame + frames.pack(frames.REPLY, reply))
