"""Weight sync to the backend: which weights are sent, and detection of a failed sync."""

import copy
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'agentfly-rl[train]'")

from torch import Tensor  # noqa: E402

from agentfly.backends.base import Backend, Request  # noqa: E402
from agentfly.backends.engine import EngineBackend  # noqa: E402
from agentfly.backends.engine.loading import LazyWeights  # noqa: E402
from agentfly.backends.fleet import FleetBackend  # noqa: E402
from agentfly.errors import ConfigError, WeightSyncError  # noqa: E402
from agentfly.training.local_learner import LocalLearner  # noqa: E402
from agentfly.training.lora import MergedWeights, add_lora  # noqa: E402
from agentfly.training.weight_sync import Canary, sync_weights, weights_for  # noqa: E402
from agentfly.types import Completion  # noqa: E402
from tests.backends.engine.tiny import backend_of, model_of  # noqa: E402
from tests.training.pieces import make_learner, samples  # noqa: E402

Weights = Iterable[tuple[str, Any]]


def model_with_adapters() -> Any:
    pytest.importorskip("peft", reason="LoRA needs peft: pip install 'agentfly-rl[train]'")
    return add_lora(model_of(), 4)


@pytest.fixture
async def backend_on() -> AsyncIterator[Callable[[Any], EngineBackend]]:
    """Makes backends that are closed after the test."""
    backends: list[EngineBackend] = []

    def make(model: Any) -> EngineBackend:
        backends.append(backend_of(model))
        return backends[-1]

    yield make
    for backend in backends:
        await backend.close()


BackendOn = Callable[[Any], EngineBackend]


class Lossy(Backend):
    """A backend that does with weights as it likes."""

    def __init__(self, inner: EngineBackend, takes: Callable[[Weights], Weights]) -> None:
        self._inner, self._takes = inner, takes

    @property
    def weight_version(self) -> int:
        return self._inner.weight_version

    async def generate(self, request: Request) -> Completion:
        return await self._inner.generate(request)

    async def update_weights(self, weights: Weights, version: int) -> None:
        await self._inner.update_weights(self._takes(weights), version)


# ── what is delivered ──


async def test_shared_model_is_synced_without_a_copy(backend_on: BackendOn) -> None:
    model = model_of()
    backend, learner = backend_on(model), make_learner(model)
    canary = Canary(learner, backend)
    assert weights_for(learner, backend) == ()
    for version in range(1, 4):
        learner.update(samples(20, 9))
        apart = await sync_weights(learner, backend, version, canary)
        assert apart is not None
        assert apart < 1e-5
        assert backend.weight_version == version


async def test_another_model_object_gets_all_weights(backend_on: BackendOn) -> None:
    backend, learner = backend_on(model_of(seed=1)), make_learner(model_of())
    canary = Canary(learner, backend)
    for version in range(1, 3):
        learner.update(samples(20, 9))
        assert (await sync_weights(learner, backend, version, canary) or 0) < 1e-5
    assert all(
        torch.equal(one, other)
        for one, other in zip(backend.model.parameters(), learner.trainable_weights.values(), strict=True)
    )


@pytest.mark.parametrize("engine_model", ["the same object", "with adapters", "without"])
async def test_adapters_reach_the_backend(backend_on: BackendOn, engine_model: str) -> None:
    model = model_with_adapters()
    where = {"the same object": model, "with adapters": copy.deepcopy(model), "without": model_of()}[engine_model]
    backend, learner = backend_on(where), make_learner(model)
    canary = Canary(learner, backend)
    learner.update(samples(20, 9))
    learner.update(samples(20, 9))
    sent = dict(weights_for(learner, backend))
    if engine_model == "without":
        assert "model.layers.0.self_attn.q_proj.weight" in sent
        assert not any("norm" in name or "lora" in name for name in sent)
    else:
        assert (len(sent) > 0) == (engine_model == "with adapters")
        assert all("lora_" in name for name in sent)
    assert (await sync_weights(learner, backend, 1, canary) or 0) < 1e-4


async def test_adapters_added_after_the_backend_are_rejected(backend_on: BackendOn) -> None:
    model = model_of()
    backend = backend_on(model)
    pytest.importorskip("peft", reason="LoRA needs peft: pip install 'agentfly-rl[train]'")
    learner = make_learner(add_lora(model, 4))
    with pytest.raises(WeightSyncError, match="create the backend from what `add_lora` returns"):
        await sync_weights(learner, backend, 1)


async def test_merged_weights_are_made_one_at_a_time(backend_on: BackendOn) -> None:
    model, alive = model_with_adapters(), 0
    backend, learner = backend_on(model_of()), make_learner(model)
    learner.update(samples(20))

    class Counted(MergedWeights):
        most = 0

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            nonlocal alive
            for name, weight in super().__iter__():
                held = _Held()
                weight.held = held
                Counted.most = max(Counted.most, alive)
                yield name, weight
                del weight, held

    class _Held:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    await backend.update_weights(Counted(model), 1)
    assert 0 < Counted.most <= 2


