"""Learning curves in the prebuilt environments, from an untrained model on a CPU: SFT on expert chains, then GRPO.

Each run uses the environment's own recipe. A model of a million parameters, with a tokenizer built from the expert's
texts, is first fine-tuned on expert chains of training tasks (`agentfly sft --model new`) and evaluated on held-out
tasks four times on the way; `agentfly train` continues from there. One thread, so that runs can share a machine.

    python -m benchmarks.learning_environments [RECIPE …] [--seeds 0] [--steps 40] [--out FOLDER] [--quick]

Existing results in the folder are reused, so an interrupted run can be continued.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import print_table

SUCCESS = 1.0
"""Minimum reward of a solved held-out task."""


@dataclass(frozen=True)
class Study:
    """SFT settings of one environment."""

    expert: int
    """Tasks that the expert demonstrates."""
    steps: int
    """Optimizer steps of SFT."""
    batch_size: int = 16
    learning_rate: float = 1e-3
    prompt_loss_weight: float = 0.0


STUDIES = {
    "alfworld": Study(expert=4000, steps=3200, batch_size=8, prompt_loss_weight=0.1),
    "webshop": Study(expert=12_000, steps=4000, learning_rate=2e-3, prompt_loss_weight=0.2),
    "search": Study(expert=6000, steps=2000, batch_size=8, prompt_loss_weight=1.0),
    "sql": Study(expert=4000, steps=1600),
    "math_with_python": Study(expert=2000, steps=1000),
    "frozen_lake": Study(expert=2000, steps=600),
}
STAGES = 4
"""Evaluations during SFT, besides the one before it."""


@dataclass(frozen=True)
class Point:
    """Held-out figures after `shown` demonstrations and `rewarded` steps of reinforcement learning."""

    shown: int
    rewarded: int
    reward: float
    """Mean reward, sampled at temperature 1."""
    greedy: float
    """Fraction of tasks that a greedy chain solves."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=[*STUDIES], help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=40, help="Steps of reinforcement learning; 0: SFT only.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        for name in options.recipes:
            study = Study(expert=8, steps=STAGES) if options.quick else STUDIES[name]
            steps = min(options.steps, 2) if options.quick else options.steps
            curves = [_run(folder / f"{name}-{seed}", name, study, steps, seed) for seed in options.seeds]
            _show(name, options.seeds, curves, folder)
            if options.out is not None:
                _draw(folder / f"{name}.png", name, curves)


def _run(place: Path, name: str, study: Study, steps: int, seed: int) -> list[Point]:
    """Return the curve of a run; stages with results in `place` are not run again."""
    place.mkdir(parents=True, exist_ok=True)
    stages = _fine_tune(place, name, study, seed)
    curve = [_evaluate(place, name, step, step * study.batch_size, model) for step, model in stages.items()]
    return [*curve, *_train(place, name, stages[study.steps], curve[-1].shown, steps, seed)] if steps else curve


def _fine_tune(place: Path, name: str, study: Study, seed: int) -> dict[int, Path]:
    """Run SFT; return the model folder after each saved step (0: the untrained model)."""
    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.run import load_recipe
    from agentfly.cli.sft import SftConfig, new_model, run_sft

    recipe, out, every = find_recipe(name), place / "warm", study.steps // STAGES
    if not (out / "config.json").exists():
        for left in place.glob("warm*"):
            shutil.rmtree(left)
        config = SftConfig(
            out, expert=study.expert, steps=study.steps, batch_size=study.batch_size, save_every=every,
            learning_rate=study.learning_rate, prompt_loss_weight=study.prompt_loss_weight, seed=seed,
        )  # fmt: skip
        with _measure_cpu(place / "imitation"), new_model(recipe, None, config) as model:
            shutil.copytree(model, place / "warm-0")
            run_sft(load_recipe(recipe, {"model_name_or_path": model}, without_model=True), config)
    steps = [*range(0, study.steps, every), study.steps]
    return {step: out if step == study.steps else place / f"warm-{step}" for step in steps}


def _evaluate(place: Path, name: str, step: int, shown: int, model: Path) -> Point:
    from agentfly.cli.evaluate import SUMMARY, EvalOptions, run_evaluation
    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.run import load_recipe

    out = place / f"eval-{step}"
    if not (out / SUMMARY).exists():
        run = load_recipe(find_recipe(name), {"model_name_or_path": str(model)}, ("eval_tasks",))
        run_evaluation(run, EvalOptions(greedy=True, threshold=SUCCESS, out=out))
    figures = json.loads((out / SUMMARY).read_text())
    return Point(shown, 0, figures["reward"][0], figures["greedy"][0])


def _train(place: Path, name: str, model: Path, shown: int, steps: int, seed: int) -> list[Point]:
    """Train the model with GRPO; return the held-out figures of each evaluation."""
    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.train import train_recipe
    from agentfly.runs import RunDirectory

    run = place / "grpo"
    if not (run / "report.html").exists():
        shutil.rmtree(run, ignore_errors=True)
        fields = [f"model={model}", f"seed={seed}", f"steps={steps}", "checkpoint.every=1000"]
        with _measure_cpu(place / "rewards"):
            train_recipe(find_recipe(name), fields, run)
    found = [(record.step, record.eval) for record in RunDirectory(run).records() if record.eval is not None]
    return [Point(shown, step, each.reward, each.metrics["greedy"]) for step, each in found if step]


@contextmanager
def _measure_cpu(place: Path) -> Iterator[None]:
    """Write the CPU seconds of the block to `place`.seconds."""
    begun = time.process_time()
    yield
    place.with_suffix(".seconds").write_text(f"{time.process_time() - begun:.0f}")


def _show(name: str, seeds: list[int], curves: list[list[Point]], folder: Path) -> None:
    rows: list[list[str]] = []
    for seed, curve in zip(seeds, curves, strict=True):
        seconds = [place.read_text() for place in sorted((folder / f"{name}-{seed}").glob("*.seconds"))]
        for point in curve:
            figures = f"{point.shown:,}", str(point.rewarded), f"{point.reward:.2f}", f"{point.greedy:.2f}"
            rows.append([str(seed), *figures, ""])
        rows[-1][-1] = " + ".join(seconds)
    print_table(name, ["seed", "demonstrations seen", "steps of GRPO", "reward", "done, greedy", "CPU-s"], rows)


def _draw(place: Path, name: str, curves: list[list[Point]]) -> None:
    """Plot the held-out figures; the vertical line separates SFT from GRPO."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        places = range(len(curve))
        axes.plot(places, [point.greedy for point in curve], "o-", color="C0", label="done, greedy")
        axes.plot(places, [point.reward for point in curve], "o--", color="C1", label="reward, temperature 1")
    sft = [number for number, point in enumerate(curves[0]) if not point.rewarded]
    axes.axvline(sft[-1], color="gray", lw=0.8)
    labels = [f"+{point.rewarded}" if point.rewarded else f"{point.shown:,}" for point in curves[0]]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="demonstrations seen, then +steps of GRPO", ylabel="held-out tasks", ylim=(0, 1.02), title=name)
    axes.grid(alpha=0.3)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[:2], names[:2], frameon=False)
    figure.savefig(place, dpi=130)


if __name__ == "__main__":
    main()
