"""Models of many architectures: greedy output is that of `generate`, in every runner."""

import asyncio
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly-rl[train]'")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from agentfly.backends.engine.loading import apply_softcap  # noqa: E402
from agentfly.backends.engine.model_runner import SequentialRunner  # noqa: E402
from tests.backends.engine.tiny import VOCABULARY, backend_of, greedy, make_request, score_completion  # noqa: E402

SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SHARED = {"num_key_value_heads": 2}
PACKED: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5, **SHARED},
    "cohere2": {"sliding_window": 8, "logit_scale": 0.5},
    "gemma": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        **SHARED,
    },
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, **SHARED},
    "glm": {"head_dim": 8},
    "gpt2": {},
    "gpt_neox": {},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, **SHARED},
    "llama": {"tie_word_embeddings": True, **SHARED},
    "ministral": {"sliding_window": 8, "head_dim": 8},
    "mistral": {"sliding_window": 8, **SHARED},
    "mixtral": {"num_local_experts": 4, **SHARED},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {**SHARED},
    "phi3": {"sliding_window": 8, **SHARED},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, **SHARED},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **SHARED},
    "qwen3": {"head_dim": 8, **SHARED},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "smollm3": {},
    "starcoder2": {"sliding_window": 8, **SHARED},
}
PLAIN: dict[str, dict[str, Any]] = {
    "bloom": {},
    "falcon": {},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
    "gptj": {"rotary_dim": 4},
    "llama4_text": {"head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "mamba": {"state_size": 8},
    "stablelm": {},
}


def prompts(lengths: list[int]) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def build_model(family: str, overrides: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = apply_softcap(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | overrides)).eval())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("family", [*PACKED, *PLAIN])
async def test_greedy_output_equals_generate(family: str) -> None:
    model = build_model(family, {**PACKED, **PLAIN}[family])
    backend = backend_of(model, max_rows=3, max_batch_tokens=7)
    assert isinstance(backend._runner, SequentialRunner) == (family in PLAIN)
    rows = prompts([1, 30, 12, 5])
    got = await asyncio.gather(*(backend.generate(make_request(row, 10, temperature=0)) for row in rows))
    assert [list(completion.token_ids) for completion in got] == [greedy(model, row, 10) for row in rows]
    got += await asyncio.gather(*(backend.generate(make_request(row, 10, seed=at)) for at, row in enumerate(rows)))
    assert len({token for completion in got for token in completion.token_ids}) > 5
    for row, completion in zip([*rows, *rows], got, strict=True):
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), score_completion(model, make_request(row), completion), atol=1e-4, rtol=0
        )
    await backend.close()


def test_softcap_of_attention_is_in_effect() -> None:
    capped, uncapped = (
        build_model("gemma2", {**PACKED["gemma2"], "attn_logit_softcapping": softcap}) for softcap in (0.1, None)
    )
    uncapped.load_state_dict(capped.state_dict())
    row = torch.tensor(prompts([20]))
    with torch.inference_mode():
        assert (capped(row).logits - uncapped(row).logits).abs().max() > 1e-2


async def test_sequential_runner_recomputes_the_cache_after_a_weight_update() -> None:
    model, other = build_model("gpt_neo", PLAIN["gpt_neo"]), build_model("gpt_neo", PLAIN["gpt_neo"])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    backend = backend_of(model, max_batch_tokens=7)  # less than the turn has when the weights change
    halfway = asyncio.Event()
    request = make_request(prompts([12])[0], 110, seed=1, on_tokens=lambda _: halfway.set())
    turn = asyncio.create_task(backend.generate(request))
    await halfway.wait()
    await backend.update_weights(other.named_parameters(), 1)
    got = await turn
    late = list(got.weight_versions).index(1)
    expected = score_completion(other, request, got)[late:]
    torch.testing.assert_close(torch.tensor(got.logprobs[late:]), expected, atol=1e-4, rtol=0)
    await backend.close()
