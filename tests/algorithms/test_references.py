"""Advantages and losses agree with verl's and TRL's own functions where they define the same thing."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from agentfly.algorithms import GDPO, GRPO, PPO, RLOO, DrGRPO, ReinforcePP, ReinforcePPBaseline, ReMax
from agentfly.algorithms.base import Algorithm, Episode, Group
from agentfly.algorithms.kl import KLController, kl_divergence
from agentfly.algorithms.loss import Loss, TokenBatch, aggregation_weights, combine_metrics, correction_weights
from tests.algorithms import references
from tests.algorithms.chains import Array, episode
from tests.algorithms.fetch import is_there
from tests.algorithms.references import Ask

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _start_reference(name: str) -> Iterator[Ask]:
    if not is_there(name):
        pytest.skip(f"{name} is not fetched: python tests/algorithms/fetch.py")
    with references.reference(name) as ask:
        yield ask


@pytest.fixture(scope="module")
def verl() -> Iterator[Ask]:
    yield from _start_reference("verl")


@pytest.fixture(scope="module")
def trl() -> Iterator[Ask]:
    yield from _start_reference("trl")


def batch(seed: int, *, penalized: bool = False) -> list[Group]:
    """Groups of chains of one to four turns, each with one reward at its end, and a greedy chain.

    `penalized`: every token has a KL penalty.
    """
    random = np.random.default_rng(seed)

    def chain() -> Episode:
        lengths = random.integers(1, 5, random.integers(1, 5))
        values, penalties = random.normal(size=(2, lengths.sum()))
        return episode(lengths, float(random.normal()), values=values, penalties=penalties if penalized else None)

    return [Group(tuple(chain() for _ in range(size)), chain()) for size in random.integers(2, 6, 3)]


def pad_rows(rows: list[Array]) -> Array:
    return np.stack([np.pad(row, (0, max(map(len, rows)) - len(row))) for row in rows])


def as_rows(groups: list[Group]) -> dict[str, Array]:
    """The batch as padded rows: everything after the prompt, the reward on the last token that the model sampled."""
    episodes = [chain for group in groups for chain in group.episodes]
    masks = [chain.segments[0].mask.astype(np.float32) for chain in episodes]
    rewards = [np.zeros_like(mask) for mask in masks]
    for reward, mask, chain in zip(rewards, masks, episodes, strict=True):
        reward[np.flatnonzero(mask)[-1]] = chain.total_reward
        reward -= 0 if chain.penalties is None else chain.penalties[0]
    return {
        "mask": pad_rows(masks),
        "rewards": pad_rows(rewards),
        "values": pad_rows([chain.values[0] for chain in episodes if chain.values is not None]),
        "groups": np.repeat(np.arange(len(groups)), [len(group.episodes) for group in groups]),
    }


ESTIMATORS: list[tuple[str, Algorithm, dict[str, Any]]] = [
    ("grpo", GRPO(), {}),
    ("grpo", DrGRPO(), {"norm_adv_by_std_in_grpo": False}),
    ("rloo", RLOO(), {}),
    ("reinforce_plus_plus", ReinforcePP(), {"gamma": 1.0}),
    ("reinforce_plus_plus", ReinforcePP(gamma=0.9), {"gamma": 0.9}),
    ("reinforce_plus_plus_baseline", ReinforcePPBaseline(), {}),
    ("gae", PPO(), {"gamma": 1.0, "lam": 1.0}),
    ("gae", PPO(gamma=0.97, lam=0.9), {"gamma": 0.97, "lam": 0.9}),
    ("gae", PPO(lam=0.0), {"gamma": 1.0, "lam": 0.0}),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "algorithm", "more"), ESTIMATORS, ids=lambda it: it if isinstance(it, str) else "")
def test_advantages_equal_verl(verl: Ask, name: str, algorithm: Algorithm, more: dict[str, Any], seed: int) -> None:
    groups = batch(seed, penalized=name in ("reinforce_plus_plus", "gae") and seed % 2 == 1)
    rows = as_rows(groups)
    more = more | ({"values": rows["values"]} if name == "gae" else {})
    expected, returns = verl(references.verl_advantages, name, rows["rewards"], rows["mask"], rows["groups"], **more)
    credits = [credit for group in algorithm.compute_advantages(groups) for credit in group]
    np.testing.assert_allclose(pad_rows([credit.advantages[0] for credit in credits]), expected * rows["mask"], **CLOSE)
    if name == "gae":
        targets = pad_rows([credit.returns[0] for credit in credits if credit.returns is not None])
        np.testing.assert_allclose(targets, returns * rows["mask"], **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_gdpo_equals_verl(verl: Ask, seed: int) -> None:
    random = np.random.default_rng(seed)
    weights = {"correct": 1.0, "short": 0.3}
    groups = [
        Group(
            tuple(
                episode(
                    random.integers(1, 5, 3),
                    components=dict(zip(weights, random.normal(size=2), strict=True)),
                    weights=weights,
                )
                for _ in range(size)
            )
        )
        for size in random.integers(2, 6, 3)
    ]
    chains = [chain for group in groups for chain in group.episodes]
    mask = pad_rows([chain.segments[0].mask.astype(np.float32) for chain in chains])
    indices = np.repeat(np.arange(len(groups)), [len(group.episodes) for group in groups])
    scores = [chain.trajectory.score for chain in chains]
    values = {name: np.array([score.components[name].value for score in scores if score]) for name in weights}
    expected, _ = verl(
        references.verl_advantages, "gdpo", mask, mask, indices,
        config={"gdpo_reward_keys": list(weights), "gdpo_reward_weights": list(weights.values())},
        non_tensor_batch=values,
    )  # fmt: skip
    credits = [credit for group in GDPO().compute_advantages(groups) for credit in group]
    np.testing.assert_allclose(pad_rows([credit.advantages[0] for credit in credits]), expected, **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_remax_equals_verl(verl: Ask, seed: int) -> None:
    groups = batch(seed)
    rows = as_rows(groups)
    greedy = np.array(
        [group.greedy.total_reward for group in groups if group.greedy for _ in group.episodes], np.float32
    )
    expected, _ = verl(
        references.verl_advantages, "remax", rows["rewards"], rows["mask"], rows["groups"], reward_baselines=greedy
    )
    credits = [credit for group in ReMax().compute_advantages(groups) for credit in group]
    np.testing.assert_allclose(pad_rows([credit.advantages[0] for credit in credits]), expected * rows["mask"], **CLOSE)


def tokens_of(seed: int, spread: float = 0.4) -> dict[str, Array]:
    """Padded rows of random log-probabilities, with holes where tools wrote."""
    random, shape = np.random.default_rng(seed), (5, 9)
    mask = (random.random(shape) < 0.7).astype(np.float32)
    mask[:, 0] = 1
    logprobs = -random.exponential(size=shape).astype(np.float32)
    near = {name: logprobs + spread * random.normal(size=shape) for name in ("old", "sampled", "reference")}
    rows = {"logprobs": logprobs, "mask": mask, "advantages": random.normal(size=shape), **near}
    rows["entropies"] = random.random(shape)
    return {name: row.astype(np.float32) for name, row in rows.items()}


def as_tokens(rows: dict[str, Array], aggregation: Any, constant: int) -> TokenBatch:
    """The tokens that count, in a row."""
    mask = rows["mask"] > 0
    shares = aggregation_weights(mask.sum(1).tolist(), aggregation, constant)
    row = {name: torch.tensor(rows[name][mask]) for name in rows}
    sequence = np.nonzero(mask)[0]
    return TokenBatch(
        logprobs=row["logprobs"].requires_grad_(),
        old_logprobs=row["old"],
        sampler_logprobs=row["sampled"],
        advantages=row["advantages"],
        weights=torch.tensor(np.array(shares)[sequence], dtype=torch.float32),
        sequence_ids=torch.tensor(sequence),
        num_sequences=len(mask),
        reference_logprobs=row["reference"],
        entropies=row["entropies"],
    )


def assert_loss(
    loss: Loss, tokens: TokenBatch, rows: dict[str, Array], expected: float, gradient: Array
) -> dict[str, float]:
    value, measured = loss(tokens)
    (loss_gradient,) = torch.autograd.grad(value, tokens.logprobs)
    assert value.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(loss_gradient.numpy(), gradient[rows["mask"] > 0], **CLOSE)
    return combine_metrics([measured])


VERL_AGGREGATION = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
VERL_LOSS = {"clip": "vanilla", "cispo": "cispo", "plain": "gpg"}
LOSSES = [
    ("clip", "token", (0.2, 0.2)),
    ("clip", "token", (0.2, 0.28)),
    ("clip", "token", (0.2, 0.28, 1.5)),
    ("clip", "segment", (0.05, 0.1)),
    ("cispo", "token", (0.3, 0.5)),
    ("plain", "token", (0.2, 0.2)),
]


@pytest.mark.parametrize("aggregation", VERL_AGGREGATION)
@pytest.mark.parametrize(("surrogate", "ratio", "clip"), LOSSES)
def test_losses_equal_verl(verl: Ask, surrogate: Any, ratio: Any, clip: Any, aggregation: str) -> None:
    name = "gspo" if ratio == "segment" else VERL_LOSS[surrogate]
    for seed in range(3):
        rows = tokens_of(seed)
        expected, gradient, cut = verl(references.verl_loss, name, rows, clip, VERL_AGGREGATION[aggregation], 7, None)
        tokens = as_tokens(rows, aggregation, 7)
        measured = assert_loss(Loss(surrogate, clip, ratio), tokens, rows, expected, gradient)
        if surrogate != "plain":
            assert measured["clip_low"] + measured["clip_high"] == pytest.approx(cut)
            assert cut > 0  # or nothing of the clip was compared


@pytest.mark.parametrize(("estimator", "verl_name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_divergences_equal_verl(verl: Ask, estimator: Any, verl_name: str) -> None:
    rows = tokens_of(0)
    estimate = kl_divergence(torch.tensor(rows["logprobs"]), torch.tensor(rows["reference"]), estimator)
    expected = verl(references.verl_divergence, rows["logprobs"], rows["reference"], verl_name)
    np.testing.assert_allclose(estimate.numpy(), expected, **CLOSE)


def test_adaptive_kl_controller_equals_verl(verl: Ask) -> None:
    steps = [(0.3, 64), (0.001, 128), (0.11, 64), (0.0, 32)]
    controller = KLController(0.05, target=0.1, horizon=500)
    for measured, chains in steps:
        controller.update(measured, chains)
    assert controller.coef == pytest.approx(verl(references.verl_controller, 0.05, 0.1, 500, steps))


@pytest.mark.parametrize("cap", [1.15, 1.3])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_corrections_equal_verl(verl: Ask, level: str, mode: str, cap: float) -> None:
    rows = tokens_of(1, spread=0.1)
    weights, cut = correct(rows, f"{level}-{mode}", cap)
    threshold = cap if mode == "truncate" else f"{1 / cap}_{cap}"
    expected = verl(references.verl_correction, rows["old"] - rows["sampled"], rows["mask"], level, threshold)
    np.testing.assert_allclose(weights, expected[rows["mask"] > 0], **CLOSE)
    assert cut.any()
    assert not cut.all()


def test_geometric_mask_equals_verls_rejection(verl: Ask) -> None:
    """verl has no geometric weights, but rejects sequences by the geometric mean."""
    rows = tokens_of(1, spread=0.1)
    weights, cut = correct(rows, "geometric-mask", 1.03)
    bounds = f"{1 / 1.03}_1.03"
    kept = verl(references.verl_rejection, rows["old"] - rows["sampled"], rows["mask"], "seq_mean_k1", bounds)
    assert ((weights != 0) == (kept[rows["mask"] > 0] > 0)).all()
    assert cut.any()
    assert not cut.all()


def correct(rows: dict[str, Array], correction: Any, cap: float) -> tuple[Array, Array]:
    tokens = as_tokens(rows, "token", 1)
    weights, cut = correction_weights(
        tokens.old_logprobs,
        tokens.sampler_logprobs,
        tokens.sequence_ids,
        num_sequences=tokens.num_sequences,
        correction=correction,
        cap=cap,
    )
    return weights.numpy(), cut.numpy()


def test_corrected_losses_equal_verl(verl: Ask) -> None:
    rows = tokens_of(2)
    weights = verl(references.verl_correction, rows["old"] - rows["sampled"], rows["mask"], "sequence", 1.3)
    expected, gradient, _ = verl(references.verl_loss, "vanilla", rows, (0.2, 0.2), "token-mean", 1, weights)
    loss = Loss(correction="sequence-truncate", correction_cap=1.3)
    assert_loss(loss, as_tokens(rows, "token", 1), rows, expected, gradient)


TRL_LOSSES = [
    ("grpo", "token", "clip", "sequence"),
    ("bnpo", "token", "clip", "token"),
    ("dapo", "token", "clip", "token"),
    ("dr_grpo", "token", "clip", "constant"),
    ("grpo", "sequence", "clip", "sequence"),
    ("cispo", "token", "cispo", "token"),
]


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28, 1.5)])
@pytest.mark.parametrize(("kind", "level", "surrogate", "aggregation"), TRL_LOSSES)
def test_losses_equal_trl(trl: Ask, kind: str, level: str, surrogate: Any, aggregation: str, clip: Any) -> None:
    """With the divergence and a correction. TRL's CISPO clips from above alone, at a bound of the ratio itself.

    Its GSPO spreads a token's correction over the sequence, ours and verl's do not: one a sequence is the same.
    """
    rows = tokens_of(3)
    rows["advantages"][:] = rows["advantages"][:, :1]  # TRL's are one a sequence
    tokens = as_tokens(rows, aggregation, 11)
    theirs_clip = clip
    if surrogate == "cispo":
        clip, theirs_clip = (1.0, 0.5), (0.0, 1.5)
    if level == "sequence":
        clip = theirs_clip = clip[:2]
    how: Any = "sequence-truncate" if level == "sequence" else "token-truncate"
    correction = np.zeros_like(rows["mask"])
    correction[rows["mask"] > 0], _ = correct(rows, how, 1.2)
    trl_rows = rows | {"correction": correction}
    expected, gradient = trl(references.trl_loss, kind, level, trl_rows, theirs_clip, 0.04, 0.0, 11)
    ratio: Any = "segment" if level == "sequence" else "token"
    loss = Loss(surrogate, clip, ratio, kl_coef=0.04, correction=how, correction_cap=1.2)
    assert_loss(loss, tokens, rows, expected, gradient)


def test_entropy_bonus_equals_trl(trl: Ask) -> None:
    rows = tokens_of(4)
    expected, gradient = trl(references.trl_loss, "bnpo", "token", rows, (0.2, 0.2), 0.0, 0.05, 1)
    assert_loss(Loss(entropy_coef=0.05), as_tokens(rows, "token", 1), rows, expected, gradient)
