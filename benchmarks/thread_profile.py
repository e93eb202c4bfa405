"""Where the threads of this process spend their CPU time, by cause.

CPU seconds of a thread come from the operating system. Their split by cause comes from samples of its stack: by py-spy
where it is installed, which also sees threads that hold the interpreter's lock without a pause, else by a thread.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil  # type: ignore[import-untyped]

INTERVAL = 0.005
"""Seconds between two samples."""
CAUSES = (
    ("environment", "agentfly/environments/"),
    ("template, parser", "agentfly/templates/|tokenizers/"),
    ("tool call", "agentfly/tooling|rollout/tool_calls"),
    ("lease", "agentfly/resources/"),
    ("transcript", "rollout/history|agentfly/segment|agentfly/trajectory"),
    ("rollout", "agentfly/rollout/|agentfly/agent|agentfly/scoring|agentfly/types"),
    ("prefix cache, KV cache", "engine/prefix_cache|engine/kv_cache"),
    ("scheduler", "engine/scheduler"),
    ("sampler", "engine/sampler"),
    ("forward pass", "engine/(model_runner|cuda_graphs|attention|kernels|packed_linear)"),
    ("engine loop, requests", "backends/engine/"),
    ("vLLM client", "backends/vllm/|vllm/"),
    ("writing the run", "agentfly/runs/"),
    ("learner", "agentfly/training/|agentfly/algorithms/"),
    ("event loop", "asyncio/|selectors"),
)
"""Causes with a pattern of file names; the innermost frame that matches one decides."""
_IDLE = re.compile(r"^(select|wait|_wait_for_tstate_lock|acquire|get|_work|_worker|poll) ")


def find_cause(frames: list[str]) -> str:
    """The cause of a stack, whose frames are `function (file:line)`, the outermost first."""
    for frame in reversed(frames):
        for name, pattern in CAUSES:
            if re.search(pattern, frame):
                return name
    return "other"


class ThreadProfile:
    """CPU seconds and stack samples of the threads of this process, while `measure` runs."""

    def __init__(self) -> None:
        self.cpu: Counter[str] = Counter()
        """CPU seconds by thread name."""
        self.samples: dict[str, Counter[str]] = {}
        """Samples by thread name and cause."""
        self.lines: Counter[str] = Counter()
        """Samples by thread name and innermost line of this package."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Sample all threads until the block ends."""
        before = _cpu_seconds()
        names = {}
        stacks: Counter[tuple[str, str]] = Counter()
        with tempfile.TemporaryDirectory() as folder, _sample_stacks(stacks, Path(folder) / "stacks"):
            yield
            names = {thread.native_id: thread.name for thread in threading.enumerate()}
            after = _cpu_seconds()
        for ident, seconds in after.items():
            self.cpu[_role(names.get(ident, "other threads"))] += seconds - before.get(ident, 0.0)
        for (thread, stack), count in stacks.items():
            frames = stack.split(";")
            role = _role(thread)
            self.samples.setdefault(role, Counter())[find_cause(frames)] += count
            package_frames = [frame for frame in frames if "agentfly" in frame]
            self.lines[f"{role}: {package_frames[-1] if package_frames else frames[-1]}"] += count

    def rows(self) -> list[list[str]]:
        """Rows of a table: thread, CPU seconds, cause, share of the thread's samples."""
        out = []
        for role, seconds in self.cpu.most_common():
            if seconds < 0.05 or role == "sampler":
                continue
            causes = self.samples.get(role, Counter())
            out.append([role, f"{seconds:.2f}", "all", ""])
            for cause, count in causes.most_common(8):
                share = count / causes.total()
                out.append(["", f"{seconds * share:.2f}", cause, f"{share:.0%}"])
        return out


def _role(thread: str) -> str:
    if thread == "MainThread":
        return "event loop"
    if thread.startswith("asyncio_"):
        return "learner"
    return {"agentfly-engine": "engine", "agentfly-vllm": "vLLM client", "agentfly": "tools"}.get(thread, thread)


def _cpu_seconds() -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


@contextmanager
def _sample_stacks(stacks: Counter[tuple[str, str]], file: Path) -> Iterator[None]:
    """Count (thread name, frames joined by semicolons) while the block runs. `file`: where py-spy writes."""
    spy = shutil.which("py-spy")
    if spy is not None:
        command = [spy, "record", "--pid", str(os.getpid()), "--format", "raw", "--threads", "--nonblocking"]
        command += ["--rate", str(int(1 / INTERVAL)), "--duration", "3600", "--output", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(1)  # it reads the symbols of the interpreter first
        if process.poll() is None:
            try:
                yield
            finally:
                process.send_signal(signal.SIGINT)  # it writes what it has
                process.communicate(timeout=120)
            for line in file.read_text().splitlines() if file.exists() else ():
                stack, _, count = line.rpartition(" ")
                thread, _, frames = stack.partition(";")
                name = re.sub(r"^thread \(\w+\): |\"", "", thread)
                stacks[name, frames] += int(count)
            return
        message = process.stderr.read().strip().splitlines() if process.stderr is not None else []
        print(f"py-spy cannot look at this process ({' '.join(message)[-200:]}); a thread samples instead", flush=True)
    ended = threading.Event()

    def sample() -> None:
        sampler_thread = threading.get_ident()
        while not ended.wait(INTERVAL):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, innermost in sys._current_frames().items():
                frames = []
                frame: FrameType | None = innermost
                while frame is not None:
                    frames.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
                    frame = frame.f_back
                if ident != sampler_thread and not _IDLE.match(frames[0]):
                    stacks[names.get(ident, "other threads"), ";".join(reversed(frames))] += 1

    thread = threading.Thread(target=sample, name="sampler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
