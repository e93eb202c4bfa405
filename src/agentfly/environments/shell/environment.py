"""A shell in a sandbox, with a tree of files that is made for the task.

What a chain leaves behind and what its last command printed is compared with what the right command leaves and prints
on a copy of the same tree, in a session of its own that the chain's cannot reach.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentfly.environment import Environment, Pool, Recycle
from agentfly.environments.shell import questions
from agentfly.environments.shell.state import State, Untold, changes, state_of
from agentfly.environments.shell.words import same_output, similarity
from agentfly.errors import ConfigError, DataError, EnvironmentFault
from agentfly.sandbox import EndReason, FileAccessError, Limits, Session
from agentfly.sandbox.shared import Mechanism, shared_sandbox
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

_TIMEOUT = 600.0
"""Seconds after which a call is given up altogether; a session's own limit ends it long before."""
_SORTS = re.compile(r"\bsort\b")
_GONE = "[A fresh session was started, with the files of the task as they were.]"


@dataclass(frozen=True, slots=True)
class Job:
    """What a task is made of."""

    files: dict[str, str]
    setup: str
    """A script that makes more of the tree, or changes it; may be empty."""
    gold: str | None

    @classmethod
    def of(cls, task: Task) -> Job:
        files, setup = task.columns.get("files") or {}, task.columns.get("setup") or ""
        gold = task.columns.get("gold")
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise DataError("the column 'files' must map paths to text")
        if not isinstance(setup, str) or not isinstance(gold, str | None) or not (files or setup):
            raise DataError(
                f"task {task.id!r} needs the column 'files' or 'setup' (a script), and 'gold' (a command); "
                "Shell.draw_tasks and nl2bash_tasks make such rows"
            )
        return cls(files, setup, gold)

    @property
    def mark(self) -> str:
        return hashlib.sha256(json.dumps([self.files, self.setup, self.gold], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Expected:
    """What the right command does."""

    before: State
    after: State
    printed: str


_EXPECTED: OrderedDict[str, Expected] = OrderedDict()
_KEPT = 512
"""Tasks of which it is remembered what the right command does: the chains of a group ask for the same."""


class Shell(Environment):
    """A shell, and a tree of files in which something is to be found or changed."""

    pool = Pool(recycle=Recycle.REPLACE, min_warm=2, max_instances=256)
    scored_by = "shell_match"
    limits: ClassVar[Limits] = Limits(seconds=10, inodes=2000, output=64 << 10)
    mechanism: ClassVar[Mechanism] = None
    """By name, or a Container. None takes the strongest that works here, and refuses to run where none does."""
    longest: ClassVar[int] = 4000
    """Characters of what a command prints that are shown."""
    _session: Session | None = None

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, kinds: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Things to find, count, move, rename, pack, sort, delete or permit, which take turns; or those of `kinds`."""
        return questions.draw_tasks(split, count, seed, kinds)

    async def start(self) -> None:
        self._sandbox = await shared_sandbox(self.mechanism)
        self._session = await self._sandbox.open_session(self.limits)
        self._fresh = True

    async def reset(self, task: Task) -> None:
        """A fresh session with the tree of the task."""
        self._job = Job.of(task)
        if not self._fresh:
            await self._replace()
        self._fresh = False
        await _prepare(self._live, self._job)
        self.printed = ""
        """What the last command printed."""
        self.commands = 0
        """How many were run."""

    async def check(self) -> None:
        """Fail where the session died while nobody used it."""
        if not self._live.alive:
            raise EnvironmentFault("the session is gone")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def _live(self) -> Session:
        assert self._session is not None
        return self._session

    async def _replace(self) -> None:
        await self.close()
        self._session = await self._sandbox.open_session(self.limits)

    @tool(name="shell", timeout=_TIMEOUT, max_length=100_000)
    async def run_shell(self, command: str) -> dict[str, Any]:
        """Run a shell command. It starts in the folder of the task. What the last command prints is the answer.

        Args:
            command: The command, as one would type it.
        """
        outcome = await self._live.shell(command)
        self.commands += 1
        self.printed = outcome.output
        text = outcome.text if len(outcome.text) <= self.longest else f"{outcome.text[: self.longest]}\n(cut)"
        if not outcome.files_kept:
            await self._replace()
            await _prepare(self._live, self._job)
            text += f"\n{_GONE}"
        return {"observation": text or "(no output)", "end": outcome.end.value}

    async def judged(self, answer: str = "") -> dict[str, Any]:
        """What the chain left and printed, against what the right command does.

        `match`: whether both are the same; `similarity`: how much they are, as InterCode counts it; `changed`: whether
        the files are as they should be; `said`: whether the right thing was printed, or said as the final answer.
        """
        right = await self._expected()
        ordered = self._job.gold is not None and bool(_SORTS.search(self._job.gold))
        said = not right.printed.strip() or any(
            same_output(text, right.printed, ordered=ordered) for text in (self.printed, answer)
        )
        try:
            state = await state_of(self._live)
        except Untold:
            return {"match": False, "similarity": 0.0, "changed": False, "said": said, "commands": self.commands}
        changed = dict(state) == dict(right.after)
        return {
            "match": changed and said,
            "similarity": _similarity(state, self.printed, right),
            "changed": changed,
            "said": said,
            "commands": self.commands,
        }

    async def _expected(self) -> Expected:
        mark = self._job.mark
        if mark not in _EXPECTED:
            _EXPECTED[mark] = await self._carried_out()
            while len(_EXPECTED) > _KEPT:
                _EXPECTED.popitem(last=False)
        return _EXPECTED[mark]

    async def _carried_out(self) -> Expected:
        """Run the right command in a session that nobody else has."""
        if self._job.gold is None:
            raise DataError("the row needs a command in the column 'gold'")
        session = await self._sandbox.open_session(self.limits)
        try:
            await _prepare(session, self._job)
            before = await state_of(session)
            outcome = await session.shell(self._job.gold)
            if outcome.end not in (
                EndReason.OK,
                EndReason.ERROR,
            ):  # a status is no fault: grep has one where nothing is found
                raise DataError(f"the command of the column 'gold' fails: {outcome.text:.200}: {self._job.gold:.200}")
            return Expected(before, await state_of(session), outcome.output)
        except Untold as error:
            raise DataError(f"the tree of the task cannot be compared: {error}") from error
        finally:
            await session.close()

    def expert(self) -> ToolCall | str:
        """Run the right command."""
        if self._job.gold is None:
            raise ConfigError("this task has no expert: its row has no column 'gold'")
        return "Done." if self.commands else ToolCall("shell", {"command": self._job.gold})


async def _prepare(session: Session, job: Job) -> None:
    try:
        for path, text in job.files.items():
            await session.put(path, text.encode())
    except FileAccessError as error:
        raise DataError(f"a file of the task cannot be written: {error}") from error
    if job.setup:
        outcome = await session.shell(job.setup)
        if outcome.end not in (EndReason.OK, EndReason.ERROR):
            raise DataError(f"the script of the column 'setup' fails: {outcome.text:.200}")


def _similarity(state: State, printed: str, right: Expected) -> float:
    """A third each for the right files changed, for their contents, and for what was printed."""
    ours, theirs = (set(changes(right.before, after).items()) for after in (state, right.after))
    common = [path for path, status in ours & theirs if status != "D"]
    contents = sum(state[path] == right.after[path] for path in common) / len(common) if common else 1.0
    said = similarity(printed, right.printed) if right.printed.strip() else 1.0
    return (1 - math.erf(len(ours ^ theirs)) + contents + said) / 3
