"""The largest model that trains on one GPU of 80 and of 140 GiB: all weights, and LoRA adapters.

Random weights of published shapes. Every run is a process of its own: learner, dry run, engine beside it, some sampled
tokens, one update with gradient checkpointing, weight sync, and tokens again. For each device size and kind, the search
starts at the largest model that the memory plan expects to fit, and goes on to the first that does not.

    python -m benchmarks.largest_model [--gib 80 140] [--kinds all lora] [--seconds 240] [--device cpu --shapes test]
"""

import argparse
import asyncio
import multiprocessing
import time
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from agentfly.backends.base import Request
from agentfly.backends.engine import EngineBackend
from agentfly.errors import describe
from agentfly.training.config import TrainConfig
from agentfly.training.local_learner import LocalLearner
from agentfly.training.lora import add_lora
from agentfly.training.memory import MemoryPlan, ModelSize, fit_cache, frozen_weight_dtype, plan_memory
from agentfly.training.weight_sync import weights_for
from agentfly.types import Sampling
from benchmarks.shapes import SHAPES, build_model
from benchmarks.table import print_table
from benchmarks.update_gpu import build_samples

GIB = 2**30
CHAINS, LENGTH = 16, 1000
ENGINE = {"backend": "transformers", "max_rows": 64, "max_batch_tokens": 1024}
"""Small steps: capturing the default's CUDA graphs would take most of the time."""


@cache
def measure_shape(shape: str) -> ModelSize:
    return ModelSize.from_config(SHAPES[shape])


@dataclass(frozen=True)
class Case:
    """A model on a device."""

    shape: str
    kind: str
    """all or lora."""
    gib: float
    device: str = "cuda"

    @property
    def config(self) -> TrainConfig:
        rank = 16 if self.kind == "lora" else None
        return TrainConfig(micro_batch_tokens=4096, gradient_checkpointing=True, lora_rank=rank, backend=ENGINE)

    def plan(self) -> MemoryPlan:
        return plan_memory(measure_shape(self.shape), self.config, int(self.gib * GIB), on_gpu=self.device == "cuda")


@dataclass(frozen=True)
class Outcome:
    """What a run measured."""

    error: str = ""
    peak: float = 0.0
    """GiB allocated at the peak of the whole run."""
    cache: float = 0.0
    """GiB of the engine's KV cache."""
    engine: float = 0.0
    """GiB that the engine holds without its KV cache: weights, fused weights, CUDA graphs."""
    engine_planned: float = 0.0
    activations: float = 0.0
    """GiB, measured by the dry run."""
    activations_planned: float = 0.0
    update: float = 0.0
    """Seconds of the first update."""
    start: float = 0.0
    """Seconds until the first update."""


def run_case(case: Case) -> Outcome:
    """Train one step, in a process of its own."""
    start = time.perf_counter()
    on_gpu = case.device == "cuda"
    config = case.config
    if on_gpu:
        fraction = case.gib * GIB / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(fraction, 1.0))
    model = build_model(case.shape, case.device, frozen_weight_dtype(config, on_gpu=on_gpu))
    if config.lora_rank is not None:
        model = add_lora(model, config.lora_rank)
    learner = LocalLearner.from_config(model, config)
    plan = case.plan()
    fitted = fit_cache(plan, learner)
    before = _allocated_bytes(on_gpu)
    sampled_from = build_model(case.shape, case.device, torch.bfloat16) if on_gpu else model
    settings: dict[str, Any] = {name: value for name, value in ENGINE.items() if name != "backend"}
    kv_memory = fitted.parts["kv_cache"] if on_gpu else 1 << 24
    backend = EngineBackend(sampled_from, kv_memory=kv_memory, **settings)

    async def work() -> float:
        request = Request(list(range(5, 105)), Sampling(max_tokens=16, seed=0))
        await backend.update_weights(weights_for(learner, backend), 0)
        await backend.generate(request)
        nonlocal engine
        engine = _allocated_bytes(on_gpu) - before - (kv_memory if on_gpu else 0)
        updating = time.perf_counter()
        learner.update(build_samples(SHAPES[case.shape].vocab_size, CHAINS, LENGTH))
        seconds = time.perf_counter() - updating
        await backend.update_weights(weights_for(learner, backend), 1)
        await backend.generate(request)
        await backend.close()
        return seconds

    engine = 0
    started = time.perf_counter() - start
    seconds = asyncio.run(work())
    planned = sum(fitted.parts[name] for name in ("engine_weights", "engine_graphs"))
    return Outcome(
        peak=(torch.cuda.max_memory_allocated() if on_gpu else 0) / GIB,
        cache=kv_memory / GIB,
        engine=engine / GIB,
        engine_planned=planned / GIB,
        activations=fitted.parts["activations"] / GIB,
        activations_planned=plan.parts["activations"] / GIB,
        update=seconds,
        start=started,
    )


