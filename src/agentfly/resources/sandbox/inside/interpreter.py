"""The interpreter: the one process that runs what a model wrote, one cell after another in one `__main__`.

User code shares this process and may break it; it then fools or stops only itself. What it can break by accident is
guarded: this module has its own copy of the builtins, imports nothing after the start, and blocks signals outside user
code.
"""

from __future__ import annotations

import base64
import builtins

globals()["__builtins__"] = dict(vars(builtins))  # before any function: what user code does to builtins stays its own

import contextlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import linecache  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import struct  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
import types  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from . import frames  # noqa: E402

_ONLY_AST = 0x400
_MOST_FIGURES, _MOST_FIGURE_BYTES = 8, 2 << 20
_ALL_SIGNALS = signal.valid_signals()
_b64, _exit, _write, _getpid = base64.b64encode, os._exit, os.write, os.getpid
_lines, _unpack = linecache.cache, struct.Struct(">QI").unpack_from
_trusted: list[str] = []
_receive, _pack, _mask, _pending = frames.receive, frames.pack, signal.pthread_sigmask, signal.sigtimedwait


def _encoder() -> Any:
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return lambda value: json.JSONEncoder().encode(value)
    encode = make(None, None, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda value: "".join(encode(value, 0))  # all of it C: it does not look at builtins


_encode = _encoder()


class _Meter:
    """How much of a call's output still fits."""

    left = dropped = 0


class _Raw(io.RawIOBase):
    """Bytes to the output pipe, until the meter is full."""

    def __init__(self, place: int, meter: _Meter) -> None:
        self._place, self._meter = place, meter

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._place

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size, start = len(view), 0
        while start < size and self._meter.left > 0:
            start += _write(self._place, view[start : min(size, start + self._meter.left)])
        self._meter.dropped += size - start
        return size


class _Stream(io.TextIOWrapper):
    """`sys.stdout` or `sys.stderr`: written through, and cut before it is encoded."""

    def __init__(self, place: int, meter: _Meter) -> None:
        raw: Any = _Raw(place, meter)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._meter = meter

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        fits = max(self._meter.left, 0)
        kept = text[:fits]
        if kept:
            super().write(kept)
            self._meter.left -= len(kept)
        self._meter.dropped += len(text) - len(kept)
        return len(text)


class Interpreter:
    """One `__main__` that lives as long as the session's interpreter."""

    def __init__(self, channel: socket.socket, pipe: int, work: str) -> None:
        self.channel, self.pipe, self.work = channel, pipe, work
        self.meter = _Meter()
        self.out, self.err = _Stream(1, self.meter), _Stream(2, self.meter)
        self.cells = 0
        self.main = types.ModuleType("__main__")
        self.space = self.main.__dict__
        self.space["__builtins__"] = builtins
        sys.modules["__main__"] = self.main
        self.pid = _getpid()

    def serve(self) -> NoReturn:
        """Answer until the keeper is gone."""
        while True:
            try:
                _, question = _receive(self.channel, 1 << 30)
                number, output = _unpack(question)
                reply = self.cell(question[12:].decode("utf-8", "surrogatepass"), output)
                self.channel.sendall(_pack(b"R", _encode({"id": number, **reply}).encode()))
            except BaseException:
                _exit(70)

    def cell(self, code: str, output: int) -> dict[str, Any]:
        """Run one piece of code and say how it went."""
        self.prepare(output)
        self.cells += 1
        name = f"<cell {self.cells}>"
        _lines[name] = (len(code), None, code.splitlines(True), name)
        reply: dict[str, Any] = {"status": "ok", "value": None, "error": None, "traceback": None, "figures": []}
        try:
            _clear_interrupts()
            try:
                _mask(signal.SIG_UNBLOCK, _ALL_SIGNALS)
                reply["value"] = _cut(self.run(code, name), output)
                reply["figures"] = _figures()
            finally:
                _block()
        except BaseException as error:
            self.fail(reply, error, output)
        if _getpid() != self.pid:  # a fork of user code that ran off its end, as in a script
            _leave(reply)
        sys.settrace(None)
        sys.setprofile(None)
        reply["dropped"] = self.meter.dropped
        return reply

    def prepare(self, output: int) -> None:
        """What every call starts with, whatever the one before did."""
        self.meter.left, self.meter.dropped = output, 0
        os.set_blocking(self.pipe, True)
        for place in (1, 2):
            os.dup2(self.pipe, place)
        if self.out.closed or self.err.closed:
            self.out, self.err = _Stream(1, self.meter), _Stream(2, self.meter)
        nothing = io.TextIOWrapper(io.BytesIO())
        vars(sys).update(stdin=nothing, stdout=self.out, stderr=self.err, __stdout__=self.out, __stderr__=self.err)
        try:
            os.getcwd()
        except OSError:
            os.chdir(self.work)

    def run(self, code: str, name: str) -> str | None:
        tree: Any = compile(code, name, "exec", _ONLY_AST, True)
        last = tree.body.pop() if tree.body and type(tree.body[-1]).__name__ == "Expr" else None
        exec(compile(tree, name, "exec", 0, True), self.space)
        if last is None:
            return None
        single = compile("0", name, "eval", _ONLY_AST, True)
        single.body = last.value
        value = eval(compile(single, name, "eval", 0, True), self.space)
        return None if value is None else repr(value)

    def fail(self, reply: dict[str, Any], error: BaseException, output: int) -> None:
        if isinstance(error, SystemExit):
            if error.code in (None, 0):
                return
            reply.update(status="exit", error=_cut(f"SystemExit: {_said(error.code)}", output))
            return
        status = "error"
        if isinstance(error, (KeyboardInterrupt, MemoryError)):
            status = "memory" if isinstance(error, MemoryError) else "interrupted"
        try:
            words, lines = _trimmed(error, self.work)
        except BaseException:
            words = type(error).__name__
            lines = f"{words} (the traceback cannot be written)"
        reply.update(status=status, error=_cut(words, 2000), traceback=_cut(lines, output))


def _said(value: object) -> str:
    try:
        return str(value)
    except BaseException:
        return "(cannot be written)"


def _cut(text: str | None, most: int) -> str | None:
    if text is None or len(text) <= most:
        return text
    return f"{text[:most]}… ({len(text) - most} more characters)"


def _clear_interrupts() -> None:
    """An interrupt meant for the call before must not stop this one."""
    while _pending([signal.SIGINT], 0) is not None:
        pass


def _block() -> None:
    """Keep signals for later. What a handler of user code raises meanwhile is nobody's."""
    while True:
        try:
            _mask(signal.SIG_BLOCK, _ALL_SIGNALS)
            return
        except BaseException:
            continue


def _leave(reply: dict[str, Any]) -> NoReturn:
    with contextlib.suppress(BaseException):
        if reply["traceback"]:
            sys.stderr.write(reply["traceback"])
    _exit(0 if reply["status"] == "ok" else 1)


def _trimmed(error: BaseException, work: str) -> tuple[str, str]:
    """The error in one line, and a traceback of the user's own lines."""
    described = traceback.TracebackException(type(error), error, error.__traceback__)
    seen: set[int] = set()
    _keep_own(described, work, seen)
    said = "".join(described.format_exception_only()).strip().splitlines() or [type(error).__name__]
    return said[-1 if isinstance(error, SyntaxError) else 0], "".join(described.format())


def _keep_own(described: traceback.TracebackException | None, work: str, seen: set[int]) -> None:
    if described is None or id(described) in seen:
        return
    seen.add(id(described))
    places = [place for place in described.stack if not place.filename.startswith(os.path.dirname(__file__))]
    own = [place for place in places if place.filename.startswith(("<cell ", work))]
    described.stack[:] = own or places
    _keep_own(described.__cause__, work, seen)
    _keep_own(described.__context__, work, seen)
    for each in getattr(described, "exceptions", None) or ():
        _keep_own(each, work, seen)


def _figures() -> list[str]:
    """The figures that matplotlib has open, as PNG; they are closed."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    found = []
    for number in pyplot.get_fignums()[:_MOST_FIGURES]:
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png")
        if buffer.tell() <= _MOST_FIGURE_BYTES:
            found.append(_b64(buffer.getvalue()).decode())
    pyplot.close("all")
    return found


def warm_up() -> None:
    """In the zygote: load all that the standard library loads late, before a file of the user's can shadow it."""
    # Found here: in a session, looking at every module would make its own copy of many pages.
    _trusted[:] = [name for name in sys.modules if name.split(".")[0] == (__package__ or "").split(".")[0]]
    try:
        raise ValueError("warm")
    except ValueError as error:
        _trimmed(error, "/")
    with contextlib.suppress(SyntaxError):
        compile("a b", "<warm>", "exec", _ONLY_AST, True)


def serve(channel: socket.socket, pipe: int, work: str) -> NoReturn:
    """Be an interpreter; in a fresh child of the keeper."""
    _block()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _trusted:
        del sys.modules[name]
    sys.path.insert(0, work)
    sys.argv = [""]
    generator: Any = sys.modules.get("numpy.random")
    if generator is not None:
        generator.seed(int.from_bytes(os.urandom(4), "little"))  # every fork would draw the same numbers
    os.environ["HOME"] = work
    Interpreter(channel, pipe, work).serve()
