"""MathJudge: compares mathematical answers with math-verify, in processes that a hostile answer cannot block.

math-verify limits its time by a signal, which Python handles only in the main thread and only between two bytecodes; an
answer such as 9**9**9**9 is one operation that never ends. So worker processes (`judge_inside`) compare answers, and
the kernel ends them at their limit of CPU time. An answer that exceeds it is wrong.
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
_MAX_ANSWERS = 1000
"""Answers that one worker process compares before it is replaced, because parsers keep caches."""


class MathJudge(Environment):
    """Decides whether two answers are mathematically equal, any number concurrently (extra `math`)."""

    pool: ClassVar[Pool] = Pool(scope=Scope.GLOBAL, concurrent=True)
    seconds: ClassVar[float] = 5.0
    """Seconds of CPU time for one answer; an answer that takes longer is wrong."""
    memory: ClassVar[int] = 2 << 30
    """Bytes of memory of one worker process."""
    max_characters: ClassVar[int] = 2000
    """Only the last characters of an answer are read, this many."""
    max_concurrent: ClassVar[int | None] = None
    """Largest number of worker processes, which are started on demand. None: one per CPU."""

    async def start(self) -> None:
        with require_extra("judging mathematics", "math"):
            if find_spec("math_verify") is None:
                raise ModuleNotFoundError("math_verify", name="math_verify")
        self._semaphore = asyncio.Semaphore(self.max_concurrent or len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._idle: list[_JudgeProcess] = []
        self._closed = False

    async def equal(self, answer: str, expected: str | float) -> bool:
        """Whether the answer in a text equals the expected one.

        The answer is the content of the last box, what follows "the answer is", or the last number or formula.
        Raises DataError if the expected answer cannot be read as mathematics.
        """
        if isinstance(expected, bool) or not isinstance(expected, str | int | float) or not str(expected).strip():
            raise DataError(f"the right answer must be a text or a number, not {expected!r:.80}")
        gold = str(expected).strip()
        async with self._semaphore:
            result = await call(self._compare, answer[-self.max_characters :], gold)
        if not result["readable"]:
            raise DataError(f"the right answer {gold!r:.80} cannot be read as mathematics; judge it with qa_em instead")
        return bool(result["right"])

    def _compare(self, answer: str, expected: str) -> dict[str, bool]:
        """Compare two answers in an idle worker, or in a new one."""
        worker = None
        while worker is None:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = _JudgeProcess(self.seconds, self.memory)
            elif not worker.alive:  # killed from outside while it was idle: no verdict on this answer
                worker.end()
                worker = None
        result = worker.compare(answer, expected)
        with self._lock:
            is_reusable = worker.answers < _MAX_ANSWERS and result is not None and not self._closed
            if is_reusable:
                self._idle.append(worker)
        if not is_reusable:
            worker.end()
        return result or {"readable": True, "right": False}

    async def close(self) -> None:
        if not hasattr(self, "_lock"):  # `start` failed
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()


class _JudgeProcess:
    """A process that compares answers one after the other: JSON lines on its standard input and output."""

    def __init__(self, seconds: float, memory: int) -> None:
        # -P: do not import from the folder of the script
        command = [sys.executable, "-P", str(_INSIDE), str(seconds), str(memory)]
        pipe = subprocess.PIPE
        self.answers = 0
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        if self._read_line() != "ready":
            self.end()
            raise EnvironmentFault(f"math-verify does not start in {sys.executable}; try to import it there")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def compare(self, answer: str, expected: str) -> dict[str, Any] | None:
        """Return the verdict; None if the process ended before it replied."""
        assert self._process.stdin is not None
        self.answers += 1
        try:
            print(json.dumps({"given": answer, "right": expected}), file=self._process.stdin, flush=True)
        except OSError:
            return None
        line = self._read_line()
        return json.loads(line) if line else None

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        with self._process:  # closes the pipes and waits
            pass
