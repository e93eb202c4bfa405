"""Which settings make reinforcement learning improve a model beyond its warm start, and in which environments does it?

SmolLM2-135M, several runs side by side on one GPU. A folder holds one JSON file per job in `jobs/`; `queue` runs them
in the order of their names, also those that are added while it runs, and not those that have a result.

    python -m benchmarks.rl_factors jobs FOLDER [--factors gigpo,turns] # one factor at a time, on SQL and search
    python -m benchmarks.rl_factors learn FOLDER [--envs alfworld,shell] # three seeds of the base in each environment
    python -m benchmarks.rl_factors queue FOLDER --parallel 10 --deadline 1500
    python -m benchmarks.rl_factors table FOLDER

A `warm` job runs SFT on demonstrations for some steps and evaluates the result; a `search` job evaluates after every
few steps of SFT and keeps the model whose success is closest to its `target`; a `measure` job estimates how often the
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
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.rl_environments import ENVS, RecipeStudy
from benchmarks.table import print_table

MEASURED = 384
"""Training tasks whose difficulty is measured."""
TUNED = 256
"""Training tasks that a `search` job evaluates the stages of SFT on."""
TARGET = 0.28
SEARCH_SECONDS = 200.0
"""Seconds after which a `search` job stops SFT."""
EVALUATION_SECONDS = 110.0
"""Seconds that a `train` job reserves for its evaluation before the deadline of the queue."""
WARM_STEPS = {"sql": (10, 16, 24, 48), "search": (8, 14, 22, 44)}
BASE_STEPS = {"sql": 24, "search": 14}
"""Steps of SFT of the warm start with a success of a third, for a selection of factors."""
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
    "ppo-warmup": ["algorithm=ppo", "optimizer.critic_learning_rate=1e-4", "optimizer.critic_warmup_steps=5"],
    "turns": ["max_turns=8"],
    "steps40": ["steps=40"],
    "pool160": [],
    "pool160-avoid": ["zero_variance=avoid"],
}
"""The fields that each factor changes. `medium` and the strengths of the warm start are added in `write_jobs`."""
POOL = 160
"""Training tasks of the factors `pool160…`: 20 steps draw each of them four times, so that a sampler can learn which
are too easy or too hard."""
SEEDED = ("base", "lr-1e-5", "resample", "mini4")
"""Factors that run with seeds 1 and 2 besides 0."""


LEARNED = ("webshop", "alfworld", "programs", "math", "shell", "webshop-official")
"""Environments of `learn`, the most valuable first."""
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("jobs", "learn", "queue", "table", "job"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parallel", type=int, default=10, help="processes at once")
    parser.add_argument("--deadline", type=float, default=1500.0, help="seconds after which all jobs are stopped")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which one job is stopped")
    parser.add_argument("--until", type=float, default=float("inf"), help="time at which the queue stops its jobs")
    parser.add_argument("--envs", default=",".join(LEARNED), help="environments of `learn`, separated by commas")
    parser.add_argument("--factors", help="factors of `jobs`, separated by commas, instead of all of them")
    parser.add_argument("--model", default="smollm2-135m", help="the model before SFT")
    parser.add_argument("--watch", action="store_true", help="wait for further jobs when all are done")
    parser.add_argument("--job", help="the job to run in this process")
    parser.add_argument("--quick", action="store_true", help="a few tasks and one step, to test the program")
    options = parser.parse_args()
    if options.command == "jobs":
        write_jobs(options.folder, options.factors.split(",") if options.factors else [])
    elif options.command == "learn":
        write_learning_jobs(options.folder, options.envs.split(","))
    elif options.command == "queue":
        run_queue(options)
    elif options.command == "job":
        run_job(options)
    show(options.folder)


# ── the queue ──


def write_jobs(folder: Path, chosen: list[str]) -> None:
    """Jobs of all factors, or of the chosen ones from the warm start of `BASE_STEPS`."""
    jobs: list[dict[str, Any]] = []
    for env, counts in WARM_STEPS.items():
        steps_of = {f"{env}-warm-{steps}": steps for steps in ((BASE_STEPS[env],) if chosen else counts)}
        jobs += [{"kind": "warm", "env": env, "name": name, "steps": steps} for name, steps in steps_of.items()]
        trained = [(factor, "base", FACTORS[factor]) for factor in chosen or FACTORS]
        if not chosen:
            jobs.append({"kind": "measure", "env": env, "name": f"{env}-measure", "model": "base"})
            seeded = [(factor, seed) for factor in SEEDED for seed in SEEDS[1:]]
            trained += [(f"{factor}-seed{seed}", "base", [*FACTORS[factor], f"seed={seed}"]) for factor, seed in seeded]
            trained += [(f"from-{steps}", name, []) for name, steps in steps_of.items()]
            trained.append(("medium", "base", []))
        jobs += [
            {"kind": "train", "env": env, "name": f"{env}-{factor}", "model": model, "changes": changes}
            | ({"medium": True} if factor == "medium" else {})
            | ({"pool": POOL} if factor.startswith("pool") else {})
            for factor, model, changes in trained
        ]
    store_jobs(folder, "factors", jobs)


def write_learning_jobs(folder: Path, envs: list[str]) -> None:
    """All warm starts first, then each environment's first seed, second, third."""
    jobs: list[dict[str, Any]] = []
    for env in envs:
        steps = ENVS[env].warm_steps
        kind = {"kind": "search", "target": ENVS[env].target} if steps is None else {"kind": "warm", "steps": steps}
        jobs.append({**kind, "env": env, "name": f"{env}-warm-{steps or 'search'}"})
    for seed in SEEDS:
        jobs += [
            {"kind": "train", "env": env, "name": f"{env}-base-seed{seed}", "model": "base"}
            | {"changes": [*ENVS[env].learning, f"seed={seed}"]}
            for env in envs
        ]
    store_jobs(folder, "a-learn", jobs)


