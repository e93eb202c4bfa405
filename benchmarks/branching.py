"""Tree sampling against independent chains: held-out success by the number of sampled tokens.

The recipe `lookup` with the model `tiny` and RLOO; every variant trains on eight chains of 16 tasks per step. Tokens
before a fork are counted once.

    python -m benchmarks.branching FOLDER [--seeds 0 1 2] [--steps 12] [--quick]

Finished runs in the folder are reused.
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from benchmarks.table import print_table

VARIANTS: dict[str, dict[str, Any]] = {
    "8 chains": {"num_chains": 8},
    "4 chains × 2 branches after turn 1": {"num_chains": 4, "run_options.branching": {"turn": 1, "branches": 2}},
    "2 chains × 4 branches after turn 1": {"num_chains": 2, "run_options.branching": {"turn": 1, "branches": 4}},
}
EVERY = 4
"""Steps between evaluations."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.quick:
        options.seeds, options.steps = [0], 1
    from agentfly.environments.lookup import recipe
    from agentfly.runs import RunDirectory
    from agentfly.training import train

    rows: list[list[Any]] = []
    for seed in options.seeds:
        for number, (name, changes) in enumerate(VARIANTS.items()):
            run_folder = options.folder / f"variant{number}-{seed}"
            if not (run_folder / "report.html").exists():
                shutil.rmtree(run_folder, ignore_errors=True)
                fixed = {"algorithm": "rloo", "optimizer.schedule": "constant", "optimizer.learning_rate": 3e-4}
                run = {"steps": options.steps, "seed": seed, "evaluation.every": EVERY, "checkpoint.every": 1000}
                config = recipe.config.override({**fixed, **run, "loggers": (), **changes})
                train(recipe.agent, recipe.tasks, config, eval_tasks=recipe.eval_tasks, run=run_folder)
            directory = RunDirectory(run_folder)
            tokens = 0
            points = []
            for record in directory.records():
                if record.step:
                    stored = directory.trajectories(record.step)
                    tokens += sum(chain.trajectory.sampled_tokens for chain in stored)
                if record.eval is not None:
                    points.append(f"{tokens / 1000:.0f}k: {record.eval.reward:.2f}")
            rows.append([seed, name, *points])
    header = [f"step {step}" for step in range(0, options.steps + 1, EVERY)]
    print_table("Sampled tokens and held-out success", ["seed", "", *header], [list(map(str, row)) for row in rows])


if __name__ == "__main__":
    main()
