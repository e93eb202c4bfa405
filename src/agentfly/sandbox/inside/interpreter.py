"""The interpreter: the only process that runs user code, one cell after another in one `__main__`.

User code shares this process and may break it. It then deceives or stops only itself. This module is protected against
accidents: it has its own copy of the builtins, imports nothing after the start, and blocks signals outside user code.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ast
import base64
import builtins

globals()["__builtins__"] = dict(vars(builtins))  # before any function: user code may change builtins

import collections  # noqa: E402
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
_VALUE = "<value>"
_MAX_FIGURES = 8
_MAX_FIGURE_BYTES = 2 << 20
_ALL_SIGNALS = signal.valid_signals()
# Bound here, so that user code may replace them in their modules.
_b64, _exit, _write, _getpid = base64.b64encode, os._exit, os.write, os.getpid
_line_cache, _unpack = linecache.cache, struct.Struct(">QI").unpack_from
_receive, _pack, _TextIOWrapper, _BytesIO = frames.receive_alone, frames.pack, io.TextIOWrapper, io.BytesIO
_Assign, _Expr, _Name, _Store = ast.Assign, ast.Expr, ast.Name, ast.Store
_SIGINT, _SIG_SETMASK = _signal.SIGINT, _signal.SIG_SETMASK
# Not those of `signal`: they convert each of the 60 signals that are blocked into an enum, at every call.
_sigmask, _sigtimedwait = _signal.pthread_sigmask, _signal.sigtimedwait
_trusted_modules: list[str] = []


def _make_encoder() -> Any:
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return lambda value: json.JSONEncoder().encode(value)
    encode = make(None, None, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda value: "".join(encode(value, 0))  # all of it C: it does not use builtins


_encode = _make_encoder()


class _Quota:
    """Characters of output that a call may still write. Of what comes after them, the last ones are kept."""

    def __init__(self) -> None:
        self.start_call(0)

    def start_call(self, max_output: int) -> None:
        self.left = max_output // 2
        self.dropped = 0
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_size = 0
        self.max_tail = max_output - self.left

    def add_to_tail(self, data: bytes) -> None:
        """Keep the end of the data, and drop from the oldest what no longer fits."""
        self._tail.append(data)
        self._tail_size += len(data)
        # By pieces: joining them at every write would copy the whole tail a million times in a loop of prints.
        while self._tail_size - len(self._tail[0]) >= self.max_tail:
            dropped = len(self._tail.popleft())
            self._tail_size -= dropped
            self.dropped += dropped

    def take_tail(self) -> bytes:
        tail = b"".join(self._tail)
        excess = max(len(tail) - self.max_tail, 0)
        self.dropped += excess
        return tail[excess:]


class _RawOutput(io.RawIOBase):
    """Writes bytes to the output pipe until the quota is used up."""

    def __init__(self, fd: int, quota: _Quota) -> None:
        self._fd = fd
        self._quota = quota

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size, start = len(view), 0
        while start < size and self._quota.left > 0:
            start += _write(self._fd, view[start : min(size, start + self._quota.left)])
        if start < size:
            self._quota.add_to_tail(bytes(view[start:]))
        return size


class _TextOutput(io.TextIOWrapper):
    """`sys.stdout` or `sys.stderr`: unbuffered, and cut before it is encoded."""

    def __init__(self, fd: int, quota: _Quota) -> None:
        raw: Any = _RawOutput(fd, quota)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._quota = quota

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        fitting = text[: max(self._quota.left, 0)]
        if fitting:
            super().write(fitting)
            self._quota.left -= len(fitting)
        if len(fitting) < len(text):
            # Only what can be kept is copied: a text of half the memory has no room for two copies of it.
            start = max(len(fitting), len(text) - self._quota.max_tail)
            self._quota.dropped += start - len(fitting)
            self._quota.add_to_tail(text[start:].encode("utf-8", "backslashreplace"))
        return len(text)


class Interpreter:
    """One `__main__` module that lives as long as the interpreter."""

    def __init__(self, channel: socket.socket, pipe: int, work: str) -> None:
        self.channel = channel
        self.buffer = bytearray(1 << 12)
        self.pipe = pipe
        self.work = work
        self.quota = _Quota()
        self.open_streams()
        self.cells = 0
        self.main = types.ModuleType("__main__")
        self.namespace = self.main.__dict__
        self.namespace["__builtins__"] = builtins
        sys.modules["__main__"] = self.main
        self.pid = _getpid()

    def serve(self) -> NoReturn:
        """Run cells until the session init is gone."""
        # Copy the pages that every cell writes to now, not in the first call.
        self.restore_streams(0)
        self.execute("0\n0", "<warm>")
        while True:
            try:
                question = _receive(self.channel, self.buffer)
                number, max_output = _unpack(question)
                reply = self.run_cell(question[12:].decode("utf-8", "surrogatepass"), max_output)
                self.channel.sendall(_pack(b"R", _encode({"id": number, **reply}).encode()))
            except BaseException:
                _exit(70)

    def run_cell(self, code: str, max_output: int) -> dict[str, Any]:
        """Run one cell and return the reply. max_output: characters of output, of the value and of the traceback."""
        self.restore_streams(max_output)
        self.cells += 1
        name = f"<cell {self.cells}>"
        _line_cache[name] = (len(code), None, code.splitlines(True), name)
        reply: dict[str, Any] = {"status": "ok"}
        try:
            while _sigtimedwait([_SIGINT], 0) is not None:  # an interrupt meant for the previous call
                pass
            try:
                _sigmask(_SIG_SETMASK, ())
                value = self.execute(code, name)
                if value is not None:
                    reply["value"] = _cut(value, max_output)
                if "matplotlib.pyplot" in sys.modules:
                    reply["figures"] = _take_figures()
            finally:
                _block_signals()
        except BaseException as error:
            self.report_error(reply, error, max_output)
        if _getpid() != self.pid:  # a fork of user code that reached the end of the cell: exit as a script would
            with contextlib.suppress(BaseException):
                sys.stderr.write(reply.get("traceback", ""))
            _exit(0 if reply["status"] == "ok" else 1)
        sys.settrace(None)
        sys.setprofile(None)
        with contextlib.suppress(OSError):  # the code has closed the pipe
            tail = self.quota.take_tail()
            while tail:
                tail = tail[_write(self.pipe, tail) :]
        if self.quota.dropped:
            reply["dropped"] = self.quota.dropped
        return reply

    def open_streams(self) -> None:
        """Create an empty `sys.stdin`, and `sys.stdout` and `sys.stderr` that write to the pipe."""
        self.stdin = _TextIOWrapper(_BytesIO())
        self.stdout, self.stderr = _TextOutput(1, self.quota), _TextOutput(2, self.quota)

    def restore_streams(self, max_output: int) -> None:
        """Restore streams and working folder, whatever the previous call did to them."""
        self.quota.start_call(max_output)
        os.set_blocking(self.pipe, True)
        for fd in (1, 2):
            os.dup2(self.pipe, fd)
        try:
            usable = not (self.stdin.closed or self.stdout.closed or self.stderr.closed)
        except ValueError:  # detached
            usable = False
        if not usable:
            self.open_streams()
        vars(sys).update(
            stdin=self.stdin,
            stdout=self.stdout,
            stderr=self.stderr,
            __stdout__=self.stdout,
            __stderr__=self.stderr,
        )
        try:
            os.getcwd()
        except OSError:
            os.chdir(self.work)

    def execute(self, code: str, name: str) -> str | None:
        """Execute the code; return the `repr` of its last expression, or None if there is none or it is None."""
        tree: Any = compile(code, name, "exec", _ONLY_AST, True)
        last = tree.body[-1] if tree.body and type(tree.body[-1]) is _Expr else None
        if last is not None:  # assign it to a name that user code cannot write
            name_node = _Name(_VALUE, _Store())
            tree.body[-1] = _Assign([name_node], last.value)
            tree.body[-1].lineno = name_node.lineno = last.lineno
            tree.body[-1].col_offset = name_node.col_offset = last.col_offset
        exec(compile(tree, name, "exec", 0, True), self.namespace)
        value = self.namespace.pop(_VALUE, None)
        return None if value is None else repr(value)

    def report_error(self, reply: dict[str, Any], error: BaseException, max_output: int) -> None:
        """Write an exception of user code into the reply. Its own methods may raise, or return anything."""
        if isinstance(error, SystemExit):
            if error.code not in (None, 0):
                try:
                    code = str(error.code)
                except BaseException:
                    code = "(cannot be written)"
                reply.update(status="exit", error=_cut(f"SystemExit: {code}", max_output))
            return
        status = "error"
        if isinstance(error, (KeyboardInterrupt, MemoryError)):
            status = "memory" if isinstance(error, MemoryError) else "interrupted"
        try:
            summary, lines = _format_traceback(error, self.work)
        except BaseException:
            summary = type(error).__name__
            lines = f"{summary} (the traceback cannot be written)"
        reply.update(status=status, error=_cut(summary, 2000), traceback=_cut(lines, max_output))


def _cut(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}… ({len(text) - max_characters} more characters)"


def _block_signals() -> None:
    """Block all signals. Signal handlers of user code may raise meanwhile; that is ignored."""
    while True:
        try:
            _sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
            return
        except BaseException:
            continue


def _format_traceback(error: BaseException, work: str) -> tuple[str, str]:
    """Return the error in one line, and its traceback reduced to the user's own lines."""
    described = traceback.TracebackException(type(error), error, error.__traceback__)
    seen: set[int] = set()
    pending: list[traceback.TracebackException | None] = [described]
    while pending:
        exception = pending.pop()
        if exception is None or id(exception) in seen:
            continue
        seen.add(id(exception))
        outside = [frame for frame in exception.stack if not frame.filename.startswith(os.path.dirname(__file__))]
        user_frames = [frame for frame in outside if frame.filename.startswith(("<cell ", work))]
        exception.stack[:] = user_frames or outside
        pending += [exception.__cause__, exception.__context__, *(getattr(exception, "exceptions", None) or ())]
    lines = "".join(described.format_exception_only()).strip().splitlines() or [type(error).__name__]
    return lines[-1 if isinstance(error, SyntaxError) else 0], "".join(described.format())


