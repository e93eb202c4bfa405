"""Repair: a Python package with a bug in a sandbox session, to read, run and repair, and its rewards.

The session has the package and some of its tests. The hidden tests are never in it: the reward takes only the package's
source files and runs the tests on them in another session (see `judge`). Rewards have no time limit of their own: the
judge limits the time of each package, and waiting for the judge is not counted.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Sequence
from typing import Any

from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.repair import tasks
from agentfly.environments.repair.judge import RepairJudge, copy_image_folder, is_source, open_task_sandbox
from agentfly.environments.repair.tasks import Mutation
from agentfly.errors import ConfigError, DataError
from agentfly.sandbox import FileAccessError, Outcome, Session
from agentfly.scoring import reward
from agentfly.types import Task, ToolCall

_MAX_FILE_BYTES = 1 << 20
"""Largest source file. Larger ones are ignored."""
_CONTEXT_LINES = 5
"""Lines that the expert reads before and after the bug."""


class Repair(CodeInterpreter):
    """A Python package with a bug, to be repaired with the tools of the code interpreter."""

    scored_by = "repair_success"

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, packages: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Draw bugs in the shipped packages, or in those of them that `packages` names.

        A line that is mutated in one split is correct in the others. To hold out whole packages, train on other ones.
        """
        return tasks.draw_tasks(split, count, seed, packages)

    async def reset(self, task: Task) -> None:
        """Start a new session with the files of the columns `package` and `files`.

        With an `image_id`, the session is in a container of that image and also has the files of its `folder`.
        """
        self._columns = {**task.columns, "files": task.columns.get("files") or {}}
        if not isinstance(self._columns.get("package"), str) or not isinstance(self._columns["files"], dict):
            raise DataError(
                f"task {task.id!r} needs the columns `package`, a name, and `files`, texts by path; "
                "Repair.draw_tasks and package_tasks make such rows"
            )
        self._has_read = self._has_run = False
        sandbox = await open_task_sandbox(self._columns, self.mechanism)
        if sandbox is not self._sandbox:
            self._sandbox = sandbox
            self._unused = False
        await super().reset(task)

    async def _write_files(self, session: Session) -> None:
        await copy_image_folder(session, self._columns)
        await super()._write_files(session)

    async def sources(self) -> dict[str, bytes]:
        """Return the package's current source files by path."""
        package = self._columns["package"]
        contents = dict[str, bytes]()
        for folder, recursive in ((package, True), (posixpath.dirname(package) or ".", False)):
            # The package may be a single module, and files may disappear while they are listed.
            with contextlib.suppress(FileAccessError):
                for entry in await self.session.list_files(folder, recursive=recursive):
                    if entry.kind == "file" and entry.size <= _MAX_FILE_BYTES and is_source(entry.path, package):
                        contents[entry.path] = await self.session.get(entry.path, _MAX_FILE_BYTES)
        return contents

    async def expert(self) -> ToolCall | str:
        """Read the lines around the bug, correct it, run the visible tests."""
        if "mutation" not in self._columns:
            raise ConfigError("only tasks with a column `mutation` have an expert; Repair.draw_tasks makes such rows")
        bug = Mutation(**self._columns["mutation"])
        lines = (await self.session.get(bug.path)).decode().split("\n")
        if bug.line > len(lines) or lines[bug.line - 1] != bug.after:
            if not self._has_run:
                return ToolCall("run_shell", {"command": self._columns.get("test_command", tasks.TEST_COMMAND)})
            return f"Line {bug.line} of {bug.path} was wrong; it is repaired."
        if not self._has_read:
            first, last = max(1, bug.line - _CONTEXT_LINES), bug.line + _CONTEXT_LINES
            return ToolCall("read_file", {"path": bug.path, "first": first, "last": last})
        # `edit_file` needs a text that occurs once: take as many lines before the bug as make it unique.
        text = "\n".join(lines)
        for first in range(bug.line - 1, -1, -1):
            preceding = lines[first : bug.line - 1]
            old = "\n".join([*preceding, bug.after])
            if text.count(old) == 1:
                return ToolCall("edit_file", {"path": bug.path, "old": old, "new": "\n".join([*preceding, bug.before])})
        raise AssertionError("the whole text occurs once in itself")

    async def _read_text(self, path: str) -> str:
        text = await super()._read_text(path)
        self._has_read = True
        return text

    async def _observe(self, outcome: Outcome) -> dict[str, Any]:
        self._has_run = True
        return await super()._observe(outcome)


@reward(timeout=None)
async def repair_success(
    env: Repair, judge: RepairJudge, task: Task, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> dict[str, Any]:
    """1 if all hidden tests pass, else 0."""
    fixed, intact = await _pass_rates(env, judge, task, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass)
    return {"reward": float(fixed == intact == 1), "fail_to_pass": fixed, "pass_to_pass": intact}


@reward(timeout=None)
async def tests_pass(
    env: Repair, judge: RepairJudge, task: Task, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> dict[str, Any]:
    """The fraction of the failing hidden tests that pass now. 0 if another test is broken."""
    fixed, intact = await _pass_rates(env, judge, task, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass)
    return {"reward": fixed if intact == 1 else 0.0, "fail_to_pass": fixed, "pass_to_pass": intact}


async def _pass_rates(
    env: Repair, judge: RepairJudge, task: Task, *, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> tuple[float, float]:
    if isinstance(fail_to_pass, str) or isinstance(pass_to_pass, str):
        raise DataError("the columns 'fail_to_pass' and 'pass_to_pass' must be lists of tests, not texts")
    if not fail_to_pass:
        raise DataError("the column 'fail_to_pass' names no test: there is nothing to repair")
    passing = await judge.passing_tests(task.columns, await env.sources())
    fixed, intact = (sum(test in passing for test in tests) for tests in (fail_to_pass, pass_to_pass))
    return fixed / len(fail_to_pass), intact / len(pass_to_pass) if pass_to_pass else 1.0
