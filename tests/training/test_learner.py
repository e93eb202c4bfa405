"""The learner: updates, independent of their split into micro-batches; saving and resuming."""

import copy
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'agentfly-rl[train]'")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from agentfly.algorithms.loss import Loss  # noqa: E402
from agentfly.backends.engine.loading import bfloat16_is_fast  # noqa: E402
from agentfly.backends.engine.model_runner import TRACE_LOCK  # noqa: E402
from agentfly.errors import ConfigError, DataError, NonFiniteError, RecordError  # noqa: E402
from agentfly.training.batch import Sample, number_turns  # noqa: E402
from agentfly.training.local_learner import LocalLearner  # noqa: E402
from agentfly.training.lora import add_lora  # noqa: E402
from agentfly.training.optimizer import LRSchedule, warn_of_unusual_rate  # noqa: E402
from tests.backends.engine.test_architectures import PLAIN, build_model  # noqa: E402
from tests.backends.engine.tiny import CONFIG, VOCABULARY, model_of  # noqa: E402
from tests.training.pieces import make_learner, piece, sample, samples  # noqa: E402

LENGTHS = (30, 5, 17, 40, 9, 2)


def flat(model: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def gradient(model: Any, batch: list[Sample], **settings: Any) -> Tensor:
    """The gradient of an update, which plain descent with a rate of 1 would subtract."""
    caught: list[Tensor] = []
    learner = make_learner(model, **settings)
    step = learner._optimizer.step

    def catch(update: int) -> float:
        caught.append(
            torch.cat(
                [weight.grad.flatten() for weight in learner.trainable_weights.values() if weight.grad is not None]
            )
        )
        return step(update)

    learner._optimizer.step = catch  # type: ignore[method-assign]
    learner.update(batch)
    return caught[0]


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_an_update_records_the_logprobs_before_it(mini_batches: int) -> None:
    learner = make_learner(model_of(), mini_batches=mini_batches)
    batch = [replace(sample, name=f"0/{index}#0") for index, sample in enumerate(samples(*LENGTHS))]
    scores = learner.score([member.segment for member in batch], 1.0)
    learner.update(batch)
    for member, score in zip(batch, scores, strict=True):
        np.testing.assert_allclose(learner.update_logprobs[member.name], score[member.segment.mask], atol=1e-5)
    learner.skip_update()
    assert learner.update_logprobs == {}


# ── the gradient ──


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    "loss", [Loss(), Loss(ratio="turn", entropy_coef=0.01), Loss("cispo", kl_coef=0.1), Loss("plain")]
)
def test_micro_batches_add_up_to_one_large_batch(loss: Loss, aggregation: str) -> None:
    batch = [replace(sample, reference_logprobs=sample.segment.logprobs) for sample in samples(*LENGTHS)]
    settings = {"loss": loss, "aggregation": aggregation, "constant": 20 if aggregation == "constant" else None}
    whole = gradient(model_of(), batch, **settings)
    for budget in (1, 45):
        parts = gradient(model_of(), batch, micro_batch_tokens=budget, **settings)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))


