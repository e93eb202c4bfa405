"""One session, seen from the host: asks its keeper, waits no longer than it should, tells what ended a call."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from agentfly.resources.sandbox import endings, wire
from agentfly.resources.sandbox.cell import Cell
from agentfly.resources.sandbox.contract import Entry, FileRefused, Session, SessionOver
from agentfly.resources.sandbox.limits import Limits
from agentfly.resources.sandbox.outcome import Outcome

GRACE = 1.0
"""Seconds after an interrupt, and again after a restart, before the next stronger step."""
_FILE_SECONDS = 60.0
_MOST_ENTRIES = 5000
_MOST_CODE = 8 << 20
_ENDED_FORM: dict[str, Callable[[Any], bool]] = {
    "id": wire.is_count,
    "dropped": wire.is_count,
    "kills": wire.is_count,
    "reply": lambda value: value is True,
    "ended": endings.REASONS.__contains__,
    "ran": lambda value: type(value) is bool,
    "gone": lambda value: type(value) is bool,
    "status": lambda value: value is None or (type(value) is int and -(1 << 31) < value < 1 << 31),
}
_FILE_FORM: dict[str, Callable[[Any], bool]] = {
    "id": wire.is_count,
    "error": wire.is_text,
    "size": wire.is_count,
    "more": lambda value: type(value) is bool,
    "entries": lambda value: isinstance(value, list) and all(map(_is_entry, value)),
}


def _is_entry(value: Any) -> bool:
    return isinstance(value, list) and [type(each) for each in value] == [str, str, int]


class CellSession(Session):
    """A session whose keeper is at the other end of a cell's wire."""

    def __init__(self, open_cell: Callable[[Limits], Awaitable[Cell]], cell: Cell) -> None:
        self._open_cell, self._cell = open_cell, cell
        self._limits = cell.limits
        self._lock = asyncio.Lock()
        self._over = ""
        self._kills = 0
        self._resting = False

    @property
    def folder(self) -> str:
        """The working folder, as the session sees it itself."""
        return self._cell.folder

    @property
    def alive(self) -> bool:
        """Whether it can be used, as far as can be told without a call."""
        return not self._over and not self._cell.wire.hung_up()

    async def run(self, code: str, timeout: float | None = None) -> Outcome:
        """Run Python; variables stay."""
        if len(code) > _MOST_CODE:
            return endings.refused(f"The code has {len(code)} characters; {_MOST_CODE} are allowed.")
        return await self._call({"do": "run", "code": code}, timeout)

    async def shell(self, command: str, timeout: float | None = None) -> Outcome:
        """Run a shell command in the session's folder."""
        if "\0" in command or len(command) > 100_000:
            return endings.refused(
                "The command holds a NUL character, or more than 100000 characters: write a file, run that."
            )
        return await self._call({"do": "shell", "command": wire.clean(command)}, timeout)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file below the session's folder."""
        if len(data) > self._limits.disk:
            raise FileRefused(f"{path}: {len(data)} bytes do not fit on a disk of {self._limits.disk}")
        await self._file({"do": "put", "path": path, "size": len(data)}, data)

    async def get(self, path: str, most: int = 16 << 20) -> bytes:
        """Read a file of at most `most` bytes."""
        return (await self._file({"do": "get", "path": path, "most": most}))[1]

    async def listing(self, path: str = ".", deep: bool = False) -> list[Entry]:
        """The first names in a folder, sorted, and with `deep` all below it."""
        said, _ = await self._file({"do": "list", "path": path, "deep": deep, "most": _MOST_ENTRIES})
        return [Entry(wire.clean(name), kind, size) for name, kind, size in said["entries"]]

    async def reset(self) -> None:
        """End everything and start over in a fresh cell."""
        async with self._lock:
            if self._over == "closed":
                raise SessionOver("the session is closed; open another")
            self._over = "being reset"
            await self._cell.over()
            self._cell = await self._open_cell(self._limits)
            self._kills, self._over, self._resting = 0, "", False

    async def close(self) -> None:
        """End everything. A call that is under way ends too."""
        self._over = "closed"
        await self._cell.over()

    async def memory(self) -> int | None:
        """Bytes that its processes and files hold; None where nobody counts them."""
        self._check()
        return await self._cell.memory()

    async def rest(self) -> None:
        """Use no processor until `wake`, or until the next call. Where nothing can stop it, an idle session goes on."""
        async with self._lock:
            self._check()
            self._resting = True
            await self._cell.pause(True)

    async def wake(self) -> None:
        """Be ready again, after `rest`."""
        async with self._lock:
            await self._awake()

    async def _awake(self) -> None:
        self._check()
        if self._resting:
            await self._cell.pause(False)
            self._resting = False

    def _check(self) -> None:
        if self._over:
            raise SessionOver(f"this session is over ({self._over}); reset it or open another")

    # Calls

    async def _call(self, question: dict[str, Any], timeout: float | None) -> Outcome:
        seconds = self._limits.seconds if timeout is None else min(timeout, self._limits.seconds)
        async with self._lock:
            await self._awake()
            call = endings.Call(question["do"], seconds, self._limits)
            clock = _Clock(self._cell.wire, seconds)
            try:
                await self._ask(question, call)
            except wire.WireError as error:
                return await self._bury(call, error, clock.late)
            except BaseException:
                self._abandon("its call was cancelled")
                raise
            finally:
                clock.stop()
            if call.went_wrong:
                kills = call.said.get("kills", self._cell.memory_kills())
                call.memory_kills, self._kills = kills - self._kills, kills
            return call.outcome(clock.late)

    async def _ask(self, question: dict[str, Any], call: endings.Call) -> None:
        """Ask, gather output, read the answer."""
        number = secrets.randbits(62)
        line = self._cell.wire
        line.allow(self._limits.output * 8 + (32 << 20))
        await line.send(wire.QUESTION, json.dumps({**question, "id": number}).encode())
        while True:
            kind, payload = await line.receive(wire.OUTPUT, wire.ANSWER)
            if kind == wire.ANSWER:
                break
            call.output += payload
        said = wire.parse(payload, _ENDED_FORM, frozenset(("kills", "reply", "ended", "status", "ran", "gone")))
        complete = bool(said.get("reply")) if call.do == "run" else "status" in said and "reply" not in said
        if said["id"] != number or not (complete or "ended" in said):
            raise wire.WireBroken("an answer to another question")
        call.said = said
        if said.get("reply"):
            _, payload = await line.receive(wire.REPLY)
            call.reply = wire.parse_reply(payload, number, self._limits.output)

    async def _bury(self, call: endings.Call, error: wire.WireError, late: bool) -> Outcome:
        """The wire is broken: the session is over, and its outcome says why."""
        kills = self._cell.memory_kills()
        self._abandon(f"{type(error).__name__}: {error}")
        status = await self._cell.over()
        call.memory_kills = max(kills, self._cell.memory_kills()) - self._kills
        return call.over(error, status, late)

    def _abandon(self, why: str) -> None:
        self._over = self._over or why
        self._cell.end()

    # Files

    async def _file(self, question: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
        question["path"] = wire.clean(question["path"])
        async with self._lock:
            await self._awake()
            clock = _Clock(self._cell.wire, _FILE_SECONDS)
            try:
                return await self._ask_file(question, data)
            except wire.WireError as error:
                self._abandon(f"{type(error).__name__}: {error}")
                raise SessionOver(f"the session ended while {question['path']} was asked for: {error}") from error
            except asyncio.CancelledError:
                self._abandon("its call was cancelled")
                raise
            finally:
                clock.stop()

    async def _ask_file(self, question: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        number = secrets.randbits(62)
        line, most = self._cell.wire, question.get("most", 0)
        line.allow(most * 2 + (16 << 20))
        await line.send(wire.QUESTION, json.dumps({**question, "id": number}).encode())
        for start in range(0, len(data), 1 << 18):
            await line.send(wire.DATA, data[start : start + (1 << 18)])
        _, payload = await line.receive(wire.ANSWER)
        said = wire.parse(payload, _FILE_FORM, frozenset(("error", "size", "entries", "more")))
        if said["id"] != number:
            raise wire.WireBroken("an answer to another question")
        if "error" in said:
            raise FileRefused(f"{question['path']}: {wire.clean(said['error'])}")
        needed = {"put": set(), "get": {"size"}, "list": {"entries", "more"}}[question["do"]]
        if set(said) != {"id", *needed} or said.get("size", 0) > most:
            raise wire.WireBroken("an answer of another kind")
        content = bytearray()
        while len(content) < said.get("size", 0):
            content += (await line.receive(wire.DATA))[1]
        return said, bytes(content)


class _Clock:
    """Ends a call that takes too long: asks it to stop, then kills what runs, then gives the session up."""

    def __init__(self, line: wire.Wire, seconds: float) -> None:
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._steps = iter((self._say("interrupt"), self._say("restart"), line.expire))
        self._handle = self._loop.call_later(max(seconds, 0.0), self._step)
        self.late = False
        """Whether the time was over."""

    def _say(self, do: str) -> Callable[[], None]:
        return lambda: self._line.send_now(wire.QUESTION, json.dumps({"do": do}).encode())

    def _step(self) -> None:
        self.late = True
        step = next(self._steps, None)
        if step:
            step()
            self._handle = self._loop.call_later(GRACE, self._step)

    def stop(self) -> None:
        """The call has ended."""
        self._handle.cancel()
