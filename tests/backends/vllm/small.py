"""A small model with the head size that vLLM needs on a CPU, and helpers for its processes."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

from transformers import LlamaConfig

from agentfly.backends.vllm import VLLMBackend
from agentfly.backends.vllm.engine import VLLMEngine
from agentfly.templates.tokenizer import load_tokenizer
from tests.backends.engine import tiny

VOCABULARY = 300
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def model_of(seed: int = 0, **changes: Any) -> Any:
    return tiny.model_of(seed, LlamaConfig(**{**CONFIG.to_dict(), **changes}))


def save_model(model: Any, folder: Path) -> str:
    """A folder with the model and a tokenizer of bytes."""
    model.save_pretrained(folder)
    load_tokenizer("bytes").backend_tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def backend_of(folder: str, **settings: Any) -> VLLMBackend:
    on_update = "continue" if VLLMEngine.reports_versions else "finish"
    return VLLMBackend(folder, **{"dtype": "float32", "kv_memory": 1 << 26, "on_update": on_update, **settings})


def descendants() -> set[int]:
    """The processes below this one that are vLLM's."""
    parents: dict[int, int] = {}
    for process_folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process_folder.name)] = int((process_folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below, vllm_pids = [os.getpid()], set()
    while below:
        parent = below.pop()
        children = [pid for pid, its in parents.items() if its == parent]
        vllm_pids |= {pid for pid in children if "VLLM" in command_line(pid)}
        below += children
    return vllm_pids


def command_line(pid: int) -> str:
    """A process's command line; empty where it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


async def until(true: Any, seconds: float = 60) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.05)
