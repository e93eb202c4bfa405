"""A small model with random weights, and what tests ask of the engine."""

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentfly.backends.base import Request
from agentfly.backends.engine import EngineBackend
from agentfly.types import Completion, Sampling

VOCABULARY = 300
torch.set_num_threads(1)  # threads that wait for each other are most of the time of so small a model
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def model_of(seed: int = 0, config: LlamaConfig = CONFIG) -> Any:
    """Random weights, large enough that the next token is no coin toss."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def backend_of(model: Any, **settings: Any) -> EngineBackend:
    return EngineBackend(model, **{"kv_memory": 1 << 22, **settings})


def make_request(
    prompt: list[int], max_tokens: int = 12, stop_ids: frozenset[int] = frozenset(), **settings: Any
) -> Request:
    fields = {name: settings.pop(name) for name in ("chain", "turn", "on_tokens") if name in settings}
    return Request(prompt, Sampling(max_tokens=max_tokens, **settings), stop_ids, **fields)


@torch.inference_mode()
def score_completion(model: Any, request: Request, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """The log-probabilities of a completion in a fresh forward pass of the whole sequence."""
    tokens = [*request.prompt, *completion.token_ids]
    logits = model(torch.tensor([tokens])).logits[0, len(request.prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(list(completion.token_ids))[:, None])[:, 0]


@torch.inference_mode()
def filter_logprobs(model: Any, prompt: list[int], temperature: float, **filters: float) -> torch.Tensor:
    """The log-probabilities of the next token behind the filters of transformers, by their names."""
    makers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    warp = LogitsProcessorList([makers[name](value) for name, value in filters.items()])
    ids = torch.tensor([prompt])
    left: torch.Tensor = warp(ids, model(ids).logits[:, -1] / temperature)
    return left.log_softmax(-1)[0]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """What `generate` says."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    sampled: list[int] = out[0, len(prompt) :].tolist()
    return sampled
