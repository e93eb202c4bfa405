"""A vision model on a GPU: sampling with a screenshot in every turn, and the memory of training with images.

Random weights of the shape of Qwen2.5-VL-3B in bfloat16 (training: float32 weights, products in bfloat16). Chains come
in groups of eight that begin with the same screenshot; every turn ends with another one of 504 x 504 pixels. Sampling
runs with the cache of image features and without it, in turns. Training has the vision tower frozen and trained.

    python -m benchmarks.vision_gpu [--shape qwen2.5-vl-3b] [--chains 64] [--turns 6] [--rounds 2]
        [--variants frozen trained …]
"""

import argparse
import asyncio
import gc
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLImageProcessorPil

from agentfly.algorithms.base import SegmentArrays
from agentfly.backends.base import Request
from agentfly.backends.engine import EngineBackend
from agentfly.backends.engine import vision as engine_vision
from agentfly.errors import describe
from agentfly.models.tiny import build_tokenizer
from agentfly.templates import load_template
from agentfly.templates.tokenizer import load_tokenizer
from agentfly.training.batch import Sample
from agentfly.training.config_records import UpdateConfig
from agentfly.training.local_learner import LocalLearner
from agentfly.types import Image, Sampling
from agentfly.vision import processor as vision_module
from agentfly.vision.images import encode_image
from agentfly.vision.processor import ImageProcessor, load_image_processor
from benchmarks.table import print_table

SCREENSHOT = 504
"""Width and height in pixels: 324 tokens."""
PROMPT, SAMPLED = 200, 64
"""Tokens of the first prompt, and of every turn."""
GROUP = 8
GIB = 2**30
TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}<|image_pad|>"
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "test": (
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 1024, "mrope_section": [2, 3, 3]},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [1]},
    ),
    "qwen2.5-vl-3b": (
        {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
         "num_key_value_heads": 2, "vocab_size": 151936, "mrope_section": [16, 24, 24]},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
         "fullatt_block_indexes": [7, 15, 23, 31]},
    ),
}  # fmt: skip
"""Text and vision configuration. `test` is no published shape: it is for smoke runs on a CPU."""

VARIANTS = ("frozen", "frozen-checkpointing", "trained-checkpointing", "trained")
"""The vision tower is frozen or trained, with and without gradient checkpointing."""


def write_folder(shape: str, folder: Path) -> None:
    """Write configuration, tokenizer and image processor of a model, as its publisher does; no weights."""
    tokenizer = build_tokenizer(["Look at the screenshot, then click. 0 1 2 3 4 5 6 7 8 9"], 320)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    start, end, image, video = tokenizer.convert_tokens_to_ids(TOKENS)
    text, vision = SHAPES[shape]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": text["mrope_section"]}
    text = {
        **text,
        "bos_token_id": None,
        "eos_token_id": 2,
        "rope_parameters": rope,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }
    Qwen2_5_VLConfig(
        text_config=text, vision_config={**vision, "out_hidden_size": text["hidden_size"], "window_size": 112},
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({}))


def build_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig.from_pretrained(folder)
    with device:
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    model.config.name_or_path = str(folder)
    return model


@cache
def draw_screenshot(seed: int) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (SCREENSHOT, SCREENSHOT, 3), dtype=np.uint8)
    return encode_image(Pillow.fromarray(pixels))


class History:
    """The tokens of a chain so far, its images, and the positions of their tokens."""

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self.tokens: list[int] = []
        self.images: list[Image] = []
        self.positions: list[int] = []

    def show(self, image: Image) -> None:
        ids = self._processor.encode(image).ids
        start = len(self.tokens)
        self.positions += [start + index for index, token in enumerate(ids) if token == self._processor.token_id]
        self.tokens += ids
        self.images.append(image)


