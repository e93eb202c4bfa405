"""Learning curves of the lookup agent under each algorithm, ablations, and the vision agents of `rooms`, `find_digit`.

Each run is one of these recipes with its own seed and a warm start trained from that seed: seeds share only the
held-out tasks. One thread, so that runs can share a machine.

    python -m benchmarks.learning [STUDY …] [--seeds 0 1 2] [--out FOLDER] [--quick]

Existing runs in the folder are reused, so an interrupted study can be continued.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import print_table

LONG_RUN = ["steps=300", "mini_batches=4", "evaluation.every=30"]
STUDIES: dict[str, dict[str, list[str]]] = {
    "demo": {"as make demo trains it": ["steps=80"]},
    "algorithms": {
        "GRPO": [],
        "RLOO": ["algorithm=rloo"],
        "REINFORCE++": ["algorithm=reinforce_pp"],
        "PPO": ["algorithm=ppo", "optimizer.critic_learning_rate=1e-3"],
    },
    "critic": {
        "PPO": ["algorithm=ppo", "optimizer.critic_learning_rate=1e-3"],
        "PPO, 5 steps of critic warm-up": [
            "algorithm=ppo",
            "optimizer.critic_learning_rate=1e-3",
            "optimizer.critic_warmup_steps=5",
        ],
    },
    "turns": {"at most 4 turns": [], "at most 8 turns": ["max_turns=8"]},
    "size": {"1.0 M parameters": [], "0.2 M parameters": ["model=small"]},
    "staleness": {
        "max_staleness=0": [],
        "max_staleness=1": ["async_training.max_staleness=1", "loss.correction=token-truncate"],
    },
    "observations": {"policy gradient only": [], "and observations": ["loss.observation_coef=0.1"]},
    "observations_lake": {
        "policy gradient only": ["frozen_lake", "steps=24", "evaluation.every=4"],
        "and observations": ["frozen_lake", "steps=24", "evaluation.every=4", "loss.observation_coef=0.1"],
    },
    "ratios": {
        "token": LONG_RUN,
        "turn": [*LONG_RUN, "loss.ratio=turn"],
        "segment": [*LONG_RUN, "loss.ratio=segment", "loss.clip=[3e-4,4e-4]"],
        "segment, GiGPO, resampled groups": [
            *LONG_RUN,
            "loss.ratio=segment",
            "loss.clip=[3e-4,4e-4]",
            "algorithm=gigpo",
            "zero_variance=resample",
        ],
    },
    "masking": {"own tokens only": [], "observations too": ["unmasked"]},
    "vision": {"rooms": ["rooms"], "rooms, images of noise": ["rooms", "blind"]},
    "find_digit": {"find_digit": ["find_digit"], "find_digit, images of noise": ["find_digit", "blind"]},
}
"""By study and variant: the config fields that are changed, and switches, which are handled below."""
RECIPES = ("rooms", "find_digit", "frozen_lake")
"""Switches that name another recipe than `lookup`."""
SWITCHES = ("model=small", "unmasked", *RECIPES, "blind")
STEPS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=[*STUDIES], help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    steps, seeds = (2, [0]) if options.quick else (STEPS, options.seeds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        for study in options.studies:
            runs = {
                name: [_run(folder, changes, seed, steps) for seed in seeds] for name, changes in STUDIES[study].items()
            }
            show(study, runs)
            if options.out is not None:
                draw(folder / f"{study}.png", runs)


def _run(folder: Path, changes: Sequence[str], seed: int, steps: int) -> Path:
    """Run a variant unless its results exist; return its folder."""
    import torch

    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.train import train_recipe

    torch.set_num_threads(1)
    run_folder = folder / "-".join([*(change.replace("=", "_") for change in changes), f"seed_{seed}"])
    if (run_folder / "report.html").exists():
        return run_folder
    shutil.rmtree(run_folder, ignore_errors=True)
    fields = [change for change in changes if change not in SWITCHES]
    with contextlib.ExitStack() as stack:
        if "unmasked" in changes:
            stack.enter_context(_train_on_observations())
        if "blind" in changes:
            stack.enter_context(_blind())
        model = _warm_start(folder, changes, seed, quick=steps < STEPS)
        started = _cpu_seconds()
        overrides = [f"model={model}", f"seed={seed}", f"steps={steps}", "checkpoint.every=1000", *fields]
        recipe = next((change for change in changes if change in RECIPES), "lookup")
        train_recipe(find_recipe(recipe), overrides, run_folder)
        built = (model / "cpu-seconds").read_text()
        (run_folder / "cpu-seconds").write_text(f"{built} + {_cpu_seconds() - started:.1f}")
    return run_folder


def _cpu_seconds() -> float:
    """CPU time of this process and of processes that it waited for."""
    return sum(os.times()[:4])


def _warm_start(folder: Path, changes: Sequence[str], seed: int, *, quick: bool) -> Path:
    """Build the model like `agentfly models`, from another seed."""
    from agentfly.models import find_digit, rooms, tiny, tiny_vision

    switches = [change.removeprefix("model=") for change in changes if change in SWITCHES and change != "unmasked"]
    run_folder = folder / "-".join(["warm-start", *switches, str(seed)])
    if not (run_folder / "config.json").exists():
        started = _cpu_seconds()
        draft = run_folder.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        task = rooms if "rooms" in switches else find_digit if "find_digit" in switches else None
        if "frozen_lake" in switches:
            _fine_tune("frozen_lake", draft, seed, ["--steps=20", "--expert=200"] if quick else [])
        elif task is not None:
            tiny_vision.build(draft, draft, task=task, seed=seed, steps=20 if quick else tiny_vision.STEPS)
        else:
            size = {"heads": 3, "layers": 2} if "small" in switches else {}
            tiny.build(draft, draft, seed=seed, steps=20 if quick else tiny.STEPS, **size)
        (draft / "cpu-seconds").write_text(f"{_cpu_seconds() - started:.1f}")
        draft.rename(run_folder)
    return run_folder


def _fine_tune(recipe: str, folder: Path, seed: int, changes: Sequence[str]) -> None:
    """Run the SFT that a recipe declares, from a new model."""
    from agentfly.cli.recipes import find_recipe
    from agentfly.cli.train import plan_recipe

    warm_start = plan_recipe(find_recipe(recipe), {}).warm_start
    assert warm_start is not None
    arguments = [
        *warm_start.sft_arguments(recipe),
        f"--out={folder}",
        f"--seed={seed}",
        *changes,
    ]  # the last one counts
    subprocess.run([sys.executable, "-m", "agentfly", *arguments], check=True)


@contextmanager
def _blind() -> Iterator[None]:
    """Show noise in place of every image of `rooms` and `find_digit`, in demonstrations, tasks and tool results."""
    from PIL import Image

    from agentfly.models import find_digit, rooms

    def draw_noise(_: Image.Image, rng: np.random.Generator) -> Image.Image:
        return Image.fromarray(rng.integers(0, 256, (rooms.SIDE, rooms.SIDE, 3), dtype=np.uint8))

    exact = rooms.add_noise
    rooms.add_noise = find_digit.add_noise = draw_noise
    try:
        yield
    finally:
        rooms.add_noise = find_digit.add_noise = exact


@contextmanager
def _train_on_observations() -> Iterator[None]:
    """Train on observation tokens like on sampled ones. No setting of AgentFly does this."""
    from agentfly.algorithms.base import SegmentArrays
    from agentfly.segment import Author, Segment

    exact: Callable[[Segment], SegmentArrays] = SegmentArrays.from_segment

    def everything(segment: Segment) -> SegmentArrays:
        piece = exact(segment)
        tool = np.repeat([span.author is Author.TOOL for span in segment.spans], [len(s) for s in segment.spans])
        return SegmentArrays(piece.tokens, piece.mask | tool, piece.logprobs, piece.turns, piece.weight_versions)

    SegmentArrays.from_segment = staticmethod(everything)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        SegmentArrays.from_segment = exact  # type: ignore[method-assign]


def show(study: str, runs: dict[str, list[Path]]) -> None:
    from agentfly.runs import RunDirectory

    rows: list[list[Any]] = []
    for name, places in runs.items():
        for run_folder in places:
            evals = {r.step: r.eval for r in RunDirectory(run_folder).records() if r.eval is not None}
            curve = [f"{evals[step].reward:.2f}" for step in sorted(evals)]
            greedy = f"{evals[0].metrics['greedy']:.2f} → {evals[max(evals)].metrics['greedy']:.2f}"
            rows.append(
                [name, run_folder.name.rpartition("_")[2], *curve, greedy, (run_folder / "cpu-seconds").read_text()]
            )
    print_table(study, ["", "seed", *map(str, sorted(evals)), "greedy", "CPU-s (warm start + RL)"], rows)


def draw(image: Path, runs: dict[str, list[Path]]) -> None:
    """Plot the held-out curves: one color per variant, one line per seed."""
    from matplotlib.figure import Figure

    from agentfly.runs import RunDirectory

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, places) in enumerate(runs.items()):
        for seed, run in enumerate(places):
            points = [(r.step, r.eval.reward) for r in RunDirectory(run).records() if r.eval is not None]
            axes.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.8, label="" if seed else name)
    axes.set(xlabel="step", ylabel="held-out success", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(image, dpi=130)


if __name__ == "__main__":
    main()
