"""Failures around the embedded engine affect only the requests that they concern."""

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly-rl[train]'")

from agentfly.backends.engine import EngineBackend  # noqa: E402
from agentfly.errors import BackendFault, ConfigError, NonFiniteError  # noqa: E402
from agentfly.types import FinishReason  # noqa: E402
from tests.backends.engine.tiny import VOCABULARY, backend_of, make_request, model_of, score_completion  # noqa: E402


@pytest.fixture
async def backend() -> AsyncIterator[EngineBackend]:
    backend = backend_of(model_of())
    yield backend
    await backend.close()


def empty(backend: EngineBackend) -> bool:
    engine = backend._engine
    return engine._scheduler.idle and not engine._pending and not engine._updates


async def start_turns(backend: EngineBackend, count: int = 1, length: int = 400) -> list[asyncio.Task[Any]]:
    """Start turns and wait until each has sampled a token."""
    first_tokens = [asyncio.Event() for _ in range(count)]
    tasks = [
        asyncio.create_task(
            backend.generate(make_request([5] * 20, length, seed=at, on_tokens=lambda _, e=event: e.set()))
        )
        for at, event in enumerate(first_tokens)
    ]
    for event in first_tokens:
        await event.wait()
    return tasks


# ── requests ──


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([5, VOCABULARY, 7], "the prompt has the token 300, the model knows 0 to 299"),
        ([5, -1], "the prompt has the token -1"),
        ([5, 1 << 70], "sequence of token ids, not of int"),
        ([0.5, 1.5], "sequence of token ids, not of float"),
        (["a"], "sequence of token ids, not of str"),
    ],
)
async def test_prompt_with_invalid_token_ids_is_rejected(backend: EngineBackend, prompt: Any, words: str) -> None:
    with pytest.raises(BackendFault, match=words):
        await backend.generate(make_request(prompt))


@pytest.mark.parametrize("settings", [{"temperature": 1e-30}, {"repetition_penalty": 1e-30}, {"stop": ("x",)}])
async def test_invalid_sampling_is_rejected_before_it_joins_the_batch(backend: EngineBackend, settings: Any) -> None:
    running = await start_turns(backend, 2, 60)
    with pytest.raises(ConfigError):
        await backend.generate(make_request([5] * 10, **settings))
    assert {len(completion.token_ids) for completion in await asyncio.gather(*running)} == {60}


async def test_longest_prompt_gets_one_token_and_max_tokens_is_capped_by_the_context(
    backend: EngineBackend,
) -> None:
    assert len((await backend.generate(make_request([5] * 511, 100))).token_ids) == 1
    assert len((await backend.generate(make_request([5] * 500, 10_000))).token_ids) == 12
    assert len((await backend.generate(make_request([5] * 9, 3.0))).token_ids) == 3  # type: ignore[arg-type]


async def test_stop_string_that_never_occurs_changes_nothing(backend: EngineBackend) -> None:
    free = await backend.generate(make_request([5] * 20, 30, seed=1))
    backend._decode = lambda ids: "x" * len(ids)  # type: ignore[method-assign,assignment]
    got = await backend.generate(make_request([5] * 20, 30, seed=1, stop=("y" * 50,)))
    assert (got.token_ids, got.finish) == (free.token_ids, FinishReason.LENGTH)


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(), asyncio.CancelledError()])
async def test_exception_in_on_tokens_ends_only_its_turn(backend: EngineBackend, error: Any) -> None:
    def watch(_: Any) -> None:
        raise error

    bad = asyncio.create_task(backend.generate(make_request([6] * 20, 400, seed=1, on_tokens=watch)))
    good = await asyncio.gather(*(backend.generate(make_request([5] * 20, 30, seed=at)) for at in range(4)))
    assert [len(completion.token_ids) for completion in good] == [30] * 4
    with pytest.raises(ValueError if isinstance(error, ValueError) else RuntimeError):
        await bad
    await backend.generate(make_request([5] * 20, 1))
    assert empty(backend)


async def test_many_cancellations_leave_the_engine_empty(backend: EngineBackend) -> None:
    for pause in (0.0, 0.001, 0.02):
        tasks = [asyncio.create_task(backend.generate(make_request([5] * (10 + at), 200))) for at in range(60)]
        await asyncio.sleep(pause)
        cancelled = [task.cancel() for task in tasks[1:]]  # False if it is done already
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in done[1:]] == cancelled
        assert any(cancelled)
        assert len(done[0].token_ids) == 200  # type: ignore[union-attr]
    await backend.generate(make_request([5], 1))
    assert empty(backend)


