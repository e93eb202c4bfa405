"""The embedded engine against plain transformers: equal tokens and log-probabilities in any batch."""

import asyncio
import copy
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly-rl[train]'")

from agentfly.backends.engine import EngineBackend, packed_linear  # noqa: E402
from agentfly.backends.engine.model_runner import ModelRunner, compile_layers  # noqa: E402
from agentfly.errors import BackendFault, ConfigError, NonFiniteError  # noqa: E402
from agentfly.types import FinishReason  # noqa: E402
from tests.backends.engine.tiny import (  # noqa: E402
    VOCABULARY,
    backend_of,
    filter_logprobs,
    greedy,
    make_request,
    model_of,
    score_completion,
)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture
async def backend(model: Any) -> AsyncIterator[EngineBackend]:
    backend = backend_of(model)
    yield backend
    await backend.close()


async def test_output_equals_continuous_batching_of_transformers(model: Any, backend: EngineBackend) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    rows = prompts([4, 33, 17, 60, 9], seed=2)
    # Pages of 16 tokens: the parameter is `block_size` in transformers 5.10 and `page_size` later.
    batching = ContinuousBatchingConfig(
        16, num_blocks=64, max_batch_tokens=64, return_logprobs=True, allow_block_sharing=False
    )
    greedily = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=-1)
    completions_by_id = copy.deepcopy(model).generate_batch(rows, greedily, continuous_batching_config=batching)
    got = await asyncio.gather(*(backend.generate(make_request(row, 12, temperature=0)) for row in rows))
    for row, completion in zip(rows, got, strict=True):
        (their,) = (output for output in completions_by_id.values() if output.prompt_ids == row)
        assert list(completion.token_ids) == their.generated_tokens
        torch.testing.assert_close(torch.tensor(completion.logprobs), torch.tensor(their.logprobs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_logprobs_are_of_the_sampled_distribution(model: Any, backend: EngineBackend, temperature: float) -> None:
    requests = [make_request(row, temperature=temperature, seed=at) for at, row in enumerate(prompts([4, 30, 17]))]
    for request, got in zip(requests, await asyncio.gather(*map(backend.generate, requests)), strict=True):
        expected = score_completion(model, request, got, temperature)
        torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=1e-4, rtol=0)


async def test_seeded_tokens_do_not_depend_on_the_batch(backend: EngineBackend) -> None:
    rows = prompts([9, 25, 40, 6, 13, 28], seed=3)
    alone = [await backend.generate(make_request(row, 20, seed=7)) for row in rows]
    together = await asyncio.gather(*(backend.generate(make_request(row, 20, seed=7)) for row in reversed(rows)))
    assert [completion.token_ids for completion in reversed(together)] == [completion.token_ids for completion in alone]
    other = await backend.generate(make_request(rows[0], 20, seed=8))
    assert other.token_ids != alone[0].token_ids


async def test_token_frequencies_match_their_probabilities(model: Any, backend: EngineBackend) -> None:
    row = prompts([8])[0]
    draws = await asyncio.gather(
        *(backend.generate(make_request(row, 1, seed=at, temperature=0.3)) for at in range(2000))
    )
    counts = (
        torch.bincount(torch.tensor([completion.token_ids[0] for completion in draws]), minlength=VOCABULARY) / 2000
    )
    with torch.inference_mode():
        expected = (model(torch.tensor([row])).logits[0, -1] / 0.3).softmax(-1)
    assert (counts - expected).abs().max() < 0.05


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4}, {"top_k": 20, "top_p": 0.9}])
async def test_sampling_filters_equal_those_of_transformers(
    model: Any, backend: EngineBackend, filters: dict[str, Any]
) -> None:
    row = prompts([8])[0]
    expected = filter_logprobs(model, row, 0.5, **filters)
    draws = await asyncio.gather(
        *(backend.generate(make_request(row, 1, seed=at, temperature=0.5, **filters)) for at in range(100))
    )
    for completion in draws:
        assert completion.logprobs[0] == pytest.approx(expected[completion.token_ids[0]].item(), abs=1e-4)


async def test_repetition_penalty_equals_that_of_transformers(model: Any, backend: EngineBackend) -> None:
    row = prompts([10])[0]
    got = await backend.generate(make_request(row, 12, temperature=0, repetition_penalty=1.5))
    with torch.inference_mode():
        ids = torch.tensor([row])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None,
            repetition_penalty=1.5,
        )  # fmt: skip
    assert list(got.token_ids) == expected[0, 10:].tolist()


