"""Memory: the plan, gradient checkpointing, and updates that run out of memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'agentfly-rl[train]'")

from agentfly.errors import ConfigError  # noqa: E402
from agentfly.training.batch import Sample  # noqa: E402
from agentfly.training.config import TrainConfig  # noqa: E402
from agentfly.training.local_learner import LocalLearner  # noqa: E402
from agentfly.training.lora import add_lora  # noqa: E402
from agentfly.training.memory import GIB, ModelSize, activation_bytes, plan_memory  # noqa: E402
from tests.backends.engine.test_architectures import PLAIN, build_model  # noqa: E402
from tests.backends.engine.tiny import CONFIG, model_of  # noqa: E402
from tests.training.pieces import make_learner, samples  # noqa: E402

LENGTHS = (20, 19, 20, 18, 20, 19, 20, 18)


def weights_of(learner: LocalLearner) -> Any:
    return torch.cat([weight.detach().flatten() for weight in learner.trainable_weights.values()])


def wrap_policy(learner: LocalLearner, around: Callable[[Any, Any], Any]) -> None:
    """Replace the learner's forward pass by `around(forward pass, inputs)`."""
    policy = learner._policy

    def run(inputs: Any, temperatures: Any) -> Any:
        return around(lambda: policy(inputs, temperatures), inputs)

    run.backbone = policy.backbone  # type: ignore[attr-defined]
    run.logprobs = policy.logprobs  # type: ignore[attr-defined]
    learner._policy = run  # type: ignore[assignment]


def run_out_of_memory(learner: LocalLearner, fails: Callable[[int, int], bool]) -> list[int]:
    """Make passes with gradients raise where `fails(number of the pass, its tokens)`; returns the tokens of all."""
    passes: list[int] = []

    def around(forward: Callable[[], Any], inputs: Any) -> Any:
        scores = forward()
        if torch.is_grad_enabled():
            passes.append(sum(input.num_input_tokens for input in inputs))
            if fails(len(passes), passes[-1]):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")
        return scores

    wrap_policy(learner, around)
    return passes


# ── an update that runs out of memory ──


def test_update_is_repeated_with_half_the_micro_batch_and_stays_there() -> None:
    batch = samples(*LENGTHS)
    learner = make_learner(model_of(), micro_batch_tokens=80)
    passes = run_out_of_memory(learner, lambda number, tokens: number == 2)  # the first has left its gradient
    first = learner.update(batch)
    assert first["update/out_of_memory"] == 1
    smaller = first["update/micro_batch_tokens"]
    assert smaller == passes[1] // 2
    second = learner.update(batch)
    assert max(passes[2:]) <= smaller
    assert second["update/out_of_memory"] == 0
    assert second["update/micro_batch_tokens"] == smaller

    from_the_start = make_learner(model_of(), micro_batch_tokens=int(smaller))
    for _ in range(2):
        from_the_start.update(batch)
    assert torch.equal(weights_of(learner), weights_of(from_the_start))


def test_only_the_failed_optimizer_step_is_repeated() -> None:
    batch = samples(*LENGTHS)
    settings: dict[str, Any] = {"epochs": 2, "mini_batches": 2, "critic": True, "micro_batch_tokens": 60}
    plain = make_learner(model_of(), **settings)
    plain.update(batch)
    learner = make_learner(model_of(), **settings)
    run_out_of_memory(learner, lambda number, tokens: number == 5)
    steps = []
    step = learner._optimizer.step
    learner._optimizer.step = lambda update: steps.append(1) or step(update)  # type: ignore[method-assign,func-returns-value]
    assert learner.update(batch)["update/out_of_memory"] == 1
    assert len(steps) == 4
    torch.testing.assert_close(weights_of(learner), weights_of(plain), rtol=1e-3, atol=1e-4)


def test_optimizer_that_runs_out_of_memory_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(model_of(), micro_batch_tokens=60)
    passes = run_out_of_memory(learner, lambda number, tokens: False)
    steps = []

    def fail() -> None:
        steps.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(learner._optimizer._adam, "step", fail)
    with pytest.raises(torch.OutOfMemoryError):
        learner.update(samples(*LENGTHS))
    assert len(steps) == 1
    assert sum(passes) == sum(sample.segment.num_input_tokens for sample in samples(*LENGTHS)), "no pass was repeated"
    assert (learner._runner.tokens, learner._runner.retries) == (60, 0)
    assert all(weight.grad is None for weight in learner.trainable_weights.values())


def test_sample_that_does_not_fit_alone_is_an_error_with_its_length() -> None:
    learner = make_learner(model_of())
    before = weights_of(learner).clone()
    batch = samples(*LENGTHS)
    longest = max(sample.segment.num_input_tokens for sample in batch)
    run_out_of_memory(learner, lambda number, tokens: tokens >= longest)
    with pytest.raises(ConfigError, match=rf"a sequence of {longest} tokens alone .*20.00 GiB.*gradient_checkpointing"):
        learner.update(batch)
    assert torch.equal(weights_of(learner), before)
    assert all(weight.grad is None for weight in learner.trainable_weights.values())


