"""vLLM on a CPU compared with transformers: tokens, log-probabilities and weight updates."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

import torch
from vllm.platforms import current_platform

from agentfly.backends.base import OnUpdate
from agentfly.backends.vllm import VLLMBackend
from agentfly.errors import BackendFault, ConfigError, NonFiniteError
from agentfly.types import FinishReason, Image
from tests.backends.engine.tiny import filter_logprobs, greedy, make_request, score_completion
from tests.backends.vllm.small import VOCABULARY, backend_of, descendants, model_of, save_model, until


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture(scope="module")
def backend(model: Any, tmp_path_factory: Any) -> Iterator[VLLMBackend]:
    backend = backend_of(save_model(model, tmp_path_factory.mktemp("model")))
    yield backend
    asyncio.run(backend.close())


@pytest.fixture
async def updatable(backend: VLLMBackend, model: Any) -> AsyncIterator[VLLMBackend]:
    """The backend for a test that changes its weights."""
    yield backend
    backend._on_update = OnUpdate.CONTINUE
    await backend.update_weights(model.named_parameters(), 0)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=0)


# ── tokens ──


async def test_greedy_turns_equal_transformers_in_any_batch(model: Any, backend: VLLMBackend) -> None:
    rows = prompts([4, 33, 17, 60, 9], seed=2)
    got = await asyncio.gather(*(backend.generate(make_request(row, 12, temperature=0)) for row in rows))
    for row, completion in zip(rows, got, strict=True):
        assert list(completion.token_ids) == greedy(model, row, 12)
        assert completion.finish is FinishReason.LENGTH
        close(completion.logprobs, score_completion(model, make_request(row), completion))
        assert completion.raw_logprobs == completion.logprobs


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_logprobs_are_those_of_the_sampled_distribution(
    model: Any, backend: VLLMBackend, temperature: float
) -> None:
    requests = [make_request(row, temperature=temperature, seed=at) for at, row in enumerate(prompts([4, 30, 17]))]
    for request, got in zip(requests, await asyncio.gather(*map(backend.generate, requests)), strict=True):
        close(got.logprobs, score_completion(model, request, got, temperature))
        assert (got.raw_logprobs is None) == (temperature != 1)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4}, {"top_k": 20, "top_p": 0.9}])
async def test_logprobs_with_filters_equal_transformers(
    model: Any, backend: VLLMBackend, filters: dict[str, Any]
) -> None:
    row = prompts([8])[0]
    expected = filter_logprobs(model, row, 0.7, **filters)
    draws = await asyncio.gather(
        *(backend.generate(make_request(row, 1, seed=at, temperature=0.7, **filters)) for at in range(50))
    )
    for completion in draws:
        assert completion.logprobs[0] == pytest.approx(expected[completion.token_ids[0]].item(), abs=1e-4)


async def test_seed_gives_the_same_tokens_in_any_batch(backend: VLLMBackend) -> None:
    rows = prompts([9, 25, 40, 6], seed=3)
    alone = [await backend.generate(make_request(row, 20, seed=7)) for row in rows]
    together = await asyncio.gather(*(backend.generate(make_request(row, 20, seed=7)) for row in reversed(rows)))
    assert [completion.token_ids for completion in reversed(together)] == [completion.token_ids for completion in alone]
    assert (await backend.generate(make_request(rows[0], 20, seed=-3))).token_ids != alone[0].token_ids


async def test_stop_tokens_and_stop_strings_are_part_of_the_turn(backend: VLLMBackend) -> None:
    row = prompts([12])[0]
    free = list((await backend.generate(make_request(row, 40, seed=3))).token_ids)
    stop = free[5]
    got = await backend.generate(make_request(row, 40, seed=3, stop_ids=frozenset({stop})))
    assert (list(got.token_ids), got.finish) == (free[: free.index(stop) + 1], FinishReason.STOP)

    from agentfly.templates.tokenizer import load_tokenizer

    decode = load_tokenizer("bytes").backend_tokenizer.decode
    letters = [at for at, token_id in enumerate(free) if decode([token_id]).isascii() and decode([token_id]).strip()]
    first = letters[0]
    got = await backend.generate(make_request(row, 40, seed=3, stop=(decode([free[first]]),)))
    assert (list(got.token_ids), got.finish) == (free[: first + 1], FinishReason.STOP)
    assert len(got.logprobs) == first + 1


async def test_eos_of_the_model_does_not_end_a_turn(model: Any, backend: VLLMBackend) -> None:
    rows = torch.randint(3, VOCABULARY, (4000, 3), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        (ending, *_) = rows[model(rows).logits[:, -1].argmax(-1) == 2].tolist()
    got = await backend.generate(make_request(ending, 8, temperature=0))
    assert (got.token_ids[0], len(got.token_ids), got.finish) == (2, 8, FinishReason.LENGTH)


async def test_tokens_are_streamed_and_an_exception_of_the_callback_ends_the_turn(backend: VLLMBackend) -> None:
    heard: list[list[int]] = []
    got = await backend.generate(
        make_request(prompts([10])[0], 30, seed=1, on_tokens=lambda ids: heard.append(list(ids)))
    )
    assert [token_id for ids in heard for token_id in ids] == list(got.token_ids)
    assert len(heard) > 3

    def refuse(_: Any) -> None:
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        await backend.generate(make_request(prompts([10])[0], 400, on_tokens=refuse))
    await until(lambda: not backend._engine._llm.get_num_unfinished_requests())  # type: ignore[union-attr]


async def test_cancelled_turn_is_aborted_in_the_engine(backend: VLLMBackend) -> None:
    llm = backend._engine._llm
    assert llm is not None
    first_token = asyncio.Event()
    turns = [
        asyncio.create_task(backend.generate(make_request([5, 6], 500, on_tokens=lambda _: first_token.set())))
        for _ in range(8)
    ]
    await first_token.wait()
    assert llm.get_num_unfinished_requests() == 8
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    assert all(turn.cancelled() for turn in turns)
    await until(lambda: not llm.get_num_unfinished_requests())
    assert not backend._engine._running


async def test_invalid_requests_are_rejected(backend: VLLMBackend) -> None:
    for prompt, words in ([[], "empty prompt"], [[VOCABULARY], "the token 300, the model knows 0 to 299"],
                         [[5] * 512, "has 512 tokens, the context 512"], [["a"], "token ids, not of str"]):  # fmt: skip
        with pytest.raises(BackendFault, match=words):
            await backend.generate(make_request(prompt))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"vLLM samples at 0\.01 and above"):
        await backend.generate(make_request([5], temperature=0.001))
    with pytest.raises(ConfigError, match="vLLM rejects these sampling settings: temperature must be in"):
        await backend.generate(make_request([5], temperature=3.0))
    request = make_request([5])
    object.__setattr__(request, "images", (Image("data:,"),))
    with pytest.raises(ConfigError, match="takes no images"):
        await backend.generate(request)
    assert len((await backend.generate(make_request([5] * 510, 400))).token_ids) == 2


# ── weights ──


async def test_update_discards_cached_keys_and_values(model: Any, updatable: VLLMBackend) -> None:
    other, request = model_of(seed=9), make_request(prompts([300])[0], 10, seed=1, chain="0/0")
    first = await updatable.generate(request)
    await updatable.update_weights(other.named_parameters(), 1)
    got = await updatable.generate(request)
    assert set(got.weight_versions) == {updatable.weight_version} == {1}
    close(got.logprobs, score_completion(other, request, got))
    assert got.token_ids != first.token_ids
    assert set(first.weight_versions) == {0}


async def test_weights_that_are_left_out_are_unchanged(model: Any, updatable: VLLMBackend) -> None:
    mixed, other, request = model_of(), model_of(seed=9), make_request(prompts([20])[0], 10, seed=1)
    name = "model.layers.1.self_attn.q_proj.weight"
    with torch.no_grad():
        mixed.get_parameter(name).copy_(other.get_parameter(name))
    await updatable.update_weights([(name, other.get_parameter(name))], 4)
    got = await updatable.generate(request)
    close(got.logprobs, score_completion(mixed, request, got))
    await updatable.update_weights((), 5)
    got = await updatable.generate(request)
    assert set(got.weight_versions) == {5}
    close(got.logprobs, score_completion(mixed, request, got))


async def test_invalid_weights_are_rejected_and_change_nothing(model: Any, backend: VLLMBackend) -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        yield from list(model.named_parameters())[:2]
        raise ValueError("the disk is gone")

    norm = "model.norm.weight"
    for weights, words in (
        ([("nonsense", torch.zeros(1))], "the model has no weight 'nonsense'"),
        ([(norm, torch.zeros(1))], r"has the shape \(1,\), not \(128,\)"),
        ([(norm, 3)], "is a int, not a tensor"),
        ([(norm, torch.zeros(128))] * 2, "came twice"),
        ([("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(1))], "with lora="),
        (broken(), "the disk is gone"),
        (7, "not iterable"),
    ):
        with pytest.raises(ConfigError, match=words):
            await backend.update_weights(weights, 9)  # type: ignore[arg-type]
    assert backend.weight_version == 0
    request = make_request(prompts([20])[0], 6, seed=1)
    got = await backend.generate(request)
    close(got.logprobs, score_completion(model, request, got))


@pytest.mark.parametrize("then", ["continue", "finish", "abort"])
async def test_running_turns_follow_on_update(then: str, updatable: VLLMBackend) -> None:
    other, halfway = model_of(seed=9), asyncio.Event()
    updatable._on_update = OnUpdate(then)
    seen: list[int] = []

    def watch(ids: Any) -> None:
        seen.extend(ids)
        if len(seen) >= 20:
            halfway.set()

    request = make_request(prompts([10])[0], 400, seed=1, on_tokens=watch)
    running = asyncio.create_task(updatable.generate(request))
    await halfway.wait()
    await updatable.update_weights(other.named_parameters(), 1)
    got = await running
    versions = list(got.weight_versions)
    assert list(got.token_ids) == seen
    match then:
        case "finish":
            assert (set(versions), len(versions)) == ({0}, 400)
        case "abort":
            assert (set(versions), got.finish) == ({0}, FinishReason.ABORTED)
            assert 20 <= len(versions) < 400
        case "continue":
            assert set(versions) == {0, 1}
            assert versions == sorted(versions)
            late = versions.index(1)
            close(got.logprobs[late:], score_completion(other, request, got)[late:])


async def test_non_finite_logits_raise_until_the_weights_are_replaced(model: Any, updatable: VLLMBackend) -> None:
    await updatable.update_weights([("model.norm.weight", torch.full((128,), float("nan")))], 3)
    with pytest.raises(NonFiniteError, match=r"not finite \(weights of version 3\)"):
        await updatable.generate(make_request([5] * 10))
    await updatable.update_weights(model.named_parameters(), 4)
    assert set((await updatable.generate(make_request([5] * 10))).weight_versions) == {4}


async def test_cancelled_update_completes(updatable: VLLMBackend) -> None:
    other, request = model_of(seed=9), make_request(prompts([20])[0], 6, seed=1)
    update = asyncio.create_task(updatable.update_weights(other.named_parameters(), 1))
    await asyncio.sleep(0)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    await until(lambda: updatable.weight_version == 1)
    got = await updatable.generate(request)
    close(got.logprobs, score_completion(other, request, got))


async def test_sleep_needs_a_gpu(backend: VLLMBackend) -> None:
    with pytest.raises(ConfigError, match="enable_sleep_mode=True"):
        await backend.sleep()
    with pytest.raises(ConfigError, match="cannot sleep on a CPU"):
        backend_of("anything", enable_sleep_mode=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": {"logprobs_mode": "raw_logits"}}, "is set by the backend and cannot be changed"),
        ({"engine": {"max_model_len": 3}}, "use its setting context_length="),
        ({"engine": {"enforce_eagre": 1}}, "did you mean 'enforce_eager'"),
        ({"on_update": "never"}, "one of continue, finish, abort"),
        ({"dtype": "int3"}, "dtype is one of"),
        ({"lora": "/nowhere"}, r"no adapter_config\.json"),
        ({"lora": {"rank": 3}}, "r, lora_alpha, target_modules"),
        ({"lora": {"r": 4096, "lora_alpha": 1, "target_modules": []}}, "a rank up to 512"),
        ({"engine": {"tensor_parallel_size": "many"}}, "vLLM does not take"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], words: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        backend_of(save_model(model_of(), tmp_path), **settings)


async def test_close_ends_all_processes_and_fails_pending_calls(backend: VLLMBackend) -> None:
    first_token = asyncio.Event()
    running = asyncio.create_task(backend.generate(make_request([5, 6], 500, on_tokens=lambda _: first_token.set())))
    await first_token.wait()
    assert len(descendants()) == 2
    backend._on_update = OnUpdate.FINISH
    update = asyncio.create_task(backend.update_weights(model_of().named_parameters(), 7))
    await asyncio.sleep(0.1)
    await backend.close()
    for call in (running, update):
        with pytest.raises(BackendFault, match="the engine is closed"):
            await call
    assert not descendants()


@pytest.fixture
async def sleeper(tmp_path: Path) -> AsyncIterator[VLLMBackend]:
    """A backend on a GPU that can sleep."""
    if not torch.cuda.is_available():
        pytest.skip("sleeping and sharing weights between processes need a GPU, and torch sees none")
    engine = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
    settings: dict[str, Any] = {"dtype": "bfloat16", "on_update": "finish", "kv_memory": 1 << 30, "engine": engine}
    backend = backend_of(save_model(model_of(tie_word_embeddings=True), tmp_path), enable_sleep_mode=True, **settings)
    yield backend
    await backend.close()


@pytest.mark.parametrize("keep", [True, False])
async def test_sleep_frees_gpu_memory_and_loses_nothing(sleeper: VLLMBackend, keep: bool) -> None:
    request = make_request(prompts([20])[0], 12, temperature=0)
    completion = await sleeper.generate(request)
    awake = torch.cuda.mem_get_info()[0]
    await sleeper.sleep(keep_weights=keep)
    assert torch.cuda.mem_get_info()[0] > awake + (1 << 29)
    waiting = asyncio.create_task(sleeper.generate(request))
    await sleeper.wake_up()
    assert list((await waiting).token_ids) == list(completion.token_ids)


@pytest.mark.parametrize("keep", [True, False])
async def test_update_wakes_a_sleeping_engine_with_weights_from_the_gpu(sleeper: VLLMBackend, keep: bool) -> None:
    first, other = model_of(tie_word_embeddings=True), model_of(seed=9, tie_word_embeddings=True)
    request = make_request(prompts([200])[0], 32, seed=1)
    await sleeper.generate(request)  # its prompt is in the prefix cache
    await sleeper.sleep(keep_weights=keep)
    await sleeper.update_weights([(name, parameter.cuda()) for name, parameter in other.named_parameters()], 1)
    got = await sleeper.generate(request)
    assert set(got.weight_versions) == {1}
    logprobs = torch.tensor(got.logprobs)
    to_new = (logprobs - score_completion(other, request, got)).abs().mean()
    to_old = (logprobs - score_completion(first, request, got)).abs().mean()
    assert to_new < to_old / 5, (to_new, to_old)


async def test_update_of_a_tied_head_on_a_cpu_is_rejected(tmp_path: Path) -> None:
    """On a CPU, vLLM keeps a packed copy of a head that is shared with the embeddings."""
    if not current_platform.is_cpu():
        pytest.skip("a GPU keeps no packed copy")
    tied = model_of(tie_word_embeddings=True)
    backend = backend_of(save_model(tied, tmp_path))
    try:
        with pytest.raises(ConfigError, match="a head of the old weights"):
            await backend.update_weights(tied.named_parameters(), 1)
        assert list((await backend.generate(make_request([7, 8, 9], 2))).weight_versions) == [0, 0]
    finally:
        await backend.close()
