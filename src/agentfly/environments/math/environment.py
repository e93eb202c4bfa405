"""MathWithPython, MathJudge, which compares mathematical answers, and the rewards that use it.

math-verify limits its time by a signal, which Python handles only in the main thread and only between two bytecodes. An
answer such as 9**9**9**9 is one operation that never ends. So worker processes (`judge_inside`) compare answers, and
the kernel ends them at their limit of CPU time. An answer that exceeds it is wrong.

The rewards take the answer from the final reply without its thoughts: the last `<answer>…</answer>`, the last box, what
follows "the answer is", or the last number or formula. They have no time limit of their own: the judge limits the time
of each answer, and waiting for the judge is not counted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from agentfly.environment import Environment, Pool, Scope
from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.math import tasks
from agentfly.errors import ConfigError, DataError, EnvironmentFault, require_extra
from agentfly.rewards.answers import extract_answer, has_successful_call
from agentfly.sandbox.inside.frames import DATA, NO_LIMIT, PipeChannel, pack, receive
from agentfly.scoring import reward
from agentfly.segment import Author
from agentfly.threads import call, usable_cpus
from agentfly.trajectory import Trajectory
from agentfly.types import Task, ToolCall

TOOL_CREDIT = 0.1
"""Reward of a wrong answer after a successful tool call, in the rewards that require one."""
_INSIDE = Path(__file__).with_name("judge_inside.py")
_MAX_ANSWERS = 1000
"""Answers that one worker process compares before it is replaced, because parsers keep caches."""
_OPEN, _CLOSE = "<think>", "</think>"


class MathWithPython(CodeInterpreter):
    """A code interpreter with problems whose answers have to be computed."""

    scored_by = "math_equal"

    draw_tasks = staticmethod(tasks.draw_tasks)

    async def reset(self, task: Task) -> None:
        self._program = task.columns.get("program")
        await super().reset(task)

    def expert(self) -> ToolCall | str:
        """Run the program of the column `program`, then answer with the last line of its output."""
        if self.last_output is not None:
            return self.last_output.strip().rpartition("\n")[2]
        if not isinstance(self._program, str):
            raise ConfigError("only problems with a column `program` have an expert; draw_tasks makes such rows")
        return ToolCall("code_interpreter", {"code": self._program})


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
        self._semaphore = asyncio.Semaphore(self.max_concurrent or usable_cpus())
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
            elif worker.process.poll() is not None:  # killed from outside while it was idle: no verdict on this answer
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
    """A process that compares answers one after the other: frames of JSON on its standard input and output."""

    def __init__(self, seconds: float, memory: int) -> None:
        # -P: do not import from the folder of the script
        command = [sys.executable, "-P", str(_INSIDE), str(seconds), str(memory)]
        pipe = subprocess.PIPE
        self.answers = 0
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._channel = PipeChannel(self.process.stdout.fileno(), self.process.stdin.fileno())
        try:
            receive(self._channel, NO_LIMIT)  # the worker sends one frame when it is ready
        except EOFError:
            self.end()
            raise EnvironmentFault(f"math-verify does not start in {sys.executable}; try to import it there") from None

    def compare(self, answer: str, expected: str) -> dict[str, Any] | None:
        """Return the verdict. None if the process ended before it replied."""
        self.answers += 1
        try:
            self._channel.sendall(pack(DATA, json.dumps({"answer": answer, "right": expected}).encode()))
            verdict: dict[str, Any] = json.loads(receive(self._channel, NO_LIMIT)[1])
        except (OSError, EOFError):
            return None
        return verdict

    def end(self) -> None:
        self.process.kill()
        with self.process:  # closes the pipes and waits
            pass


@reward(timeout=None)
async def math_equal(prediction: str, answer: str | float, judge: MathJudge) -> dict[str, float]:
    """1 if the answer equals the column `answer`, else 0."""
    return await _score(prediction, answer, judge)


@reward(timeout=None)
async def math_equal_tool(
    prediction: str, answer: str | float, trajectory: Trajectory, judge: MathJudge
) -> dict[str, float]:
    """1 if the answer is right and a tool was called before it, 0.1 if it is wrong. 0 without a tool call."""
    return await _score(prediction, answer, judge, used_tool=has_successful_call(trajectory))


@reward(timeout=None)
async def math_equal_think(
    prediction: str, answer: str | float, trajectory: Trajectory, judge: MathJudge
) -> dict[str, float]:
    """1 if the answer is right and every reply has a thought, else 0."""
    return await _score(prediction, answer, judge, thought=has_thoughts(trajectory))


@reward(timeout=None)
async def math_equal_think_tool(
    prediction: str, answer: str | float, trajectory: Trajectory, judge: MathJudge
) -> dict[str, float]:
    """The reward of `math_equal_tool` if every reply has a thought, else 0."""
    used_tool, thought = has_successful_call(trajectory), has_thoughts(trajectory)
    return await _score(prediction, answer, judge, used_tool=used_tool, thought=thought)


async def _score(prediction: str, answer: str | float, judge: MathJudge, **conditions: bool) -> dict[str, float]:
    """The accuracy, or 0 unless all conditions hold. With the condition `used_tool`, a wrong answer earns a little."""
    accuracy = float(await judge.equal(extract_answer(prediction.rpartition(_CLOSE)[2]), answer))
    score = max(accuracy, TOOL_CREDIT) if "used_tool" in conditions else accuracy
    metrics = {name: float(holds) for name, holds in conditions.items()}
    return {"reward": score * all(conditions.values()), "acc": accuracy, **metrics}


def has_thoughts(trajectory: Trajectory) -> bool:
    """Whether there are replies of the model and each has a thought.

    The template separates the thought. If a server renders the messages, it is still in the text.
    """
    spans = [span for segment in trajectory.segments for span in segment.spans if span.author is Author.MODEL]
    replies = [message for span in spans for message in span.messages]
    for reply in replies:
        thought, closed, _ = reply.text.partition(_OPEN)[2].partition(_CLOSE)
        if not reply.thinking.strip() and not (closed and thought.strip()):
            return False
    return bool(replies)
