"""Any schedule of requests, cancellations and updates: tokens equal a fresh forward pass, and no cache slot is lost."""

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
from agentfly.backends.engine import scheduler  # noqa: E402
from agentfly.backends.engine.engine import Engine  # noqa: E402
from agentfly.backends.engine.kv_cache import KVCache  # noqa: E402
from agentfly.backends.engine.model_runner import ModelRunner, WaitForOutput, bytes_per_token  # noqa: E402
from agentfly.backends.engine.request import Batch, EngineRequest  # noqa: E402
from agentfly.backends.engine.sampler import SamplingRow, sample, uniform  # noqa: E402
from agentfly.backends.engine.scheduler import Scheduler  # noqa: E402
from agentfly.types import Completion, FinishReason, Sampling  # noqa: E402
from tests.backends.engine.tiny import VOCABULARY, model_of  # noqa: E402

CONTEXT = 90
VERSIONS = [model_of(seed=seed) for seed in range(3)]
BASE = np.random.default_rng(0).integers(3, VOCABULARY, 2 * CONTEXT).tolist()


class Stepped(Engine):
    """An engine that the test advances step by step, to fix what happens between two steps."""

    def _work(self) -> None:
        """Do nothing: the test calls `advance`."""

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)

    async def advance(self) -> bool:
        """Run one step; return False if there was nothing to do."""
        for _ in range(3):
            await asyncio.sleep(0)
        self._drain_commands()
        batch = self._scheduler.schedule()
        if batch is not None:
            self._in_flight.append((batch, self._runner.launch(batch)))
        done = batch is None and not self._in_flight
        self._collect(self.ahead if batch is not None and not self._scheduler.needs_host_sampling else 0)
        self.check()
        return not done

    ahead = 0
    """Steps whose results are collected late, as on a GPU."""

    def check(self) -> None:
        """Every slot is free, in the prefix cache or held by one request; locks and counts follow from the requests."""
        scheduler, tables = self._scheduler, self._scheduler.tables
        nodes = list(scheduler.prefix_cache.nodes())
        owned = [scheduler.kv_cache.free_slots(), *(node.slots for node in nodes)]
        for request in scheduler.running:
            row = request.row
            owned.append(tables.slots[row, tables.shared[row] : tables.reserved[row]])
            assert tables.shared[row] <= tables.computed[row] <= tables.reserved[row] <= scheduler.kv_cache.capacity
            path, node = [], request.node
            while node is not scheduler.prefix_cache.root:
                path.insert(0, node)
                node = node.parent
            shared = np.concatenate([np.empty(0, np.int32), *(node.slots for node in path)])
            assert shared.tolist() == tables.slots[row, : tables.shared[row]].tolist()
            tokens = np.concatenate([np.empty(0, np.int32), *(node.tokens for node in path)])
            assert tokens.tolist() == tables.tokens[row, : tables.shared[row]].tolist()
        assert sorted(np.concatenate(owned).tolist()) == list(range(scheduler.kv_cache.capacity))
        assert scheduler.kv_cache.free == len(scheduler.kv_cache.free_slots())
        assert scheduler.prefix_cache.evictable == sum(len(node.tokens) for node in nodes if not node.locks)
        ends = [request.node for request in scheduler.running]
        for node in nodes:
            below, num_locks = [node], 0
            while below:
                descendant = below.pop()
                num_locks += sum(end is descendant for end in ends)
                below += descendant.children.values()
            assert node.locks == num_locks
        assert not any(request.row >= 0 for request in scheduler.waiting)
        assert {*scheduler.running, *scheduler.waiting} <= set(self._pending)


class PagedRunner(ModelRunner):
    """A runner whose sequences have their slots in any order, and that may be a step ahead, as on a GPU."""

    def _build_cache(self, capacity: int, shape: tuple[int, ...], like: torch.Tensor) -> KVCache:
        return KVCache(capacity, like.new_zeros(shape))

    def attach(self, scheduler: Scheduler) -> None:
        self._last = np.zeros(scheduler.tables.rows, np.int32)

    def launch(self, batch: Batch) -> WaitForOutput:
        rows = batch.rows[: batch.decodes]
        batch.tables.tokens[rows, batch.starts[: batch.decodes]] = self._last[rows]  # what the host does not know yet
        launched = super().launch(batch)
        self._last[batch.rows[batch.samples]] = launched().tokens
        return launched


