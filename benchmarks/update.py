"""One training update on a CPU in float32, against TRL's GRPOTrainer: the same chains, model, loss and precision.

Chains are of mixed lengths. Each side runs in a fresh process on one thread, first one, then the other; seconds are of
the process's own time, since others on the machine disturb the clock. That both do the same work shows in the norm of
the gradient, which must be the same.

    python -m benchmarks.update [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.sides.update_work import Work
from benchmarks.table import print_table

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".cache" / "peers" / "trl" / "bin" / "python"
OURS, THEIRS = (Path(sys.executable), "agentfly_update"), (PEER, "trl_update")


@dataclass(frozen=True)
class Took:
    """What an update took."""

    seconds: float
    added: float
    """MiB at the peak, beyond what the process held before."""
    norm: float


def run(side: tuple[Path, str], work: Work) -> Took:
    python, module = side
    command = [python, "-m", f"benchmarks.sides.{module}", work.shape, work.chains, work.scale, work.rounds]
    done = subprocess.run(
        [str(each) for each in command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Took(median(answer["process"]), answer["added"], answer["norm"])


def sizes(work: Work) -> list[str]:
    chains = work.trajectories()
    tokens = [len(each.prompt) + len(each.completion) for each in chains]
    return [work.shape, f"{work.chains}", f"{sum(tokens):,}", f"{max(tokens):,}"]


def compared(work: Work) -> list[str]:
    ours, theirs = run(OURS, work), run(THEIRS, work)
    if abs(ours.norm - theirs.norm) > 1e-3 * theirs.norm:
        raise RuntimeError(f"the gradients differ: norms of {ours.norm} and {theirs.norm}")
    times, memory = theirs.seconds / ours.seconds, theirs.added / ours.added
    seconds = [f"{ours.seconds:.2f}", f"{theirs.seconds:.2f}", f"{times:.1f}×"]
    return [*sizes(work), *seconds, f"{ours.added:.0f}", f"{theirs.added:.0f}", f"{memory:.1f}×"]


def growing(works: list[Work]) -> list[list[str]]:
    rows = []
    for work in works:
        took, named = run(OURS, work), sizes(work)
        each = 1e3 * took.seconds / int(named[2].replace(",", ""))
        rows.append([*named, f"{took.seconds:.2f}", f"{each:.3f}", f"{took.added:.0f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="One training update against TRL's GRPOTrainer.")
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures mean little")
    quick = parser.parse_args().quick
    header = ["model", "chains", "tokens", "longest"]
    if PEER.exists():
        cases = [Work("tiny", 16, 1, 1)] if quick else [Work("tiny", 32, 1, 5), Work("SmolLM2-135M", 8, 1, 1)]
        titles = ["agentfly s", "TRL s", "faster", "agentfly MiB", "TRL MiB", "less"]
        print_table("One update, seconds of CPU and memory at the peak", [*header, *titles], list(map(compared, cases)))
    else:
        print("TRL is not installed, run benchmarks/peers/setup.sh trl")
    scales, counts, rounds = ((1, 2), (8,), 1) if quick else ((1, 2, 4, 8), (8, 16, 32, 64), 3)
    titles = ["s", "ms a token", "MiB"]
    longer = growing([Work("tiny", 16, scale, rounds) for scale in scales])
    print_table("Growth with the length of chains, the micro-batch growing as much", [*header, *titles], longer)
    more = growing([Work("tiny", count, 1, rounds) for count in counts])
    print_table("Growth with the number of chains", [*header, *titles], more)


if __name__ == "__main__":
    main()