def store_jobs(folder: Path, prefix: str, jobs: list[dict[str, Any]]) -> None:
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    for number, job in enumerate(jobs):
        (folder / "jobs" / f"{prefix}-{number:03}.json").write_text(json.dumps(job))


def run_queue(options: argparse.Namespace) -> None:
    """Start jobs while there is room, and stop those that take too long."""
    folder, study_start, started = options.folder, time.monotonic(), set[str]()
    options.until = time.time() + options.deadline
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    while time.monotonic() - study_start < options.deadline and not (folder / "stop").exists():
        for name, (process, since) in list(running.items()):
            if process.poll() is not None:
                print(f"{time.monotonic() - study_start:6.0f} s  {name}: exit {process.returncode}", flush=True)
                del running[name]
            elif time.monotonic() - since > options.limit:
                os.killpg(process.pid, signal.SIGKILL)
        for path in sorted((folder / "jobs").glob("*.json")):
            job = read(path)
            if (folder / "results" / f"{job['name']}.json").exists():
                started.add(path.stem)
            if len(running) < options.parallel and path.stem not in started and is_ready(folder, job):
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
    command += ["--parallel", str(options.parallel), "--until", str(options.until), "--limit", str(options.limit)]
    command += ["--model", options.model, *(["--quick"] if options.quick else [])]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    quiet |= {"JAX_PLATFORMS": "cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"}
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / f"{path.stem}.txt").open("wb") as log:
        return subprocess.Popen(
            command, env={**os.environ, **quiet}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def is_ready(folder: Path, job: dict[str, Any]) -> bool:
    """Whether the model that the job starts from exists."""
    if job["kind"] in ("warm", "search"):
        return True
    if job["model"] == "base":
        jobs = map(read, (folder / "jobs").glob("*.json"))
        warm = [other for other in jobs if other["kind"] in ("warm", "search")]
        needed = [other["name"] for other in warm if other["env"] == job["env"]]
    else:
        needed = [job["model"]]
    needed += [f"{job['env']}-measure"] if job.get("medium") else []
    return all((folder / "results" / f"{name}.json").exists() for name in needed)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def base_of(folder: Path, env: str) -> str:
    """The warm start whose success is closest to the target."""
    warm_starts = [read(path) for path in (folder / "results").glob(f"{env}-warm-*.json")]
    return str(min(warm_starts, key=lambda warm_start: abs(warm_start["sampled"][0] - TARGET))["name"])


# ── one job ──


def run_job(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    job = read(options.folder / "jobs" / f"{options.job}.json")
    if torch.cuda.is_available():
        memory, total = ENVS[job["env"]].memory, torch.cuda.get_device_properties(0).total_memory
        share = 0.95 / options.parallel if memory is None else min(memory * 2**30 / total, 0.95)
        torch.cuda.set_per_process_memory_fraction(share)
    started = time.monotonic()
    until = min(options.until, time.time() + options.limit)
    study = RecipeStudy(options.folder, job["env"], model=options.model, quick=options.quick, until=until)
    kinds = {"warm": warm, "search": search, "measure": measure, "train": train}
    result = kinds[job["kind"]](study, job, options.folder)
    result = {**job, **result, "seconds": time.monotonic() - started}
    (options.folder / "results").mkdir(exist_ok=True)
    (options.folder / "results" / f"{job['name']}.json").write_text(json.dumps(result))


def warm(study: RecipeStudy, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from agentfly.sft.training import build_sft_learner, train_sft

    steps, seed = 1 if study.quick else job["steps"], job.get("seed", 0)
    demonstrations = study.demonstrate(16 * steps)
    learner = build_sft_learner(study.model, steps=steps, learning_rate=1e-4, seed=seed)
    losses = train_sft(learner, demonstrations, steps=steps, batch_size=2 if study.quick else 16, seed=seed)
    out = folder / "models" / job["name"]
    save_model(study, learner, out)

    async def evaluate() -> dict[str, Any]:
        agent = study.make_agent(**study.config(out, []).agent_settings)
        try:
            return await study.evaluate(agent)
        finally:
            await agent.close()

    return {"loss": losses[-1].loss, **asyncio.run(evaluate())}


def save_model(study: RecipeStudy, learner: Any, out: Path) -> None:
    from agentfly.models import resolve
    from agentfly.templates.tokenizer import load_tokenizer

    learner.save(out)
    tokenizer: Any = load_tokenizer(resolve(study.model))
    tokenizer.save_pretrained(out)


def search(study: RecipeStudy, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """SFT in stages; keeps the model whose success on training tasks is closest to the target, and evaluates it."""
    from agentfly.models import resolve
    from agentfly.sft.training import build_sft_learner, train_sft
    from agentfly.training.weight_sync import sync_weights

    started = time.monotonic()
    stages = (1, 2) if study.quick else study.env.stages
    demonstrations = study.demonstrate(8 if study.quick else min(16 * stages[-1], study.env.demonstrated))
    learner = build_sft_learner(study.model, steps=2 * stages[-1], learning_rate=1e-4)
    out = folder / "models" / job["name"]
    target = job["target"]
    curve: list[tuple[int, float]] = []

    async def search() -> dict[str, Any]:
        agent = study.make_agent(**study.config(Path(resolve(study.model)), []).agent_settings)
        best = 1.0
        try:
            for number, stage in enumerate(stages):
                before = stages[number - 1] if number else 0
                size = 2 if study.quick else 16
                train_sft(learner, demonstrations, steps=stage - before, batch_size=size, seed=number)
                await sync_weights(learner, agent.backend, number + 1)
                tuned = study.trained[-TUNED:]
                share = (await study.evaluate(agent, tuned, greedy=False))["sampled"][0]
                curve.append((stage, share))
                print(f"{time.monotonic() - started:.0f} s: {share:.3f} after {stage} steps of SFT", flush=True)
                if abs(share - target) < best:
                    best = abs(share - target)
                    save_model(study, learner, out)
                if share >= target or time.monotonic() - started > SEARCH_SECONDS:
                    break
            learner.load(out)
            await sync_weights(learner, agent.backend, len(stages) + 1)
            return await study.evaluate(agent)
        finally:
            await agent.close()

    return {"curve": curve, **asyncio.run(search())}


def measure(study: RecipeStudy, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The success of each of the first training tasks."""

    async def measure() -> list[float]:
        config = study.config(folder / "models" / base_of(folder, job["env"]), [])
        agent = study.make_agent(**config.agent_settings)
        tasks = study.trained[: 4 if study.quick else MEASURED]
        try:
            chains = await agent.run(tasks, config.max_turns, 4, sampling=config.sampling, seed=1)
        finally:
            await agent.close()
        return [fmean(chain.reward or 0.0 for chain in chains if chain.group == group) for group in range(len(tasks))]

    return {"shares": asyncio.run(measure())}


def train(study: RecipeStudy, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from agentfly.training.plan import TrainPlan
    from agentfly.training.trainer import Trainer

    model = base_of(folder, job["env"]) if job["model"] == "base" else job["model"]
    config = study.config(folder / "models" / model, job["changes"])
    tasks = study.trained
    if job.get("medium"):
        shares = read(folder / "results" / f"{job['env']}-measure.json")["shares"]
        tasks = [task for task, share in zip(tasks, shares, strict=False) if 0 < share < 1]
    tasks = tasks[: job.get("pool")]
    run = folder / "runs" / job["name"]
    trainer = Trainer.create(TrainPlan(study.make_agent, tasks, config), run)

    async def train_and_evaluate() -> dict[str, Any]:
        """`Trainer.run`, with an evaluation before the agent is closed."""
        async with trainer:
            slowest = 0.0
            while trainer.step < config.steps and time.time() + slowest + EVALUATION_SECONDS < study.until:
                started = time.time()
                await trainer.train_step()
                slowest = max(slowest, time.time() - started)
            return {"steps": trainer.step, **await study.evaluate(trainer.agent)}

    outcome = asyncio.run(train_and_evaluate())
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [sum(value for name, value in record.items() if name.startswith("time/")) for record in records]
    return {"model": model, "training_tasks": len(tasks), "step_seconds": median(seconds), **outcome}


# ── the tables ──


def show(folder: Path) -> None:
    results = [read(path) for path in sorted((folder / "results").glob("*.json"))]
    rows = []
    for result in results:
        if "sampled" in result:
            shares = (result["sampled"], result["greedy"])
            cells = [f"{mean:.3f} ({low:.2f} to {high:.2f})" for mean, low, high in shares]
            seconds = f"{result.get('step_seconds', 0):.1f}"
            rows.append([result["name"], result.get("model", ""), " ".join(result.get("changes", [])), *cells, seconds])
    if rows:
        print_table("Held-out success", ["run", "warm start", "changes", "sampled", "greedy", "s a step"], rows)
    starts = {result["name"]: result for result in results}
    gains = []
    for result in results:
        start = starts.get(result.get("model", ""))
        if start is not None and "sampled" in result:
            cells = [cell for kind in ("sampled", "greedy") for cell in compare(start, result, kind)]
            seed = next((change[5:] for change in result["changes"] if change.startswith("seed=")), "0")
            steps, seconds = str(result.get("steps", "")), f"{result['step_seconds']:.1f}"
            gains.append([result["env"], result["name"], seed, str(start["tasks"]), *cells, steps, seconds])
    if gains:
        columns = ["environment", "run", "seed", "n", "before, sampled", "after", "gain"]
        columns += ["before, greedy", "after", "gain", "steps", "s a step"]
        print_table("Gain over the warm start", columns, gains)


def compare(before: dict[str, Any], after: dict[str, Any], kind: str) -> list[str]:
    """Share before, share after, and their difference with the half-width of its 95 % interval."""
    old, new, count = before[kind][0], after[kind][0], before["tasks"]
    # Normal approximation for two independent shares p and q of n: 1.96 √(p(1-p)/n + q(1-q)/n).
    half = 1.96 * sqrt((old * (1 - old) + new * (1 - new)) / count)
    return [f"{old:.3f}", f"{new:.3f}", f"{new - old:+.3f} ± {half:.3f}"]


if __name__ == "__main__":
    main()
