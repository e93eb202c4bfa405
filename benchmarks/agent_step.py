"""Training steps of a recipe: tokens a second, and where the time of a step goes.

    python -m benchmarks.agent_step RECIPE [field=value …] [--steps 3] [--warmup 1] [--profile]
    python -m benchmarks.agent_step alfworld --random smollm2-135m --backends transformers,vllm

`--random SHAPE` trains random weights of a published shape. Their replies mean nothing, so the expert's calls are run
in their place, in a cycle, without the last one: every chain has `max_turns` turns of `sampling.max_tokens` tokens.
Everything else is a real step: parsing, tools, templates, rewards, the update of all tokens, and weight sync.
`--backends` runs the same steps with each in turn, in a process of its own.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agentfly.backends.base import Request
from agentfly.backends.scripted import ScriptedBackend
from agentfly.cli.recipes import find_recipe
from agentfly.cli.train import plan_recipe
from agentfly.errors import AgentFlyError
from agentfly.models import resolve
from agentfly.runs import RunDirectory, StepRecord
from agentfly.sft.demonstrations import Demonstrations, demonstrate
from agentfly.training.config import parse_overrides, validate_overrides
from agentfly.training.plan import TrainPlan
from agentfly.training.trainer import Trainer
from agentfly.types import Completion, Message, Reply, Task, ToolCall
from benchmarks.shapes import PEAK_FLOPS, SHAPES, build_model, count_flops
from benchmarks.table import print_table
from benchmarks.thread_profile import ThreadProfile

BACKENDS: dict[str, dict[str, Any]] = {
    "transformers": {"backend": "transformers"},
    "vllm": {"backend": "vllm", "on_update": "finish", "max_rows": 512, "context_length": 8192},
}
_TASK: ContextVar[Task] = ContextVar("task")


def write_random_model(shape: str, tokenizer: str, folder: Path) -> None:
    """Write random weights of a shape in bfloat16, with the tokenizer of another model."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(shape, device, torch.bfloat16, vocab=len(tokens))
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


def replay_expert(plan: TrainPlan) -> TrainPlan:
    """The plan with an agent whose replies are the expert's calls, whatever the model samples."""
    tasks = list(plan.tasks)[: plan.config.tasks_per_step]
    calls: dict[str, list[ToolCall]] = {}

    def make_agent(**settings: Any) -> Any:
        agent = plan.make_agent(**settings)
        initial_messages, read = agent.initial_messages, agent.read

        def remember_task(task: Task) -> Sequence[Message]:
            _TASK.set(task)  # a chain has a context of its own
            return initial_messages(task)

        def reply(request: Request, completion: Completion) -> Reply:
            read(request, completion)  # parsing is part of the cost
            script = calls[_TASK.get().id]
            call = script[request.turn % len(script)]
            return Reply(Message("assistant", "", (call,)))

        if not calls:
            settings.pop("backend_config", None)
            expert = plan.make_agent(**{**settings, "backend": ScriptedBackend("unused")})

            async def record() -> Demonstrations:
                try:
                    return await demonstrate(expert, tasks, max_turns=100)
                finally:
                    await expert.close()

            demonstrations = asyncio.run(record())
            for chain in (*demonstrations.accepted, *demonstrations.rejected):
                demonstrated = [dataclasses.replace(call, id="") for m in chain.messages for call in m.tool_calls]
                calls[chain.task.id] = demonstrated[:-1] or demonstrated
        agent.initial_messages, agent.read = remember_task, reply
        return agent

    return dataclasses.replace(plan, make_agent=make_agent, tasks=tasks)


def make_plan(recipe: str, overrides: Mapping[str, Any], steps: int) -> TrainPlan:
    """The recipe's plan with these overrides, without evaluations, checkpoints and console output."""
    quiet = {"steps": steps + 1, "loggers": [], "evaluation": {}, "checkpoint": {"every": steps + 2}}
    plan = plan_recipe(find_recipe(recipe), {**quiet, **overrides})
    return dataclasses.replace(plan, eval_tasks=())


async def run_steps(trainer: Trainer, warmup: int, steps: int, profile: ThreadProfile | None) -> list[float]:
    """Train; returns samples of the GPU's utilization in percent during the steps after the warm-up."""
    async with trainer:
        for _ in range(warmup):
            await trainer.train_step()
        gc.collect()
        with watch_gpu() as busy, profile.measure() if profile is not None else contextlib.nullcontext():
            for _ in range(steps):
                await trainer.train_step()
    return busy


@contextlib.contextmanager
def watch_gpu() -> Iterator[list[float]]:
    """Fill the list with the GPU's utilization, five times a second, when the block has ended; empty without a GPU."""
    busy: list[float] = []
    tool = shutil.which("nvidia-smi") if torch.cuda.is_available() else None
    if tool is None:
        yield busy
        return
    command = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield busy
    finally:
        process.terminate()
        output, _ = process.communicate()
        busy += [float(line) for line in output.split() if line.isdigit()]


