"""A judge of code: runs what a model wrote in a fresh session of the sandbox, and says what it earned.

A solution and its tests are two processes there. The tests' process gets its tests only after the solution's process
has left it, talks to it in plain data, and reports over a channel the solution has no copy of. What a program should
have printed never enters the sandbox at all.
"""

from __future__ import annotations

import ast
import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from agentfly.environment import Environment, Pool, Scope
from agentfly.environments.judge_tests import Step, UnitTests
from agentfly.errors import DataError, EnvironmentFault
from agentfly.sandbox import EndReason, FileAccessError, Limits, Outcome, Session, SessionClosed
from agentfly.sandbox.mounts import INSIDE
from agentfly.sandbox.shared import shared_sandbox

_INSIDE = Path(__file__).parent / "judge_inside"
_PACKAGE = "agentfly_judge"
_FRAMES = "agentfly.sandbox.inside.frames"
_LOAD = """
import sys, types
def load(files):
    for name, source in files.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__package__, module.__path__ = {package!r}, []
        exec(compile(source, name, "exec", 0, True), module.__dict__)
load({files!r})
sys.modules["{package}.trusted"].close_to_others()
"""
_RUN = "sys.modules[{module!r}].{call}"
_MOST_COMPLAINT = 2000
_COMPLAINT = "complaint"


@dataclass(frozen=True)
class Verdict:
    """What a solution earned."""

    passed: int
    total: int
    failures: tuple[str, ...] = ()
    """Each test that failed, with what went wrong in words."""

    @property
    def rate(self) -> float:
        """The part of the tests that passed."""
        return self.passed / self.total


@dataclass(frozen=True)
class Printed:
    """What a program wrote to its standard output."""

    text: str
    wrong: str = ""
    """What went wrong, in words; empty when it ended by itself and with status 0."""


class CodeJudge(Environment):
    """Judges any number of solutions, some at once. Set other limits, or another mechanism, on a subclass."""

    pool: ClassVar[Pool] = Pool(scope=Scope.GLOBAL, concurrent=True)
    limits: ClassVar[Limits] = Limits(seconds=5, memory=1 << 30, output=1 << 20)
    """Of one judgement; `seconds` are those of one test, or of one run of a program."""
    total_seconds: ClassVar[float] = 60.0
    """Seconds for all tests of a solution together; those not reached have failed."""
    at_once: ClassVar[int | None] = None
    """Judgements that run at once; None: one for each processor."""
    mechanism: ClassVar[str | None] = None
    """None takes the strongest that works here, and refuses to run where none does."""

    async def start(self) -> None:
        self._sandbox = await shared_sandbox(self.mechanism)
        self._turns = asyncio.Semaphore(self.at_once or len(os.sched_getaffinity(0)))

    @asynccontextmanager
    async def _fresh(self) -> AsyncIterator[Session]:
        session = await self._sandbox.open_session(self.limits)
        try:
            yield session
        finally:
            await session.close()

    async def unit_tests(
        self, solution: str, tests: str | Sequence[str], *, setup: str = "", entry_point: str | None = None
    ) -> Verdict:
        """Run tests against a solution. `setup` runs before them, on their side; UnitTests says what tests may be."""
        told = UnitTests.of(tests, setup, entry_point)
        async with self._turns:
            judgement = _Judgement(solution, told, time.monotonic() + self.total_seconds)
            while judgement.left:
                async with self._fresh() as session:
                    await judgement.go_on(session)
        failures = tuple(judgement.failures)
        return Verdict(told.total - len(failures), told.total, failures)

    async def output(self, program: str, stdin: str = "") -> Printed:
        """Run a program as a script, with this on its standard input."""
        async with self._turns, self._fresh() as session:
            await session.put("input", stdin.encode("utf-8", "surrogatepass"))
            try:
                await session.put("program.py", program.encode("utf-8", "surrogatepass"))
            except FileAccessError as error:
                return Printed("", str(error))
            outcome = await session.shell(f"exec python3 -B program.py < input 2> {_COMPLAINT}")
            if outcome.ok and not outcome.dropped:
                return Printed(outcome.output)
            return Printed(outcome.output, await _complaint(session, outcome))


async def _complaint(session: Session, outcome: Outcome) -> str:
    if outcome.dropped:
        return f"it printed {outcome.dropped} characters more than it may"
    if outcome.end is not EndReason.ERROR:
        return "it took too long" if outcome.end is EndReason.TIMEOUT else outcome.error or outcome.end.value
    try:
        said = (await session.shell(f"tail -c {_MOST_COMPLAINT} {_COMPLAINT}", 5)).output
    except SessionClosed:  # the program's doing: it had the session to itself
        said = ""
    return " ".join([outcome.message, *said.strip().splitlines()[-1:]])


class _Judgement:
    """The tests of one solution, run in as many sessions as it takes: one that broke is not used again."""

    def __init__(self, solution: str, tests: UnitTests, until: float) -> None:
        self._solution, self._tests, self._until = solution, tests, until
        self._prepared: list[Step] = []
        self.left = list(tests.steps)
        self.failures: list[str] = []

    async def go_on(self, session: Session) -> None:
        """Run the tests that are left, as far as this session goes."""
        wrong = await self._begin(session)
        for step in self._prepared:
            wrong = wrong or await self._run(session, step)
        while self.left and not wrong:
            step = self.left.pop(0)
            wrong = await self._run(session, step)
            if not step.counts:
                self._prepared.append(step)
            elif wrong:
                self._fail(step, wrong)
                if wrong.startswith("broken: "):
                    return  # the tests after it get a fresh session
                wrong = ""
        for step in self.left:
            self._fail(step, wrong)
        self.left.clear()

    def _fail(self, step: Step, wrong: str) -> None:
        if step.counts:
            self.failures.append(f"{step.label}: {wrong.partition(': ')[2]}")

    async def _begin(self, session: Session) -> str:
        files = {_FRAMES: (INSIDE / "frames.py").read_text(), _PACKAGE: ""}
        files |= {f"{_PACKAGE}.{name}": source for name, source in _inside().items()}
        loading = await session.run(_LOAD.format(package=_PACKAGE, files=files))
        if not loading.ok:
            raise EnvironmentFault(f"the judge does not start: {loading.message or loading.error}")
        names, modules = list(self._tests.names), dict(self._tests.modules)
        wrong = await self._ask(session, f"begin({self._solution!r})", "the solution")
        return wrong or await self._ask(session, f"take_names({names!r}, {modules!r})", "modules they use")

    async def _run(self, session: Session, step: Step) -> str:
        return await self._ask(session, f"run({step.source!r})", step.label)

    async def _ask(self, session: Session, call: str, what: str) -> str:
        """What went wrong in the tests' process: `failed: …`, or `broken: …` where no more can be asked; empty when all
        went well."""
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            return "failed: there was no time left for it"
        outcome = await session.run(_RUN.format(module=f"{_PACKAGE}.trusted", call=call), seconds)
        if not outcome.ok or outcome.value is None:
            late = outcome.end is EndReason.TIMEOUT
            return f"broken: {'it took too long' if late else outcome.error or outcome.end.value}"
        said = str(ast.literal_eval(outcome.value))
        if said.startswith("fault: "):
            raise DataError(f"the tests cannot run in the sandbox: {said[7:]}, in {what}")
        return "" if said == "passed" else said


@cache
def _inside() -> dict[str, str]:
    """The modules that run inside, each after those it needs."""
    return {
        name: (_INSIDE / f"{name}.py").read_text() for name in ("plain", "peer", "solution", "swallowed", "trusted")
    }
