"""Compare this tree with an earlier commit: orchestration, leases, engine and update, side by side in one run.

The commit is checked out in a git worktree under `.cache/bench`. Each benchmark runs alternately in both trees, with
the same interpreter and libraries, so that whatever else the machine does affects both. A figure is the median of its
rounds. It is reported as slower when it is worse by more than 10 % and by more than the spread of its own rounds.

    python -m benchmarks.check COMMIT [--rounds 3] [--only orchestration leases engine update]
"""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.table import print_table

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.10


@dataclass(frozen=True)
class Benchmark:
    """One benchmark and the figures of its tables that are compared."""

    arguments: tuple[str, ...]
    columns: dict[int, str]
    """Column of the printed table → name of the figure. Titles may differ between commits, positions may not."""
    row: str = ""
    """Compare only rows that contain this text."""
    number: int = 0
    """Which number of a cell such as `12.0 / 15.0`."""
    higher_is_better: bool = False


BENCHMARKS = {
    "orchestration": Benchmark(("--only", "agentfly"), {4: "CPU time per turn, × floor"}, row="agentfly"),
    "leases": Benchmark((), {1: "one class, µs", 2: "two classes, µs", 3: "contended, µs"}),
    "engine": Benchmark(
        ("--model", "tiny", "--sides", "transformers", "--rounds", "1", "--gap", "0.01"),
        {1: "tokens per CPU second"},
        number=1,
        higher_is_better=True,
    ),
    "update": Benchmark((), {4: "CPU seconds"}),
}


def checkout(commit: str) -> Path:
    """Check the commit out beside this tree, with the fetched tokenizers, and return its folder."""
    sha = subprocess.run(
        ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    if not sha:
        sys.exit(f"{commit} is not a commit of this repository")
    folder = ROOT / ".cache" / "bench" / sha
    if not folder.exists():
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, sha], cwd=ROOT, check=True)
    tokenizers = folder / ".cache" / "tokenizers"
    if not tokenizers.exists():
        tokenizers.parent.mkdir(exist_ok=True)
        tokenizers.symlink_to(ROOT / ".cache" / "tokenizers")
    return folder


def run(tree: Path, name: str, benchmark: Benchmark) -> dict[tuple[str, str], float]:
    """Run one benchmark in one tree and return its figures by row label and name."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *benchmark.arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{name} failed in {tree}:\n{done.stderr[-3000:]}")
    figures: dict[tuple[str, str], float] = {}
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        for column, figure in benchmark.columns.items():
            numbers = re.findall(r"\d[\d,]*\.?\d*", cells[column]) if column < len(cells) else []
            if benchmark.row in line and len(numbers) > benchmark.number:
                # Rows are matched by position: their labels may be worded differently.
                label = f"{len(figures) // len(benchmark.columns) + 1}: {cells[0]}"
                figures[label, figure] = float(numbers[benchmark.number].replace(",", ""))
    return figures


def compare(name: str, benchmark: Benchmark, base: Path, rounds: int) -> list[list[str]]:
    """Run a benchmark alternately in both trees and return one row per figure."""
    before: list[list[float]] = []
    after: list[list[float]] = []
    keys: list[tuple[str, str]] = []
    for number in range(rounds):
        for tree, results in [(base, before), (ROOT, after)][:: -1 if number % 2 else 1]:
            figures = run(tree, name, benchmark)
            results.append(list(figures.values()))
            if tree == ROOT:
                keys = list(figures)
    if {len(keys_of_run) for keys_of_run in before} != {len(keys)}:
        sys.exit(f"{name} prints {len(before[0])} figures at the base commit and {len(keys)} here: not comparable")
    rows = []
    for (label, figure), old, new in zip(keys, zip(*before, strict=True), zip(*after, strict=True), strict=True):
        ratio = median(new) / median(old)
        slowdown = 1 / ratio if benchmark.higher_is_better else ratio
        spread = max(max(old) / min(old), max(new) / min(new))
        verdict = "slower" if slowdown > max(1 + TOLERANCE, spread) else ""
        medians = [f"{median(old):,.2f}", f"{median(new):,.2f}", f"{ratio:.2f}", f"{spread:.2f}"]
        rows.append([label.split(": ", 1)[1], figure, *medians, verdict])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare this tree's speed with an earlier commit.")
    parser.add_argument("commit", help="commit, tag or branch to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each benchmark in each tree")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    options = parser.parse_args()
    base = checkout(options.commit)
    header = ["case", "figure", options.commit, "this tree", "ratio", "spread of rounds", ""]
    slower = False
    for name in options.only:  # each table is printed when it is complete: a later benchmark may fail
        rows = compare(name, BENCHMARKS[name], base, options.rounds)
        print_table(f"{name}: this tree against {options.commit}", header, rows)
        slower |= any(row[-1] for row in rows)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