def measure(
    recipe: str,
    overrides: Mapping[str, Any],
    *,
    steps: int,
    warmup: int,
    shape: str | None = None,
    tokenizer: str = "tiny",
    profile: ThreadProfile | None = None,
) -> dict[str, float]:
    """Run the steps, print a table of them, and return the medians. `shape`, `tokenizer`: of random weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if shape is not None:
            write_random_model(shape, resolve(tokenizer), folder / "model")
            overrides = {**overrides, "model": str(folder / "model"), "zero_variance": "keep"}
        plan = make_plan(recipe, overrides, warmup + steps)
        plan = plan if shape is None else replay_expert(plan)
        started = time.perf_counter()
        trainer = Trainer.create(plan, folder / "run")
        start_seconds = time.perf_counter() - started
        print(f"started after {start_seconds:.0f} s. {trainer.memory}", flush=True)
        busy = asyncio.run(run_steps(trainer, warmup, steps, profile))
        records = RunDirectory(folder / "run").records()[-steps:]
    rows = [step_figures(record) for record in records]
    header = list(rows[0])
    cells = [[_format(row[name]) for name in header] for row in rows]
    print_table(f"{recipe}: {steps} steps after {warmup} of warm-up", header, cells)
    if profile is not None:
        header_row = ["thread", "CPU s", "cause", "of its samples"]
        print_table("CPU seconds by thread and cause", header_row, profile.rows())
        print("\n".join(f"{count:6d} {line}" for line, count in profile.lines.most_common(40)), flush=True)
    figures = {name: median(row[name] for row in rows) for name in header[1:]}
    figures["start s"] = start_seconds
    if busy:
        figures["GPU busy %"] = sum(busy) / len(busy)
    if torch.cuda.is_available():
        length = figures["prompt"] + figures["turns"] * (figures["sampled/turn"] + figures["read/turn"])
        flops = count_flops(trainer.learner.model, int(figures["chains"] * length), length)
        gpus = int(os.environ.get("WORLD_SIZE", 1))
        figures["MFU of the update"] = flops / figures["update s"] / (gpus * PEAK_FLOPS)
        figures["peak GiB of the learner's process"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def step_figures(record: StepRecord) -> dict[str, float]:
    """The figures of one step: seconds by phase, and tokens."""
    metrics, seconds = record.metrics, record.seconds
    chains, turns = metrics["chains"], metrics["chain/turns"]
    sampled = metrics["chain/sampled_tokens"]
    return {
        "step": float(record.step),
        "tokens/s": metrics["throughput/tokens_per_second"],
        "step s": sum(seconds.values()),
        "sampling s": seconds.get("generate", 0.0),
        "tools s": seconds.get("tools", 0.0),
        "waiting s": seconds.get("waiting", 0.0),
        "update s": seconds.get("update", 0.0),
        "sync s": seconds.get("publish", 0.0),
        "other s": seconds.get("other", 0.0),
        "chains": chains,
        "turns": turns,
        "sampled/turn": sampled / max(turns, 1),
        "read/turn": metrics["chain/observation_tokens"] / max(turns, 1),
        "prompt": metrics["chain/prompt_tokens"],
    }


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def compare_backends(names: Sequence[str], recipe: str, arguments: list[str]) -> None:
    """Run this benchmark once per backend, in a new process each; one that fails leaves its exit status."""
    at = arguments.index(recipe) + 1
    results: dict[str, dict[str, float]] = {}
    for name in names:
        # Before the user's overrides, so that they can change a field of it.
        backend_arguments = [*arguments[:at], f"backend={json.dumps(BACKENDS[name])}", *arguments[at:]]
        command = [sys.executable, "-m", "benchmarks.agent_step", *backend_arguments]
        with tempfile.NamedTemporaryFile() as file:
            done = subprocess.run([*command, "--result", file.name], env={**os.environ, "PYTHONUNBUFFERED": "1"})
            text = Path(file.name).read_text()
        results[name] = json.loads(text) if text else {"failed": float(done.returncode)}
    fields = list(dict.fromkeys(itertools.chain.from_iterable(results.values())))
    rows = [[f, *(_format(result[f]) if f in result else "" for result in results.values())] for f in fields]
    print_table("Medians of the steps", ["", *results], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--random", choices=SHAPES, help="train random weights of this shape")
    parser.add_argument("--tokenizer", default="tiny", help="model whose tokenizer goes with --random")
    parser.add_argument("--backends", help="comma-separated names to compare: " + ", ".join(BACKENDS))
    parser.add_argument("--profile", action="store_true", help="also print CPU time by thread and cause")
    parser.add_argument("--result", help="file to write the medians to, as JSON")
    arguments = parser.parse_intermixed_args()
    try:
        find_recipe(arguments.recipe)
        validate_overrides(overrides := parse_overrides(arguments.overrides))
    except AgentFlyError as error:
        parser.error(str(error))
    if arguments.backends:
        remaining = iter(sys.argv[1:])
        others = [argument for argument in remaining if argument != "--backends" or not next(remaining)]
        compare_backends(arguments.backends.split(","), arguments.recipe, others)
        return
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # as the command line does
    figures = measure(
        arguments.recipe,
        overrides,
        steps=arguments.steps,
        warmup=arguments.warmup,
        shape=arguments.random,
        tokenizer=arguments.tokenizer,
        profile=ThreadProfile() if arguments.profile else None,
    )
    print(", ".join(f"{name} {_format(value)}" for name, value in figures.items()))
    if arguments.result:
        Path(arguments.result).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