class ScheduledEngine:
    """A stepped engine with its requests, their results and the weight updates."""

    def __init__(
        self, capacity: int, rows: int, tokens: int, then: OnUpdate, ahead: int = 0, paged: bool = False
    ) -> None:
        self.model = model_of()
        self.context = min(CONTEXT, capacity)
        runner = (PagedRunner if paged else ModelRunner)(self.model, capacity * bytes_per_token(self.model))
        self.engine = Stepped(runner, rows, tokens, self.context)
        self.engine.ahead = ahead
        self.then = then
        self.submitted: list[tuple[Request, asyncio.Task[Completion]]] = []
        self.updates: list[asyncio.Task[None]] = []

    def ask(self, prompt: Sequence[int], chain: str, turn: int, sampling: Sampling, stop: int) -> None:
        prompt = list(prompt[: self.context - 1])
        request = Request(prompt, sampling, frozenset(range(3, 3 + stop)), chain=chain, turn=turn)
        limit = min(sampling.max_tokens or CONTEXT, self.context - len(prompt))
        waiting = EngineRequest(request, np.asarray(prompt, np.int32), limit)
        self.submitted.append((request, asyncio.create_task(self.engine.sample(waiting))))

    def again(self, which: int, edit: int | None, num_new: int, sampling: Sampling) -> None:
        """Request the next turn of a finished chain, optionally with one token of its history changed."""
        ended = [(request, task) for request, task in self.submitted if task.done() and not task.cancelled()]
        if ended:
            request, task = ended[which % len(ended)]
            prompt = [*request.prompt, *task.result().token_ids, *BASE[-num_new:]]
            if edit is not None:
                prompt[edit % len(prompt)] = 3
            self.ask(prompt, request.chain, request.turn + 1, sampling, 0)

    def cancel(self, which: int) -> None:
        if self.submitted:
            self.submitted[which % len(self.submitted)][1].cancel()

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
        assert all(task.done() for task in self.updates), "an update was never applied"
        assert all(task.done() for _, task in self.submitted), "a turn was never ended"
        assert self.engine._scheduler.idle
        assert not self.engine._pending
        assert not self.engine._updates
        self.engine._scheduler.prefix_cache.clear()
        assert self.engine._scheduler.kv_cache.free == self.engine._scheduler.kv_cache.capacity


@torch.inference_mode()
def verify(request: Request, got: Completion) -> None:
    """Assert that every token is drawn by its seed from a fresh forward pass with the weights of its version."""
    count, tokens = len(got.token_ids), [*request.prompt, *got.token_ids]
    seed = request.sampling.seed
    assert seed is not None
    rows = [
        SamplingRow(
            request.sampling, float(uniform(seed, at)), np.asarray(tokens[: len(request.prompt) + at], np.int32)
        )
        for at in range(count)
    ]
    for version in set(got.weight_versions):
        logits = VERSIONS[version](torch.tensor([tokens])).logits[0, len(request.prompt) - 1 : -1]
        drawn, logprobs, raw_logprobs = sample(logits, rows)
        of_version = torch.tensor([weight_version == version for weight_version in got.weight_versions])
        assert torch.equal(drawn[of_version], torch.tensor(got.token_ids)[of_version])
        torch.testing.assert_close(torch.tensor(got.logprobs)[of_version], logprobs[of_version], atol=1e-4, rtol=0)
        torch.testing.assert_close(
            torch.tensor(got.raw_logprobs)[of_version], raw_logprobs[of_version], atol=1e-4, rtol=0
        )
    stopped = [at for at, token in enumerate(got.token_ids) if token in request.stop_ids]
    assert stopped == ([count - 1] if got.finish is FinishReason.STOP else [])


settings_of_turns = st.builds(
    Sampling, temperature=st.sampled_from([0.0, 0.7, 1.0]), max_tokens=st.integers(1, 40), seed=st.integers(0, 99),
    top_k=st.sampled_from([0, 0, 5]), repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
)  # fmt: skip
prompts = st.one_of(
    st.builds(lambda cut: BASE[:cut], st.integers(1, CONTEXT)),
    st.builds(lambda at, num_new: [*BASE[:at], *BASE[-num_new:]], st.integers(0, 60), st.integers(1, 30)),
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
    reserve=st.integers(1, 30),
    ahead=st.sampled_from([None, 0, 1, 2]),
    plan=st.lists(st.tuples(st.integers(0, 6), actions), min_size=5, max_size=20),
)
@example(200, 2, 20, OnUpdate.FINISH, 5, None, ONE_BEHIND_AN_UPDATE)
@example(200, 2, 20, OnUpdate.FINISH, 5, 1, ONE_BEHIND_AN_UPDATE)
def test_tokens_equal_a_fresh_forward_pass_in_any_schedule(
    capacity: int, rows: int, tokens: int, then: OnUpdate, reserve: int, ahead: int | None, plan: list[tuple[int, Any]]
) -> None:
    """`ahead`: steps whose results are collected late, with a paged cache; None: with a contiguous cache."""

    async def run() -> ScheduledEngine:
        scheduled = ScheduledEngine(capacity, rows, tokens, then, ahead or 0, ahead is not None)
        for wait, (what, *details) in plan:
            for _ in range(wait):
                await scheduled.engine.advance()
            getattr(scheduled, what)(*details)
        await scheduled.finish()
        return scheduled

    with patch.object(scheduler, "RESERVE", reserve), patch.object(scheduler, "MIN_PREFIX", 4):
        scheduled = asyncio.run(run())
    for request, task in scheduled.submitted:
        if not task.cancelled():
            verify(request, task.result())
    failed = [task.exception() for task in scheduled.updates]
    assert all(error is None or isinstance(error, LookupError) for error in failed)
