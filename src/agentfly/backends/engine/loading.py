"""Loads models from a folder or the hub, in the precision that is fast on this machine; checks weights of an update."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from agentfly.errors import ConfigError, describe
from agentfly.models.huggingface import hide_progress_bars

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a causal language model for sampling, with its vision tower if it has one."""
    auto = auto_class(load_config(name))
    with hide_progress_bars(), _explain_missing(name):
        model: Any = auto.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    return apply_softcap(model.to(device).eval())


def apply_softcap(model: Any) -> Any:
    """The same model, with an attention that applies the soft cap of its configuration, if it has one.

    `scaled_dot_product_attention` cannot cap logits, but transformers up to 5.10 chooses it for Gemma 2 nevertheless.
    """
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    return model


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model of this configuration. Most vision models are known as such only."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_vision = hasattr(config, "vision_config") and type(config) not in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if is_vision else AutoModelForCausalLM


def load_config(name: str) -> Any:
    """Load the configuration of a model, without its weights."""
    from transformers import AutoConfig

    with _explain_missing(name):
        return AutoConfig.from_pretrained(name, trust_remote_code=False)


@contextmanager
def _explain_missing(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
            raise ConfigError(f"there is no folder {name!r} with a model") from error
        folder = Path(name).expanduser()
        # Inside a checkpoint, the folder of checkpoints, a run directory, or a folder of runs.
        inside = ("model", "*/model", "checkpoints/*/model", "*/checkpoints/*/model")
        config_files = [file for path in inside for file in sorted(folder.glob(f"{path}/config.json"))]
        if config_files:
            raise ConfigError(
                f"{name!r} is not the folder of a model, but contains one: give {config_files[-1].parent}"
            ) from error
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"{name!r} is an adapter (lora_rank=…), not a whole model: merge it into its model with peft, "
                "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OUT), and copy "
                "its tokenizer files to OUT"
            ) from error
        reason = " ".join(str(error).split())[:200]
        if folder.is_dir():
            raise ConfigError(
                f"the folder {name!r} has no model that transformers can load, with config.json and weights: {reason}"
            ) from error
        raise ConfigError(
            f"there is no folder {name!r}, and no such model from the hub ({reason}). "
            "`agentfly models` lists what can be had without the hub."
        ) from error


def resolve_device(name: str | None) -> torch.device:
    """The requested device; None takes a GPU if there is one, CUDA's before Apple's (mps)."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name is None:
        return torch.device(next(kind for kind, usable in available.items() if usable))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"there is no device {name!r}; write cpu, cuda, cuda:1 or mps") from None
    if not available.get(device.type, True):
        raise ConfigError(f"device={name!r}, but torch {torch.__version__} sees no GPU here; write device='cpu'")
    return device


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The requested precision. None is bfloat16 on a GPU and float32 on a CPU.

    On a CPU the rounding of a bfloat16 product depends on how many rows are multiplied at once, so which chains share a
    pass would change what is sampled: two runs with one seed would differ.
    """
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype is one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


_PROBE = """
import time, torch
torch.set_num_threads(1)  # with the CPU time of this thread alone, other processes do not change the result
def took(dtype):
    x = torch.randn(256, 256).to(dtype)
    x @ x
    begun = time.thread_time()
    for _ in range(8): x @ x
    return time.thread_time() - begun
rounds = [(took(torch.bfloat16), took(torch.float32)) for _ in range(8)]
print(min(fast for fast, _ in rounds) < min(slow for _, slow in rounds))
"""


def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 faster than float32."""
    return device.type == "cuda" or _cpu_is_fast_in_bfloat16()


@cache
def _cpu_is_fast_in_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32.

    Many are dozens of times slower, and a virtual machine may announce instructions that kill the process that uses
    them, so a child process tries.
    """
    announced = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)()
    if not announced:
        return False
    try:
        tried = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return False
    return tried.returncode == 0 and tried.stdout.strip() == "True"


class LazyWeights:
    """Weights by name that are computed one at a time, whenever they are iterated. Their shapes are known before."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], compute: Callable[[str], torch.Tensor]) -> None:
        self.shapes = shapes
        self._compute = compute

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._compute(name)) for name in self.shapes)


def iterate_tensors(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights. An exception of the iterable is raised as ConfigError."""
    pairs: Iterator[tuple[str, Any]] | None = None
    while True:
        try:
            pairs = iter(weights) if pairs is None else pairs
            name, value = next(pairs)
        except StopIteration:
            return
        except Exception as error:
            raise ConfigError(f"the weights could not be read, none of them was taken: {describe(error)}") from error
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"the weight {name!r} is a {type(value).__name__}, not a tensor")
        yield str(name), value


def check_weight(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError if a model with weights of `shapes` has none of this name, or one of another shape."""
    if name not in shapes:
        raise ConfigError(f"the model has no weight {name!r}; it has {', '.join(list(shapes)[:3])}, …")
    if tuple(shape) != tuple(shapes[name]):
        raise ConfigError(f"the weight {name!r} has the shape {tuple(shape)}, not {tuple(shapes[name])}")


def max_positions(config: Any) -> int:
    """Most tokens of a sequence; a model without position limit is limited by memory only.

    A rotary embedding that changes with the length of the whole sequence would invalidate the cache at the length of
    the original training: such a model is used up to there.
    """
    limit: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
    rotation = getattr(config, "rope_parameters", None) or {}
    for parameters in (rotation, *rotation.values()):  # one for all layers, or one for each kind of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") in ("dynamic", "longrope"):
            limit = min(limit, parameters.get("original_max_position_embeddings") or limit)
    return limit


def graphs(model: Any) -> bool:
    """Whether the Triton kernels can do a model's attention: half precision, no soft cap, a head width of 16, 32, …"""
    config, half = model.config.get_text_config(), next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    width = config_shape(config)[2]
    return half and getattr(config, "attn_logit_softcapping", None) is None and width >= 16 and not width & (width - 1)


def config_shape(config: Any) -> tuple[int, int, int]:
    """Number of layers, of key heads, and the width of a head."""
    heads = getattr(config, "num_attention_heads", None) or 1
    shared = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, shared, width