# ── stop conditions ──


async def test_stop_token_ends_the_turn_and_is_kept(model: Any, backend: EngineBackend) -> None:
    row = prompts([12])[0]
    free = greedy(model, row, 12)
    stop = free[5]
    got = await backend.generate(make_request(row, 12, frozenset({stop}), temperature=0))
    assert list(got.token_ids) == free[: free.index(stop) + 1]
    assert got.finish is FinishReason.STOP
    assert (await backend.generate(make_request(row, 3, temperature=0))).finish is FinishReason.LENGTH


async def test_prompt_that_fills_the_context_is_rejected(backend: EngineBackend) -> None:
    with pytest.raises(BackendFault, match="the prompt has 512 tokens, the context 512: no room left"):
        await backend.generate(make_request([5] * 512))
    with pytest.raises(BackendFault, match="empty prompt"):
        await backend.generate(make_request([]))


async def test_turn_without_limit_fills_the_context(backend: EngineBackend) -> None:
    got = await backend.generate(make_request([5] * 500, None, seed=1))  # type: ignore[arg-type]
    assert (len(got.token_ids), got.finish) == (12, FinishReason.LENGTH)


async def test_cancelled_request_leaves_the_batch(backend: EngineBackend) -> None:
    first_token = asyncio.Event()
    request = make_request([7] * 20, 400, seed=1, on_tokens=lambda _: first_token.set())
    long = asyncio.create_task(backend.generate(request))
    await first_token.wait()
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    await backend.generate(make_request([9] * 20, 4, seed=2))
    assert not backend._engine._scheduler.running


async def test_tokens_are_streamed(backend: EngineBackend) -> None:
    seen: list[int] = []
    got = await backend.generate(make_request([7] * 20, 10, seed=1, on_tokens=seen.extend))
    assert seen == list(got.token_ids)


# ── the cache ──


async def test_next_turn_computes_only_new_tokens(model: Any) -> None:
    backend, seen = count_tokens(backend_of(model))
    first = make_request(prompts([60])[0], 10, seed=1, chain="0/0")
    completion = await backend.generate(first)
    num_computed = sum(seen)
    second = make_request([*first.prompt, *completion.token_ids, *prompts([15], seed=5)[0]], 10, seed=2, chain="0/0")
    got = await backend.generate(second)
    assert sum(seen) - num_computed <= 15 + 1 + 10  # the observation, the last token sampled, and what is sampled now
    torch.testing.assert_close(torch.tensor(got.logprobs), score_completion(model, second, got), atol=1e-4, rtol=0)
    await backend.close()


async def test_chains_of_a_group_compute_their_prompt_once(model: Any) -> None:
    backend, seen = count_tokens(backend_of(model))
    row = prompts([100])[0]
    requests = [make_request(row, 5, seed=at, chain=f"0/{at}") for at in range(8)]
    got = await asyncio.gather(*map(backend.generate, requests))
    assert sum(seen) <= 100 + 8 * 5 + 8
    for request, completion in zip(requests, got, strict=True):
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), score_completion(model, request, completion), atol=1e-4, rtol=0
        )
    await backend.close()


def count_tokens(backend: EngineBackend) -> tuple[EngineBackend, list[int]]:
    """Record the number of tokens that the model computes in each step."""
    seen: list[int] = []
    launch = backend._runner.launch

    def count(batch: Any) -> Any:
        seen.append(batch.tokens)
        return launch(batch)

    backend._runner.launch = count  # type: ignore[method-assign]
    return backend, seen


async def test_small_cache_gives_the_same_output(model: Any) -> None:
    token = 2 * 3 * 2 * 16 * 4
    backend = backend_of(model, kv_memory=130 * token)
    requests = [make_request(row, 30, seed=at) for at, row in enumerate(prompts([40, 50, 35, 60, 44]))]
    got = await asyncio.gather(*map(backend.generate, requests))
    for request, completion in zip(requests, got, strict=True):
        assert len(completion.token_ids) == 30
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), score_completion(model, request, completion), atol=1e-4, rtol=0
        )
    assert backend.context_length == 130
    await backend.close()


# ── weights ──


async def test_weights_are_shared_with_the_given_model(model: Any, backend: EngineBackend) -> None:
    engine_tensors = {parameter.data_ptr() for parameter in backend._runner.model.parameters()}
    assert engine_tensors == {parameter.data_ptr() for parameter in model.parameters()}
    assert model.config._attn_implementation != backend._runner.model.config._attn_implementation