def test_gradient_equals_the_formula() -> None:
    model, batch = model_of(), samples(*LENGTHS, temperature=0.8)
    total, loss = sum(member.num_sampled_tokens for member in batch), torch.zeros(())
    for member in batch:
        logits = model(torch.tensor(member.segment.tokens)[None].long()).logits[0, :-1] / 0.8
        logs = logits.log_softmax(-1).gather(1, torch.tensor(member.segment.tokens[1:]).long()[:, None])[:, 0]
        loss = loss - (logs * torch.tensor(member.advantages[1:]) * torch.tensor(member.segment.mask[1:])).sum() / total
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    got = gradient(model, batch, loss=Loss("plain"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("budget", [1, 45, 1000])
def test_gradient_of_the_observations_equals_the_formula(budget: int, teacher: bool) -> None:
    """Their mean is over the mini-batch, at temperature 1, and includes what comes after the last sampled token."""
    model, batch = model_of(), samples(*LENGTHS, temperature=0.8)
    draw = np.random.default_rng(0)
    for number, member in enumerate(batch):
        observed = ~member.segment.mask & (draw.random(len(member.segment.mask)) < 0.5)
        observed[0], observed[-1] = False, not member.segment.mask[-1]
        batch[number] = replace(member, observations=observed & (number != 3))
    total = sum(member.num_sampled_tokens for member in batch)
    total_observed = sum(member.num_observation_tokens for member in batch)
    loss = torch.zeros(())
    for member in batch:
        assert member.observations is not None
        logits = model(torch.tensor(member.segment.tokens)[None].long()).logits[0, :-1]
        targets = torch.tensor(member.segment.tokens[1:]).long()[:, None]
        sampled, observed_logprobs = (
            (logits / temperature).log_softmax(-1).gather(1, targets)[:, 0] for temperature in (0.8, 1.0)
        )
        loss = (
            loss - (sampled * torch.tensor(member.advantages[1:]) * torch.tensor(member.segment.mask[1:])).sum() / total
        )
        loss = loss - 0.3 * observed_logprobs[torch.tensor(member.observations[1:])].sum() / total_observed
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    settings: dict[str, Any] = {"loss": Loss("plain", observation_coef=0.3)}
    if teacher:  # itself: the divergence and its gradient are 0
        settings = {"loss": Loss("plain", observation_coef=0.3, teacher_coef=0.5), "teacher": copy.deepcopy(model)}
    got = gradient(model, batch, micro_batch_tokens=budget, **settings)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6 * float(expected.abs().max()))


def test_turns_are_numbered_over_all_segments() -> None:
    first, second = piece(12, share=1.0), piece(7, share=1.0)
    first = replace(first, turns=np.array([0, 0, 0, 0, 1, 1, 3, 3, 3, 3, 3, 3], np.int32))
    second = replace(
        second, turns=np.array([0, 3, 3, 3, 4, 4, 4], np.int32)
    )  # begins with the turn that ended the other
    numbers = number_turns([first, second])
    turns = np.concatenate([first.turns[first.mask], second.turns[second.mask] + 10])
    assert numbers.tolist() == [sorted(set(turns.tolist())).index(turn) for turn in turns.tolist()]


@pytest.mark.parametrize(
    ("aggregation", "mini_batches", "lora"), [("token", 1, False), ("sequence", 1, True), ("token", 2, False)]
)
@pytest.mark.parametrize("budget", [1, 45, 1000])
def test_gradient_of_the_divergence_to_a_teacher_equals_the_formula(
    budget: int, aggregation: str, mini_batches: int, lora: bool
) -> None:
    all_samples = samples(*LENGTHS, temperature=0.8)
    model, teacher = model_of(), model_of(seed=1, config=LlamaConfig(**{**CONFIG.to_dict(), "hidden_size": 32}))
    if lora:
        model = add_lora(model, 4, seed=0)
    batch = list(all_samples)
    if mini_batches > 1:  # the first step has the first half of the shuffled samples
        Random("0/0").shuffle(batch)
        batch = batch[: len(batch) // 2]
    total, loss = sum(member.num_sampled_tokens for member in batch), torch.zeros(())
    for member in batch:
        tokens = torch.tensor(member.segment.tokens)[None].long()
        student, target = ((of(tokens).logits[0, :-1] / 0.8).log_softmax(-1) for of in (model, teacher))
        divergence = (student.exp() * (student - target.detach())).sum(-1)  # [tokens - 1]
        surrogate = -student.gather(1, tokens[0, 1:, None])[:, 0] * torch.tensor(member.advantages[1:])
        divisor = total if aggregation == "token" else len(batch) * member.num_sampled_tokens
        loss = loss + ((surrogate + 0.5 * divergence) * torch.tensor(member.segment.mask[1:])).sum() / divisor
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad])
    model.zero_grad()
    settings = {"micro_batch_tokens": budget, "mini_batches": mini_batches, "aggregation": aggregation}
    got = gradient(model, all_samples, loss=Loss("plain", teacher_coef=0.5), teacher=teacher, **settings)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_divergence_to_a_teacher_is_measured_and_reaches_zero() -> None:
    batch = [replace(sample, advantages=np.zeros_like(sample.advantages)) for sample in samples(*LENGTHS)]
    teacher = model_of(seed=1)
    learner = make_learner(model_of(), loss=Loss(teacher_coef=2.0), teacher=teacher)
    first = learner.update(batch)
    assert first["policy/loss"] == pytest.approx(2 * first["policy/teacher_kl"], rel=1e-5)
    assert first["policy/teacher_kl"] > 0.1
    same = make_learner(model_of(seed=1), loss=Loss(teacher_coef=2.0), teacher=teacher).update(batch)
    assert same["policy/teacher_kl"] == pytest.approx(0, abs=1e-6)
    assert same["policy/grad_norm"] == pytest.approx(0, abs=1e-5)


