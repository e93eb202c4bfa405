"""Session: one isolated session as the host uses it. Sandbox: opens sessions of one mechanism."""

from __future__ import annotations

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Self

from agentfly.errors import EnvironmentFault
from agentfly.sandbox import channel, results
from agentfly.sandbox.base import Capabilities, Entry, FileAccessError, Limits, Outcome, SessionClosed
from agentfly.sandbox.host import Deadline, SessionHost

_OPEN_SECONDS = 60.0
_FILE_SECONDS = 60.0
_CHUNK = 1 << 18
_MAX_ENTRIES = 5000
_MAX_CODE = 8 << 20
_MAX_COMMAND = 100_000

_CALL_FORM: channel.Form = {
    "id": channel.is_count,
    "dropped": channel.is_count,
    "kills": channel.is_count,
    "reply": lambda value: value is True,
    "ended": results.RESTART_REASONS.__contains__,
    "ran": channel.is_flag,
    "gone": channel.is_flag,
    "status": lambda value: value is None or (type(value) is int and -(1 << 31) < value < 1 << 31),
}
_CALL_OPTIONAL = frozenset(("kills", "reply", "ended", "status", "ran", "gone"))
_FILE_FORM: channel.Form = {
    "id": channel.is_count,
    "error": channel.is_text,
    "size": channel.is_count,
    "more": channel.is_flag,
    "entries": lambda value: (
        isinstance(value, list)
        and all(isinstance(entry, list) and [type(field) for field in entry] == [str, str, int] for entry in value)
    ),
}
_FILE_KEYS = {"put": {"id"}, "get": {"id", "size"}, "list": {"id", "entries", "more"}}