@pytest.mark.parametrize("copied", [False, True])
async def test_weight_update_discards_the_cache(copied: bool) -> None:
    model, other = model_of(), model_of(seed=9)
    backend = backend_of(model)
    first = make_request(prompts([40])[0], 10, seed=1, chain="0/0")
    await backend.generate(first)
    if copied:
        await backend.update_weights(other.named_parameters(), 1)
    else:
        model.load_state_dict(other.state_dict())
        await backend.update_weights((), 1)
    got = await backend.generate(first)
    assert set(got.weight_versions) == {backend.weight_version} == {1}
    torch.testing.assert_close(torch.tensor(got.logprobs), score_completion(other, first, got), atol=1e-4, rtol=0)
    await backend.close()


async def test_weights_are_packed_on_first_use_and_again_after_an_update() -> None:
    backend = backend_of(model_of())
    head = backend._runner.model.lm_head.product
    turns = [make_request(prompt, 10) for prompt in prompts([30, 20, 9, 15, 12])]
    assert head.packed is None
    await asyncio.gather(*map(backend.generate, turns))
    assert head.packed is not None
    await backend.update_weights((), 1)
    assert head.packed is None
    await asyncio.gather(*map(backend.generate, turns))
    given_up: Future[None] = Future()
    given_up.cancel()
    backend._engine._commit(lambda: None, 2, given_up)  # the weights it was for may have been trained in place
    assert (head.packed, backend.weight_version) == (None, 1)
    await backend.close()


async def test_weights_are_not_packed_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "free_memory", lambda: 1000)
    backend = backend_of(model_of())
    assert type(backend._runner.model.lm_head) is torch.nn.Linear
    await backend.close()


async def test_weights_of_wrong_name_or_shape_are_rejected(backend: EngineBackend) -> None:
    with pytest.raises(ConfigError, match="the model has no weight 'nonsense'"):
        await backend.update_weights([("nonsense", torch.zeros(1))], 1)
    with pytest.raises(ConfigError, match="has the shape"):
        await backend.update_weights([("lm_head.weight", torch.zeros(1))], 1)
    assert backend.weight_version == 0


@pytest.mark.parametrize("then", ["continue", "finish", "abort"])
async def test_running_turns_follow_on_update_when_weights_change(then: str) -> None:
    model, other = model_of(), model_of(seed=9)
    backend = backend_of(model, on_update=then)
    halfway = asyncio.Event()
    seen: list[int] = []

    def watch(ids: Any) -> None:
        seen.extend(ids)
        if len(seen) >= 20:
            halfway.set()

    running = asyncio.create_task(backend.generate(make_request(prompts([10])[0], 400, seed=1, on_tokens=watch)))
    await halfway.wait()
    await backend.update_weights(other.named_parameters(), 1)
    got = await running
    versions = list(got.weight_versions)
    assert versions == sorted(versions)
    match then:
        case "finish":
            assert set(versions) == {0}
        case "abort":
            assert (set(versions), got.finish) == ({0}, FinishReason.ABORTED)
        case "continue":
            assert set(versions) == {0, 1}
            late = versions.index(1)
            request = make_request(prompts([10])[0])
            expected = score_completion(other, request, got)[late:]
            torch.testing.assert_close(torch.tensor(got.logprobs[late:]), expected, atol=1e-4, rtol=0)
    await backend.close()


# ── faults ──


async def test_failed_step_fails_its_turns_and_the_engine_continues(model: Any) -> None:
    backend = backend_of(model)
    launch, failing = backend._runner.launch, True

    def break_down(batch: Any) -> Any:
        if failing:
            raise RuntimeError("out of memory")
        return launch(batch)

    backend._runner.launch = break_down  # type: ignore[method-assign]
    with pytest.raises(BackendFault, match="the engine failed: RuntimeError: out of memory"):
        await backend.generate(make_request([5] * 10))
    failing = False
    assert len((await backend.generate(make_request([5] * 10, 4))).token_ids) == 4
    failing = True
    for _ in range(3):
        with pytest.raises(BackendFault):
            await backend.generate(make_request([5] * 10))
    with pytest.raises(BackendFault, match="the engine failed 3 times in a row"):
        await backend.generate(make_request([5] * 10))
    await backend.close()


