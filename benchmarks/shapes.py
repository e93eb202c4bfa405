"""Published model shapes, models of random weights built on the device, and the FLOPs of an update."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

PEAK_FLOPS = 989e12
"""Dense bfloat16 FLOP/s of an H100 or H200 (SXM)."""


def _qwen(width: int, inner: int, layers: int, heads: tuple[int, int], *, vocab: int = 151936, tied: bool) -> Any:
    return Qwen2Config(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], max_position_embeddings=32768,
        tie_word_embeddings=tied,
    )  # fmt: skip


def _llama(width: int, inner: int, layers: int, heads: tuple[int, int], *, vocab: int, tied: bool) -> Any:
    return LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], max_position_embeddings=32768,
        tie_word_embeddings=tied,
    )  # fmt: skip


SHAPES: dict[str, Any] = {
    "test": _llama(64, 160, 2, (4, 2), vocab=512, tied=True),
    "smollm2-135m": _llama(576, 1536, 30, (9, 3), vocab=49152, tied=True),
    "smollm2-1.7b": _llama(2048, 8192, 24, (32, 32), vocab=49152, tied=True),
    "qwen2.5-0.5b": _qwen(896, 4864, 24, (14, 2), tied=True),
    "qwen2.5-1.5b": _qwen(1536, 8960, 28, (12, 2), tied=True),
    "qwen2.5-3b": _qwen(2048, 11008, 36, (16, 2), tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, (24, 8), vocab=128256, tied=True),
    "qwen2.5-7b": _qwen(3584, 18944, 28, (28, 4), vocab=152064, tied=False),
    "llama-3.1-8b": _llama(4096, 14336, 32, (32, 8), vocab=128256, tied=False),
    "qwen2.5-14b": _qwen(5120, 13824, 48, (40, 8), vocab=152064, tied=False),
    "qwen2.5-32b": _qwen(5120, 27648, 64, (40, 8), vocab=152064, tied=False),
}
"""`test` is no published shape: it is for smoke runs on a CPU."""


def build_model(shape: str, device: str, dtype: torch.dtype, *, vocab: int = 0, context: int = 0) -> Any:
    """Build a model of random weights, on the device: that takes a second where a CPU takes minutes.

    vocab: least size of the vocabulary, for a tokenizer that has more tokens than the shape.
    context: least number of positions.
    """
    config = copy.deepcopy(SHAPES[shape])
    config.vocab_size = max(config.vocab_size, vocab)
    config.max_position_embeddings = max(config.max_position_embeddings, context)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def count_flops(model: Any, tokens: int, length: float) -> float:
    """FLOPs of forward and backward pass, without what is recomputed.

    Per token 6 per trained weight (2 forward, 4 backward) and 4 per frozen one; an embedding that is also the head
    counts once, one that is not does not. For causal attention 12 · layers · heads · head width per token and key, half
    of which are masked.
    """
    config = model.config
    embedding = None if config.tie_word_embeddings else model.get_input_embeddings().weight
    weights = sum(
        (6.0 if parameter.requires_grad else 4.0) * parameter.numel()
        for parameter in model.parameters()
        if parameter is not embedding
    )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * width * length / 2
    return tokens * (weights + attention)
