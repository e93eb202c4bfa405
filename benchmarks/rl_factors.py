"""Which settings make reinforcement learning improve a model beyond its warm start?

SmolLM2-135M on SQL (levels 1 and 2) and search (two hops), several runs side by side on one GPU. A folder holds one
JSON file per job in `jobs/`; `queue` runs them in the order of their names, also those that are added while it runs.

    python -m benchmarks.rl_factors jobs FOLDER            # write the jobs of the screening
    python -m benchmarks.rl_factors queue FOLDER --parallel 10 --deadline 1500
    python -m benchmarks.rl_factors table FOLDER

A `warm` job runs SFT on demonstrations for some steps and evaluates the result; a `measure` job estimates how often the
warm start solves each training task; a `train` job trains from a warm start and evaluates the result. The model `base`
is the warm start whose success is closest to `TARGET`.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.table import print_table

DEMONSTRATED, TRAINED, HELD_OUT, MEASURED = 1000, 2400, 400, 384
"""Tasks for demonstrations, for training, for evaluation, and training tasks whose difficulty is measured."""
TARGET = 0.35
WARM_STEPS = {"sql": (10, 16, 24, 48), "search": (8, 14, 22, 44)}
SHARED = {
    "template": "chatml", "tasks_per_step": 32, "num_chains": 8, "optimizer.learning_rate": 3e-5,
    "optimizer.schedule": "constant",
    "micro_batch_tokens": 4096, "steps": 20, "checkpoint.every": 1000, "checkpoint.keep": 1,
    "evaluation.every": None, "loggers": (),
}  # fmt: skip
"""The fields of every run; a job's `changes` override them."""
FACTORS: dict[str, list[str]] = {
    "base": [],
    "lr-3e-6": ["optimizer.learning_rate=3e-6"],
    "lr-1e-5": ["optimizer.learning_rate=1e-5"],
    "lr-1e-4": ["optimizer.learning_rate=1e-4"],
    "lr-1e-4-warmup": ["optimizer.learning_rate=1e-4", "optimizer.warmup_steps=5"],
    "resample": ["zero_variance=resample"],
    "keep": ["zero_variance=keep"],
    "g4": ["tasks_per_step=64", "num_chains=4"],
    "g16": ["tasks_per_step=16", "num_chains=16"],
    "tasks16": ["tasks_per_step=16"],
    "tasks64": ["tasks_per_step=64"],
    "T0.7": ["sampling.temperature=0.7"],
    "T1.2": ["sampling.temperature=1.2"],
    "rloo": ["algorithm=rloo"],
    "ppo": ["algorithm=ppo", "optimizer.critic_learning_rate=1e-4"],
    "reinforce_pp": ["algorithm=reinforce_pp"],
    "gigpo": ["algorithm=gigpo"],
    "mini4": ["mini_batches=4"],
    "mini4-lr-1e-5": ["mini_batches=4", "optimizer.learning_rate=1e-5"],
    "mini4-cliphigh": ["mini_batches=4", "loss.clip=[0.2,0.28]"],
    "mini4-steps40": ["mini_batches=4", "steps=40"],
    "resample-mini4": ["zero_variance=resample", "mini_batches=4"],
    "kl": ["kl.coef=0.01"],
    "entropy": ["loss.entropy_coef=0.003"],
    "turns": ["max_turns=8"],
    "steps40": ["steps=40"],
}
"""The fields that each factor changes. `medium` and the strengths of the warm start are added in `write_jobs`."""
SEEDED = ("base", "lr-1e-5", "resample", "mini4")
"""Factors that run with seeds 1 and 2 besides 0."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("jobs", "queue", "table", "job"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parallel", type=int, default=10, help="processes at once")
    parser.add_argument("--deadline", type=float, default=1500.0, help="seconds after which all jobs are stopped")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which one job is stopped")
    parser.add_argument("--watch", action="store_true", help="wait for further jobs when all are done")
    parser.add_argument("--job", help="the job to run in this process")
    parser.add_argument("--quick", action="store_true", help="a few tasks and one step, to test the program")
    options = parser.parse_args()
    if options.command == "jobs":
        write_jobs(options.folder)
    elif options.command == "queue":
        run_queue(options)
    elif options.command == "job":
        run_job(options)
    show(options.folder)


# ── the queue ──


def write_jobs(folder: Path) -> None:
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    jobs: list[dict[str, Any]] = []
    for env, counts in WARM_STEPS.items():
        starts = [f"{env}-warm-{steps}" for steps in counts]
        jobs += [
            {"kind": "warm", "env": env, "name": name, "steps": steps}
            for name, steps in zip(starts, counts, strict=True)
        ]
        jobs.append({"kind": "measure", "env": env, "name": f"{env}-measure", "model": "base"})
        trained = [(factor, "base", changes) for factor, changes in FACTORS.items()]
        trained += [(f"{factor}-seed{n}", "base", [*FACTORS[factor], f"seed={n}"]) for factor in SEEDED for n in (1, 2)]
        trained += [(f"from-{steps}", name, []) for name, steps in zip(starts, counts, strict=True)]
        trained.append(("medium", "base", []))
        jobs += [
            {"kind": "train", "env": env, "name": f"{env}-{factor}", "model": model, "changes": changes}
            | ({"medium": True} if factor == "medium" else {})
            for factor, model, changes in trained
        ]
    for number, job in enumerate(jobs):
        (folder / "jobs" / f"{number:03}.json").write_text(json.dumps(job))


def run_queue(options: argparse.Namespace) -> None:
    """Start jobs while there is room, and stop those that take too long."""
    folder, begun, started = options.folder, time.monotonic(), set[str]()
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    while time.monotonic() - begun < options.deadline and not (folder / "stop").exists():
        for name, (process, since) in list(running.items()):
            if process.poll() is not None:
                print(f"{time.monotonic() - begun:6.0f} s  {name}: exit {process.returncode}", flush=True)
                del running[name]
            elif time.monotonic() - since > options.limit:
                os.killpg(process.pid, signal.SIGKILL)
        for path in sorted((folder / "jobs").glob("*.json")):
            if len(running) < options.parallel and path.stem not in started and is_ready(folder, read(path)):
                started.add(path.stem)
                running[path.stem] = (start(path, options), time.monotonic())
        if not running and not options.watch:
            break
        time.sleep(0.5)
    for process, _ in running.values():
        os.killpg(process.pid, signal.SIGKILL)


def start(path: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    folder = options.folder
    command = [sys.executable, "-m", "benchmarks.rl_factors", "job", str(folder), "--job", path.stem]
    command += ["--parallel", str(options.parallel), *(["--quick"] if options.quick else [])]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    quiet |= {"JAX_PLATFORMS": "cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"}
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / f"{path.stem}.txt").open("wb") as log:
        return subprocess.Popen(
            command, env={**os.environ, **quiet}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def is_ready(folder: Path, job: dict[str, Any]) -> bool:
    """Whether the model that the job starts from exists."""
    if job["kind"] == "warm":
        return True
    if job["model"] == "base":
        warm = [each for each in map(read, (folder / "jobs").glob("*.json")) if each["kind"] == "warm"]
        needed = [each["name"] for each in warm if each["env"] == job["env"]]
    else:
        needed = [job["model"]]
    needed += [f"{job['env']}-measure"] if job.get("medium") else []
    return all((folder / "results" / f"{name}.json").exists() for name in needed)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def base_of(folder: Path, env: str) -> str:
    """The warm start whose success is closest to the target."""
    there = [read(path) for path in (folder / "results").glob(f"{env}-warm-*.json")]
    return str(min(there, key=lambda each: abs(each["sampled"][0] - TARGET))["name"])


# ── one job ──


def run_job(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.95 / options.parallel)
    job = read(options.folder / "jobs" / f"{options.job}.json")
    study = RecipeStudy(job["env"], options.quick)
    begun = time.monotonic()
    found = {"warm": warm, "measure": measure, "train": train}[job["kind"]](study, job, options.folder)
    result = {**job, **found, "seconds": time.monotonic() - begun}
    (options.folder / "results").mkdir(exist_ok=True)
    (options.folder / "results" / f"{job['name']}.json").write_text(json.dumps(result))


class RecipeStudy:
    """A recipe with the tasks of this study."""

    def __init__(self, env: str, quick: bool) -> None:
        from agentfly.cli.recipes import find_recipe
        from agentfly.cli.resolve import load_module, make_agent
        from agentfly.environments.search import Search
        from agentfly.environments.sql import SQL
        from agentfly.rollout.config import parse_tasks

        module = load_module(find_recipe(env).path, "recipe", env)
        self.make_agent, self.recipe, self.quick = partial(make_agent, module), module.config, quick
        draw = {
            "sql": partial(SQL.draw_tasks, levels=(1, 2)),
            "search": partial(Search.draw_tasks, hops=(2,), articles=100),
        }[env]
        tasks = parse_tasks(draw("train", DEMONSTRATED + TRAINED))
        self.demonstrated, self.trained = tasks[:DEMONSTRATED], tasks[DEMONSTRATED:]
        self.held_out = parse_tasks(draw("validation", 4 if quick else HELD_OUT))

    def config(self, model: Path, changes: list[str]) -> Any:
        from agentfly.training.config import parse_overrides

        fields = {**SHARED, "model": str(model), "backend": {"backend": "transformers", "kv_memory": 3 << 30}}
        fields |= {"sampling.max_tokens": 96} | parse_overrides(changes)
        fields |= {"tasks_per_step": 2, "num_chains": 2, "steps": 1} if self.quick else {}
        return self.recipe.override(fields)

    async def evaluate(self, agent: Any) -> dict[str, Any]:
        """Success on held-out tasks, sampled at temperature 1 and greedy, each with its 95 % interval."""
        from agentfly.evaluation.evaluator import evaluate

        sampling = {"temperature": 1.0, "max_tokens": 96}
        found = await evaluate(
            agent, self.held_out, greedy=True, max_turns=self.recipe.max_turns, sampling=sampling, seed=0
        )
        shares = {"sampled": found.success, "greedy": found.greedy}
        return {
            **{name: (each.mean, each.low, each.high) for name, each in shares.items() if each is not None},
            "turns": found.turns, "tokens": found.tokens, "unscored": found.unscored, "stops": dict(found.stops),
        }  # fmt: skip


def warm(study: RecipeStudy, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from agentfly.demonstrations import demonstrate
    from agentfly.models import resolve
    from agentfly.sft import build_sft_learner, train_sft
    from agentfly.templates.tokenizer import load_tokenizer

    name, steps = "smollm2-135m", 1 if study.quick else job["steps"]
    scripted = {"backend": "scripted", "backend_config": {"script": "-"}}
    writer = study.make_agent(model_name_or_path=name, template="chatml", **scripted)
    tasks = study.demonstrated[: 4 if study.quick else 16 * steps]
    shown = asyncio.run(demonstrate(writer, tasks, max_turns=study.recipe.max_turns)).accepted
    learner = build_sft_learner(name, steps=steps, learning_rate=1e-4, seed=job.get("seed", 0))
    losses = train_sft(learner, shown, steps=steps, batch_size=2 if study.quick else 16, seed=job.get("seed", 0))
    out = folder / "models" / job["name"]
    learner.save(out)
    tokenizer: Any = load_tokenizer(resolve(name))
    tokenizer.save_pretrained(out)

    async def evaluated() -> dict[str, Any]:
        agent = study.make_agent(**study.config(out, []).agent_settings)
        try:
            return await study.evaluate(agent)
        finally:
            await agent.close()

    return {"loss": losses[-1].loss, **asyncio.run(evaluated())}


def measure(study: RecipeStudy, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The success of each of the first training tasks."""

    async def measured() -> list[float]:
        config = study.config(folder / "models" / base_of(folder, job["env"]), [])
        agent = study.make_agent(**config.agent_settings)
        tasks = study.trained[: 4 if study.quick else MEASURED]
        try:
            chains = await agent.run(tasks, config.max_turns, 4, sampling=config.sampling, seed=1)
        finally:
            await agent.close()
        return [fmean(each.reward or 0.0 for each in chains if each.group == group) for group in range(len(tasks))]

    return {"shares": asyncio.run(measured())}


