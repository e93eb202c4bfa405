"""One update of the learner on a GPU: tokens/s, model FLOPs utilization (MFU), peak memory, and where the time goes.

Random weights of a published shape: float32 weights and AdamW, products in bfloat16. Chains have 1,000 tokens, half of
them sampled. Each variant is one setting changed against the first; a variant that fails is reported in its row, and
the others still run. With --sharded, the learner of one process and the one sharded with FSDP2, on one rank over NCCL
(gloo on a CPU), are compared, all weights and LoRA, beside what the memory plan of a run expects.

    python -m benchmarks.update_gpu [--shape qwen2.5-3b] [--chains 57] [--variants "as trained;16k tokens"]
    python -m benchmarks.update_gpu --sharded --shape qwen2.5-3b qwen2.5-7b --chains 24 --seconds 110
"""

import argparse
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from agentfly.algorithms.base import SegmentArrays
from agentfly.errors import describe
from agentfly.training import logprobs
from agentfly.training import model as training_model
from agentfly.training.batch import Sample
from agentfly.training.config import TrainConfig
from agentfly.training.config_records import UpdateConfig
from agentfly.training.local_learner import LocalLearner
from agentfly.training.lora import add_lora
from agentfly.training.memory import MemoryPlan, ModelSize, device_memory, plan_memory
from agentfly.training.sharded_learner import ShardedLearner
from agentfly.training.sharding import Ranks
from benchmarks.shapes import PEAK_FLOPS, SHAPES, build_model, count_flops
from benchmarks.table import print_table

GIB = 2**30


@dataclass(frozen=True)
class Variant:
    """A way to run the update."""

    micro_batch: int = 8192
    """Maximum tokens in one forward pass."""
    checkpointing: bool = False
    compiled: bool = True
    """Layers and head are compiled, as the learner does on a GPU."""
    lora_rank: int | None = None
    sharded: bool = False


VARIANTS = {
    "as trained": Variant(),
    "checkpointing": Variant(checkpointing=True),
    "16k tokens": Variant(16384),
    "16k tokens, checkpointing": Variant(16384, checkpointing=True),
    "not compiled": Variant(compiled=False),
    "not compiled, checkpointing": Variant(compiled=False, checkpointing=True),
}
SHARDED_VARIANTS = {
    f"{learner}, {weights}{', checkpointing' if checkpointing else ''}": Variant(
        checkpointing=checkpointing, lora_rank=16 if weights == "LoRA" else None, sharded=learner == "FSDP2"
    )
    for checkpointing in (True, False)
    for learner in ("FSDP2", "one process")
    for weights in ("all weights", "LoRA")
}
"""The most important first: a limit of time leaves out the last."""
WARMUP_CHAINS = 16
"""Enough for two full micro-batches, which compile what the measured update runs."""


def build_samples(vocabulary: int, chains: int, length: int) -> list[Sample]:
    """Chains in four turns: an observation, then as many sampled tokens."""
    draw = np.random.default_rng(0)
    samples = []
    for number in range(chains):
        tokens = draw.integers(5, vocabulary, length).astype(np.int32)
        mask = np.arange(length) // max(length // 8, 1) % 2 == 1
        zeros = np.zeros(length, np.int32)
        segment = SegmentArrays(tokens, mask, np.where(mask, -1.0, 0.0).astype(np.float32), zeros, zeros)
        advantages = np.where(mask, draw.normal(), 0.0).astype(np.float32)
        samples.append(Sample(segment, advantages, name=f"{number}/0#0"))
    return samples


