"""Any schedule of arrivals, aborts and updates, in any cache: the tokens of a fresh forward pass, and exact books."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly-rl[train]'")

from agentfly.backends.base import OnUpdate, Request  # noqa: E402
from agentfly.backends.engine import prefix_cache, scheduler  # noqa: E402
from agentfly.backends.engine.engine import Engine  # noqa: E402
from agentfly.backends.engine.model_runner import ModelRunner, bytes_per_token  # noqa: E402
from agentfly.backends.engine.request import EngineRequest  # noqa: E402
from agentfly.backends.engine.sampler import SamplingRow, draw, uniform  # noqa: E402
from agentfly.types import Completion, FinishReason, Sampling  # noqa: E402
from tests.backends.engine.tiny import VOCABULARY, model_of  # noqa: E402

CONTEXT = 90
VERSIONS = [model_of(seed=seed) for seed in range(3)]
BASE = np.random.default_rng(0).integers(3, VOCABULARY, 2 * CONTEXT).tolist()


class Stepped(Engine):
    """An engine whose steps are taken by hand, so that what comes between two of them is known."""

    def _work(self) -> None:
        """Nothing happens by itself."""

    def _submit(self, order: Callable[[], None]) -> None:
        self._orders.append(order)

    async def advance(self) -> bool:
        """One step; False where there was nothing to do."""
        for _ in range(3):
            await asyncio.sleep(0)
        self._drain_commands()
        chunks = self._scheduler.step()
        if chunks:
            self._step(chunks)
        self.check()
        return bool(chunks)

    def check(self) -> None:
        """The arena is cut into what is free, what jobs hold and what is on the shelf, without gap or overlap."""
        there, arena = self._scheduler, self._scheduler.arena
        held = [job.stretch for job in there.running]
        kept = [kept.stretch for each in there.shelf._kept.values() for kept in each]
        edge = 0
        for stretch in sorted([*arena._free, *held, *kept], key=lambda each: each.start):
            assert stretch.start == edge
            assert stretch.room > 0
            edge = stretch.end
        assert edge == arena.capacity
        assert not any(job.stretch or job.cached for job in there.waiting)
        assert all(job.cached <= job.stretch.room for job in there.running if job.stretch)
        assert {*there.running, *there.waiting} <= set(self._tickets)


class World:
    """An engine, what was asked of it, and what became of that."""

    def __init__(self, capacity: int, rows: int, tokens: int, then: OnUpdate) -> None:
        self.model = model_of()
        self.context = min(CONTEXT, capacity)
        self.engine = Stepped(ModelRunner(self.model, capacity * bytes_per_token(self.model)), rows, tokens)
        self.then = then
        self.asked: list[tuple[Request, asyncio.Task[Completion]]] = []
        self.updates: list[asyncio.Task[None]] = []

    def ask(self, prompt: Sequence[int], chain: str, turn: int, sampling: Sampling, stop: int) -> None:
        prompt = list(prompt[: self.context - 1])
        request = Request(prompt, sampling, frozenset(range(3, 3 + stop)), chain=chain, turn=turn)
        limit = min(sampling.max_tokens or CONTEXT, self.context - len(prompt))
        job = EngineRequest(request, np.asarray(prompt, np.int32), limit, str)
        self.asked.append((request, asyncio.create_task(self.engine.sample(job))))

    def again(self, which: int, edit: int | None, more: int, sampling: Sampling) -> None:
        """The next turn of a chain whose last one ended, maybe with something in its history changed."""
        ended = [(request, task) for request, task in self.asked if task.done() and not task.cancelled()]
        if ended:
            request, task = ended[which % len(ended)]
            prompt = [*request.prompt, *task.result().token_ids, *BASE[-more:]]
            if edit is not None:
                prompt[edit % len(prompt)] = 3
            self.ask(prompt, request.chain, request.turn + 1, sampling, 0)

    def cancel(self, which: int) -> None:
        if self.asked:
            self.asked[which % len(self.asked)][1].cancel()

    def update(self, fails: bool) -> None:
        version = (len(self.updates) + 1) % len(VERSIONS)

        def prepare() -> Callable[[], None]:
            if fails:
                raise LookupError("no weights")
            return lambda: self.model.load_state_dict(VERSIONS[version].state_dict())

        self.updates.append(asyncio.create_task(self.engine.update(prepare, version, self.then)))

    async def finish(self) -> None:
        idle = 0
        while idle < 3:
            idle = 0 if await self.engine.advance() else idle + 1
        assert all(task.done() for task in self.updates), "an update was never made"
        assert all(task.done() for _, task in self.asked), "a turn was never ended"
        assert self.engine._scheduler.idle
        assert not self.engine._tickets
        assert not self.engine._updates
        self.engine._scheduler.shelf.clear()
        assert self.engine._scheduler.arena.free == self.engine._scheduler.arena.capacity


@torch.inference_mode()
def verify(request: Request, got: Completion) -> None:
    """Every token is the one that its seed draws from a fresh forward pass with the weights of its version."""
    count, tokens = len(got.token_ids), [*request.prompt, *got.token_ids]
    seed = request.sampling.seed
    assert seed is not None
    rows = [
        SamplingRow(request.sampling, float(uniform(seed, at)), tokens[: len(request.prompt) + at])
        for at in range(count)
    ]
    for version in set(got.weight_versions):
        logits = VERSIONS[version](torch.tensor([tokens])).logits[0, len(request.prompt) - 1 : -1]
        drawn, logprobs, own = draw(logits, rows)
        mine = torch.tensor([each == version for each in got.weight_versions])
        assert torch.equal(drawn[mine], torch.tensor(got.token_ids)[mine])
        torch.testing.assert_close(torch.tensor(got.logprobs)[mine], logprobs[mine], atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(got.raw_logprobs)[mine], own[mine], atol=1e-4, rtol=0)
    stopped = [at for at, token in enumerate(got.token_ids) if token in request.stop_ids]
    assert stopped == ([count - 1] if got.finish is FinishReason.STOP else [])


settings_of_turns = st.builds(
    Sampling, temperature=st.sampled_from([0.0, 0.7, 1.0]), max_tokens=st.integers(1, 40), seed=st.integers(0, 99),
    top_k=st.sampled_from([0, 0, 5]), repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
)  # fmt: skip
prompts = st.one_of(
    st.builds(lambda cut: BASE[:cut], st.integers(1, CONTEXT)),
    st.builds(lambda at, more: [*BASE[:at], *BASE[-more:]], st.integers(0, 60), st.integers(1, 30)),
    st.builds(lambda at: [*BASE[:at], 5, *BASE[at + 1 : 60]], st.integers(0, 59)),
)
asks = st.tuples(
    st.just("ask"), prompts, st.sampled_from(["a", "b", "c"]), st.integers(0, 2), settings_of_turns, st.integers(0, 60)
)
actions = st.one_of(
    asks,
    asks,
    st.tuples(st.just("update"), st.just(False)),
    st.tuples(
        st.just("again"), st.integers(0, 9), st.none() | st.integers(0, 89), st.integers(1, 20), settings_of_turns
    ),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("update"), st.sampled_from([False, False, True])),
)


ONE_BEHIND_AN_UPDATE = [
    (0, ("ask", BASE[:20], "a", 0, Sampling(max_tokens=10, seed=1), 0)),
    (2, ("update", False)),
    (1, ("ask", BASE[:20], "b", 0, Sampling(max_tokens=10, seed=1), 0)),
]


@settings(max_examples=50, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    capacity=st.integers(40, 260),
    rows=st.integers(1, 5),
    tokens=st.integers(1, 40),
    then=st.sampled_from(OnUpdate),
    ahead=st.integers(1, 30),
    plan=st.lists(st.tuples(st.integers(0, 6), actions), min_size=5, max_size=20),
)
@example(200, 2, 20, OnUpdate.FINISH, 5, ONE_BEHIND_AN_UPDATE)
def test_whatever_comes_in_between_every_token_is_that_of_a_fresh_forward_pass(
    capacity: int, rows: int, tokens: int, then: OnUpdate, ahead: int, plan: list[tuple[int, Any]]
) -> None:
    async def run() -> World:
        world = World(capacity, rows, tokens, then)
        for wait, (what, *details) in plan:
            for _ in range(wait):
                await world.engine.advance()
            getattr(world, what)(*details)
        await world.finish()
        return world

    with patch.object(scheduler, "RESERVE", ahead), patch.object(prefix_cache, "HEAD", 4):
        world = asyncio.run(run())
    for request, task in world.asked:
        if not task.cancelled():
            verify(request, task.result())
    failed = [task.exception() for task in world.updates]
    assert all(error is None or isinstance(error, LookupError) for error in failed)