async def test_closed_engine_raises(model: Any) -> None:
    backend = backend_of(model)
    first_token = asyncio.Event()
    running = asyncio.create_task(backend.generate(make_request([5] * 10, 400, on_tokens=lambda _: first_token.set())))
    await first_token.wait()
    await backend.close()
    with pytest.raises(BackendFault, match="the engine is closed"):
        await running
    await backend.close()


async def test_engine_that_is_stopped_while_its_thread_wakes_up_ends(model: Any) -> None:
    backend = backend_of(model)
    engine = backend._engine

    class WakeUp(threading.Event):
        """The event of an engine that is stopped just before its thread clears it."""

        def clear(self) -> None:
            engine.stop()
            super().clear()

    sleeping, engine._awake = engine._awake, WakeUp()
    for event in (sleeping, engine._awake):  # the thread may wait for either
        event.set()
    await asyncio.to_thread(engine.join, 60)
    assert not engine._thread.is_alive()
    await backend.close()


# ── other models ──


async def test_lora_adapters_are_applied_without_merging() -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft: pip install 'agentfly-rl[train]'")
    model = peft.get_peft_model(model_of(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    backend = backend_of(model.eval())
    request = make_request(prompts([20])[0], 12, seed=1)
    got = await backend.generate(request)
    torch.testing.assert_close(torch.tensor(got.logprobs), score_completion(model, request, got), atol=1e-4, rtol=0)
    with model.disable_adapter():
        assert (torch.tensor(got.logprobs) - score_completion(model, request, got)).abs().max() > 1e-3
    await backend.close()


async def test_nan_raises_and_names_the_layer() -> None:
    model = model_of()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    backend = backend_of(model)
    with pytest.raises(NonFiniteError, match=r"logits are not finite .* is model\.layers\.1\.mlp\.down_proj"):
        await backend.generate(make_request([5] * 10))
    await backend.update_weights(model_of().named_parameters(), 1)  # others may read where the broken turn lay
    assert torch.isfinite(backend._runner.kv_cache.data).all()
    turns = [make_request(prompt) for prompt in prompts([9, 30, 4])]
    for turn, got in zip(turns, await asyncio.gather(*map(backend.generate, turns)), strict=True):
        torch.testing.assert_close(
            torch.tensor(got.logprobs), score_completion(model_of(), turn, got), atol=1e-4, rtol=0
        )
    await backend.close()


async def test_stop_strings_end_a_turn_and_keep_all_sampled_tokens(backend: EngineBackend) -> None:
    row = prompts([12])[0]
    free = list((await backend.generate(make_request(row, 12, seed=3))).token_ids)
    backend._decode = lambda ids: "".join(f"<{token_id}>" for token_id in ids)  # type: ignore[method-assign,assignment]
    got = await backend.generate(make_request(row, 12, seed=3, stop=(f"{free[3]}><{free[4]}",)))
    assert (list(got.token_ids), got.finish) == (free[:5], FinishReason.STOP)


async def test_agent_runs_with_a_model_folder(tmp_path: Any) -> None:
    from agentfly.agents import HFAgent
    from agentfly.templates.tokenizer import load_tokenizer

    model_of().save_pretrained(tmp_path)
    load_tokenizer("bytes").backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    agent = HFAgent(str(tmp_path), template="chatml", backend_config={"kv_memory": 1 << 22})
    result = await agent.run("Hi.", num_chains=3, sampling={"max_tokens": 8, "seed": 1})
    assert [trajectory.sampled_tokens for trajectory in result] == [8, 8, 8]
    await agent.close()


async def test_thread_of_the_engine_compiles_with_the_settings_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[tuple[bool, int]] = []

    class CompiledRunner(ModelRunner):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            compile_layers(self.model)

        def warm_up(self) -> None:  # in the engine's thread, where layers are traced first
            settings.append((torch._dynamo.config.specialize_float, torch._dynamo.config.recompile_limit))

    monkeypatch.setattr("agentfly.backends.engine.backend.ModelRunner", CompiledRunner)
    await backend_of(model_of()).close()
    assert settings == [(True, 64)]


def test_interpreter_exits_cleanly_while_the_engine_starts() -> None:
    script = """
import torch
from agentfly.backends.engine.model_runner import ModelRunner
from tests.backends.engine.tiny import backend_of, model_of

def warm_up(self):
    for _ in range(400):
        torch.ones(300, 300) @ torch.ones(300, 300)
    print("warm")

ModelRunner.warm_up = warm_up
backend = backend_of(model_of())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stdout) == (0, "warm\n"), done.stderr
