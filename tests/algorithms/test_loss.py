"""The loss compared with slow plain Python, its split into micro-batches, and rejected settings."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from agentfly.algorithms.kl import KLController, kl_divergence, kl_penalty
from agentfly.algorithms.loss import (
    Aggregation,
    Correction,
    Loss,
    Surrogate,
    TokenBatch,
    aggregation_weights,
    combine_metrics,
)
from agentfly.errors import ConfigError
from agentfly.training.optimizer import LRSchedule

LENGTHS = (3, 1, 0, 5, 2)
SURROGATES: tuple[Any, ...] = get_args(Surrogate)
POLICY_LOSSES: list[dict[str, Any]] = [
    *({"surrogate": surrogate} for surrogate in SURROGATES),
    {"ratio": "turn"},
    {"ratio": "segment"},
    {"surrogate": "cispo", "ratio": "turn"},
]
"""Surrogates with the levels of the ratio that differ."""
CORRECTIONS: tuple[Any, ...] = get_args(Correction)
AGGREGATIONS: tuple[Any, ...] = get_args(Aggregation)


def tokens_of(seed: int = 0, aggregation: Any = "token", lengths: Sequence[int] = LENGTHS) -> TokenBatch:
    random = torch.Generator().manual_seed(seed)
    count = sum(lengths)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(count, generator=random)

    logprobs = -normal().abs()
    repeats = torch.tensor(lengths)
    # Turns of two tokens.
    turns = [(number, position // 2) for number, length in enumerate(lengths) for position in range(length)]
    return TokenBatch(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=logprobs + normal(0.3),
        sampler_logprobs=logprobs + normal(0.3),
        advantages=normal(),
        weights=torch.tensor(aggregation_weights(lengths, aggregation, 4)).repeat_interleave(repeats),
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(repeats),
        num_sequences=len(lengths),
        turn_ids=torch.tensor([sorted(set(turns)).index(turn) for turn in turns], dtype=torch.int64),
        reference_logprobs=logprobs + normal(0.3),
        entropies=normal().abs().requires_grad_(),
    )


# ── a slow reference ──


def slow_loss(loss: Loss, tokens: TokenBatch) -> float:
    rows = {
        name: getattr(tokens, name).tolist()
        for name in (
            "logprobs",
            "old_logprobs",
            "sampler_logprobs",
            "advantages",
            "weights",
            "sequence_ids",
            "turn_ids",
            "reference_logprobs",
            "entropies",
        )
    }
    total = 0.0
    for t, share in enumerate(rows["weights"]):
        same = [s for s in range(len(rows["weights"])) if rows["sequence_ids"][s] == rows["sequence_ids"][t]]
        policy = slow_surrogate(loss, rows, t, same) * slow_correction(loss, rows, t, same)
        d = rows["logprobs"][t] - rows["reference_logprobs"][t]
        strayed = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[loss.kl_estimator]
        total += share * (policy + loss.kl_coef * strayed - loss.entropy_coef * rows["entropies"][t])
    return total


def slow_surrogate(loss: Loss, rows: dict[str, list[float]], t: int, same: list[int]) -> float:
    advantage, logprob = rows["advantages"][t], rows["logprobs"][t]
    turn = [s for s in same if rows["turn_ids"][s] == rows["turn_ids"][t]]
    which = {"token": [t], "turn": turn, "segment": same}[loss.ratio]
    ratio = math.exp(sum(rows["logprobs"][s] - rows["old_logprobs"][s] for s in which) / len(which))
    held = min(max(ratio, 1 - loss.clip[0]), 1 + loss.clip[1])
    if loss.surrogate == "plain":
        return -advantage * logprob
    if loss.surrogate == "cispo":
        return -held * advantage * logprob
    worst = -min(ratio * advantage, held * advantage)
    return min(worst, -loss.clip[2] * advantage) if len(loss.clip) == 3 and advantage < 0 else worst


def slow_correction(loss: Loss, rows: dict[str, list[float]], t: int, same: list[int]) -> float:
    if loss.correction is None:
        return 1.0
    level, mode = loss.correction.split("-")
    apart = [rows["old_logprobs"][s] - rows["sampler_logprobs"][s] for s in ([t] if level == "token" else same)]
    ratio = math.exp(sum(apart) / (len(apart) if level == "geometric" else 1))
    if mode == "truncate":
        return min(ratio, loss.correction_cap)
    return ratio if 1 / loss.correction_cap <= ratio <= loss.correction_cap else 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("settings", POLICY_LOSSES)
def test_losses_by_hand(settings: dict[str, Any], aggregation: Any) -> None:
    clips: list[Any] = [(0.2, 0.2), (0.1, 0.4), *([] if "surrogate" in settings else [(0.2, 0.3, 1.4)])]
    for seed, clip in enumerate(clips):
        tokens, loss = tokens_of(seed, aggregation), Loss(clip=clip, **settings)
        assert loss(tokens)[0].item() == pytest.approx(slow_loss(loss, tokens), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("cap", [1.05, 1.2, 3.0])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_by_hand(correction: Any, cap: float) -> None:
    tokens, loss = tokens_of(3), Loss(correction=correction, correction_cap=cap)
    assert loss(tokens)[0].item() == pytest.approx(slow_loss(loss, tokens), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_and_the_entropy_bonus_by_hand(estimator: Any) -> None:
    tokens, loss = tokens_of(4), Loss(ratio="turn", kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.07)
    value, _ = loss(tokens)
    assert value.item() == pytest.approx(slow_loss(loss, tokens), rel=1e-5, abs=1e-6)
    value.backward()
    assert tokens.entropies is not None
    np.testing.assert_allclose(tokens.entropies.grad, -0.07 * tokens.weights)


# ── what holds ──


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token", [1 / 10, 1 / 10, 0.0]),
        ("sequence", [1 / (2 * 8), 1 / (2 * 2), 0.0]),
        ("constant", [1 / (2 * 100), 1 / (2 * 100), 0.0]),
    ],
)
def test_aggregation_weight_of_a_token(how: Any, expected: list[float]) -> None:
    assert aggregation_weights([8, 2, 0], how, 100) == pytest.approx(expected)
    assert aggregation_weights([0, 0], how, 100) == [0.0, 0.0]
    assert aggregation_weights([], how, 100) == []


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("settings", POLICY_LOSSES)
def test_micro_batches_add_up(settings: dict[str, Any], aggregation: Any) -> None:
    """However a mini-batch is cut between its sequences, the loss, its gradient and what is measured are the same."""
    loss = Loss(kl_coef=0.1, entropy_coef=0.01, correction="geometric-mask", correction_cap=1.1, **settings)
    whole = tokens_of(5, aggregation)
    value, measured = loss(whole)
    value.backward()
    for cut in ([[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]], [[4, 0], [3, 1, 2]]):
        parts = [part_of(whole, sequences) for sequences in cut]
        results = [loss(part) for part, _ in parts]
        assert sum(part_loss.item() for part_loss, _ in results) == pytest.approx(value.item(), rel=1e-5)
        for (part, where), (part_loss, _) in zip(parts, results, strict=True):
            part_loss.backward()
            assert whole.logprobs.grad is not None
            np.testing.assert_allclose(part.logprobs.grad, whole.logprobs.grad[where], rtol=1e-4, atol=1e-7)
        assert combine_metrics(metrics for _, metrics in results) == pytest.approx(
            combine_metrics([measured]), rel=1e-4
        )


def part_of(whole: TokenBatch, sequences: list[int]) -> tuple[TokenBatch, torch.Tensor]:
    where = torch.cat([torch.nonzero(whole.sequence_ids == n).flatten() for n in sequences])
    index = torch.tensor([sequences.index(int(n)) for n in whole.sequence_ids[where]], dtype=torch.int64)
    names = ("logprobs", "old_logprobs", "sampler_logprobs", "advantages", "weights", "turn_ids")
    names = (*names, "reference_logprobs", "entropies")
    rows = {name: getattr(whole, name).detach()[where] for name in names}
    rows["logprobs"].requires_grad_()
    rows["turn_ids"] = torch.unique(rows["turn_ids"], return_inverse=True)[1]
    return TokenBatch(**rows, sequence_ids=index, num_sequences=len(sequences)), where


def test_loss_metrics() -> None:
    zero = torch.zeros(4)
    tokens = TokenBatch(
        logprobs=torch.tensor([0.5, -0.5, 0.0, 1.0]).requires_grad_(),
        old_logprobs=zero,
        sampler_logprobs=torch.tensor([0.0, 0.0, 0.0, -1.0]),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        weights=torch.full((4,), 0.25),
        sequence_ids=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
        entropies=torch.full((4,), 2.0),
    )
    measured = combine_metrics([Loss(clip=(0.2, 0.3, 2.0), correction="token-truncate")(tokens)[1]])
    ratios = [math.exp(x) for x in (0.5, -0.5, 0.0, 1.0)]
    assert measured["tokens"] == 4
    assert measured["ratio"] == pytest.approx(sum(ratios) / 4)
    assert measured["ratio_max"] == pytest.approx(math.e)
    assert measured["approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)
    assert [measured[f"clip_{side}"] for side in ("low", "high", "dual")] == [0.25, 0.25, 0.25]
    assert measured["mismatch_kl"] == pytest.approx((math.e - 2) / 4)
    assert measured["mismatch_max"] == 1
    assert measured["corrected"] == 0.25
    assert measured["correction_weight"] == pytest.approx((3 + 2) / 4)
    assert measured["entropy"] == 2
    assert "kl" not in measured
    assert measured["loss"] == pytest.approx(measured["loss_policy"])


@pytest.mark.parametrize(("surrogate", "low", "high"), [("clip", 1, 1), ("cispo", 2, 2), ("plain", None, None)])
def test_clipped_tokens_are_counted_where_the_clip_has_an_effect(surrogate: Any, low: Any, high: Any) -> None:
    """Ratios 0.5, 0.5, 0.9, 1.1, 2, 2 with a clip of 0.2: the minimum with r·A ignores it on one side of A."""
    ratios = torch.tensor([0.5, 0.5, 0.9, 1.1, 2.0, 2.0])
    tokens = TokenBatch(
        logprobs=ratios.log().requires_grad_(),
        old_logprobs=torch.zeros(6),
        sampler_logprobs=torch.full((6,), -0.5),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]),
        weights=torch.full((6,), 1 / 6),
        sequence_ids=torch.arange(6),
        num_sequences=6,
    )
    measured = Loss(surrogate, clip=(0.2, 0.2))(tokens)[1]
    assert (measured.get("clip_low"), measured.get("clip_high")) == (low, high)
    assert measured["mismatch_max"] == 0.5


def test_every_term_of_the_loss_is_measured_under_its_name() -> None:
    tokens = replace(tokens_of(), teacher_kl=torch.full((sum(LENGTHS),), 0.25))
    loss = Loss(kl_coef=0.5, kl_estimator="k1", entropy_coef=0.1, teacher_coef=2.0)
    total, measured = loss(tokens)
    weights = tokens.weights
    kl = (tokens.logprobs - tokens.reference_logprobs).detach()
    assert tokens.entropies is not None
    expected = {
        "loss_kl": 0.5 * (weights * kl).sum(),
        "loss_entropy": -0.1 * (weights * tokens.entropies.detach()).sum(),
        "loss_teacher": 2.0 * 0.25 * weights.sum(),
    }
    assert {name: measured[name].item() for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}
    )
    assert total.item() == pytest.approx((measured["loss_policy"] + sum(expected.values())).item(), rel=1e-5)
    figures = combine_metrics([measured, measured])
    count = sum(LENGTHS)
    assert (figures["teacher_kl"], figures["kl"]) == pytest.approx((0.25, kl.sum().item() / count), rel=1e-5)
    assert figures["loss_kl"] == pytest.approx(2 * expected["loss_kl"].item(), rel=1e-5)  # summed, not averaged
    without = Loss()(tokens)[1]
    assert not {"loss_kl", "loss_entropy"} & without.keys()
    with pytest.raises(ConfigError, match="a divergence to a teacher, and no `teacher_kl`"):
        Loss(teacher_coef=1.0)(tokens_of())


def test_observations_add_their_cross_entropy() -> None:
    """The policy terms, and what is measured of the sampled tokens, are as without them."""
    observed = torch.tensor([-0.5, -2.0, -3.5], requires_grad=True)
    tokens = replace(tokens_of(), observation_logprobs=observed, observation_weight=1 / 3)
    total, measured = Loss(observation_coef=0.1)(tokens)
    plain_total, plain_measured = Loss()(tokens_of())
    assert measured["loss_observation"].item() == pytest.approx(0.1 * 2.0)
    assert total.item() == pytest.approx(plain_total.item() + 0.1 * 2.0, rel=1e-5)
    assert {name: measured[name].item() for name in plain_measured if name != "loss"} == {
        name: value.item() for name, value in plain_measured.items() if name != "loss"
    }
    total.backward()
    np.testing.assert_allclose(observed.grad, -0.1 / 3)
    without = replace(tokens, observation_logprobs=observed[:0])  # a micro-batch without observations
    assert Loss(observation_coef=0.1)(without)[1]["loss_observation"].item() == 0


def test_combining_no_metrics_gives_no_metrics() -> None:
    assert combine_metrics([]) == {}


@pytest.mark.parametrize("settings", POLICY_LOSSES)
def test_no_tokens_no_loss(settings: dict[str, Any]) -> None:
    """A micro-batch of sequences in which nothing was sampled still has a loss to go backward from."""
    tokens = tokens_of(lengths=(0, 0))
    value, measured = Loss(kl_coef=0.1, entropy_coef=0.1, correction="sequence-mask", **settings)(tokens)
    value.backward()
    assert value.item() == 0
    assert combine_metrics([measured])["tokens"] == 0


@pytest.mark.parametrize("settings", POLICY_LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_extreme_log_probabilities_stay_finite(settings: dict[str, Any], correction: Any) -> None:
    wild = torch.tensor([500.0, -500.0, 500.0])
    tokens = replace(tokens_of(lengths=(2, 1)), old_logprobs=wild, sampler_logprobs=-wild, reference_logprobs=wild)
    value, measured = Loss(kl_coef=0.1, correction=correction, **settings)(tokens)
    value.backward()
    assert value.isfinite()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.isfinite().all()
    assert all(map(math.isfinite, combine_metrics([measured]).values()))


def test_on_the_first_step_all_losses_have_the_gradient_of_the_plain_one() -> None:
    """Where the old model is the model, a clip holds nothing back and a ratio is 1."""
    gradients = []
    for settings in POLICY_LOSSES:
        tokens = tokens_of(6)
        Loss(**settings)(replace(tokens, old_logprobs=tokens.logprobs.detach()))[0].backward()
        gradients.append(tokens.logprobs.grad)
    for gradient in gradients[1:]:
        np.testing.assert_allclose(gradient, gradients[0], rtol=1e-5)


def test_clipped_token_has_no_gradient_except_with_cispo() -> None:
    tokens = replace(tokens_of(lengths=(1,)), advantages=torch.tensor([1.0]))
    far = replace(tokens, old_logprobs=tokens.logprobs.detach() - 1)
    for surrogate, has in (("clip", False), ("cispo", True)):
        (gradient,) = torch.autograd.grad(Loss(surrogate)(far)[0], tokens.logprobs)  # type: ignore[arg-type]
        assert bool(gradient) is has


def test_old_log_probabilities_get_no_gradient() -> None:
    tokens = tokens_of(7)
    others = {name: getattr(tokens, name).clone().requires_grad_() for name in ("old_logprobs", "sampler_logprobs")}
    _, measured = Loss(correction="token-truncate")(replace(tokens, **others))
    assert not any(value.requires_grad for value in measured.values())


# ── divergence ──


def test_estimates_of_the_divergence_and_their_gradients() -> None:
    """Over a whole distribution: the mean of k1 and k3 is the divergence; k2 has its gradient, k1 none, k3 another."""
    logits = torch.tensor([0.4, -1.0, 0.3], requires_grad=True, dtype=torch.float64)
    reference = torch.tensor([0.1, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    p = logprobs.exp().detach()
    true = (logprobs.exp() * (logprobs - reference)).sum()
    means = {k: (p * kl_divergence(logprobs, reference, k)).sum() for k in ("k1", "k2", "k3")}  # type: ignore[arg-type]
    assert means["k1"].item() == pytest.approx(true.item())
    assert means["k3"].item() == pytest.approx(true.item())
    gradient = {k: torch.autograd.grad(mean, logits, retain_graph=True)[0] for k, mean in means.items()}
    forward = -(reference.exp() * logprobs).sum()
    np.testing.assert_allclose(gradient["k1"], 0, atol=1e-12)
    np.testing.assert_allclose(gradient["k2"], torch.autograd.grad(true, logits, retain_graph=True)[0])
    np.testing.assert_allclose(gradient["k3"], torch.autograd.grad(forward, logits)[0])


def test_kl_penalty_in_the_reward() -> None:
    logprobs, reference = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -1.0], np.float32)
    np.testing.assert_allclose(kl_penalty(logprobs, reference, "k1", 0.1), [0.05, -0.1], rtol=1e-6)
    assert kl_penalty(logprobs, reference, "k3", 0.1).dtype == np.float32
    far = kl_penalty(np.array([100.0, -100.0], np.float32), np.zeros(2, np.float32), "k3", 1.0)
    np.testing.assert_allclose(far, [19.0, math.exp(20) - 21], rtol=1e-6)  # log ratios are clamped to ±20


def test_the_controller_steers_and_is_resumed() -> None:
    controller = KLController(0.1, target=0.05, horizon=100)
    controller.update(1.0, chains=50)
    assert controller.coef == pytest.approx(0.1 * 1.1)
    controller.update(0.0, chains=50)
    assert controller.coef == pytest.approx(0.1 * 1.1 * 0.9)
    near = KLController(0.1, target=0.05, horizon=1)
    near.update(0.055, chains=1)  # 10 % above the target, within the clip of 20 %
    assert near.coef == pytest.approx(0.1 * 1.1)
    again = KLController(0.1, target=0.05, horizon=100)
    again.load_state_dict(controller.state_dict())
    assert again.coef == controller.coef
    fixed = KLController(0.1)
    fixed.update(5.0, chains=1000)
    assert fixed.coef == 0.1


# ── refusals ──


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"surrogate": "clipped"},
            "no loss is named 'clipped'; there are clip, cispo, plain; did you mean 'clip'",
        ),
        ({"ratio": "sequence"}, "no level of the ratio is named 'sequence'; there are token, turn, segment"),
        ({"kl_estimator": "k4"}, "no KL estimator is named 'k4'"),
        ({"correction": "token-truncated"}, "did you mean 'token-truncate'"),
        ({"correction_cap": 1.0}, "correction_cap must be a number above 1, not 1.0"),
        ({"correction_cap": float("nan")}, "correction_cap must be a finite number, not nan"),
        ({"kl_coef": -0.1}, "kl_coef must be a number of at least 0, not -0.1"),
        ({"clip": (0.2,)}, r"the clip of a loss is \[low, high\]"),
        ({"clip": (1.5, 0.2)}, "low from 0 to 1"),
        ({"clip": (0.2, 0.2, 3.0, 4.0)}, r"the clip of a loss is \[low, high\]"),
        ({"clip": (0.2, 0.3, 1.2)}, "above 1 \\+ high"),
        ({"surrogate": "cispo", "clip": (0.2, 0.2, 3.0)}, "the loss 'cispo' has no dual clip"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loss(**settings)


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        (Loss(kl_coef=0.1), "reference_logprobs"),
        (Loss(entropy_coef=0.1), "entropies"),
        (Loss(ratio="turn"), "turn_ids"),
        (Loss(observation_coef=0.1), "observation_logprobs"),
    ],
)
def test_missing_token_data_is_rejected(loss: Loss, missing: str) -> None:
    tokens = tokens_of()
    with pytest.raises(ConfigError, match=f"no `{missing}` came"):
        loss(replace(tokens, **{missing: None}))


@pytest.mark.parametrize("record", [Loss, KLController, LRSchedule], ids=lambda cls: cls.__name__)
def test_every_number_declares_its_bounds(record: Any) -> None:
    for name, field in record.__pydantic_fields__.items():
        is_number = {field.annotation, *get_args(field.annotation)} & {int, float}
        assert not is_number or field.metadata or name == "clip", f"{record.__name__}.{name} has no bounds"


@pytest.mark.parametrize("settings", [{"coef": -0.1}, {"coef": 0.1, "horizon": 0}, {"coef": 0.1, "target": 0}])
def test_controller_of_numbers_that_are_not_positive_is_rejected(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"a KL controller's \w+ must be a number (above|of at least) 0, not"):
        KLController(**settings)


def test_invalid_sizes_and_controllers_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"no aggregation is named 'tokens'.* did you mean 'token'"):
        aggregation_weights([1], "tokens")  # type: ignore[arg-type]
    for constant in (None, 0):
        with pytest.raises(ConfigError, match=f"1 token or more, not by {constant}"):
            aggregation_weights([1], "constant", constant)
    with pytest.raises(ConfigError, match="a KL coefficient of 0 stays 0"):
        KLController(0.0, target=0.1)
    with pytest.raises(ConfigError, match="no KL estimator is named 'k9'"):
        kl_divergence(torch.zeros(1), torch.zeros(1), "k9")  # type: ignore[arg-type]