def test_resumed_learner_keeps_the_smaller_micro_batch() -> None:
    learner = make_learner(model_of(), micro_batch_tokens=80)
    run_out_of_memory(learner, lambda number, tokens: number == 1)
    smaller = learner.update(samples(*LENGTHS))["update/micro_batch_tokens"]
    other = make_learner(model_of(), micro_batch_tokens=80)
    other.load_state_dict(*learner.state_dict())
    assert other.update(samples(*LENGTHS))["update/micro_batch_tokens"] == smaller


@pytest.mark.parametrize("changed", [40, 160])
def test_resumed_learner_takes_a_micro_batch_that_was_changed(changed: int) -> None:
    learner = make_learner(model_of(), micro_batch_tokens=80)
    learner.update(samples(*LENGTHS))
    other = make_learner(model_of(), micro_batch_tokens=changed)
    other.load_state_dict(*learner.state_dict())
    assert other.update(samples(*LENGTHS))["update/micro_batch_tokens"] == changed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the allocator of torch raises the error")
def test_cuda_out_of_memory_is_repeated_with_smaller_micro_batches() -> None:
    config = type(CONFIG)(**{**CONFIG.to_dict(), "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8})
    total = torch.cuda.get_device_properties(0).total_memory
    batch = samples(*[400] * 64)
    learner = make_learner(model_of(config=config).cuda(), micro_batch_tokens=1 << 20, precision="auto")
    learner.update(batch[:1])
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (3 << 29)) / total)
        metrics = learner.update(batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert metrics["update/out_of_memory"] >= 1
    assert metrics["update/micro_batch_tokens"] < 64 * 400


def test_dry_run_changes_no_later_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"reset_peak_memory_stats": None, "memory_allocated": 5, "max_memory_allocated": 7}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)  # there is no GPU to ask
    batch = samples(*LENGTHS, old_logprobs=None)
    settings: dict[str, Any] = {"epochs": 2, "critic": True, "micro_batch_tokens": 100, "gradient_checkpointing": True}
    plain, measured = (make_learner(model_of(), **settings) for _ in range(2))
    random = torch.get_rng_state()
    assert measured.measure_update(30) == (2, 90)
    assert torch.equal(torch.get_rng_state(), random)
    for learner in (plain, measured):
        learner.update(batch)
    assert torch.equal(weights_of(measured), weights_of(plain))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the dry run measures its memory")
def test_cuda_dry_run_changes_nothing() -> None:
    learner = make_learner(model_of().cuda(), critic=True, precision="auto", micro_batch_tokens=256)
    before = weights_of(learner).clone()
    random = torch.cuda.get_rng_state()
    taken, tokens = learner.measure_update(64)
    assert taken > 0
    assert tokens == 256
    assert torch.equal(weights_of(learner), before)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert all(weight.grad is None for weight in learner.trainable_weights.values())
    assert not learner._optimizer.state_dict()


# ── gradient checkpointing ──


