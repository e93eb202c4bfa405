"""Environments of the benchmark of reinforcement learning: their recipes, tasks and settings.

`RecipeStudy` has what a job needs of one of them: tasks for demonstrations, training and evaluation, and agents.
"""

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

SHARED = {
    "template": "chatml", "micro_batch_tokens": 4096, "checkpoint.every": 1000, "checkpoint.keep": 1,
    "evaluation.every": None, "loggers": (),
}  # fmt: skip
"""What every run changes in its recipe: the template of SmolLM2, and settings for a GPU that several runs share."""


@dataclass(frozen=True)
class Env:
    """One environment of the study: its recipe, its tasks and what differs from the recipe."""

    recipe: str
    draw: Callable[[str, int], list[dict[str, Any]]]
    """Tasks of a split."""
    demonstrated: int = 640
    trained: int = 1000
    held_out: int = 400
    changes: tuple[str, ...] = ()
    """What differs from the recipe; a job's own changes come after these."""
    stages: tuple[int, ...] = (6, 9, 12, 15, 18, 22, 26, 30, 36, 42, 50, 60, 72, 90)
    """Steps of SFT, of 16 demonstrations each, after which a `search` job evaluates."""
    target: float = 0.28
    """Success on training tasks at which a `search` job stops SFT."""
    warm_steps: int | None = None
    """Steps of SFT of the warm start; None: determined by a `search` job."""
    learning: tuple[str, ...] = ()
    """What the runs of `learn` change."""
    agent: Callable[[], dict[str, Any]] = dict
    """Arguments of the recipe's agent."""
    memory: int | None = None
    """GiB of GPU memory that a job may take; None: an equal share of the parallel jobs."""


def draw_by(environment: str, **options: Any) -> Callable[[str, int], list[dict[str, Any]]]:
    """Tasks that the environment of that name draws; it is imported when they are drawn."""

    def draw(split: str, count: int) -> list[dict[str, Any]]:
        import agentfly.environments

        tasks: list[dict[str, Any]] = getattr(agentfly.environments, environment).draw_tasks(split, count, **options)
        return tasks

    return draw


def draw_official_shop(split: str, count: int) -> list[dict[str, Any]]:
    from agentfly.environments.webshop import official_tasks

    return official_tasks(split)[:count]


def square_reward() -> dict[str, Any]:
    """The square of the score: a full score is worth more than twice half of it."""
    from agentfly.rewards import product, webshop_reward

    return {"reward": product(webshop_reward, webshop_reward, name="squared_score")}


LONG = f"backend.kv_memory={9 << 29}"
"""For chains of a thousand tokens: 128 of them take about 4 GiB of keys and values."""
SHOP_STAGES = (6, 8, 10, 11, 12, 13, 14, 15, 17, 20, 24)
ENVS = {
    # Factors are compared with a base that drops groups without variance; the recipes resample them.
    "sql": Env(
        "sql", draw_by("SQL", levels=(1, 2)), demonstrated=1000, trained=2400, changes=("zero_variance=null",),
    ),
    "search": Env(
        "search", draw_by("Search", hops=(2,), articles=100), demonstrated=1000, trained=2400,
        changes=("zero_variance=null",),
    ),
    # Held-out functions are harder than those of training tasks, which a search would evaluate.
    "programs": Env("program_synthesis", draw_by("ProgramSynthesis", kinds=["lists"]), warm_steps=13),
    "shell": Env("shell", draw_by("Shell")),
    "math": Env(
        "math_with_python", draw_by("MathWithPython"), trained=3000, stages=tuple(range(5, 16)), target=0.19,
        learning=("steps=45",), memory=11,
    ),
    "webshop": Env("webshop", draw_by("WebShop"), changes=(LONG,), stages=SHOP_STAGES, target=0.2),
    "webshop-official": Env(
        "webshop", draw_official_shop, trained=4000, changes=(LONG,), warm_steps=13,
        learning=("steps=75", "optimizer.schedule=linear", "optimizer.warmup_steps=3"), agent=square_reward, memory=13,
    ),
    "alfworld": Env(
        "alfworld", draw_by("ALFWorld"), trained=2400, held_out=240, changes=(LONG,), warm_steps=46, memory=19,
    ),
}  # fmt: skip
"""Environments by name."""