def test_teacher_without_comparable_logits_is_refused() -> None:
    loss = Loss(teacher_coef=1.0)
    with pytest.raises(ConfigError, match="make the learner with teacher=model"):
        make_learner(model_of(), loss=loss)
    fewer = model_of(config=LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": 290}))
    with pytest.raises(ConfigError, match=r"the teacher has 290 of the 300 .*: write teacher.divergence=sampled"):
        make_learner(model_of(), loss=loss, teacher=fewer)
    custom = model_of()
    custom.lm_head.register_forward_hook(lambda _, __, out: out.sin())
    with pytest.raises(ConfigError, match="needs heads that are plain linear layers"):
        make_learner(model_of(), loss=loss, teacher=custom)


def test_padded_rows_give_the_same_gradient() -> None:
    batch = samples(*LENGTHS)
    whole = gradient(build_model("gpt_neo", PLAIN["gpt_neo"]), batch)
    alone = gradient(build_model("gpt_neo", PLAIN["gpt_neo"]), batch, micro_batch_tokens=1)
    torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("loss", [Loss(), Loss(entropy_coef=0.1, correction="token-mask")])
def test_nothing_is_read_from_the_device_until_all_passes_are_launched(
    loss: Loss, critic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("agentfly.training.model.supports_packing", lambda _: False)  # rows are padded, as on a GPU
    learner = make_learner(model_of(), loss=loss, critic=critic, micro_batch_tokens=40)
    with Operators():  # type: ignore[no-untyped-call]
        learner.update(samples(*LENGTHS))
    # Adam runs once for matrices and once for vectors; the critic has its own.
    steps = [at for at, name in enumerate(called) if "fused_adam" in name][1::2]
    assert len(steps) == 1 + critic
    for start, end in pairwise([0, *steps]):
        passes = [at for at in range(start, end) if "embedding_dense_backward" in called[at]]
        read = [at for at in range(start, end) if "_local_scalar_dense" in called[at]]
        assert len(passes) > 2
        assert passes[-1] < read[-1]
        assert not any(passes[0] < at < passes[-1] for at in read)


def test_other_models_of_the_process_compile_without_graph_breaks() -> None:
    model = model_of()
    ids = torch.randint(3, VOCABULARY, (1, 17))
    two_in_a_row = torch.cat([torch.arange(9), torch.arange(8)])[None]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for positions in (None, two_in_a_row):
            expected = model(ids, position_ids=positions, use_cache=False).logits
            torch.testing.assert_close(compiled(ids, position_ids=positions, use_cache=False).logits, expected)


def test_gradient_checkpointing_gives_the_same_gradient_and_recomputes() -> None:
    batch, calls = samples(*LENGTHS), []
    plain = gradient(model_of(), batch)
    model = model_of()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    learner = make_learner(model)
    calls.clear()
    learner.update(batch)
    assert len(calls) == 1
    learner = make_learner(model, gradient_checkpointing=True)
    calls.clear()
    learner.update(batch)
    assert len(calls) == 2
    torch.testing.assert_close(gradient(model_of(), batch, gradient_checkpointing=True), plain, rtol=1e-5, atol=1e-8)


def test_dropout_is_off_in_every_mode_of_the_model() -> None:
    batch, results = samples(*LENGTHS), []
    for dropout, recompute in ((0.0, False), (0.5, False), (0.5, True)):
        model = build_model("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": dropout}).train()
        results.append(gradient(model, batch, gradient_checkpointing=recompute))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-7)


# ── the steps ──


