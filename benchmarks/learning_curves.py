"""One page with the curves of many training runs: reward, turns, tool calls, hallucinated calls and response length.

    python -m benchmarks.learning_curves FOLDER/runs --out curves.png

The folder holds one run directory per run, named ENVIRONMENT-…-seedN. Runs that differ in the seed only share a row,
with a thin line per seed, and their mean. A call is hallucinated if there is no tool of its name, or if its
arguments cannot be parsed or do not fit the tool.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from agentfly.runs import RunDirectory
from benchmarks.table import print_table

PANELS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "training reward": lambda metrics: metrics["reward/mean"],
    "turns per chain": lambda metrics: metrics["chain/turns"],
    "tool calls per chain": lambda metrics: metrics["calls/chain"],
    "hallucinated calls": lambda metrics: metrics["calls/unknown_rate"] + metrics["calls/invalid_rate"],
    "sampled tokens per chain": lambda metrics: metrics["chain/sampled_tokens"],
}
"""Each panel's figure of one training step."""
ENDS = 3
"""Steps at the start and at the end of a run that the table averages over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of run directories")
    parser.add_argument("--out", type=Path, required=True, help="image to write")
    options = parser.parse_args()
    curves: dict[str, list[np.ndarray]] = defaultdict(list)  # per run [steps, panels]
    for path in sorted(run for run in options.folder.iterdir() if (run / "metrics.jsonl").exists()):
        steps = [record.metrics for record in RunDirectory(path).records() if record.step]
        if len(steps) > ENDS:
            figures = [[measure(step) for measure in PANELS.values()] for step in steps]
            curves[re.sub(r"-seed\d+$", "", path.name)].append(np.array(figures))
    draw(curves, options.out)
    rows = []
    for name, runs in curves.items():
        first, last = (np.mean([run[part].mean(0) for run in runs], 0) for part in (slice(ENDS), slice(-ENDS, None)))
        rows.append([name, str(len(runs)), *(f"{a:.3g} → {b:.3g}" for a, b in zip(first, last, strict=True))])
    print_table(f"Mean of the first and of the last {ENDS} steps", ["run", "seeds", *PANELS], rows)


def draw(curves: Mapping[str, list[np.ndarray]], out: Path) -> None:
    """Draw one row of panels per group of runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(PANELS), 2.1 * len(curves)), layout="constrained")
    grid = figure.subplots(len(curves), len(PANELS), squeeze=False)
    for axes, title in zip(grid[0], PANELS, strict=True):
        axes.set_title(title, fontsize=10)
    for axes_row, (name, runs) in zip(grid, curves.items(), strict=True):
        shortest = min(map(len, runs))
        mean = np.mean([run[:shortest] for run in runs], 0)
        for number, axes in enumerate(axes_row):
            for run in runs:
                axes.plot(range(1, len(run) + 1), run[:, number], color="C0", lw=0.7, alpha=0.5)
            axes.plot(range(1, shortest + 1), mean[:, number], color="C0", lw=2)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        axes_row[0].set_ylabel(name, fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
