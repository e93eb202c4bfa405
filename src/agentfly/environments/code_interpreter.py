"""Python, a shell and files in a sandbox: every chain has a session of its own.

Variables and files stay from call to call. A session that had to be killed is replaced by a fresh one in the middle of
its chain, and the model is told that what it had is gone.
"""

from __future__ import annotations

import functools
import posixpath
import shlex
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

from agentfly.environment import Environment, Pool, Recycle
from agentfly.errors import DataError, EnvironmentFault
from agentfly.resources.sandbox import FileRefused, Limits, Outcome, Session
from agentfly.resources.sandbox.shared import Mechanism, shared_sandbox
from agentfly.tooling import tool
from agentfly.types import Task

_TIMEOUT = 600.0
"""Seconds after which a call is given up altogether; a session's own limit ends it long before."""
_LARGEST = 1 << 20
"""Bytes of a file that is read or edited as text."""
_CHANGES = 20
"""Changes of files that can be taken back."""

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


def _refusals_told(method: Method) -> Method:
    """What the file system refuses is the model's to mend, and no fault of the tool."""

    @functools.wraps(method)
    async def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return await method(*args, **kwargs)
        except FileRefused as error:
            return f"Error: {error}."

    return told  # type: ignore[return-value]


class CodeInterpreter(Environment):
    """A session in a sandbox. Set other limits, or another mechanism, on a subclass."""

    pool = Pool(recycle=Recycle.REPLACE, min_warm=2, max_instances=256)
    limits: ClassVar[Limits] = Limits()
    mechanism: ClassVar[Mechanism] = None
    """By name, or a Container. None takes the strongest that works here, and refuses to run where none does."""

    async def start(self) -> None:
        self._session: Session | None = None
        self._sandbox = await shared_sandbox(self.mechanism)
        self._session = await self._sandbox.open_session(self.limits)
        self._fresh = True

    async def reset(self, task: Task) -> None:
        """A fresh session, with the files of the task's column `files` (path → text or bytes) in its folder."""
        self._files = _files_of(task)
        self.shown: str | None = None
        """What the last call of Python or of the shell showed; None before the first."""
        await self._fill() if self._fresh else await self._start_over()
        self._fresh = False

    async def check(self) -> None:
        """Fail where the session died while nobody used it."""
        if not self._live.alive:
            raise EnvironmentFault("the session is gone")

    async def close(self) -> None:
        if self._session is not None:
            await self._live.close()
            self._session = None

    @property
    def _live(self) -> Session:
        assert self._session is not None
        return self._session

    async def _start_over(self) -> None:
        await self._live.close()
        self._session = await self._sandbox.open_session(self.limits)
        await self._fill()

    async def _fill(self) -> None:
        self._history: deque[tuple[str, bytes | None]] = deque(maxlen=_CHANGES)
        for path, data in self._files.items():
            await self._live.put(path, data)

    async def _told(self, outcome: Outcome) -> dict[str, Any]:
        """What the model is shown of an outcome; where the session is over, it goes on in a fresh one."""
        text = outcome.text or "(no output)"
        if not outcome.files_kept:
            await self._start_over()
            text += "\n[A fresh session was started, with only the task's own files in it.]"
        self.shown = text
        shown: dict[str, Any] = {"observation": text, "end": outcome.end.value, "seconds": outcome.seconds}
        return {**shown, "image": list(outcome.figures)} if outcome.figures else shown

    @tool(name="code_interpreter", timeout=_TIMEOUT, max_length=20_000)
    async def run_python(self, code: str) -> dict[str, Any]:
        """Run Python code. Variables, imports and files stay for the next call. Shows what was printed and the value
        of the last expression.

        Args:
            code: The code to run.
        """
        return await self._told(await self._live.run(code))

    @tool(timeout=_TIMEOUT, max_length=20_000)
    async def run_shell(self, command: str) -> dict[str, Any]:
        """Run a shell command in the working folder.

        Args:
            command: The command, as one would type it.
        """
        return await self._told(await self._live.shell(command))

    @tool(timeout=_TIMEOUT, max_length=20_000)
    @_refusals_told
    async def read_file(self, path: str, first: int = 1, last: int | None = None) -> str:
        """Read a text file, or some of its lines.

        Args:
            path: The file, from the working folder.
            first: The first line to read.
            last: The last line to read; without it, all to the end.
        """
        text = await self._text(path)
        if first <= 1 and last is None:
            return text
        lines = text.splitlines(keepends=True)
        return "".join(lines[max(first, 1) - 1 : last]) or f"{path} has {len(lines)} lines; none of them is meant."

    @tool(timeout=_TIMEOUT)
    @_refusals_told
    async def write_file(self, path: str, content: str) -> str:
        """Write a text file, replacing what was there.

        Args:
            path: The file, from the working folder; folders on the way are made.
            content: All of the file's new text.
        """
        data = _encoded(content)
        await self._remember(path)
        await self._live.put(path, data)
        return f"{path} written."

    @tool(timeout=_TIMEOUT)
    @_refusals_told
    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a piece of a text file.

        Args:
            path: The file, from the working folder.
            old: The text to replace; it must occur exactly once.
            new: The text to put in its place.
        """
        text = await self._text(path)
        found = text.count(old) if old else 0
        if found != 1:
            raise FileRefused(f"the old text occurs {found} times in {path}; it must occur exactly once")
        data = _encoded(text.replace(old, new))
        await self._remember(path)
        await self._live.put(path, data)
        return f"{path} written."

    @tool(timeout=_TIMEOUT)
    @_refusals_told
    async def undo_edit(self, path: str) -> str:
        """Take back the last change that edit_file or write_file made to a file; again, the one before it.

        Args:
            path: The file, from the working folder.
        """
        name = self._name(path)
        at = max((number for number, (each, _) in enumerate(self._history) if each == name), default=None)
        if at is None:
            raise FileRefused(f"there is no change of {path} to undo")
        before = self._history[at][1]
        if before is None:
            await self._live.shell(f"rm -f -- {shlex.quote(name)}")
        else:
            await self._live.put(name, before)
        del self._history[at]
        return f"{path} is {'gone again' if before is None else 'as it was before the last change'}."

    @tool(timeout=_TIMEOUT)
    @_refusals_told
    async def list_files(self, path: str = ".") -> str:
        """List the files and folders below a folder.

        Args:
            path: The folder, from the working folder.
        """
        entries = await self._live.listing(path, deep=True)
        lines = [f"{each.path}/" if each.kind == "folder" else f"{each.path} ({each.size} bytes)" for each in entries]
        return "\n".join(lines) or "(empty)"

    @tool(timeout=_TIMEOUT)
    @_refusals_told
    async def search_files(self, pattern: str, path: str = ".") -> str:
        """Search the text files below a folder, line by line.

        Args:
            pattern: A piece of text, or a regular expression as `grep -E` takes it.
            path: The folder, from the working folder.
        """
        command = f"grep -rnIE -e {shlex.quote(pattern)} -- {shlex.quote(path)}"
        outcome = await self._live.shell(command)
        if outcome.status == 1 and not outcome.output:
            return "No line matches."
        return (await self._told(outcome))["observation"] if outcome.status else outcome.output

    def _name(self, path: str) -> str:
        """A path as it is however it was written."""
        return posixpath.relpath(posixpath.join(self._live.folder, path), self._live.folder)

    async def _remember(self, path: str) -> None:
        """Keep what a file is now, for `undo_edit`; None where there is none."""
        name = self._name(path)
        try:
            self._history.append((name, await self._live.get(path, _LARGEST)))
        except FileRefused:
            if await self._is_there(name):  # too large to keep: then nothing before it can be had back either
                self._history = deque((each for each in self._history if each[0] != name), _CHANGES)
            else:
                self._history.append((name, None))

    async def _is_there(self, name: str) -> bool:
        try:
            return any(each.path == name for each in await self._live.listing(posixpath.dirname(name) or "."))
        except FileRefused:  # the folder is not there either
            return False

    async def _text(self, path: str) -> str:
        try:
            return (await self._live.get(path, _LARGEST)).decode()
        except UnicodeDecodeError:
            raise FileRefused(f"{path} is not a text file") from None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise FileRefused("the text holds half of a surrogate pair, which no file can hold") from None


def _files_of(task: Task) -> dict[str, bytes]:
    files = task.columns.get("files") or {}
    if not isinstance(files, dict) or not all(isinstance(data, str | bytes) for data in files.values()):
        raise DataError("the column 'files' must map paths to text or bytes")
    return {str(path): data.encode() if isinstance(data, str) else data for path, data in files.items()}
