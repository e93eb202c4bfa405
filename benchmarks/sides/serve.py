"""A side as a process: it reads workload sizes line by line and answers each with the CPU time it took.

Imports, encoding the fake model's replies and checking the outcome all lie outside the measured stretch.
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
    """What a run left behind, to see that the sides did the same work."""

    reward: float
    """Summed over the chains: equals their number when every chain went as it should."""
    tokens: int
    """Prompt and all, summed over the chains; 0 where the side keeps none."""
    sampled: int
    """Of these, the tokens that the model wrote."""


@dataclass(frozen=True)
class Case:
    """One workload size, ready to run."""

    run: Callable[[], Any]
    """Runs all chains and returns what the framework returns. This is what is measured."""
    inspect: Callable[[Any], Outcome]


def serve(prepare: Callable[[int, int], Case]) -> None:
    """Answer `{"chains": N, "turns": T}` lines until the input ends; `prepare` makes the case of each."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a framework prints must not mix with the answers
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
    """User and system time of this process, all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
