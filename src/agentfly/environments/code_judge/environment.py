"""CodeJudge: runs generated code against unit tests or on given input, in a new session of the sandbox.

A solution and its tests run in two processes (see `judge_inside`). The tests' process receives the tests only after it
has forked the solution's process, exchanges plain data with it, and reports over a channel of which the solution has no
copy. The expected output of a program never enters the sandbox.

The rewards `unit_tests` and `output_match` have no time limit of their own: the judge limits the time of each solution,
and waiting for the judge is not counted.
"""

from __future__ import annotations

import ast
import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from agentfly.environment import Environment, Pool, Scope
from agentfly.environments.code_judge.unit_tests import Step, UnitTests
from agentfly.errors import DataError, EnvironmentFault
from agentfly.sandbox import EndReason, FileAccessError, Limits, Session, SessionClosed
from agentfly.sandbox.mechanisms import shared_sandbox
from agentfly.sandbox.mounts import INSIDE
from agentfly.scoring import reward
from agentfly.threads import usable_cpus

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
sys.modules["{package}.trusted"].protect_process()
"""
_MAX_STDERR_BYTES = 2000
_STDERR = "stderr"
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "python3", "py")
_MATCHES = ("exact", "words", "numbers")
_MAX_FAILURES = 5


@dataclass(frozen=True)
class Verdict:
    """The result of unit tests."""

    passed: int
    total: int
    failures: tuple[str, ...] = ()
    """Each failed test with the reason."""

    @property
    def rate(self) -> float:
        """The fraction of the tests that passed."""
        return self.passed / self.total


@dataclass(frozen=True)
class ProgramOutput:
    """The standard output of a program."""

    text: str
    error: str = ""
    """Why the program failed. Empty if it ended with status 0."""


class CodeJudge(Environment):
    """Scores any number of solutions concurrently. Subclasses set other limits or another mechanism."""

    pool: ClassVar[Pool] = Pool(scope=Scope.GLOBAL, concurrent=True)
    limits: ClassVar[Limits] = Limits(seconds=5, memory=1 << 30, output=1 << 20)
    """Limits of one session; `seconds` is the limit of one test, or of one run of a program."""
    total_seconds: ClassVar[float] = 60.0
    """Seconds for all tests of a solution. Tests that are not reached in time have failed."""
    max_concurrent: ClassVar[int | None] = None
    """Largest number of sessions at a time. None: one per CPU."""
    mechanism: ClassVar[str | None] = None
    """Name of a sandbox mechanism. None: the strongest safe one that works here; without one, `start` fails."""

    async def start(self) -> None:
        self._sandbox = await shared_sandbox(self.mechanism)
        self._semaphore = asyncio.Semaphore(self.max_concurrent or usable_cpus())

    @asynccontextmanager
    async def _open_session(self) -> AsyncIterator[Session]:
        session = await self._sandbox.open_session(self.limits)
        try:
            yield session
        finally:
            await session.close()

    async def unit_tests(
        self, solution: str, tests: str | Sequence[str], *, setup: str = "", entry_point: str | None = None
    ) -> Verdict:
        """Run tests against a solution.

        Args:
            solution: Python code.
            tests: One text, or a list of texts that are a test each. See `UnitTests.parse`.
            setup: Code that runs before the tests, in their process.
            entry_point: The expression that is passed to the tests' function `check`.

        Raises:
            DataError: The tests are not valid, or cannot run in the sandbox.
        """
        parsed = UnitTests.parse(tests, setup, entry_point)
        async with self._semaphore:
            run = _TestRun(solution, parsed, time.monotonic() + self.total_seconds)
            while run.remaining:
                async with self._open_session() as session:
                    await run.run_session(session)
        return Verdict(parsed.total - len(run.failures), parsed.total, tuple(run.failures))

    async def run_program(self, program: str, stdin: str = "") -> ProgramOutput:
        """Run a program as a script with the given standard input."""
        async with self._semaphore, self._open_session() as session:
            await session.put("input", stdin.encode("utf-8", "surrogatepass"))
            try:
                await session.put("program.py", program.encode("utf-8", "surrogatepass"))
            except FileAccessError as error:
                return ProgramOutput("", str(error))
            outcome = await session.shell(f"exec python3 -B program.py < input 2> {_STDERR}")
            if outcome.dropped:
                return ProgramOutput(outcome.output, f"it printed {outcome.dropped} characters more than it may")
            if outcome.ok:
                return ProgramOutput(outcome.output)
            if outcome.end is EndReason.TIMEOUT:
                return ProgramOutput(outcome.output, "it took too long")
            if outcome.end is not EndReason.ERROR:
                return ProgramOutput(outcome.output, outcome.error or outcome.end.value)
            try:
                stderr = (await session.shell(f"tail -c {_MAX_STDERR_BYTES} {_STDERR}", 5)).output
            except SessionClosed:  # the program can end its own session
                stderr = ""
            return ProgramOutput(outcome.output, " ".join([outcome.message, *stderr.strip().splitlines()[-1:]]))


class _TestRun:
    """A run of all tests of one solution, in as many sessions as it takes: a session that broke is not used again."""

    def __init__(self, solution: str, tests: UnitTests, deadline: float) -> None:
        self._solution = solution
        self._tests = tests
        self._deadline = deadline
        self._setup: list[Step] = []
        """Steps that ran and do not count: they are repeated in every session."""
        self.remaining = list(tests.steps)
        self.failures: list[str] = []

    async def run_session(self, session: Session) -> None:
        """Run the remaining tests as far as this session goes."""
        files = _inside_modules()
        loading = await session.run(_LOAD.format(package=_PACKAGE, files=files))
        if not loading.ok:
            raise EnvironmentFault(f"the judge does not start: {loading.message or loading.error}")
        names, modules = list(self._tests.names), dict(self._tests.modules)
        error = await self._call(session, f"start_solution({self._solution!r})", "the solution")
        error = error or await self._call(session, f"import_names({names!r}, {modules!r})", "modules they use")
        for step in self._setup:
            error = error or await self._call(session, f"run({step.source!r})", step.label)
        while self.remaining and not error:
            step = self.remaining.pop(0)
            error = await self._call(session, f"run({step.source!r})", step.label)
            if not step.counts:
                self._setup.append(step)
            elif error:
                self._fail(step, error)
                if error.startswith("broken: "):
                    return  # the remaining tests get a new session
                error = ""
        for step in self.remaining:
            self._fail(step, error)
        self.remaining.clear()

    def _fail(self, step: Step, error: str) -> None:
        if step.counts:
            self.failures.append(f"{step.label}: {error.partition(': ')[2]}")

    async def _call(self, session: Session, call: str, label: str) -> str:
        """Call a function of the tests' process and return its error.

        The error is empty, `failed: …`, or `broken: …` if the session cannot be used any more.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            return "failed: there was no time left for it"
        outcome = await session.run(f"sys.modules['{_PACKAGE}.trusted'].{call}", seconds)
        if outcome.end is EndReason.TIMEOUT:
            return "broken: it took too long"
        if not outcome.ok or outcome.value is None:
            return f"broken: {outcome.error or outcome.end.value}"
        result = str(ast.literal_eval(outcome.value))
        if result.startswith("fault: "):
            raise DataError(f"the tests cannot run in the sandbox: {result[7:]}, in {label}")
        return "" if result == "passed" else result