@contextmanager
def patch(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def join_ranks(device: torch.device) -> Ranks:
    """The ranks that torchrun started; without it, one rank in this process."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        os.environ.setdefault(name, str(value))
    return Ranks(device)


def build_learner(shape: str, device: torch.device, variant: Variant) -> LocalLearner:
    low = variant.lora_rank is not None and device.type == "cuda"  # frozen weights as in training
    model = build_model(shape, device.type, torch.bfloat16 if low else torch.float32)
    if variant.lora_rank is not None:
        model = add_lora(model, variant.lora_rank)
    update = UpdateConfig(
        micro_batch_tokens=variant.micro_batch,
        gradient_checkpointing=variant.checkpointing,
        precision="auto" if device.type == "cuda" else "float32",
    )
    if variant.sharded:
        return ShardedLearner(model, ranks=join_ranks(device), update=update)
    return LocalLearner(model, update=update)


def plan_variant(shape: str, device: torch.device, variant: Variant) -> MemoryPlan:
    """What a training run of the variant would take, engine included."""
    config = TrainConfig(
        micro_batch_tokens=variant.micro_batch,
        gradient_checkpointing=variant.checkpointing,
        lora_rank=variant.lora_rank,
    )
    size = ModelSize.from_config(SHAPES[shape])
    return plan_memory(size, config, device_memory(device), on_gpu=device.type == "cuda", ranks=1)


@contextmanager
def apply(variant: Variant) -> Iterator[None]:
    """The settings of a variant that are not the learner's own."""
    if variant.compiled:
        yield
        return
    with (
        patch(training_model, compile_layers=lambda model: None),
        patch(logprobs, _fuse=lambda function, device: function),
    ):
        yield


def time_phases(learner: LocalLearner, samples: list[Sample]) -> dict[str, float]:
    """Seconds of an update by phase, with the GPU idle between two of them."""
    seconds: dict[str, float] = {}

    def time_calls(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize(learner.device)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize(learner.device)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        return call

    class TimedHead(logprobs._ChunkedScore):
        forward = staticmethod(time_calls("head forward", logprobs._ChunkedScore.forward))
        backward = staticmethod(time_calls("head backward", logprobs._ChunkedScore.backward))

    backbone = learner._policy.backbone
    with (
        patch(logprobs, _chunked_score=TimedHead.apply),
        patch(backbone, hidden_states=time_calls("layers forward", backbone.hidden_states)),
        patch(torch.Tensor, backward=time_calls("layers backward", torch.Tensor.backward)),
        patch(learner._optimizer, step=time_calls("optimizer", learner._optimizer.step)),
    ):
        time_calls("whole", learner.update)(samples)
    seconds["layers backward"] -= seconds["head backward"]
    seconds["rest"] = 2 * seconds["whole"] - sum(seconds.values())
    return seconds


def profile(learner: LocalLearner, samples: list[Sample]) -> None:
    """Print the device time of an update by kind of kernel, and the ten longest kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    on_gpu = learner.device.type == "cuda"
    with record(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        learner.update(samples)
        synchronize(learner.device)
    events = recorded.key_averages()
    cost = {event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events}
    counts = {event.key: event.count for event in events}
    total = sum(cost.values()) or 1
    kinds = {
        "matrix products": ("gemm", "nvjet", "cutlass", "mm", "splitk", "addmm"),
        "attention": ("flash", "fmha", "attention", "cudnn", "sdpa"),
        "fused by torch.compile": ("triton",),
        "optimizer": ("adam", "multi_tensor", "norm_kernel", "lpnorm"),
        "copies and casts": ("memcpy", "memset", "copy", "cat"),
    }
    shares = dict.fromkeys([*kinds, "other elementwise"], 0.0)
    for key, spent in cost.items():
        kind = next((kind for kind, words in kinds.items() if any(word in key.lower() for word in words)), None)
        shares[kind or "other elementwise"] += spent
    rows = [[name, f"{spent / 1e3:.0f}", f"{spent / total:.0%}"] for name, spent in shares.items()]
    print_table("Device time by kind", ["kind", "ms", "share"], rows)
    longest = sorted(cost.items(), key=lambda item: -item[1])[:10]
    rows = [
        [f"`{key[:100]}`", f"{counts[key]}", f"{spent / 1e3:.0f}", f"{spent / total:.0%}"] for key, spent in longest
    ]
    print_table("Longest kernels", ["kernel", "calls", "ms", "share"], rows)


def run_variant(
    shape: str, device: torch.device, variant: Variant, samples: list[Sample], *, detailed: bool
) -> list[str]:
    """Run a warm-up update and a measured one; returns the cells of the variant's row."""
    with apply(variant):
        learner = build_learner(shape, device, variant)
        started = time.perf_counter()
        learner.update(samples[:WARMUP_CHAINS])
        synchronize(device)
        first = time.perf_counter() - started
        started = time.perf_counter()
        metrics = learner.update(samples)
        synchronize(device)
        seconds = time.perf_counter() - started
        if detailed:
            phases = time_phases(learner, samples)
            cells = [[name, f"{spent:.3f}", f"{spent / phases['whole']:.0%}"] for name, spent in phases.items()]
            print_table("Phases, the GPU idle between them", ["phase", "s", "share"], cells)
            profile(learner, samples[:16])
    tokens = sum(len(sample.segment.tokens) for sample in samples)
    mfu = count_flops(learner.model, tokens, len(samples[0].segment.tokens)) / seconds / PEAK_FLOPS
    peak = metrics.get("update/peak_memory_bytes", 0.0) / GIB
    norm = f"{metrics['policy/grad_norm']:.5g}"
    return [f"{seconds:.2f}", f"{tokens / seconds:,.0f}", f"{mfu:.3f}", f"{peak:.1f}", f"{first:.1f}", norm]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One update of the learner on a GPU.")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["qwen2.5-3b"])
    parser.add_argument("--chains", type=int, default=57)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--variants", help="names, separated by semicolons; default: all")
    parser.add_argument("--sharded", action="store_true", help="compare one process with FSDP2, all weights and LoRA")
    parser.add_argument("--profile", default="as trained", help="variants that are profiled")
    parser.add_argument("--seconds", type=float, default=240, help="no variant starts after this time")
    parser.add_argument("--quick", action="store_true", help="a smoke run on the CPU; the figures are not meaningful")
    options = parser.parse_args(arguments)
    if options.quick:
        options.device, options.shape, options.chains, options.length = "cpu", ["test"], 6, 64
        options.variants = options.variants or (None if options.sharded else "as trained;checkpointing")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no GPU here")
        return
    started = time.perf_counter()
    variants = SHARDED_VARIANTS if options.sharded else VARIANTS
    profiled = () if options.sharded else options.profile.split(";")
    device = torch.device(options.device)
    names = options.variants.split(";") if options.variants else list(variants)
    rows = []
    for name, shape in product(names, options.shape):
        variant = variants[name]
        plan = plan_variant(shape, device, variant)
        needed = f"{(plan.total - plan.left) / GIB:.1f}"
        if time.perf_counter() - started > options.seconds:
            cells = ["not started: time is up"]
        else:
            samples = build_samples(SHAPES[shape].vocab_size, options.chains, options.length)
            try:
                cells = run_variant(shape, device, variant, samples, detailed=name in profiled)
            except Exception as error:
                cells = [describe(error).splitlines()[0][:120]]
        rows.append([shape, name, needed, *cells])
        print(" | ".join(rows[-1]), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    header = ["shape", "variant", "plan GiB", "s", "tokens/s", "MFU", "peak GiB", "first s", "gradient norm"]
    print_table(f"One update, {options.chains} × {options.length} tokens", header, rows)
    if options.sharded:
        for shape in options.shape:
            for name in ("FSDP2, all weights, checkpointing", "FSDP2, LoRA, checkpointing"):
                print(f"plan of a run, {shape}, {name}: {plan_variant(shape, device, variants[name])}")
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
