"""Asynchronous training on one machine: the time of a step against the longer of sampling and update.

The same recipe is trained three times for a few steps, each in a new process: synchronously on half of the cores,
which gives the times of sampling and update alone; with `max_staleness=1`, where each has half of the cores; and
synchronously on all cores. Steps with an evaluation or a checkpoint count without it, and the first two not at all.

    python -m benchmarks.async_training [--recipe lookup] [--steps 16] [--quick] [field=value …]

Held-out success with and without staleness, over three seeds: `python -m benchmarks.learning staleness`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from benchmarks.table import print_table

ROOT = Path(__file__).resolve().parents[1]
ASYNC = ["async_training.max_staleness=1"]
COMMON = ["loss.correction=token-truncate", "evaluation.every=null", "checkpoint.every=100000", "loggers=[]"]
SKIPPED = 2
"""First steps, which are not counted: compilation, and the rollout that has nothing to overlap with."""


def train(recipe: str, folder: Path, threads: int, changes: list[str]) -> list[dict[str, float]]:
    """Train in a new process; returns the metrics of the steps that count."""
    from agentfly.runs import RunDirectory

    command = [sys.executable, "-m", "agentfly.cli", "train", recipe, "--run", str(folder), *COMMON, *changes]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr[-3000:]}")
    return [record.flat() for record in RunDirectory(folder).records() if record.step > SKIPPED]


def step_seconds(line: dict[str, float]) -> float:
    """Duration of a step without its evaluation and checkpoint."""
    phases = {name: seconds for name, seconds in line.items() if name.startswith("time/")}
    return sum(phases.values()) - phases.get("time/evaluate", 0.0) - phases.get("time/save", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="The time of a step in asynchronous training.")
    parser.add_argument("--recipe", default="lookup")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures are not meaningful")
    parser.add_argument("changes", nargs="*", metavar="field=value")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    half = max(cores // 2, 1)
    steps = 4 if options.quick else options.steps
    changes = [f"steps={steps}", *options.changes]
    variants = {
        f"max_staleness=0, {half} threads": (half, changes),
        f"max_staleness=1, {half} + {half} threads": (half, [*changes, *ASYNC]),
        f"max_staleness=0, {cores} threads": (cores, changes),
    }
    rows = []
    bound = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (threads, overrides)) in enumerate(variants.items()):
            lines = train(options.recipe, Path(folder) / str(number), threads, overrides)
            sampling = median(sum(line[f"time/{part}"] for part in ("generate", "tools", "waiting")) for line in lines)
            update = median(line["time/update"] for line in lines)
            step = median(map(step_seconds, lines))
            bound = bound or max(sampling, update)
            waits = [f"{mean(line.get(f'wait/{side}', 0.0) for line in lines):.0%}" for side in ("learner", "rollout")]
            waits = waits if "wait/learner" in lines[0] else ["", ""]
            discarded = sum(
                line.get(f"staleness/{kind}_chains", 0.0) for line in lines for kind in ("dropped", "recomputed")
            )
            age = mean(line["policy/staleness"] for line in lines)
            times = [f"{seconds:.2f}" for seconds in (sampling, update, step)]
            rows.append([name, *times, f"{step / bound:.2f}×", *waits, f"{age:.2f}", f"{discarded:.0f}"])
    header = [
        "",
        "rollout s",
        "update s",
        "step s",
        "step / longer",
        "learner waits",
        "rollout waits",
        "mean age",
        "discarded",
    ]
    print_table(f"{options.recipe}, {steps} steps, {cores} cores; medians of wall-clock seconds", header, rows)
    print(
        f"The longer of rollout and update, alone on {half} threads: {bound:.2f} s. In the asynchronous row, "
        "`rollout s` is how long the learner waited for it."
    )


if __name__ == "__main__":
    main()