def test_several_event_loops_share_an_engine() -> None:
    model = model_of()
    backend = backend_of(model)
    requests = [make_request([7 + at] * 20, 40, seed=at) for at in range(6)]
    got: dict[int, Any] = {}

    async def some(indices: list[int]) -> None:
        got.update(zip(indices, await asyncio.gather(*(backend.generate(requests[at]) for at in indices)), strict=True))

    threads = [threading.Thread(target=lambda m=m: asyncio.run(some(m))) for m in ([0, 1, 2], [3, 4, 5])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, request in enumerate(requests):
        torch.testing.assert_close(
            torch.tensor(got[at].logprobs), score_completion(model, request, got[at]), atol=1e-4, rtol=0
        )
    loop = asyncio.new_event_loop()  # closed while a turn is running
    task = loop.create_task(backend.generate(make_request([5] * 20, 400)))
    loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    asyncio.run(some([0]))
    asyncio.run(backend.close())


# ── weights ──


async def test_updates_of_an_idle_engine_and_concurrent_updates(backend: EngineBackend) -> None:
    await asyncio.gather(*(backend.update_weights((), version) for version in range(1, 6)))
    assert backend.weight_version == 5


def failing() -> Iterator[tuple[str, Any]]:
    yield "lm_head.weight", torch.zeros(VOCABULARY, 64)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("then", ["continue", "finish", "abort"])
@pytest.mark.parametrize("weights", [failing, lambda: [("lm_head.weight", 3)], lambda: {"lm_head.weight": 1}])
async def test_unreadable_weights_change_nothing(weights: Any, then: str) -> None:
    model = model_of()
    backend = backend_of(model, on_update=then)
    initial_weights = model.lm_head.weight.clone()
    (turn,) = await start_turns(backend, 1, 100)
    with pytest.raises(ConfigError):
        await backend.update_weights(weights(), 1)
    got = await turn
    assert (len(got.token_ids), set(got.weight_versions), backend.weight_version) == (100, {0}, 0)
    assert torch.equal(initial_weights, model.lm_head.weight)
    await backend.close()


async def test_partially_loaded_weights_are_never_sampled_from(backend: EngineBackend) -> None:
    (turn,) = await start_turns(backend)
    broken = torch.empty(VOCABULARY, 64, device="meta")  # has a shape and nothing to copy
    with pytest.raises(BackendFault, match="the weights of version 1 came in part"):
        await backend.update_weights([("model.norm.weight", torch.zeros(64)), ("lm_head.weight", broken)], 1)
    with pytest.raises(BackendFault, match="came in part"):
        await turn
    with pytest.raises(BackendFault, match="update them again"):
        await backend.generate(make_request([5] * 10))
    other = model_of(seed=9)
    await backend.update_weights(other.named_parameters(), 2)
    got = await backend.generate(make_request([5] * 10, seed=1))
    torch.testing.assert_close(
        torch.tensor(got.logprobs), score_completion(other, make_request([5] * 10), got), atol=1e-4, rtol=0
    )


async def test_turns_requested_during_a_pending_update_use_its_weights() -> None:
    backend = backend_of(model_of(), on_update="finish")
    (first,) = await start_turns(backend)
    updates = [asyncio.create_task(backend.update_weights((), version)) for version in (1, 2)]
    await asyncio.sleep(0)
    late = asyncio.create_task(backend.generate(make_request([6] * 20, 5)))
    assert set((await first).weight_versions) == {0}
    assert set((await late).weight_versions) == {2}
    await asyncio.gather(*updates)
    await backend.close()


async def test_cancelled_update_is_not_applied() -> None:
    backend = backend_of(model_of(), on_update="finish")
    (turn,) = await start_turns(backend)
    update = asyncio.create_task(backend.update_weights((), 1))
    await asyncio.sleep(0)
    update.cancel()
    await turn
    assert set((await backend.generate(make_request([5] * 10))).weight_versions) == {0}
    await backend.close()


async def test_close_fails_pending_updates() -> None:
    backend = backend_of(model_of(), on_update="finish")
    (turn,) = await start_turns(backend)
    update = asyncio.create_task(backend.update_weights((), 1))
    late = asyncio.create_task(backend.generate(make_request([5] * 10)))
    await asyncio.sleep(0)
    await asyncio.gather(backend.close(), backend.close())
    for call in (turn, update, late, backend.generate(make_request([5])), backend.update_weights((), 1)):
        with pytest.raises(BackendFault, match="the engine is closed"):
            await call


# ── the engine ──


async def test_dead_engine_thread_fails_all_requests(backend: EngineBackend) -> None:
    turns = await start_turns(backend, 3)

    def break_down() -> Any:
        raise MemoryError("no room for a list")

    backend._engine._scheduler.schedule = break_down  # type: ignore[method-assign]
    for turn in (*turns, backend.generate(make_request([5] * 10)), backend.update_weights((), 1)):
        with pytest.raises(BackendFault, match="thread ended with MemoryError: no room for a list"):
            await turn


async def test_failed_step_does_not_affect_waiting_turns() -> None:
    backend = backend_of(model_of(), max_rows=1)
    launch, calls = backend._runner.launch, 0

    def once(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return launch(batch)

    backend._runner.launch = once  # type: ignore[method-assign]
    got = await asyncio.gather(
        *(backend.generate(make_request([5 + at] * 20, 9)) for at in range(4)), return_exceptions=True
    )
    assert [isinstance(result, BackendFault) for result in got] == [True, False, False, False]
    await backend.close()


async def test_weight_update_repairs_a_model_with_nan_weights(backend: EngineBackend) -> None:
    good = backend._runner.model.lm_head.weight.clone()
    await backend.update_weights([("lm_head.weight", good * float("nan"))], 1)
    for _ in range(5):
        with pytest.raises(NonFiniteError, match=r"weights of version 1.*lm_head"):
            await backend.generate(make_request([5] * 10))
    await backend.update_weights([("lm_head.weight", good)], 2)
    await backend.generate(make_request([5] * 10))


async def test_garbage_collected_backend_ends_its_thread() -> None:
    backend = backend_of(model_of())
    await backend.generate(make_request([5] * 10, 3))
    thread, gone = backend._engine._thread, weakref.ref(backend)
    del backend
    while gone() is not None:  # the engine's thread may still be leaving the step of the last request
        gc.collect()
        await asyncio.sleep(0.01)
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


async def test_engine_raises_in_a_forked_process(backend: EngineBackend) -> None:
    await backend.generate(make_request([5] * 10, 3))
    child = os.fork()
    if not child:
        try:
            backend._engine._submit(lambda: None)
        except BackendFault:
            os._exit(7)
        os._exit(1)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.parametrize("settings", [{"max_rows": 0}, {"max_batch_tokens": -1}, {"max_rows": True}, {"kv_memory": 0}])
def test_invalid_settings_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        backend_of(model_of(), **settings)