@contextmanager
def count_saved_bytes(model: Any) -> Iterator[list[int]]:
    """Bytes of the distinct storages that autograd saves, without the model's weights."""
    model_storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: dict[int, Any] = {}
    total = [0]

    def save(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in model_storages and storage.data_ptr() not in alive:
            alive[storage.data_ptr()] = tensor  # keeps it, so that no other tensor gets its address
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield total


def saved_bytes(batch: list[Sample], *, low_precision: bool = False, **settings: Any) -> tuple[int, Any]:
    """Bytes that autograd keeps after the forward pass of an update, and the gradient."""
    learner = make_learner(model_of(), **settings)
    learner._runner.low_precision = low_precision
    sizes: list[int] = []

    def around(forward: Callable[[], Any], inputs: Any) -> Any:
        with count_saved_bytes(learner.model) as total:
            scores = forward()
        sizes.append(total[0])
        return scores

    wrap_policy(learner, around)
    gradients: list[Any] = []
    step = learner._optimizer.step

    def catch(update: int) -> float:
        gradients.extend(
            weight.grad.flatten() for weight in learner.trainable_weights.values() if weight.grad is not None
        )
        return step(update)

    learner._optimizer.step = catch  # type: ignore[method-assign]
    learner.update(batch)
    (saved,) = sizes
    return saved, torch.cat(gradients)


@pytest.mark.parametrize("low_precision", [False, True])
def test_gradient_checkpointing_saves_a_fraction_and_gives_the_same_gradient(low_precision: bool) -> None:
    batch = samples(*[60] * 8)
    whole, plain = saved_bytes(batch, low_precision=low_precision)
    part, recomputed = saved_bytes(batch, low_precision=low_precision, gradient_checkpointing=True)
    assert part < whole / 4
    torch.testing.assert_close(recomputed, plain, rtol=1e-6, atol=1e-6 * float(plain.abs().max()))


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_estimated_activations_are_near_those_that_autograd_saves(low_precision: bool, checkpointing: bool) -> None:
    batch = samples(*[60] * 16)
    tokens = sum(sample.segment.num_input_tokens for sample in batch)
    measured, _ = saved_bytes(batch, low_precision=low_precision, gradient_checkpointing=checkpointing)
    size = ModelSize.from_config(CONFIG)
    estimated = activation_bytes(size, tokens, gradient_checkpointing=checkpointing, low_precision=low_precision)
    least = 1.0 if checkpointing else 0.7  # with checkpointing, one layer more in the backward pass
    assert measured * least < estimated
    if not checkpointing:
        assert estimated < 2.5 * measured  # the head and a layer's gradients come on top


# ── the plan ──


def test_model_size_is_counted_without_weights() -> None:
    size = ModelSize.from_config(CONFIG)
    model = model_of()
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    adapted = add_lora(model, 4)
    assert 4 * size.linear_width == sum(
        parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad
    )


def test_every_architecture_can_be_planned() -> None:
    for name, settings in PLAIN.items():
        size = ModelSize.from_config(build_model(name, settings).config)
        assert plan_memory(size, TrainConfig(), 1 << 30, on_gpu=True).parts["weights"] == 4 * size.parameters, name


def qwen_7b() -> ModelSize:
    return ModelSize(
        parameters=7_615_616_512, linear_width=28 * 103_936, layers=28, width=3584, inner=18944,
        kv_width=512, vocab=152064, positions=32768,
    )  # fmt: skip


def test_plan_counts_every_copy_of_the_weights() -> None:
    size = qwen_7b()
    plan = plan_memory(size, TrainConfig(kl={"coef": 0.1}, algorithm="ppo"), 400 * GIB, on_gpu=True)  # type: ignore[arg-type]
    billions = {name: part / size.parameters for name, part in plan.parts.items()}
    bytes_per_weight = {"weights": 4, "gradients": 4, "optimizer": 8, "reference": 4, "critic": 16, "engine_weights": 2}
    assert {name: billions[name] for name in bytes_per_weight} == bytes_per_weight
    assert plan.left == plan.total - sum(plan.parts.values())
    plan.require_fit()
    sharded = plan_memory(
        size,
        TrainConfig(kl={"coef": 0.1}, algorithm="ppo", gpus=4),
        400 * GIB,
        on_gpu=True,  # type: ignore[arg-type]
    )
    for part in ("weights", "gradients", "optimizer", "reference", "critic"):
        assert sharded.parts[part] == plan.parts[part] // 4
    assert sharded.parts["engine_weights"] == plan.parts["engine_weights"]
    assert sharded.parts["gathered_weights"] > plan.parts["gathered_weights"] == 0
    lora = plan_memory(size, TrainConfig(lora_rank=16), 400 * GIB, on_gpu=True)
    assert lora.parts["weights"] == 2 * size.parameters + 4 * 16 * size.linear_width
    assert lora.parts["optimizer"] == 8 * 16 * size.linear_width
    on_cpu = plan_memory(
        size, TrainConfig(backend={"backend": "transformers", "dtype": "float32"}), 400 * GIB, on_gpu=False
    )
    assert on_cpu.parts["engine_weights"] == 0  # the learner's own weights


def test_run_that_cannot_fit_is_refused_with_numbers_and_changes() -> None:
    plan = plan_memory(qwen_7b(), TrainConfig(), 80 * GIB, on_gpu=True)
    assert plan.left < 0
    with pytest.raises(ConfigError) as refused:
        plan.require_fit()
    message = str(refused.value)
    assert "weights 28.4, gradients 28.4, optimizer 56.7" in message
    assert "more than the 80.0 available" in message
    assert "lora_rank=16 gradient_checkpointing=true micro_batch_tokens=4096" in message
    with pytest.raises(ConfigError, match="take a smaller model or a larger device"):
        plan_memory(qwen_7b(), TrainConfig(), 16 * GIB, on_gpu=True).require_fit()


def test_estimated_activations_alone_refuse_nothing() -> None:
    size = ModelSize.from_config(CONFIG)
    plan = plan_memory(size, TrainConfig(micro_batch_tokens=1 << 24), GIB, on_gpu=False)
    assert plan.left < 0
    plan.require_fit()
    assert "(activations estimated for 16,777,216 tokens)" in str(plan)
    assert str(plan).endswith("if a pass has that many tokens; a smaller micro_batch_tokens needs less")
    assert plan.to_json()["left"] == plan.left