def _allocated_bytes(on_gpu: bool) -> int:
    return torch.cuda.memory_allocated() if on_gpu else 0


def _work(case: Case, results: Any) -> None:
    try:
        results.put(asdict(run_case(case)))
    except BaseException as error:
        results.put({"error": describe(error).splitlines()[0][:200]})


def run_in_process(case: Case, timeout: float) -> Outcome:
    """Run a case in a fork of a server that has imported everything and has not touched the GPU."""
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    process = context.Process(target=_work, args=(case, results), daemon=True)
    process.start()
    try:
        return Outcome(**results.get(timeout=timeout))
    except Exception as error:
        return Outcome(error=f"no result after {timeout:.0f} s ({type(error).__name__}), exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The largest model that trains on one GPU.")
    parser.add_argument("--gib", type=float, nargs="+", default=[80, 140], help="sizes of the device in GiB")
    parser.add_argument("--kinds", nargs="+", choices=("all", "lora"), default=["all", "lora"])
    parser.add_argument("--shapes", nargs="+", default=[shape for shape in SHAPES if shape != "test"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=240, help="no run starts after this time")
    parser.add_argument("--quick", action="store_true", help="a smoke run on the CPU; the figures are not meaningful")
    options = parser.parse_args(arguments)
    if options.quick:
        options.device, options.shapes, options.gib = "cpu", ["test"], [1]
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no GPU here")
        return
    start = time.perf_counter()
    multiprocessing.set_forkserver_preload(["benchmarks.update_gpu", "agentfly.training.trainer", "peft"])
    shapes = sorted(options.shapes, key=lambda shape: measure_shape(shape).parameters)
    kinds = [(gib, kind) for gib in options.gib for kind in options.kinds]
    cases = [Case(shape, kind, gib, options.device) for gib, kind in kinds for shape in shapes]
    plans = {case: case.plan() for case in cases}
    predicted = [
        [f"{case.gib:.0f}", case.kind, case.shape, _format_needed(plan), "yes" if plan.left >= 0 else "no"]
        for case, plan in plans.items()
    ]
    print_table("The plan", ["device GiB", "trained", "model", "least GiB", "fits"], predicted)

    outcomes: dict[Case, Outcome] = {}

    def trains(case: Case) -> bool:
        left = options.seconds - (time.perf_counter() - start)
        if left <= 0:
            return False
        outcomes[case] = run_in_process(case, min(left + 30, 120))
        print(case.gib, case.kind, case.shape, outcomes[case], flush=True)
        return not outcomes[case].error

    for gib, kind in kinds:
        row = [case for case in cases if (case.gib, case.kind) == (gib, kind)]
        at = max((index for index, case in enumerate(row) if plans[case].left >= 0), default=0)
        if trains(row[at]):
            while at + 1 < len(row) and trains(row[at + 1]):
                at += 1
        else:
            while at > 0 and not trains(row[at - 1]):
                at -= 1
    rows = []
    for case, got in outcomes.items():
        cells = [f"{case.gib:.0f}", case.kind, case.shape, _format_needed(plans[case])]
        if got.error:
            rows.append([*cells, "no", got.error.replace("|", " ")[:90]])
        else:
            compared = [(got.engine, got.engine_planned), (got.activations, got.activations_planned)]
            cells += ["yes", f"{got.peak:.1f}", f"{got.cache:.1f}"]
            cells += [f"{measured:.1f} / {planned:.1f}" for measured, planned in compared]
            rows.append([*cells, f"{got.update:.1f}", f"{got.start:.0f}"])
    header = [
        "device GiB", "trained", "model", "planned least GiB", "trains", "peak GiB", "KV cache GiB",
        "engine GiB / planned", "activations GiB / planned", "update s", "start s",
    ]  # fmt: skip
    print_table("One training step with the engine beside it", header, rows)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{where}, torch {torch.__version__}, {CHAINS} chains of {LENGTH} tokens, {time.perf_counter() - start:.0f} s"
    )


def _format_needed(plan: MemoryPlan) -> str:
    return f"{(plan.total - plan.left) / GIB:.1f}"


if __name__ == "__main__":
    main()