def _take_figures() -> list[str]:
    """Return the open figures of matplotlib as PNG in base64, and close them."""
    pyplot: Any = sys.modules["matplotlib.pyplot"]
    figures = []
    for number in pyplot.get_fignums()[:_MAX_FIGURES]:
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png")
        if buffer.tell() <= _MAX_FIGURE_BYTES:
            figures.append(_b64(buffer.getvalue()).decode())
    pyplot.close("all")
    return figures


def warm_up() -> None:
    """In the zygote: import all that the standard library imports late, before a file of the user can shadow it."""
    # Here, because iterating over all modules in a session would copy many shared pages.
    _trusted_modules[:] = [name for name in sys.modules if name.split(".")[0] == (__package__ or "").split(".")[0]]
    try:
        raise ValueError("warm")
    except ValueError as error:
        _format_traceback(error, "/")
    with contextlib.suppress(SyntaxError):
        compile("a b", "<warm>", "exec", _ONLY_AST, True)


def serve(channel: socket.socket, pipe: int, work: str) -> NoReturn:
    """Become the interpreter, in a new child of the session init. pipe: of `output.OutputPipe`."""
    _block_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _trusted_modules:
        del sys.modules[name]
    sys.path.insert(0, work)
    sys.argv = [""]
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))  # every fork would draw the same numbers
    os.environ["HOME"] = work
    Interpreter(channel, pipe, work=work).serve()