@cache
def _inside_modules() -> dict[str, str]:
    """The sources of the modules that run inside by name, each after those it needs."""
    modules = {_FRAMES: (INSIDE / "frames.py").read_text(), _PACKAGE: ""}
    for name in ("plain", "peer", "checks", "trusted"):
        modules[f"{_PACKAGE}.{name}"] = (_INSIDE / f"{name}.py").read_text()
    return modules


@reward(timeout=None)
async def unit_tests(
    prediction: str,
    tests: str | Sequence[str],
    judge: CodeJudge,
    setup: str | None = None,
    entry_point: str | None = None,
) -> dict[str, Any]:
    """The fraction of the column `tests` that the code in the reply passes."""
    verdict = await judge.unit_tests(extract_code(prediction), tests, setup=setup or "", entry_point=entry_point)
    return _build_score(verdict)


@reward(timeout=None)
async def output_match(
    prediction: str, cases: Sequence[Mapping[str, str]], judge: CodeJudge, match: str = "words", tolerance: float = 1e-6
) -> dict[str, Any]:
    """The fraction of the column `cases`, each with `stdin` and `expected`, whose expected output the program prints.

    `match`: `exact`; `words`, white space is ignored; `numbers`, words that are numbers may differ by the `tolerance`,
    absolute or relative.
    """
    if match not in _MATCHES:
        raise DataError(f"match is one of {', '.join(_MATCHES)}, not {match!r}")
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        raise DataError(f"cases must be a list of at least one case with stdin and expected, not {cases!r:.80}")
    for number, case in enumerate(cases):
        texts = [case.get("stdin", ""), case.get("expected")] if isinstance(case, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"cases[{number}] must have the texts stdin and expected, not {case!r:.80}")
    program = extract_code(prediction)
    try:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(judge.run_program(program, case.get("stdin", ""))) for case in cases]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first one, which cancelled the others
    failures = []
    for number, (case, run) in enumerate(zip(cases, runs, strict=True)):
        output = run.result()
        if output.error:
            failures.append(f"cases[{number}]: {output.error}")
        elif not _is_match(output.text, case["expected"], match, tolerance):
            failures.append(f"cases[{number}]: it printed {output.text!r:.100}")
    return _build_score(Verdict(len(cases) - len(failures), len(cases), tuple(failures)))


def extract_code(prediction: str) -> str:
    """Return the last block of Python in a reply, else the last block of any language, else the whole reply."""
    blocks = _FENCE.findall(prediction)
    python = [code for language, code in blocks if language.lower() in _PYTHON]
    return str((python or [code for _, code in blocks] or [prediction])[-1])


def _build_score(verdict: Verdict) -> dict[str, Any]:
    return {
        "reward": verdict.rate,
        "passed": verdict.passed,
        "total": verdict.total,
        "all_passed": float(verdict.passed == verdict.total),
        "wrong": list(verdict.failures[:_MAX_FAILURES]),
    }


def _is_match(printed: str, expected: str, match: str, tolerance: float) -> bool:
    if match == "exact":
        return printed == expected
    printed_words, expected_words = printed.split(), expected.split()
    if match == "words" or len(printed_words) != len(expected_words):
        return printed_words == expected_words
    for our, their in zip(printed_words, expected_words, strict=True):
        if our == their:
            continue
        try:
            # float() accepts 1_000, which no program prints for a number
            is_close = "_" not in our and math.isclose(float(our), float(their), rel_tol=tolerance, abs_tol=tolerance)
        except ValueError:
            is_close = False
        if not is_close:
            return False
    return True
