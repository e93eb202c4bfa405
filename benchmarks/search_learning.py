"""Does an agent learn to search? A model of a million parameters, from nothing: first it imitates the expert, then
rewards teach it the rest.

    python -m benchmarks.search_learning --out FOLDER [--steps 1500] [--quick]

The model has the size of `tiny` and a tokenizer of the encyclopaedia's own words. It is asked 100 held-out questions of
one and two hops about encyclopaedias none of whose names it has met, greedily, as it learns. What is in the folder
already is not made again. Then: agentfly train recipes/search.py model=FOLDER/warm-N.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from agentfly.commands.loading import load, make_agent
from benchmarks.table import print_table

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "search.py"
LEARNING_RATE = 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    steps, every, questions = (4, 2, 4) if options.quick else (options.steps, max(1, options.steps // 6), 100)
    recipe = load(RECIPE, "recipe")
    begin(options.out / "begin", recipe)
    rows = learn(options.out, recipe, steps, every, questions)
    print_table("Held-out exact match while the expert is imitated", ["step", "loss", "1 hop", "2 hops", "CPU-s"], rows)


def begin(folder: Path, recipe: Any) -> None:
    """A model that knows nothing, with a tokenizer that knows the words."""
    import torch

    from agentfly.environments.search import Encyclopaedia
    from agentfly.models.tiny import _model
    from agentfly.models.tiny_tokenizer import tiny_tokenizer

    if (folder / "config.json").exists():
        return
    frame = [f"system\n{recipe.PROMPT}\nTools: search(query)", "user\n", "assistant\n", "tool\n[1] ", '{"query": "']
    articles = [each.text for seed in range(20) for each in Encyclopaedia.draw("train", seed, 100).passages]
    tokenizer = tiny_tokenizer(frame * 200 + articles + [row["question"] for row in recipe.tasks])
    torch.manual_seed(0)
    _model(tokenizer, 5, 3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def learn(out: Path, recipe: Any, steps: int, every: int, questions: int) -> list[list[str]]:
    """Imitate the expert, and ask now and then."""
    from agentfly.encoding.tokenizer import load_tokenizer
    from agentfly.training.demonstrations import demonstrate
    from agentfly.training.warm_start import imitate, imitator

    begun, start = time.process_time(), str(out / "begin")
    shown = asyncio.run(_closed(make_agent(recipe, model_name_or_path=start), demonstrate, recipe.tasks))
    learner = imitator(start, steps=steps, learning_rate=LEARNING_RATE)
    rows = [["0", "", *asked(start, recipe, questions), ""]]
    for step in range(every, steps + 1, every):
        last = imitate(learner, shown.kept, steps=every, seed=step)[-1]
        folder = out / f"warm-{step}"
        learner.save(folder)
        load_tokenizer(start).save_pretrained(folder)  # type: ignore[attr-defined]
        spent = f"{time.process_time() - begun:.0f}"
        rows.append([str(step), f"{last.loss:.3f}", *asked(str(folder), recipe, questions), spent])
        print(*rows[-1], flush=True)
    return rows


def asked(model: str, recipe: Any, questions: int) -> list[str]:
    """Exact match of the greedy model by hops."""
    agent = make_agent(recipe, model_name_or_path=model)
    settings = {"max_turns": 4, "sampling": {"temperature": 0.0, "max_tokens": 48}}
    result = asyncio.run(_closed(agent, lambda a, tasks: a.run(tasks, **settings), recipe.eval_tasks[:questions]))
    by_hops = {
        hops: [t.reward or 0.0 for t in result.trajectories if t.task.columns["hops"] == hops] for hops in (1, 2)
    }
    return [f"{sum(rewards) / max(len(rewards), 1):.2f}" for rewards in by_hops.values()]


async def _closed(agent: Any, work: Any, tasks: Any) -> Any:
    """Do the work with the agent, and close it."""
    try:
        return await work(agent, tasks)
    finally:
        await agent.close()


if __name__ == "__main__":
    main()
