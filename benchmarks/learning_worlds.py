"""Do agents learn in the prebuilt worlds? From nothing, on a CPU: an expert is imitated, then rewards teach.

Each run is the world's own recipe. A model of a million parameters, with a tokenizer made of the expert's words, first
imitates the expert on tasks for training (`agentfly sft --model new`), and is evaluated on held-out tasks on the way,
four times; `agentfly train` goes on from there. One thread, so that runs can be made side by side.

    python -m benchmarks.learning_worlds [WORLD …] [--seeds 0] [--steps 40] [--out FOLDER] [--quick]

What is in the folder already is not made again, so a run can be stopped and gone on with.
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
"""The reward from which a held-out task counts as done."""


@dataclass(frozen=True)
class Study:
    """How a world is learned."""

    expert: int
    """Tasks that the expert demonstrates."""
    steps: int
    """Of imitation."""
    batch_size: int = 16
    learning_rate: float = 1e-3
    reading: float = 0.0


STUDIES = {
    "alfworld": Study(expert=4000, steps=3200, batch_size=8, reading=0.1),
    "webshop": Study(expert=12_000, steps=4000, learning_rate=2e-3, reading=0.2),
    "search": Study(expert=6000, steps=2000, batch_size=8, reading=1.0),
    "sql": Study(expert=4000, steps=1600),
    "math_with_python": Study(expert=2000, steps=1000),
    "frozen_lake": Study(expert=2000, steps=600),
}
STAGES = 4
"""Times that a model is evaluated on its way through imitation, but for the start."""


@dataclass(frozen=True)
class Point:
    """Held-out figures: after so many demonstrations and steps of reinforcement learning."""

    shown: int
    rewarded: int
    reward: float
    """In the mean, sampled at temperature 1."""
    greedy: float
    """The share of tasks that a greedy chain does in full."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", metavar="WORLD", default=[*STUDIES], help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=40, help="Of reinforcement learning; 0: imitation alone.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        for world in options.worlds:
            study = Study(expert=8, steps=STAGES) if options.quick else STUDIES[world]
            steps = min(options.steps, 2) if options.quick else options.steps
            curves = [_run(folder / f"{world}-{seed}", world, study, steps, seed) for seed in options.seeds]
            _show(world, options.seeds, curves, folder)
            if options.out is not None:
                _draw(folder / f"{world}.png", world, curves)


def _run(place: Path, world: str, study: Study, steps: int, seed: int) -> list[Point]:
    """The curve of a run, made unless it is there."""
    place.mkdir(parents=True, exist_ok=True)
    stages = _imitated(place, world, study, seed)
    curve = [_evaluated(place, world, step, step * study.batch_size, model) for step, model in stages.items()]
    return [*curve, *_rewarded(place, world, stages[study.steps], curve[-1].shown, steps, seed)] if steps else curve


def _imitated(place: Path, world: str, study: Study, seed: int) -> dict[int, Path]:
    """Where the model is after which steps of imitation; after 0 it is new."""
    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.run import load_recipe
    from agentfly.cli.sft import SftConfig, new_model, run_sft

    recipe, out, every = find_recipe(world), place / "warm", study.steps // STAGES
    if not (out / "config.json").exists():
        for left in place.glob("warm*"):
            shutil.rmtree(left)
        lesson = SftConfig(
            out, expert=study.expert, steps=study.steps, batch_size=study.batch_size, save_every=every,
            learning_rate=study.learning_rate, prompt_loss_weight=study.reading, seed=seed,
        )  # fmt: skip
        with _timed(place / "imitation"), new_model(recipe, None, lesson) as name:
            shutil.copytree(name, place / "warm-0")
            run_sft(load_recipe(recipe, {"model_name_or_path": name}, without_model=True), lesson)
    steps = [*range(0, study.steps, every), study.steps]
    return {step: out if step == study.steps else place / f"warm-{step}" for step in steps}


def _evaluated(place: Path, world: str, step: int, shown: int, model: Path) -> Point:
    from agentfly.cli.evaluate import SUMMARY, EvalOptions, run_evaluation
    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.run import load_recipe

    out = place / f"eval-{step}"
    if not (out / SUMMARY).exists():
        run = load_recipe(find_recipe(world), {"model_name_or_path": str(model)}, ("eval_tasks",))
        run_evaluation(run, EvalOptions(greedy=True, threshold=SUCCESS, out=out))
    figures = json.loads((out / SUMMARY).read_text())
    return Point(shown, 0, figures["reward"][0], figures["greedy"][0])


def _rewarded(place: Path, world: str, model: Path, shown: int, steps: int, seed: int) -> list[Point]:
    """The held-out figures of reinforcement learning, from the model on."""
    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.train import train_recipe
    from agentfly.runs import RunDirectory

    run = place / "grpo"
    if not (run / "report.html").exists():
        shutil.rmtree(run, ignore_errors=True)
        fields = [f"model={model}", f"seed={seed}", f"steps={steps}", "checkpoint.every=1000"]
        with _timed(place / "rewards"):
            train_recipe(find_recipe(world), fields, run)
    found = [(record.step, record.eval) for record in RunDirectory(run).records() if record.eval is not None]
    return [Point(shown, step, each.reward, each.metrics["greedy"]) for step, each in found if step]


@contextmanager
def _timed(place: Path) -> Iterator[None]:
    """Writes how many seconds of the processor were used."""
    begun = time.process_time()
    yield
    place.with_suffix(".seconds").write_text(f"{time.process_time() - begun:.0f}")


def _show(world: str, seeds: list[int], curves: list[list[Point]], folder: Path) -> None:
    rows: list[list[str]] = []
    for seed, curve in zip(seeds, curves, strict=True):
        seconds = [place.read_text() for place in sorted((folder / f"{world}-{seed}").glob("*.seconds"))]
        for point in curve:
            figures = f"{point.shown:,}", str(point.rewarded), f"{point.reward:.2f}", f"{point.greedy:.2f}"
            rows.append([str(seed), *figures, ""])
        rows[-1][-1] = " + ".join(seconds)
    print_table(world, ["seed", "demonstrations seen", "steps of GRPO", "reward", "done, greedy", "CPU-s"], rows)


def _draw(place: Path, world: str, curves: list[list[Point]]) -> None:
    """Held-out figures; what is right of the line was learned from rewards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        places = range(len(curve))
        axes.plot(places, [point.greedy for point in curve], "o-", color="C0", label="done, greedy")
        axes.plot(places, [point.reward for point in curve], "o--", color="C1", label="reward, temperature 1")
    taught = [number for number, point in enumerate(curves[0]) if not point.rewarded]
    axes.axvline(taught[-1], color="grey", lw=0.8)
    labels = [f"+{point.rewarded}" if point.rewarded else f"{point.shown:,}" for point in curves[0]]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="demonstrations seen, then +steps of GRPO", ylabel="held-out tasks", ylim=(0, 1.02), title=world)
    axes.grid(alpha=0.3)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[:2], names[:2], frameon=False)
    figure.savefig(place, dpi=130)


if __name__ == "__main__":
    main()