async def test_weights_are_computed_once_and_validated_before(backend_on: BackendOn) -> None:
    backend = backend_on(model_of())
    weights = {name: weight + 1 for name, weight in model_of().named_parameters()}
    computed: list[str] = []

    def compute(name: str) -> Tensor:
        computed.append(name)
        return weights[name]

    shapes = {name: weight.shape for name, weight in weights.items()}
    with pytest.raises(ConfigError, match="the model has no weight 'lost'"):
        await backend.update_weights(LazyWeights({**shapes, "lost": (1,)}, compute), 1)
    assert computed == []
    await backend.update_weights(LazyWeights(shapes, compute), 1)
    assert computed == list(shapes)
    assert all(torch.equal(backend.weights[name], weight) for name, weight in weights.items())


# ── what is noticed ──


async def expect_sync_error(learner: LocalLearner, backend: Backend, message: str) -> None:
    """What the backend has is published, then a step is done that does not get there."""
    canary = Canary(learner, backend)
    await sync_weights(learner, backend, 0, canary)
    learner.update(samples(20, 9))
    with pytest.raises(WeightSyncError, match=message):
        await sync_weights(learner, backend, 1, canary)


async def test_weights_that_never_arrive_are_detected(backend_on: BackendOn) -> None:
    model = model_of()
    learner = make_learner(copy.deepcopy(model))
    backend = Lossy(backend_on(model), lambda weights: ())
    await expect_sync_error(learner, backend, r"after weights 1 .* the weights were not delivered")


async def test_weights_that_never_arrive_are_detected_after_a_small_update(backend_on: BackendOn) -> None:
    model = model_of()
    learner = make_learner(copy.deepcopy(model), learning_rate=2e-5)
    canary = Canary(learner, backend := backend_on(model))
    await sync_weights(learner, backend, 0, canary)
    learner.update(samples(20, 9))
    with pytest.raises(WeightSyncError, match="the weights were not delivered"):
        await canary.check(1)


async def test_weights_that_one_of_many_engines_lacks_are_detected(backend_on: BackendOn) -> None:
    learner = make_learner(model_of(), learning_rate=1e-4)
    engines: list[Backend] = [backend_on(model_of()) for _ in range(5)]
    engines.append(Lossy(backend_on(model_of()), lambda _: ()))
    fleet = FleetBackend(engines)
    canary = Canary(learner, fleet)
    await sync_weights(learner, fleet, 0, canary)
    learner.update(samples(20, 9))
    with pytest.raises(WeightSyncError, match="the weights were not delivered"):
        await sync_weights(learner, fleet, 1, canary)


async def test_partially_synced_weights_are_detected(backend_on: BackendOn) -> None:
    model = model_of()
    learner = make_learner(copy.deepcopy(model))
    backend = Lossy(backend_on(model), lambda weights: list(islice(weights, len(list(weights)) // 2)))
    await expect_sync_error(learner, backend, "only some of the weights arrived")


async def test_adapters_that_never_arrive_are_detected(backend_on: BackendOn) -> None:
    model = model_with_adapters()
    backend = Lossy(backend_on(copy.deepcopy(model)), lambda weights: ())
    learner = make_learner(model)
    await expect_sync_error(learner, backend, "the weights were not delivered")


async def test_backend_behind_by_one_version_is_reported(backend_on: BackendOn) -> None:
    model = model_of()
    learner, inner = make_learner(copy.deepcopy(model)), backend_on(model)
    canary = Canary(learner, inner)
    learner.update(samples(20, 9))
    with pytest.raises(WeightSyncError, match="it reports that it sampled with version 0"):
        await canary.check(1)


async def test_a_healthy_backend_passes_when_nothing_was_learned(backend_on: BackendOn) -> None:
    model = model_of()
    learner, backend = make_learner(model, learning_rate=1e-45), backend_on(model)
    canary = Canary(learner, backend)
    for version in range(3):
        learner.update(samples(20))
        assert (await sync_weights(learner, backend, version, canary) or 0) < 1e-5


class Rounding(Lossy):
    """A backend whose log-probabilities are off by `error`."""

    error = 0.0

    async def generate(self, request: Request) -> Completion:
        completion = await super().generate(request)
        return replace(completion, logprobs=tuple(logprob - self.error for logprob in completion.logprobs))


async def test_rounding_may_grow_slowly_but_not_jump(backend_on: BackendOn) -> None:
    model = model_of()
    learner = make_learner(model, learning_rate=1e-45)
    backend = Rounding(backend_on(model), lambda weights: weights)
    canary = Canary(learner, backend, tolerance=0.1)
    for version, backend.error in enumerate((0.02, 0.06, 0.12, 0.3, 0.45)):
        await canary.check(version)
    backend.error = 0.6
    with pytest.raises(WeightSyncError, match=r"differ by 0.6 .* \(at most 0.5 is expected\)"):
        await canary.check(5)
    canary = Canary(learner, backend, tolerance=0.1)
    backend.error = 0.02
    await canary.check(6)
    backend.error = 0.12
    with pytest.raises(WeightSyncError, match=r"at most 0\.1 is expected"):
        await canary.check(7)
