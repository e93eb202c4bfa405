"""A framework as a process: it reads workload sizes line by line and answers each with the CPU time of a run.

Imports, encoding the fake model's replies and checking the outcome are not measured.
"""

import gc
import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parents[2] / ".cache"
TOKENIZER = CACHE / "tokenizers" / "qwen2_5"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run, to check that all frameworks did the same work."""

    reward: float
    """Sum over the chains; equals their number if all chains succeeded."""
    tokens: int
    """Sum over the chains, including prompts; 0 if the framework keeps none."""
    sampled: int
    """The sampled ones among them."""


@dataclass(frozen=True)
class Case:
    """One workload size, ready to run."""

    run: Callable[[], Any]
    """Runs all chains and returns the framework's result. This is measured."""
    inspect: Callable[[Any], Outcome]


def serve(prepare: Callable[[int, int], Case]) -> None:
    """Answer `{"chains": N, "turns": T}` lines until the input ends; `prepare` creates the case of each."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of the framework must not mix with the answers
    print("ready", file=answers, flush=True)
    cases: dict[tuple[int, int], Case] = {}
    for line in sys.stdin:
        size = json.loads(line)
        key = size["chains"], size["turns"]
        if key not in cases:
            cases = {key: prepare(*key)}
        gc.collect()
        before = cpu_seconds()
        result = cases[key].run()
        seconds = cpu_seconds() - before
        outcome = cases[key].inspect(result)
        del result
        print(
            json.dumps({"microseconds": 1e6 * seconds / (key[0] * key[1]), **asdict(outcome)}),
            file=answers,
            flush=True,
        )


def cpu_seconds() -> float:
    """User and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