def train(study: RecipeStudy, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from agentfly.training.plan import TrainPlan
    from agentfly.training.trainer import Trainer

    model = base_of(folder, job["env"]) if job["model"] == "base" else job["model"]
    config = study.config(folder / "models" / model, job["changes"])
    tasks = study.trained
    if job.get("medium"):
        shares = read(folder / "results" / f"{job['env']}-measure.json")["shares"]
        tasks = [task for task, share in zip(tasks, shares, strict=False) if 0 < share < 1]
    run = folder / "runs" / job["name"]
    trainer = Trainer(TrainPlan(study.make_agent, tasks, config), run)

    async def trained() -> dict[str, Any]:
        """`Trainer.run`, with an evaluation before the agent is closed."""
        async with trainer:
            while trainer.step < config.steps:
                await trainer.train_step()
            return await study.evaluate(trainer.agent)

    found = asyncio.run(trained())
    shutil.rmtree(run / "checkpoints")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [sum(value for name, value in each.items() if name.startswith("time/")) for each in records]
    return {"model": model, "tasks": len(tasks), "step_seconds": median(seconds), **found}


# ── the table ──


def show(folder: Path) -> None:
    rows = []
    for path in sorted((folder / "results").glob("*.json")):
        result = read(path)
        if "sampled" in result:
            shares = (result["sampled"], result["greedy"])
            shown = [f"{mean:.3f} ({low:.2f} to {high:.2f})" for mean, low, high in shares]
            seconds = f"{result.get('step_seconds', 0):.1f}"
            rows.append([result["name"], result.get("model", ""), " ".join(result.get("changes", [])), *shown, seconds])
    if rows:
        print_table("Held-out success", ["run", "warm start", "changes", "sampled", "greedy", "s a step"], rows)


if __name__ == "__main__":
    main()
