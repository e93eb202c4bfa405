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
            place = options.folder / f"{name}-{seed}.json"
            rows.append([seed, name, "", "", "", *measure(place, lambda model=model: model)])  # type: ignore[misc]
        for steps in options.steps:
            for method, splits, epochs, rates in VARIANTS:
                make: Any = imitate if method == "SFT" else partial(distill, divergence=method)
                for rate in rates:
                    place = options.folder / f"{method}-{steps}-{splits}-{epochs}-{rate}-{seed}"
                    settings = {"steps": steps, "splits": splits, "epochs": epochs, "rate": rate, "seed": seed}
                    found = measure(place.parent / f"{place.name}.json", partial(make, place, teacher, **settings))
                    rows.append([seed, method, steps * CHAINS, f"{steps * splits * epochs}", rate, *found])
    header = ["seed", "", "chains", "optimizer steps", "learning rate", "sampled", "greedy"]
    print_table("Distillation", header, [list(map(str, row)) for row in rows])


def train_teacher(folder: Path, seed: int, steps: int) -> Path:
    """The model after GRPO on the recipe, as `agentfly train lookup` trains it."""
    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.train import train_recipe

    place = folder / f"teacher-{seed}"
    if not (place / "report.html").exists():
        shutil.rmtree(place, ignore_errors=True)
        changes = [f"seed={seed}", f"steps={steps}", "evaluation.every=null", "checkpoint.every=1000", "loggers=[]"]
        train_recipe(find_recipe("lookup"), changes, place)
    return next((place / "checkpoints").glob("step-*")) / "model"


def distill(
    place: Path, teacher: Path, *, divergence: str, steps: int, splits: int, epochs: int, rate: float, seed: int
) -> Path:
    """Train the student on its own chains, one per task, by the divergence to the teacher alone."""
    from agentfly.environments.lookup import recipe
    from agentfly.training import train

    shutil.rmtree(place, ignore_errors=True)
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
    train(recipe.agent, recipe.tasks, config, run=place)
    return next((place / "checkpoints").glob("step-*")) / "model"


def imitate(place: Path, teacher: Path, *, steps: int, splits: int, epochs: int, rate: float, seed: int) -> Path:
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
    demonstrations = [each for each in wait_for(sample()) if len(each.segments[0]) <= positions]
    total = steps * splits * epochs
    learner = build_sft_learner(recipe.config.model, steps=total, learning_rate=rate, seed=seed)
    train_sft(learner, demonstrations, steps=total, batch_size=CHAINS // splits, seed=seed)
    place.mkdir(parents=True, exist_ok=True)
    learner.save(place)
    load_tokenizer(resolve(recipe.config.model)).save_pretrained(place)
    return place


def measure(place: Path, make: Callable[[], Path]) -> tuple[str, str]:
    """Sampled and greedy success of a model on the held-out tasks, stored in a file."""
    from agentfly.environments.lookup import recipe
    from agentfly.evaluation import evaluate
    from agentfly.threads import wait_for

    if not place.exists():
        agent = recipe.agent(model_name_or_path=str(make()))

        async def run() -> dict[str, float]:
            try:
                found = await evaluate(agent, recipe.eval_tasks, greedy=True, **recipe.config.agent_options(seed=0))
            finally:
                await agent.close()
            return {"sampled": found.reward.mean, "greedy": found.figures.metrics["greedy"]}

        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(wait_for(run())))
    found = json.loads(place.read_text())
    return f"{found['sampled']:.3f}", f"{found['greedy']:.3f}"


if __name__ == "__main__":
    main()