class RecipeStudy:
    """A recipe with the tasks of this study."""

    def __init__(self, folder: Path, env: str, *, model: str, quick: bool, until: float) -> None:
        from agentfly.cli.recipes import find_recipe
        from agentfly.cli.resolve import load_module, make_agent
        from agentfly.rollout.config import parse_tasks

        self.env, self.model, self.quick, self.until = ENVS[env], model, quick, until
        module = load_module(find_recipe(self.env.recipe).path, "recipe", self.env.recipe)
        self.make_agent, self.recipe = partial(make_agent, module, **self.env.agent()), module.config
        first, trained = (8, 8) if quick else (self.env.demonstrated, self.env.trained)
        self.demonstrations = folder / "demonstrations" / f"{env}.jsonl"
        drawn = folder / "tasks" / f"{env}.json"
        if not drawn.exists():  # drawing takes up to half a minute, so the first job of an environment stores the tasks
            drawn.parent.mkdir(exist_ok=True)
            held_out = self.env.draw("validation", 4 if quick else self.env.held_out)
            part = drawn.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps([self.env.draw("train", first + trained), held_out]))
            part.rename(drawn)
        tasks, self.held_out = map(parse_tasks, json.loads(drawn.read_text()))
        self.demonstrated, self.trained = tasks[:first], tasks[first:]

    def config(self, model: Path, changes: list[str]) -> Any:
        from agentfly.training.config import parse_overrides

        fields = {**SHARED, "model": str(model), "backend": {"backend": "transformers", "kv_memory": 3 << 30}}
        fields |= parse_overrides([*self.env.changes, *changes])
        config = self.recipe.override(fields)
        # Separately: with fewer steps than a warm-up that is changed at the same time, the config would be refused.
        return config.override({"tasks_per_step": 2, "num_chains": 2, "steps": 1}) if self.quick else config

    async def evaluate(self, agent: Any, tasks: Any = None, *, greedy: bool = True) -> dict[str, Any]:
        """Success on held-out or other tasks, sampled at temperature 1 and greedy, each with its 95 % interval."""
        from agentfly.evaluation import evaluate

        config = self.config(Path(), [])
        sampling = {"temperature": 1.0, "max_tokens": config.sampling.max_tokens}
        evaluation = await evaluate(
            agent, tasks or self.held_out, greedy=greedy, max_turns=config.max_turns, sampling=sampling, seed=0,
            max_concurrent_chains=config.chains_per_step,
        )  # fmt: skip
        shares = {"sampled": evaluation.success, "greedy": evaluation.greedy}
        return {
            **{name: (share.mean, share.low, share.high) for name, share in shares.items() if share is not None},
            "tasks": evaluation.tasks, "reward": evaluation.reward.mean, "turns": evaluation.turns,
            "calls": evaluation.calls, "tokens": evaluation.tokens, "unscored": evaluation.unscored,
            "stops": dict(evaluation.stops),
        }  # fmt: skip

    def demonstrate(self, count: int) -> list[Any]:
        """The expert's chains of the first tasks for demonstrations, as tokens of SmolLM2; stored by the first job."""
        from agentfly.data import load_trajectories, save_trajectories
        from agentfly.sft.demonstrations import demonstrate

        if self.demonstrations.exists():
            return load_trajectories(self.demonstrations)[:count]
        scripted = {"backend": "scripted", "backend_config": {"script": "-"}}
        writer = self.make_agent(model_name_or_path=self.model, template="chatml", **scripted)
        turns = self.config(Path(), []).max_turns

        async def run_expert() -> Any:
            try:
                return await demonstrate(writer, self.demonstrated, max_turns=turns)
            finally:
                await writer.close()

        demonstrations = asyncio.run(run_expert())
        print(f"{len(demonstrations.accepted)} demonstrations; rejected: {demonstrations.reasons}", flush=True)
        self.demonstrations.parent.mkdir(exist_ok=True)
        part = self.demonstrations.with_suffix(f".{os.getpid()}")
        save_trajectories(part, demonstrations.accepted)
        part.rename(self.demonstrations)
        return list(demonstrations.accepted[:count])
