"""One training update on a CPU in float32, compared with TRL's GRPOTrainer: same chains, model, loss and precision.

Chains have mixed lengths. Each trainer runs in a new process on one thread, one after the other. Times are CPU time,
since other processes on the machine disturb the clock. Both must compute the same gradient norm.

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
class UpdateCost:
    """Time and memory of an update."""

    seconds: float
    added: float
    """Peak MiB beyond the memory before the update."""
    norm: float


def run(side: tuple[Path, str], work: Work) -> UpdateCost:
    python, module = side
    command = [python, "-m", f"benchmarks.sides.{module}", work.shape, work.chains, work.scale, work.rounds]
    done = subprocess.run(
        [str(argument) for argument in command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return UpdateCost(median(answer["process"]), answer["added"], answer["norm"])


def sizes(work: Work) -> list[str]:
    chains = work.trajectories()
    tokens = [len(chain.prompt) + len(chain.completion) for chain in chains]
    return [work.shape, f"{work.chains}", f"{sum(tokens):,}", f"{max(tokens):,}"]


def compare(work: Work) -> list[str]:
    agentfly_cost, trl_cost = run(OURS, work), run(THEIRS, work)
    if abs(agentfly_cost.norm - trl_cost.norm) > 1e-3 * trl_cost.norm:
        raise RuntimeError(f"the gradients differ: norms of {agentfly_cost.norm} and {trl_cost.norm}")
    times, memory = trl_cost.seconds / agentfly_cost.seconds, trl_cost.added / agentfly_cost.added
    seconds = [f"{agentfly_cost.seconds:.2f}", f"{trl_cost.seconds:.2f}", f"{times:.1f}×"]
    return [*sizes(work), *seconds, f"{agentfly_cost.added:.0f}", f"{trl_cost.added:.0f}", f"{memory:.1f}×"]


def measure_growth(works: list[Work]) -> list[list[str]]:
    rows = []
    for work in works:
        cost, cells = run(OURS, work), sizes(work)
        milliseconds = 1e3 * cost.seconds / int(cells[2].replace(",", ""))
        rows.append([*cells, f"{cost.seconds:.2f}", f"{milliseconds:.3f}", f"{cost.added:.0f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="One training update against TRL's GRPOTrainer.")
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures are not meaningful")
    quick = parser.parse_args().quick
    header = ["model", "chains", "tokens", "longest"]
    if PEER.exists():
        cases = [Work("tiny", 16, 1, 1)] if quick else [Work("tiny", 32, 1, 5), Work("SmolLM2-135M", 8, 1, 1)]
        titles = ["agentfly s", "TRL s", "speedup", "agentfly MiB", "TRL MiB", "ratio"]
        print_table("One update, CPU seconds and peak memory", [*header, *titles], list(map(compare, cases)))
    else:
        print("TRL is not installed, run benchmarks/peers/setup.sh trl")
    scales, counts, rounds = ((1, 2), (8,), 1) if quick else ((1, 2, 4, 8), (8, 16, 32, 64), 3)
    titles = ["s", "ms per token", "MiB"]
    longer = measure_growth([Work("tiny", 16, scale, rounds) for scale in scales])
    print_table("Growth with the length of chains and of the micro-batch", [*header, *titles], longer)
    more = measure_growth([Work("tiny", count, 1, rounds) for count in counts])
    print_table("Growth with the number of chains", [*header, *titles], more)


if __name__ == "__main__":
    main()
