"""CodeInterpreter: Python, a shell and files in a sandbox, with a separate session for every chain.

Variables and files persist between calls. A session that had to be killed is replaced by a new one in the middle of its
chain, and the observation says that its variables and files are gone.
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
from agentfly.sandbox import FileAccessError, Limits, Outcome, Session
from agentfly.sandbox.mechanisms import Mechanism, shared_sandbox
from agentfly.tooling import tool
from agentfly.types import Task

TOOL_TIMEOUT = 600.0
"""Seconds until a tool call fails. The session's own limit ends it long before."""
_MAX_FILE_BYTES = 1 << 20
"""Largest file that can be read or edited as text."""
_MAX_UNDO = 20
"""Number of file changes that can be undone."""

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


def _answer_file_errors(method: Method) -> Method:
    """Turn a FileAccessError into an observation: it is an error of the model, not of the tool."""

    @functools.wraps(method)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return await method(*args, **kwargs)
        except FileAccessError as error:
            return f"Error: {error}."

    return wrapper  # type: ignore[return-value]


class SandboxEnvironment(Environment):
    """Base of environments that run in a sandbox session. Subclasses write the task's files in `_write_files`."""

    pool = Pool(recycle=Recycle.REPLACE, min_warm=2, max_instances=256)
    limits: ClassVar[Limits] = Limits()
    mechanism: ClassVar[Mechanism] = None
    """Name of a mechanism, or a Container. None: the strongest safe one that works here; without one, `start` fails."""
    _session: Session | None = None

    async def start(self) -> None:
        self._sandbox = await shared_sandbox(self.mechanism)
        self._session = await self._sandbox.open_session(self._session_limits)
        self._unused = True

    async def check(self) -> None:
        """Raise EnvironmentFault if the idle session has died."""
        if not self.session.alive:
            raise EnvironmentFault("the session is gone")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> Session:
        """The session of the current chain."""
        assert self._session is not None
        return self._session

    @property
    def _session_limits(self) -> Limits:
        """Limits of every session of the current chain, also of one that replaces another."""
        return self.limits

    async def _reset_session(self) -> None:
        """Provide a new session with the task's files."""
        if self._unused:
            self._unused = False
            await self._write_files(self.session)
        else:
            await self._replace_session()

    async def _replace_session(self) -> None:
        await self.session.close()
        self._session = await self._sandbox.open_session(self._session_limits)
        await self._write_files(self.session)

    async def _write_files(self, session: Session) -> None:
        """Write the task's files into a new session."""
        raise NotImplementedError


class SandboxFiles(SandboxEnvironment):
    """A session whose files the model reads and edits."""

    async def reset(self, task: Task) -> None:
        """Start a new session, with the files of the task's column `files` (path → text or bytes) in its folder."""
        files = task.columns.get("files") or {}
        if not isinstance(files, dict) or not all(isinstance(data, str | bytes) for data in files.values()):
            raise DataError("the column 'files' must map paths to text or bytes")
        self._files = {str(path): data.encode() if isinstance(data, str) else data for path, data in files.items()}
        self.last_output: str | None = None
        """Observation of the last Python or shell call. None before the first."""
        await self._reset_session()

    async def _write_files(self, session: Session) -> None:
        self._history: deque[tuple[str, bytes | None]] = deque(maxlen=_MAX_UNDO)
        """Path and previous content of each change. None if the file did not exist."""
        for path, data in self._files.items():
            await session.put(path, data)

    async def _observe(self, outcome: Outcome) -> dict[str, Any]:
        """Build the tool result of an outcome. If the session has ended, replace it."""
        text = outcome.text or "(no output)"
        if not outcome.files_kept:
            await self._replace_session()
            text += "\n[A fresh session was started, with only the task's own files in it.]"
        self.last_output = text
        result: dict[str, Any] = {"observation": text, "end": outcome.end.value, "seconds": outcome.seconds}
        if outcome.figures:
            result["image"] = list(outcome.figures)
        return result

    @tool(timeout=TOOL_TIMEOUT, max_length=20_000)
    @_answer_file_errors
    async def read_file(self, path: str, first: int = 1, last: int | None = None) -> str:
        """Read a text file, or some of its lines.

        Args:
            path: The file, from the working folder.
            first: The first line to read.
            last: The last line to read; without it, all to the end.
        """
        text = await self._read_text(path)
        if first <= 1 and last is None:
            return text
        lines = text.splitlines(keepends=True)
        return (
            "".join(lines[max(first, 1) - 1 : last]) or f"{path} has {len(lines)} lines; none of them is in this range."
        )

    @tool(timeout=TOOL_TIMEOUT)
    @_answer_file_errors
    async def write_file(self, path: str, content: str) -> str:
        """Write a text file, replacing what was there.

        Args:
            path: The file, from the working folder; folders on the way are made.
            content: All of the file's new text.
        """
        data = _encode(content)
        await self._remember(path)
        await self.session.put(self._locate(path), data)
        return f"{path} written."

    @tool(timeout=TOOL_TIMEOUT)
    @_answer_file_errors
    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a piece of a text file.

        Args:
            path: The file, from the working folder.
            old: The text to replace; it must occur exactly once.
            new: The text to put in its place.
        """
        text = await self._read_text(path)
        count = text.count(old) if old else 0
        if count != 1:
            raise FileAccessError(f"the old text occurs {count} times in {path}; it must occur exactly once")
        data = _encode(text.replace(old, new))
        await self._remember(path)
        await self.session.put(self._locate(path), data)
        return f"{path} written."

    @tool(timeout=TOOL_TIMEOUT)
    @_answer_file_errors
    async def undo_edit(self, path: str) -> str:
        """Take back the last change that edit_file or write_file made to a file; again, the one before it.

        Args:
            path: The file, from the working folder.
        """
        name = self._normalize(path)
        index = max(
            (number for number, (changed_path, _) in enumerate(self._history) if changed_path == name), default=None
        )
        if index is None:
            raise FileAccessError(f"there is no change of {path} to undo")
        content = self._history[index][1]
        if content is None:
            await self.session.shell(f"rm -f -- {shlex.quote(name)}")
        else:
            await self.session.put(name, content)
        del self._history[index]
        return f"{path} is {'gone again' if content is None else 'as it was before the last change'}."

    def _locate(self, path: str) -> str:
        """Return a path of the model as the session takes it: from the session's folder."""
        return path

    def _normalize(self, path: str) -> str:
        """Return a path of the model relative to the session's folder."""
        return posixpath.relpath(posixpath.join(self.session.folder, self._locate(path)), self.session.folder)

    async def _remember(self, path: str) -> None:
        """Save the current content of a file for `undo_edit`. None if it does not exist."""
        name = self._normalize(path)
        try:
            self._history.append((name, await self.session.get(self._locate(path), _MAX_FILE_BYTES)))
            return
        except FileAccessError:
            pass
        try:
            exists = any(entry.path == name for entry in await self.session.list_files(posixpath.dirname(name) or "."))
        except FileAccessError:  # its folder does not exist either
            exists = False
        if exists:  # too large to save: its earlier changes cannot be undone any more
            self._history = deque((version for version in self._history if version[0] != name), _MAX_UNDO)
        else:
            self._history.append((name, None))

    async def _read_text(self, path: str) -> str:
        try:
            return (await self.session.get(self._locate(path), _MAX_FILE_BYTES)).decode()
        except UnicodeDecodeError:
            raise FileAccessError(f"{path} is not a text file") from None


class CodeInterpreter(SandboxFiles):
    """A session in a sandbox. Subclasses set other limits or another mechanism."""

    @tool(name="code_interpreter", timeout=TOOL_TIMEOUT, max_length=20_000)
    async def run_python(self, code: str) -> dict[str, Any]:
        """Run Python code. Variables, imports and files stay for the next call. Shows what was printed and the value
        of the last expression.

        Args:
            code: The code to run.
        """
        return await self._observe(await self.session.run(code))

    @tool(timeout=TOOL_TIMEOUT, max_length=20_000)
    async def run_shell(self, command: str) -> dict[str, Any]:
        """Run a shell command in the working folder.

        Args:
            command: The command, as one would type it.
        """
        return await self._observe(await self.session.shell(command))

    @tool(timeout=TOOL_TIMEOUT)
    @_answer_file_errors
    async def list_files(self, path: str = ".") -> str:
        """List the files and folders below a folder.

        Args:
            path: The folder, from the working folder.
        """
        entries = await self.session.list_files(path, recursive=True)
        lines = [
            f"{entry.path}/" if entry.kind == "folder" else f"{entry.path} ({entry.size} bytes)" for entry in entries
        ]
        return "\n".join(lines) or "(empty)"

    @tool(timeout=TOOL_TIMEOUT)
    @_answer_file_errors
    async def search_files(self, pattern: str, path: str = ".") -> str:
        """Search the text files below a folder, line by line.

        Args:
            pattern: A piece of text, or a regular expression as `grep -E` takes it.
            path: The folder, from the working folder.
        """
        command = f"grep -rnIE -e {shlex.quote(pattern)} -- {shlex.quote(path)}"
        outcome = await self.session.shell(command)
        if outcome.status == 1 and not outcome.output:
            return "No line matches."
        return (await self._observe(outcome))["observation"] if outcome.status else outcome.output


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise FileAccessError("the text holds half of a surrogate pair, which no file can hold") from None
