"""A judge of mathematical answers: `math-verify`, in processes that a hostile answer can end but not hold up.

`math-verify` bounds its time by a signal, which reaches only the main thread and only between two steps of Python; an
answer such as 9**9**9**9 is one step that never ends. So it runs apart, and whoever does not come to an end in time is
wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from agentfly.environment import Environment, Pool, Scope
from agentfly.errors import DataError, EnvironmentFault
from agentfly.extras import require_extra
from agentfly.threads import call

_INSIDE = Path(__file__).with_name("judge_inside.py")
_ANSWERS = 1000
"""Answers that one process judges before another takes its place: what parsers remember must not add up."""


class MathJudge(Environment):
    """Says whether two answers are the same in mathematics, any number at once (extra `math`)."""

    pool: ClassVar[Pool] = Pool(scope=Scope.GLOBAL, concurrent=True)
    seconds: ClassVar[float] = 5.0
    """Seconds of processor time for one answer; one that takes longer is wrong."""
    memory: ClassVar[int] = 2 << 30
    """Bytes that one process may have."""
    longest: ClassVar[int] = 2000
    """Characters of an answer that are read: its last ones."""
    at_once: ClassVar[int | None] = None
    """Processes; None: one for each processor. They are started when they are needed."""

    async def start(self) -> None:
        with require_extra("judging mathematics", "math"):
            if find_spec("math_verify") is None:
                raise ModuleNotFoundError("math_verify", name="math_verify")
        self._turns = asyncio.Semaphore(self.at_once or len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._closed = False

    async def equal(self, given: str, right: str | float) -> bool:
        """Whether the answer in a text is the right one: what is boxed in it, what it says the answer is, or its last
        number or formula."""
        gold = _text_of(right)
        async with self._turns:
            said = await call(self._judged, given[-self.longest :], gold)
        if not said["readable"]:
            raise DataError(f"the right answer {gold!r:.80} cannot be read as mathematics; judge it with qa_em instead")
        return bool(said["right"])

    def _judged(self, given: str, right: str) -> dict[str, bool]:
        process = self._taken() or _Process(self.seconds, self.memory)
        said = process.judged(given, right)
        with self._lock:
            goes_on = process.answers < _ANSWERS and said is not None and not self._closed
            if goes_on:
                self._idle.append(process)
        if not goes_on:
            process.end()
        return said or {"readable": True, "right": False}

    def _taken(self) -> _Process | None:
        """A process that is idle; one that somebody ended meanwhile is no verdict on the next answer."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                process = self._idle.pop()
            if process.alive:
                return process
            process.end()

    async def close(self) -> None:
        if not hasattr(self, "_lock"):  # its start failed
            return
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for process in idle:
            process.end()


class _Process:
    """One process that judges, one answer after the other."""

    def __init__(self, seconds: float, memory: int) -> None:
        # -P: the folder of the script is no place to import from
        command = [sys.executable, "-P", str(_INSIDE), str(seconds), str(memory)]
        self.answers, pipe = 0, subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        if self._line() != "ready":
            self.end()
            raise EnvironmentFault(f"math-verify does not start in {sys.executable}; see what its import says there")

    def judged(self, given: str, right: str) -> dict[str, Any] | None:
        """What it says; None where it did not live to say it."""
        assert self._process.stdin is not None
        self.answers += 1
        try:
            print(json.dumps({"given": given, "right": right}), file=self._process.stdin, flush=True)
        except OSError:
            return None
        line = self._line()
        return json.loads(line) if line else None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        with self._process:  # closes the pipes, and waits
            pass


def _text_of(right: object) -> str:
    if isinstance(right, bool) or not isinstance(right, str | int | float) or not str(right).strip():
        raise DataError(f"the right answer must be a text or a number, not {right!r:.80}")
    return str(right).strip()
