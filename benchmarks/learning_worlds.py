"""Do agents learn in the prebuilt worlds? From nothing, on a CPU: an expert is imitated a little, then rewards teach.

Each run is the world's own recipe. A model of a million parameters, with a tokenizer made of the expert's words, first
imitates the expert on tasks for training (`agentfly sft --model new`); `agentfly train` goes on from there. Figures are
of held-out tasks. One thread, so that runs can be made side by side.

    python -m benchmarks.learning_worlds [WORLD …] [--seeds 0] [--out FOLDER] [--quick]

Runs that are in the folder already are not made again.
"""

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.learning import draw, show

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


@dataclass(frozen=True)
class Study:
    """How a world is learned."""

    expert: int
    """Tasks that the expert demonstrates."""
    steps: int
    """Of imitation."""
    batch_size: int = 8
    fields: tuple[str, ...] = ()
    """Of training, beyond the recipe's own."""


STUDIES = {
    "alfworld": Study(expert=4000, steps=800),
    "frozen_lake": Study(expert=2000, steps=500),
    "math_with_python": Study(expert=2000, steps=600),
    "search": Study(expert=6000, steps=2200, batch_size=16),
    "sql": Study(expert=4000, steps=1200),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", metavar="WORLD", default=[*STUDIES], help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        for world in options.worlds:
            made = {world: [_run(folder, world, seed, quick=options.quick) for seed in options.seeds]}
            show(world, made)
            if options.out is not None:
                draw(folder / f"{world}.png", made)


def _run(folder: Path, world: str, seed: int, *, quick: bool) -> Path:
    """The folder of a run, made unless it is there."""
    import torch

    from agentfly.commands.training import trained

    torch.set_num_threads(1)
    study, place = STUDIES[world], folder / f"{world}-seed_{seed}"
    if (place / "report.html").exists():
        return place
    shutil.rmtree(place, ignore_errors=True)
    begun = time.process_time()
    model = _warm_start(folder / f"{world}-warm_{seed}", world, seed, quick=quick)
    short = ("steps=2", "eval_every=2") if quick else ()
    fields = [f"model={model}", f"seed={seed}", "save_every=1000", *study.fields, *short]
    trained(RECIPES / f"{world}.py", fields, place)
    (place / "cpu-seconds").write_text(f"{time.process_time() - begun:.1f}")
    return place


def _warm_start(place: Path, world: str, seed: int, *, quick: bool) -> Path:
    """A model that has imitated the expert."""
    from agentfly.commands.imitating import Lesson, new_model, taught
    from agentfly.commands.running import recipe

    study, path = STUDIES[world], RECIPES / f"{world}.py"
    if not (place / "config.json").exists():
        few = {"expert": 8, "steps": 4} if quick else {"expert": study.expert, "steps": study.steps}
        lesson = Lesson(place, **few, batch_size=study.batch_size, learning_rate=1e-3, seed=seed)
        with new_model(path, None, lesson) as name:
            taught(recipe(path, {"model_name_or_path": name}, unheard=True), lesson)
    return place


if __name__ == "__main__":
    main()