class Session:
    """One isolated session. State and files persist between calls; concurrent calls run one after another."""

    def __init__(self, open_host: Callable[[Limits], Awaitable[SessionHost]], host: SessionHost) -> None:
        self._open_host = open_host
        self._host = host
        self._limits = host.limits
        self._lock = asyncio.Lock()
        self._deadline = Deadline()
        self._closed_reason = ""
        self._memory_kills = 0
        self._paused = False

    @property
    def folder(self) -> str:
        """Working folder, as the session sees it."""
        return self._host.folder

    @property
    def alive(self) -> bool:
        """Whether the session can be used, as far as this is known without a call."""
        return not self._closed_reason and not self._host.channel.hung_up()

    async def run(self, code: str, timeout: float | None = None) -> Outcome:
        """Run Python code; variables persist. Errors of the code are in the outcome, never raised."""
        # A message above the session's limit would end it: the model would lose its variables for one long reply.
        if len(code) > _MAX_CODE:
            return results.rejected_outcome(f"The code has {len(code)} characters; {_MAX_CODE} are allowed.")
        return await self._call({"do": "run", "code": code}, timeout)

    async def shell(self, command: str, timeout: float | None = None) -> Outcome:
        """Run a shell command in the working folder. User code cannot forge its exit status."""
        # The kernel refuses both in execve, which would read like a broken session. The model can act on this text.
        if "\0" in command or len(command) > _MAX_COMMAND:
            return results.rejected_outcome(
                f"The command contains a NUL character, or more than {_MAX_COMMAND} characters: "
                "write it to a file and run that."
            )
        return await self._call({"do": "shell", "command": channel.replace_surrogates(command)}, timeout)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file below the working folder, and create missing parent folders."""
        if len(data) > self._limits.disk:
            raise FileAccessError(f"{path}: {len(data)} bytes do not fit on a disk of {self._limits.disk}")
        await self._access_file({"do": "put", "path": path, "size": len(data)}, data)

    async def get(self, path: str, max_bytes: int = 16 << 20) -> bytes:
        """Read a file. Raises FileAccessError if it is larger than `max_bytes`."""
        return (await self._access_file({"do": "get", "path": path, "most": max_bytes}))[1]

    async def list_files(self, path: str = ".", recursive: bool = False) -> list[Entry]:
        """List a folder, sorted by path; with `recursive` also all folders below it. At most 5000 entries."""
        question = {"do": "list", "path": path, "deep": recursive, "most": _MAX_ENTRIES}
        answer, _ = await self._access_file(question)
        return [Entry(channel.replace_surrogates(name), kind, size) for name, kind, size in answer["entries"]]

    async def reset(self) -> None:
        """Kill all processes, delete all files and start over with a new session host."""
        async with self._lock:
            if self._closed_reason == "closed":
                raise SessionClosed("the session is closed; open another")
            self._closed_reason = "being reset"
            await self._host.close()
            self._host = await self._open_host(self._limits)
            self._memory_kills = 0
            self._paused = False
            self._closed_reason = ""

    async def close(self) -> None:
        """Kill all processes and delete all files; a running call ends too. Idempotent."""
        self._closed_reason = "closed"
        self._deadline.close()
        await self._host.close()

    async def memory(self) -> int | None:
        """Bytes used by the session's processes and files. None if they are not accounted."""
        self._require_open()
        return await self._host.memory()

    async def pause(self) -> None:
        """Use no CPU time until `resume` or the next call. A no-op where the mechanism cannot freeze a session."""
        async with self._lock:
            self._require_open()
            self._paused = True
            await self._host.pause(True)

    async def resume(self) -> None:
        """Undo `pause`."""
        async with self._lock:
            await self._resume()

    async def _resume(self) -> None:
        self._require_open()
        if self._paused:
            await self._host.pause(False)
            self._paused = False

    def _require_open(self) -> None:
        if self._closed_reason:
            raise SessionClosed(f"this session is over ({self._closed_reason}); reset it or open another")

    def _abandon(self, reason: str) -> None:
        """Mark the session as closed and start to kill it."""
        self._closed_reason = self._closed_reason or reason
        self._deadline.close()
        self._host.start_closing()

    async def _call(self, question: dict[str, Any], timeout: float | None) -> Outcome:
        """Run one call within its time limit. Any protocol error ends the session, and the outcome explains it."""
        # A call may shorten its time and never extend it: the limit is the user's, and the timeout may be the model's.
        seconds = self._limits.seconds if timeout is None else min(timeout, self._limits.seconds)
        async with self._lock:
            await self._resume()
            call = results.CallResult(seconds, self._limits)
            deadline = self._deadline
            deadline.start(self._host, seconds)
            try:
                await self._exchange(question, call)
            except channel.ChannelError as error:
                # Read before and after closing: the kill may be counted late, and the counter may go with the cgroup.
                kills = self._host.memory_kills()
                self._abandon(f"{type(error).__name__}: {error}")
                status = await self._host.close()
                call.memory_kills = max(kills, self._host.memory_kills()) - self._memory_kills
                return call.session_lost(error, status, deadline.expired)
            # A cancelled call may have left half of an answer on the socket, which the next one would read as its own.
            except BaseException:
                self._abandon("its call was cancelled")
                raise
            finally:
                deadline.stop()
            reply_failed = call.reply is not None and call.reply.status != "ok"
            # Only then: the counter is a file of the kernel, and reading it takes as long as a short call.
            if "ended" in call.answer or call.answer.get("status") or reply_failed:
                kills = call.answer.get("kills", self._host.memory_kills())
                call.memory_kills = kills - self._memory_kills
                self._memory_kills = kills
            return call.outcome(deadline.expired)

    async def _exchange(self, question: dict[str, Any], call: results.CallResult) -> None:
        """Send the question, collect output into `call`, then read the answer and the interpreter's reply."""
        # User code runs beside the interpreter. With a number that it cannot guess, it cannot answer a call in advance.
        number = secrets.randbits(62)
        wire = self._host.channel
        wire.allow(self._limits.output * 8 + (32 << 20))
        await wire.send(channel.QUESTION, json.dumps({**question, "id": number}).encode())
        while True:
            kind, payload = await wire.receive(channel.OUTPUT, channel.ANSWER)
            if kind == channel.ANSWER:
                break
            call.output += payload
        answer = channel.parse(payload, _CALL_FORM, _CALL_OPTIONAL)
        has_reply = bool(answer.get("reply"))
        complete = has_reply if question["do"] == "run" else "status" in answer
        if answer["id"] != number or not (complete or "ended" in answer) or (has_reply and question["do"] != "run"):
            raise channel.ProtocolViolation("an answer to another question")
        call.answer |= answer
        if has_reply:
            _, payload = await wire.receive(channel.REPLY)
            call.reply = channel.parse_reply(payload, number, self._limits.output)

    async def _access_file(self, question: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Send a file request with its data; return the checked answer and the file content."""
        path = question["path"] = channel.replace_surrogates(question["path"])
        async with self._lock:
            await self._resume()
            self._deadline.start(self._host, _FILE_SECONDS)
            try:
                return await self._exchange_file(question, data)
            except channel.ChannelError as error:
                self._abandon(f"{type(error).__name__}: {error}")
                raise SessionClosed(f"the session ended during access to {path}: {error}") from error
            except asyncio.CancelledError:
                self._abandon("its call was cancelled")
                raise
            finally:
                self._deadline.stop()

    async def _exchange_file(self, question: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        number = secrets.randbits(62)
        wire = self._host.channel
        limit = question.get("most", 0)
        wire.allow(limit * 2 + (16 << 20))
        await wire.send(channel.QUESTION, json.dumps({**question, "id": number}).encode())
        for start in range(0, len(data), _CHUNK):
            await wire.send(channel.DATA, data[start : start + _CHUNK])
        _, payload = await wire.receive(channel.ANSWER)
        answer = channel.parse(payload, _FILE_FORM, optional=frozenset(("error", "size", "entries", "more")))
        if answer["id"] != number:
            raise channel.ProtocolViolation("an answer to another question")
        if "error" in answer:
            raise FileAccessError(f"{question['path']}: {channel.replace_surrogates(answer['error'])}")
        size = answer.get("size", 0)
        if set(answer) != _FILE_KEYS[question["do"]] or size > limit:
            raise channel.ProtocolViolation("an answer to another kind of question")
        content = bytearray()
        while len(content) < size:
            content += (await wire.receive(channel.DATA))[1]
        return answer, bytes(content)


class Sandbox(ABC):
    """Opens sessions of one mechanism, and closes all of them with itself. An asynchronous context manager."""

    def __init__(self, mechanism: str, capabilities: Capabilities) -> None:
        self.mechanism = mechanism
        self.capabilities = capabilities
        """What the mechanism enforces."""
        self._hosts: set[SessionHost] = set()
        self._closed = False

    @abstractmethod
    async def _make_host(self, limits: Limits) -> SessionHost:
        """Return a session host that is not open yet."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open_session(self, limits: Limits | None = None) -> Session:
        """Open a new session, ready for calls. Raises EnvironmentFault if it does not start."""
        return Session(self.open_host, await self.open_host(limits or Limits()))

    async def open_host(self, limits: Limits) -> SessionHost:
        """Open a new session host whose session init is ready."""
        if self._closed:
            raise EnvironmentFault("this sandbox is closed")
        host = await self._make_host(limits)
        self._hosts.add(host)
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await host.open()
        except BaseException as error:
            closing = host.start_closing()
            if isinstance(error, Exception):  # a cancelled caller does not wait
                await asyncio.wait([closing])
            if isinstance(error, channel.ChannelError | TimeoutError | OSError):
                reason = str(error) or type(error).__name__
                raise EnvironmentFault(f"a session of the {self.mechanism} sandbox did not start: {reason}") from error
            raise
        return host

    async def close(self) -> None:
        """Close all sessions."""
        self._closed = True
        for failure in await asyncio.gather(*(host.close() for host in self._hosts), return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure
