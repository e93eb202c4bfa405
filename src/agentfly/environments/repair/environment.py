"""A package with a bug, in a sandbox: read it, run it, repair it.

The chain has the package and some of its tests; the tests that decide are never in its session. What it leaves is
judged by its source files alone (see `judge`), so nothing else that it writes has any say.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Sequence
from typing import Any

from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.repair import generated
from agentfly.environments.repair.mutation import Mutation
from agentfly.environments.repair.pytest_run import is_source, sandbox_of, unpack
from agentfly.errors import ConfigError, DataError
from agentfly.sandbox import FileAccessError, Outcome
from agentfly.types import Task, ToolCall

_LARGEST = 1 << 20
"""Bytes of a source file; a larger one is none."""
_AROUND = 5
"""Lines that the expert looks at before and after the bug."""


class Repair(CodeInterpreter):
    """A Python package that has a bug, to be repaired with the tools of the code interpreter."""

    scored_by = "repaired"

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, packages: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Bugs in the shipped packages, or in those of them that are named. A line that is wrong in one split is right
        in the others; to hold out whole packages, name others for training."""
        return generated.draw_tasks(split, count, seed, packages)

    async def reset(self, task: Task) -> None:
        """A fresh session with the package of the columns `package` and `files`; in a container of `image_id`, if there
        is one, with what that has in `folder`."""
        self._columns = _checked(task)
        self._looked = self._ran = False
        sandbox = await sandbox_of(self._columns, self.mechanism)
        if sandbox is not self._sandbox:
            self._sandbox, self._unused = sandbox, False
        await super().reset(task)

    async def _write_files(self) -> None:
        await unpack(self.session, self._columns)
        await super()._write_files()

    async def sources(self) -> dict[str, bytes]:
        """The package's source files as they are now."""
        package = self._columns["package"]
        found = dict[str, bytes]()
        for folder, deep in ((package, True), (posixpath.dirname(package) or ".", False)):
            with contextlib.suppress(
                FileAccessError
            ):  # a package may be a module, and what it is may change as we look
                for entry in await self.session.list_files(folder, recursive=deep):
                    if entry.kind == "file" and entry.size <= _LARGEST and is_source(entry.path, package):
                        found[entry.path] = await self.session.get(entry.path, _LARGEST)
        return found

    async def expert(self) -> ToolCall | str:
        """Look at the wrong line, put it right, run the tests."""
        if "mutation" not in self._columns:
            raise ConfigError("only tasks with a column `mutation` have an expert; those of Repair.draw_tasks do")
        bug = Mutation(**self._columns["mutation"])
        lines = (await self.session.get(bug.path)).decode().split("\n")
        if bug.line <= len(lines) and lines[bug.line - 1] == bug.after:
            if not self._looked:
                first, last = max(1, bug.line - _AROUND), bug.line + _AROUND
                return ToolCall("read_file", {"path": bug.path, "first": first, "last": last})
            old, new = _unique(lines, bug)
            return ToolCall("edit_file", {"path": bug.path, "old": old, "new": new})
        if not self._ran:
            return ToolCall("run_shell", {"command": self._columns.get("test_command", generated.TEST_COMMAND)})
        return f"Line {bug.line} of {bug.path} was wrong; it is repaired."

    async def _read_text(self, path: str) -> str:
        text = await super()._read_text(path)
        self._looked = True
        return text

    async def _observe(self, outcome: Outcome) -> dict[str, Any]:
        self._ran = True
        return await super()._observe(outcome)


def _unique(lines: list[str], bug: Mutation) -> tuple[str, str]:
    """The wrong line, with as many before it as make it the only one of its kind; and what it should be."""
    text = "\n".join(lines)
    for first in range(bug.line - 1, -1, -1):
        before = lines[first : bug.line - 1]
        old = "\n".join([*before, bug.after])
        if text.count(old) == 1:
            return old, "\n".join([*before, bug.before])
    raise AssertionError("all of a text occurs in it once")


def _checked(task: Task) -> dict[str, Any]:
    """The columns of a task that can be reset to."""
    columns = {**task.columns, "files": task.columns.get("files") or {}}
    if not isinstance(columns.get("package"), str) or not isinstance(columns["files"], dict):
        raise DataError(
            f"task {task.id!r} needs the columns `package`, a name, and `files`, its texts by path; "
            "Repair.draw_tasks and package_tasks make such rows"
        )
    return columns