def test_update_raises_the_probability_of_good_tokens_and_lowers_that_of_bad_ones() -> None:
    good, bad = (
        replace(member, advantages=np.where(member.segment.mask, worth, 0).astype(np.float32))
        for member, worth in ((sample(20, 1), 1.0), (sample(20, 2), -1.0))
    )
    learner = make_learner(model_of(), learning_rate=1e-3)
    before = [score.sum() for score in learner.score([good.segment, bad.segment], 1.0)]
    figures = learner.update([good, bad])
    after = [score.sum() for score in learner.score([good.segment, bad.segment], 1.0)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert figures["policy/ratio"] == 1.0
    assert figures["policy/tokens"] == good.num_sampled_tokens + bad.num_sampled_tokens
    assert figures["policy/clip_fraction"] == 0
    assert figures["policy/entropy"] > 0
    assert figures["policy/grad_norm"] > 0
    assert figures["policy/learning_rate"] == 1e-3
    assert {"update/seconds_forward", "update/seconds_backward", "policy/loss"} <= set(figures)


def test_old_policy_is_the_model_before_the_first_step() -> None:
    batch = samples(*LENGTHS)
    figures = make_learner(model_of(), epochs=3, mini_batches=2).update(batch)
    assert figures["policy/ratio"] != 1.0
    assert figures["policy/clip_fraction"] > 0
    assert figures["policy/tokens"] == 3 * sum(member.num_sampled_tokens for member in batch)
    model = model_of()
    learner = make_learner(model, epochs=3, mini_batches=2)
    old = learner.score([member.segment for member in batch], 1.0)
    learner.update([replace(member, old_logprobs=logprobs) for member, logprobs in zip(batch, old, strict=True)])
    other = model_of()
    make_learner(other, epochs=3, mini_batches=2).update(batch)
    assert torch.equal(flat(model), flat(other))


def test_equal_seeds_learn_the_same_and_different_seeds_do_not() -> None:
    models = [model_of() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        make_learner(model, mini_batches=3, seed=seed).update(samples(*LENGTHS))
    first, same, other = map(flat, models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_gradients_are_clipped_to_the_maximum_norm() -> None:
    steps = []
    for most in (1e9, 1e-9):
        model = model_of()
        before = flat(model)
        figures = make_learner(model, max_grad_norm=most).update(samples(*LENGTHS))
        steps.append(((flat(model) - before).norm(), figures["policy/grad_norm"]))
    assert steps[1][0] < steps[0][0] / 2  # Adam's own epsilon then is as large as what it divides by
    assert steps[0][1] == steps[1][1] > 1e-3


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_learning_rate_warms_up_and_follows_its_schedule(schedule: Any, rates: list[float]) -> None:
    rate = LRSchedule(2.0, warmup=4, schedule=schedule, total=8)
    assert [rate.at(update) for update in range(8)] == pytest.approx([2 * rate for rate in rates])
    assert rate.at(100) == pytest.approx(2.0 if schedule == "constant" else 0.0)


def test_updates_follow_the_schedule() -> None:
    learner = make_learner(model_of(), learning_rate=1e-3, warmup_steps=2, schedule="linear", total_steps=4, epochs=2)
    rates = [learner.update(samples(9))["policy/learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_weights_decay_but_vectors_do_not() -> None:
    model = model_of()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    still = replace(sample(9), advantages=np.zeros(9, np.float32))
    make_learner(model, weight_decay=0.1).update([still])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] * (0.999 if parameter.ndim > 1 else 1.0))


# ── what is wrong ──


@pytest.mark.parametrize("epochs", [1, 2])
def test_non_finite_advantage_is_reported_and_changes_no_weight(epochs: int) -> None:
    model = model_of()
    learner, before = make_learner(model, epochs=epochs), flat(model)
    bad = replace(sample(9, 7), advantages=np.full(9, np.nan, np.float32))
    with pytest.raises(NonFiniteError, match=r"update 1: the loss is nan: look at the samples 7/0#0; its step had"):
        learner.update([*samples(5, 6), bad])
    assert torch.equal(flat(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    learner.update(samples(5, 6))
    assert not torch.equal(flat(model), before)


def test_non_finite_logits_are_reported_with_the_samples() -> None:
    model, batch = model_of(), samples(9, 12)
    token = int(batch[1].segment.tokens[0])
    batch[0] = replace(batch[0], segment=replace(batch[0].segment, tokens=np.full(9, (token + 1) % 300, np.int32)))
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = float("nan")
    with pytest.raises(NonFiniteError, match=r"look at the samples 1/0#0; its step had the samples"):
        make_learner(model).update(batch)


def test_non_finite_gradient_is_reported_with_the_weight() -> None:
    model = model_of()
    learner, before = make_learner(model), flat(model)
    model.model.layers[1].mlp.down_proj.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteError, match=r"not finite; the first such weight is model\.layers\.1\.mlp\.down"):
        learner.update(samples(9, 12))
    assert torch.equal(flat(model), before)


def test_untrainable_samples_are_rejected() -> None:
    learner = make_learner(model_of())
    silent = replace(sample(5), segment=replace(piece(5), mask=np.zeros(5, bool)))
    with pytest.raises(RecordError, match="nothing to learn from"):
        learner.update([silent])
    with pytest.raises(RecordError, match="nothing to learn from"):
        learner.update([])
    with pytest.raises(RecordError, match=r"sample 0/0#0 has no reference"):
        make_learner(model_of(), loss=Loss(kl_coef=0.1)).update(samples(5))
    with pytest.raises(ConfigError, match="keeps no reference"):
        learner.score_reference([piece(5)], 1.0)
    with pytest.raises(ConfigError, match="has no critic"):
        learner.values([piece(5)])
    assert [score.tolist() for score in learner.score([silent.segment], 1.0)] == [[0.0] * 5]


def test_model_in_low_precision_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"torch\.bfloat16: updates smaller than its rounding would be lost"):
        make_learner(model_of().to(torch.bfloat16))
    with pytest.raises(ConfigError, match="this model has nothing to train"):
        make_learner(model_of().requires_grad_(False))


def test_bfloat16_products_train_float32_weights() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not bfloat16_is_fast(device):
        with pytest.raises(ConfigError, match="this CPU is slower in it"):
            make_learner(model_of(), precision="bfloat16")
        pytest.skip("this CPU does not multiply bfloat16 well, or dies of it")
    model, batch = model_of().to(device), samples(*LENGTHS)
    rough, exact = gradient(model_of().to(device), batch, precision="bfloat16"), gradient(model, batch)
    assert torch.nn.functional.cosine_similarity(rough, exact, dim=0) > 0.98
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# ── the reference ──


def test_reference_is_the_initial_model() -> None:
    pieces = [piece(length) for length in LENGTHS]
    learner = make_learner(model_of(), reference=True)
    before = learner.score(pieces, 0.9)
    learner.update(samples(*LENGTHS))
    for was, is_, now in zip(before, learner.score_reference(pieces, 0.9), learner.score(pieces, 0.9), strict=True):
        np.testing.assert_array_equal(was, is_)
        assert np.abs(was - now).max() > 1e-3


def test_divergence_from_the_reference_is_measured_from_the_second_update_on() -> None:
    learner = make_learner(model_of(), reference=True, loss=Loss(kl_coef=0.1))
    figures = []
    for _ in range(2):
        batch = samples(*LENGTHS)
        reference = learner.score_reference([member.segment for member in batch], 1.0)
        figures.append(
            learner.update(
                [
                    replace(member, reference_logprobs=logprobs)
                    for member, logprobs in zip(batch, reference, strict=True)
                ]
            )
        )
    assert figures[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert figures[1]["policy/kl"] > 1e-4


# ── adapters ──


def model_with_adapters(seed: int = 0) -> Any:
    pytest.importorskip("peft", reason="LoRA needs peft: pip install 'agentfly-rl[train]'")
    return add_lora(model_of(), 4, seed=seed)


def test_adapters_alone_are_trained_and_the_reference_is_the_model_without_them() -> None:
    model, pieces = model_with_adapters(), [piece(length) for length in LENGTHS]
    base = make_learner(model_of()).score(pieces, 1.0)
    learner = make_learner(model, reference=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learner.update(samples(*LENGTHS))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name or "lora_A" in name), name
    for was, is_, now in zip(base, learner.score_reference(pieces, 1.0), learner.score(pieces, 1.0), strict=True):
        np.testing.assert_allclose(was, is_, atol=1e-6)
        assert np.abs(was - now).max() > 1e-3
    assert learner._reference is None  # no copy of the model


def test_adapters_are_saved_alone_loaded_and_merged(tmp_path: Path) -> None:
    model, pieces = model_with_adapters(), [piece(20)]
    learner = make_learner(model)
    learner.update(samples(*LENGTHS))
    learner.save(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 200_000
    listed = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert listed == sorted(listed)
    other = make_learner(model_with_adapters(seed=1))
    other.load(tmp_path / "adapter")
    np.testing.assert_array_equal(other.score(pieces, 1.0)[0], learner.score(pieces, 1.0)[0])
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = type(model_of()).from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(make_learner(merged).score(pieces, 1.0)[0], learner.score(pieces, 1.0)[0], atol=1e-4)
    assert any("lora_" in name for name, _ in model.named_parameters())  # still a model with adapters


def test_adapter_initialization_depends_on_the_seed_only() -> None:
    pytest.importorskip("peft", reason="LoRA needs peft: pip install 'agentfly-rl[train]'")
    models = [model_of(), model_of()]
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = (add_lora(model, 4) for model in models)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(flat(first), flat(second))
    with pytest.raises(ConfigError, match="has adapters already"):
        add_lora(first, 4)


# ── stopping and going on ──


@pytest.mark.parametrize("critic", [False, True])
def test_restored_learner_continues_bit_for_bit(tmp_path: Path, critic: bool) -> None:
    settings: dict[str, Any] = {
        "mini_batches": 2, "critic": critic, "warmup_steps": 3, "schedule": "cosine", "total_steps": 5,
        "reference": True, "weight_decay": 0.01,
    }  # fmt: skip
    model = model_of()
    learner = make_learner(model, **settings)
    for _ in range(2):
        learner.update(samples(*LENGTHS))
    learner.save(tmp_path)
    tensors, values = learner.state_dict()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "state")
    expected = [learner.update(samples(*LENGTHS)) for _ in range(2)]

    again = model_of()
    resumed = make_learner(again, **settings)
    resumed.load(tmp_path)
    resumed.load_state_dict(load_file(tmp_path / "state"), copy.deepcopy(values))
    got = [resumed.update(samples(*LENGTHS)) for _ in range(2)]
    assert torch.equal(flat(again), flat(model))
    for actual_step, expected_step in zip(got, expected, strict=True):
        assert {name: value for name, value in actual_step.items() if "seconds" not in name} == {
            name: value for name, value in expected_step.items() if "seconds" not in name
        }
    pieces = [piece(20)]
    np.testing.assert_array_equal(resumed.score_reference(pieces, 1.0)[0], learner.score_reference(pieces, 1.0)[0])
    if critic:
        np.testing.assert_array_equal(resumed.values(pieces)[0], learner.values(pieces)[0])


def test_state_of_another_model_is_rejected(tmp_path: Path) -> None:
    learner = make_learner(model_of())
    learner.update(samples(9))
    tensors, values = learner.state_dict()
    with pytest.raises(DataError, match="belongs to another model"):
        make_learner(build_model("gpt2", {})).load_state_dict(tensors, values)
    with pytest.raises(DataError, match=r"the checkpoint has no weight .* of the critic"):
        make_learner(model_of(), critic=True).load_state_dict(tensors, values)
    build_model("gpt2", {}).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"not the one being trained: its weight model\.embed_tokens"):
        learner.load(tmp_path)


def is_trace_lock_free() -> bool:
    """Whether another thread could take the lock now."""
    with ThreadPoolExecutor(1) as thread:
        free = thread.submit(TRACE_LOCK.acquire, blocking=False).result()
        if free:
            thread.submit(TRACE_LOCK.release).result()
    return free


def test_no_other_thread_calls_a_compiled_module_during_a_pass() -> None:
    learner = LocalLearner(model_of())
    free: dict[str, bool] = {}
    layer = learner._policy.backbone.model.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda *_: free.__setitem__("forward", is_trace_lock_free()))
    weight = next(iter(learner.trainable_weights.values()))
    weight.register_hook(lambda _: free.__setitem__("backward", is_trace_lock_free()))
    learner.update(samples(9, 17))
    assert free == {"forward": False, "backward": False}
    assert is_trace_lock_free()


def test_graphs_are_captured_under_the_trace_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels of CUDA graphs need triton")
    from agentfly.backends.engine import cuda_graphs

    free: list[bool] = []
    monkeypatch.setattr(cuda_graphs, "StepGraph", lambda runner, size: free.append(is_trace_lock_free()))
    runner = object.__new__(cuda_graphs.GraphRunner)
    runner._graphs = {}
    runner._graph(3)
    assert free == [False]
    assert is_trace_lock_free()


@pytest.mark.parametrize(
    ("rate", "parameters", "lora", "warning"),
    [
        (5e-4, 2_000_000, False, ""),
        (0.5, 2_000_000, False, "may be destroyed"),
        (1e-3, 3_000_000_000, False, "may be destroyed"),
        (1e-3, 3_000_000_000, True, ""),
        (1e-10, 3_000_000_000, False, "almost nothing is learned"),
    ],
)
def test_unusual_learning_rate_for_the_size_of_a_model_is_reported(
    rate: float, parameters: int, lora: bool, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unusual_rate(torch.nn.Linear(parameters, 1, bias=False, device="meta"), rate, lora=lora)
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)