def list_seeds(chains: int, turns: int, first: int) -> list[list[int]]:
    """Seeds of each chain's screenshots: the first is that of its group."""
    return [[first + n // GROUP, *(first + 1000 + n * turns + turn for turn in range(1, turns))] for n in range(chains)]


async def sample_chains(backend: EngineBackend, processor: ImageProcessor, chains: int, turns: int, first: int) -> int:
    """Run all chains at once and return the number of sampled tokens. first: seed of the first screenshot."""

    async def run(number: int, seeds: list[int]) -> int:
        history = History(processor)
        history.tokens += np.random.default_rng(seeds[0]).integers(5, 300, PROMPT).tolist()
        sampled = 0
        for turn, seed in enumerate(seeds):
            history.show(draw_screenshot(seed))
            request = Request(
                list(history.tokens),
                Sampling(max_tokens=SAMPLED, seed=number),
                images=tuple(history.images),
                image_positions=tuple(history.positions),
                chain=f"{first}/{number}",
                turn=turn,
            )
            got = await backend.generate(request)
            sampled += len(got.token_ids)
            history.tokens += got.token_ids
        return sampled

    seeds = list_seeds(chains, turns, first)
    return sum(await asyncio.gather(*(run(number, chain_seeds) for number, chain_seeds in enumerate(seeds))))


async def compare_sampling(folder: Path, device: torch.device, options: argparse.Namespace) -> None:
    """Sampling with and without cached features, in turns. Images are drawn and processed before each round."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = EngineBackend(build_model(folder, device, dtype), kv_memory=options.kv_gib * GIB)
    processor = load_image_processor(str(folder))
    backend.attach(load_template(None, load_tokenizer(str(folder)), tools=(), image_processor=processor))
    processing: list[float] = []
    speeds: dict[str, list[float]] = {"cached": [], "not cached": []}
    for number in range(-1, options.rounds):  # the first round captures CUDA graphs
        for name, size in (("cached", engine_vision.FEATURE_BYTES), ("not cached", 0)):
            with patch.object(engine_vision, "FEATURE_BYTES", size):
                first = 100_000 * (2 * number + (name == "cached") + 2)
                seeds = {
                    seed for chain_seeds in list_seeds(options.chains, options.turns, first) for seed in chain_seeds
                }
                with ThreadPoolExecutor() as pool:
                    images = list(pool.map(draw_screenshot, seeds))
                    began = time.perf_counter()
                    list(pool.map(processor.encode, images))
                processing.append(len(images) / (time.perf_counter() - began))
                began = time.perf_counter()
                sampled = await sample_chains(backend, processor, options.chains, options.turns, first)
                speeds[name].append(sampled / (time.perf_counter() - began))
    await backend.close()
    rows = [[name, f"{median(rates[1:]):,.0f}", f"{median(processing):,.0f}"] for name, rates in speeds.items()]
    title = f"{options.shape}: {options.chains} chains x {options.turns} turns, a screenshot of {SCREENSHOT}² in each"
    print_table(title, ["features of images", "sampled tokens/s", "images/s of the processor"], rows)


def build_samples(processor: ImageProcessor, chains: int, images: int) -> list[Sample]:
    """Chains with one screenshot and as many sampled tokens as in a turn, `images` times."""
    samples = []
    for number in range(chains):
        history = History(processor)
        sampled: list[bool] = []
        for turn in range(images):
            history.show(draw_screenshot(number * images + turn))
            sampled += [False] * (len(history.tokens) - len(sampled))
            history.tokens += list(range(5, 5 + SAMPLED))
            sampled += [True] * SAMPLED
        mask = np.array(sampled)
        zeros = np.zeros(len(mask), np.int32)
        segment = SegmentArrays(
            np.array(history.tokens, np.int32),
            mask,
            np.where(mask, -1.0, 0.0).astype(np.float32),
            zeros,
            zeros,
            images=tuple(history.images),
            image_positions=np.array(history.positions, np.int32),
        )
        samples.append(Sample(segment, mask.astype(np.float32), name=f"{number}/0#0"))
    return samples


def measure_training(folder: Path, device: torch.device, options: argparse.Namespace) -> None:
    processor = load_image_processor(str(folder))
    rows = []
    for name in options.variants:
        row = [name.replace("-", ", ")]
        learner = None
        try:
            learner = LocalLearner(
                build_model(folder, device, torch.float32),
                update=UpdateConfig(
                    micro_batch_tokens=options.micro_batch, gradient_checkpointing="checkpointing" in name
                ),
                train_tower=name.startswith("trained"),
            )
            samples = build_samples(processor, options.chains // 4, 4)
            learner.update(samples)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            learner.update(samples)
            seconds = time.perf_counter() - began
            peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
            tokens = sum(len(sample.segment.tokens) for sample in samples)
            row += [f"{seconds:.2f}", f"{tokens / seconds:,.0f}", f"{peak:.1f}"]
        except Exception as error:  # the other variants still run
            row += [describe(error)[:80], "", ""]
        rows.append(row)
        print(*row, flush=True)  # a run that is stopped has measured this one
        del learner
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    title = f"{options.shape}: update of {options.chains // 4} chains with 4 screenshots"
    print_table(title, ["vision tower", "s", "tokens/s", "peak GiB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sampling and training of a vision model on a GPU.")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-vl-3b")
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=8192, help="tokens of a forward pass in training")
    parser.add_argument("--kv-gib", type=int, default=30, help="GiB of the key-value cache")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=[*VARIANTS], help="of training")
    options = parser.parse_args()
    if not torch.cuda.is_available() and options.shape != "test":
        raise SystemExit("there is no GPU here; --shape test runs on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        write_folder(options.shape, Path(name))
        with patch.object(vision_module, "CACHE_BYTES", 64 * GIB):
            asyncio.run(compare_sampling(Path(name), device, options))
        measure_training(Path(name), device, options)


if __name__ == "__main__":
    main()
