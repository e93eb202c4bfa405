"""On-policy distillation against SFT on demonstrations of the same teacher, at equal numbers of chains.

The student is the model `tiny`, the teacher the same model after 50 steps of GRPO on the recipe `lookup`. Both
take batches of 64 chains of as many tasks, in one optimizer step or four. Distillation samples them from the student
and compares them with the teacher, by the divergence over the whole vocabulary (exact) or of the sampled token. SFT
samples them from the teacher. A seed has its own teacher and order of tasks.

    python -m benchmarks.distillation FOLDER [--seeds 0 1 2] [--steps 10] [--eval-tasks 200] [--quick]

Teachers and finished variants in the folder are reused, so that an interrupted study can be continued. Another number
of tasks for the evaluation needs a new folder.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.table import print_table

CHAINS = 64
"""Chains per step."""
VARIANTS: list[tuple[str, int, int, tuple[float, ...]]] = [
    ("exact", 1, 1, (5e-4, 1e-3, 2e-3)),
    ("exact", 4, 1, (1e-3, 2e-3)),
    ("exact", 1, 4, (5e-4, 1e-3)),
    ("sampled", 1, 1, (5e-4, 1e-3, 2e-3)),
    ("sampled", 4, 1, (1e-3, 2e-3)),
    ("SFT", 1, 1, (5e-4, 1e-3, 2e-3)),
    ("SFT", 4, 1, (1e-3,)),
    ("SFT", 1, 4, (5e-4, 1e-3)),
]
"""Method, optimizer steps per batch and epoch, epochs, and the peak learning rates; all fall linearly to 0. The methods
are the values of `teacher.divergence`, and SFT."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", nargs="*", type=int, default=[10])
    parser.add_argument("--eval-tasks", type=int, default=200)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.quick:
        options.seeds, options.steps = [0], [1]
    from agentfly.environments.lookup import recipe

    recipe.eval_tasks = recipe.draw_tasks(20 if options.quick else options.eval_tasks, seed=3, held_out=True)
    rows: list[list[Any]] = []
    for seed in options.seeds:
        teacher = train_teacher(options.folder, seed, steps=2 if options.quick else 50)
        before = {"student": Path(recipe.config.model), "teacher": teacher}
        for name, model in before.items():
            result_file = options.folder / f"{name}-{seed}.json"
            rows.append([seed, name, "", "", "", *measure(result_file, lambda model=model: model)])  # type: ignore[misc]
        for steps in options.steps:
            for method, splits, epochs, rates in VARIANTS:
                make: Any = imitate if method == "SFT" else partial(distill, divergence=method)
                for rate in rates:
                    model_folder = options.folder / f"{method}-{steps}-{splits}-{epochs}-{rate}-{seed}"
                    settings = {"steps": steps, "splits": splits, "epochs": epochs, "rate": rate, "seed": seed}
                    measured = measure(
                        model_folder.parent / f"{model_folder.name}.json",
                        partial(make, model_folder, teacher, **settings),
                    )
                    rows.append([seed, method, steps * CHAINS, f"{steps * splits * epochs}", rate, *measured])
    header = ["seed", "", "chains", "optimizer steps", "learning rate", "sampled", "greedy"]
    print_table("Distillation", header, [list(map(str, row)) for row in rows])


def train_teacher(folder: Path, seed: int, steps: int) -> Path:
    """The model after GRPO on the recipe, as `agentfly train lookup` trains it."""
    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.train import train_recipe

    run_folder = folder / f"teacher-{seed}"
    if not (run_folder / "report.html").exists():
        shutil.rmtree(run_folder, ignore_errors=True)
        changes = [f"seed={seed}", f"steps={steps}", "evaluation.every=null", "checkpoint.every=1000", "loggers=[]"]
        train_recipe(find_recipe("lookup"), changes, run_folder)
    return next((run_folder / "checkpoints").glob("step-*")) / "model"


def distill(
    folder: Path, teacher: Path, *, divergence: str, steps: int, splits: int, epochs: int, rate: float, seed: int
) -> Path:
    """Train the student on its own chains, one per task, by the divergence to the teacher alone."""
    from agentfly.environments.lookup import recipe
    from agentfly.training import train

    shutil.rmtree(folder, ignore_errors=True)
    config = recipe.config.override(
        {
            "teacher.model": str(teacher),
            "teacher.divergence": divergence,
            "tasks_per_step": CHAINS,
            "num_chains": 1,
            "mini_batches": splits,
            "epochs": epochs,
            "optimizer.learning_rate": rate,
            "steps": steps,
            "seed": seed,
            "evaluation.every": None,
            "checkpoint.every": 1000,
            "loggers": (),
        }
    )
    train(recipe.agent, recipe.tasks, config, run=folder)
    return next((folder / "checkpoints").glob("step-*")) / "model"


def imitate(folder: Path, teacher: Path, *, steps: int, splits: int, epochs: int, rate: float, seed: int) -> Path:
    """Train the student on chains that the teacher samples at temperature 1, whatever their reward."""
    from random import Random

    from agentfly.backends.engine.loading import load_config, max_positions
    from agentfly.environments.lookup import recipe
    from agentfly.models import resolve
    from agentfly.sft.training import build_sft_learner, train_sft
    from agentfly.templates.tokenizer import load_tokenizer
    from agentfly.threads import wait_for

    agent = recipe.agent(model_name_or_path=str(teacher))
    tasks = Random(seed).sample(recipe.tasks, steps * CHAINS)
    options: Any = recipe.config.agent_options(seed=seed)

    async def sample() -> list[Any]:
        try:
            return list(await agent.run(tasks, **options))
        finally:
            await agent.close()

    # A chain of many broken calls may overflow the context with error messages: it cannot be imitated.
    positions = max_positions(load_config(resolve(recipe.config.model)))
    demonstrations = [chain for chain in wait_for(sample()) if len(chain.segments[0]) <= positions]
    total = steps * splits * epochs
    learner = build_sft_learner(recipe.config.model, steps=total, learning_rate=rate, seed=seed)
    train_sft(learner, demonstrations, steps=total, batch_size=CHAINS // splits, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    learner.save(folder)
    load_tokenizer(resolve(recipe.config.model)).save_pretrained(folder)
    return folder


def measure(result_file: Path, make: Callable[[], Path]) -> tuple[str, str]:
    """Sampled and greedy success of a model on the held-out tasks, stored in a file."""
    from agentfly.environments.lookup import recipe
    from agentfly.evaluation import evaluate
    from agentfly.threads import wait_for

    if not result_file.exists():
        agent = recipe.agent(model_name_or_path=str(make()))

        async def run() -> dict[str, float]:
            try:
                evaluation = await evaluate(
                    agent, recipe.eval_tasks, greedy=True, **recipe.config.agent_options(seed=0)
                )
            finally:
                await agent.close()
            return {"sampled": evaluation.reward.mean, "greedy": evaluation.figures.metrics["greedy"]}

        result_file.parent.mkdir(parents=True, exist_ok=True)
        result_file.write_text(json.dumps(wait_for(run())))
    result = json.loads(result_file.read_text())
    return f"{result['sampled']:.3f}", f"{result['greedy']:.3f}"


if __name__ == "__main__":
    main()
