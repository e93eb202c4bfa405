"""Which policy gradients are unbiased, by enumerating every group that a small decision tree can give.

The model decides when to stop, so a baseline that counts the turns a chain happened to take is biased: the natural
turn-by-turn one (verl issue 7244) is shown to be.

    start ─ stop                       earns 2
          ├ left ── earns 1 ─ stop     earns 0.5
          │                 └ on ── earns 0.25 ─ good  earns 4
          │                                    └ bad   earns −1
          └ right ─ earns −0.5 ─ stop  earns 1
                                └ on ── earns 0 ─ good 0.5
Rewards are sums of powers of two, so single precision keeps them and their means exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest

from agentfly.algorithms import GRPO, PPO, RLOO, DrGRPO, GiGPO, ReinforcePP, ReinforcePPBaseline, ReMax
from agentfly.algorithms.base import Algorithm, Episode
from tests.algorithms.chains import Array, advantages, episode

CHOICES = {"start": 3, "left": 2, "left on": 2, "right": 2, "right on": 1}
LOGITS = {
    "start": [0.3, -0.2, 0.5],
    "left": [0.4, -0.7],
    "left on": [0.1, 0.6],
    "right": [-0.3, 0.2],
    "right on": [0.0],
}
OFFSETS = dict(zip(CHOICES, np.cumsum([0, *CHOICES.values()]).tolist(), strict=False))
PARAMETERS = sum(CHOICES.values())
CHAINS: list[tuple[list[tuple[str, int]], list[float]]] = [
    ([("start", 0)], [2.0]),
    ([("start", 1), ("left", 0)], [1.0, 0.5]),
    ([("start", 1), ("left", 1), ("left on", 0)], [1.0, 0.25, 4.0]),
    ([("start", 1), ("left", 1), ("left on", 1)], [1.0, 0.25, -1.0]),
    ([("start", 2), ("right", 0)], [-0.5, 1.0]),
    ([("start", 2), ("right", 1), ("right on", 0)], [-0.5, 0.0, 0.5]),
]
CRITIC = {"start": 0.5, "left": -1.0, "left on": 2.0, "right": 0.25, "right on": 1.5}
"""Some values, and wrong ones: what a critic says before an action must not matter to the mean."""
Estimator = Callable[[Sequence[int]], list[list[float]]]
"""From the chains of a group, by number, to the advantage of each turn of each."""


def policy(state: str) -> Array:
    odds = np.exp(LOGITS[state])
    return odds / odds.sum()


PROBABILITIES = [prod(float(policy(state)[action]) for state, action in path) for path, _ in CHAINS]


def score(state: str, action: int) -> Array:
    """The gradient of the log-probability of an action with respect to all logits."""
    out = np.zeros(PARAMETERS)
    at = slice(OFFSETS[state], OFFSETS[state] + CHOICES[state])
    out[at] = -policy(state)
    out[at][action] += 1
    return out


def gradient(objective: Callable[[int], float]) -> Array:
    """The true gradient of the mean of something about the whole chain."""
    scores = [sum(score(*step) for step in path) for path, _ in CHAINS]
    return sum(p * objective(n) * scores[n] for n, p in enumerate(PROBABILITIES))


TRUE = gradient(lambda n: sum(CHAINS[n][1]))


def mean_gradient(estimator: Estimator, size: int = 2) -> Array:
    """The mean of the estimated gradient over all groups of `size` chains."""
    total = np.zeros(PARAMETERS)
    for group in product(range(len(CHAINS)), repeat=size):
        probability = prod(PROBABILITIES[n] for n in group)
        for number, of_turns in zip(group, estimator(group), strict=True):
            for step, advantage in zip(CHAINS[number][0], of_turns, strict=True):
                total += probability / size * advantage * score(*step)
    return total


@cache
def chain(number: int, rule: Any = "broadcast", outcome: bool = False, late: bool = False) -> Episode:
    """One of the chains, two tokens a turn and a segment for each turn.

    `outcome`: all rewards at its end. `late`: with the values of the states after the tokens.
    """
    path, rewards = CHAINS[number]
    built = episode([2] * len(path), sum(rewards) if outcome else rewards, segments=range(len(path)), rule=rule)
    values = np.repeat([CRITIC[state] for state, _ in path], 2)
    values[1::2] += [action + 1.0 for _, action in path]  # inside a turn a critic may see what was said
    return replace(built, values=built.scatter_sampled_tokens(np.append(values[1:], 0.0) if late else values))


def estimator_of(algorithm: Algorithm, scale: float = 1.0, **of_chain: Any) -> Estimator:
    def estimate(group: Sequence[int]) -> list[list[float]]:
        (rows,) = advantages(algorithm, [chain(n, **of_chain) for n in group], greedy=chain(2, **of_chain))
        return [(scale * row[::2]).tolist() for row in rows]

    return estimate


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("outcome", [False, True], ids=["each turn", "outcome"])
def test_leave_one_out_baseline_is_unbiased(size: int, outcome: bool) -> None:
    np.testing.assert_allclose(mean_gradient(estimator_of(RLOO(), outcome=outcome), size), TRUE, atol=1e-10)


def test_group_mean_baseline_is_the_same_but_smaller() -> None:
    np.testing.assert_allclose(mean_gradient(estimator_of(DrGRPO(), scale=2.0)), TRUE, atol=1e-10)


def test_a_greedy_chain_is_an_unbiased_baseline() -> None:
    np.testing.assert_allclose(mean_gradient(estimator_of(ReMax()), 1), TRUE, atol=1e-10)


def test_wrong_critic_does_not_bias_the_gradient() -> None:
    """With λ = 1, and the value of the state before the token: the one after it has seen what was chosen."""
    np.testing.assert_allclose(mean_gradient(estimator_of(PPO(whiten=False)), 1), TRUE, atol=1e-10)
    assert np.abs(mean_gradient(estimator_of(PPO(whiten=False), late=True), 1) - TRUE).max() > 1e-2
    assert np.abs(mean_gradient(estimator_of(PPO(lam=0.5, whiten=False)), 1) - TRUE).max() > 1e-2


FAMILIES: list[tuple[float, tuple[int, ...]]] = []
"""Every family of a chain that is forked once after its first turn, with its probability."""
for _start in range(3):
    _ends = [n for n, (path, _) in enumerate(CHAINS) if path[0] == ("start", _start)]
    _first = float(policy("start")[_start])
    _pairs = product(_ends, repeat=1 if _start == 0 else 2)
    FAMILIES += [(_first * prod(PROBABILITIES[n] / _first for n in pair), pair) for pair in _pairs]


def expected_of_trees(algorithm: Algorithm, *, marked: bool = True) -> Array:
    """The mean of the estimated gradient over all groups of two families. marked: branches are known as such."""
    total = np.zeros(PARAMETERS)
    for (p, one), (q, other) in product(FAMILIES, repeat=2):
        group, steps = [], []
        for root, family in enumerate((one, other)):
            for at, number in enumerate(family):
                built = chain(number)
                fields = {"chain": root} if at == 0 else {"chain": 2 + root, "branch_of": root, "branch_turn": 1}
                group.append(replace(built, trajectory=replace(built.trajectory, **(fields if marked else {}))))
                steps.append(CHAINS[number][0])
        (rows,) = advantages(algorithm, group)
        for path, row in zip(steps, rows, strict=True):
            for step, advantage in zip(path, row[::2], strict=True):
                total += p * q / 2 * advantage * score(*step)
    return total


def test_branches_give_an_unbiased_gradient_and_their_prefix_counts_once() -> None:
    assert sum(probability for probability, _ in FAMILIES) == pytest.approx(1)
    np.testing.assert_allclose(expected_of_trees(RLOO()), TRUE, atol=1e-10)
    np.testing.assert_allclose(2 * expected_of_trees(DrGRPO()), TRUE, atol=1e-10)
    # Taken for independent chains, the branches are a biased estimate, in its direction too.
    naive = expected_of_trees(RLOO(), marked=False)
    best = (naive @ TRUE) / (naive @ naive)
    assert np.abs(best * naive - TRUE).max() > 1e-2


def natural(group: Sequence[int]) -> list[list[float]]:
    """Each turn's reward less the others' mean for that turn, summed over the turns that the chain took."""
    rewards = [CHAINS[n][1] for n in group]
    out = []
    for index, chain_rewards in enumerate(rewards):
        others = [row for at, row in enumerate(rewards) if at != index]
        turn = [r - np.mean([o[k] if k < len(o) else 0.0 for o in others]) for k, r in enumerate(chain_rewards)]
        out.append(np.cumsum(turn[::-1])[::-1].tolist())
    return out


def test_per_turn_baseline_over_existing_turns_is_biased() -> None:
    assert np.abs(mean_gradient(natural) - TRUE).max() > 1e-2


@pytest.mark.parametrize("algorithm", [GRPO(), GiGPO(), ReinforcePP(), ReinforcePPBaseline()], ids=lambda a: str(a))
def test_std_normalization_is_not_a_multiple_of_the_gradient(algorithm: Algorithm) -> None:
    """A standard deviation of the group or the batch depends on what the chain did: biased by design."""
    gradient = mean_gradient(estimator_of(algorithm))
    best = (gradient @ TRUE) / (gradient @ gradient)
    assert np.abs(best * gradient - TRUE).max() > 1e-2


@pytest.mark.parametrize("outcome", [False, True], ids=["each turn", "outcome"])
@pytest.mark.parametrize("rule", ["broadcast", "last", "uniform", "geometric"])
def test_baseline_changes_the_gradient_of_no_segment_rule(rule: str, outcome: bool) -> None:
    """Whatever a rule credits, comparing with the others from the same turn on leaves its mean as it is."""
    exact = 1e-10 if rule in ("broadcast", "last") else 1e-6  # ninths and thirds are rounded to single precision
    compared = mean_gradient(estimator_of(RLOO(), rule=rule, outcome=outcome))
    np.testing.assert_allclose(compared, mean_gradient(credit_by_rule(rule, outcome), 1), atol=exact)


def credit_by_rule(rule: str, outcome: bool) -> Estimator:
    """What the rule credits, without a baseline. Each turn is a segment."""

    def estimate(group: Sequence[int]) -> list[list[float]]:
        rewards = list(CHAINS[group[0]][1])
        if outcome:
            rewards = [0.0] * (len(rewards) - 1) + [sum(rewards)]
        share = {
            "broadcast": lambda k, later: 1.0,
            "last": lambda k, later: float(k == later),
            "uniform": lambda k, later: 1 / (later + 1),
            "geometric": lambda k, later: 0.9 ** (later - k),
        }[rule]
        turns = range(len(rewards))
        return [[sum(share(k, later) * rewards[later] for later in turns if later >= k) for k in turns]]

    return estimate


def test_uniform_segment_reward_is_the_gradient_of_reward_per_segment() -> None:
    by_segment = gradient(lambda n: sum(CHAINS[n][1]) / len(CHAINS[n][0]))
    np.testing.assert_allclose(mean_gradient(estimator_of(RLOO(), rule="uniform", outcome=True)), by_segment, atol=1e-6)

    def shared_after_comparing(group: Sequence[int]) -> list[list[float]]:
        """The order that is biased: how many segments share the baseline is the chain's own doing."""
        totals, turns = [sum(CHAINS[n][1]) for n in group], [len(CHAINS[n][0]) for n in group]
        return [[(totals[at] - totals[1 - at]) / turns[at]] * turns[at] for at in range(2)]

    assert np.abs(mean_gradient(shared_after_comparing) - by_segment).max() > 1e-2


@pytest.mark.parametrize("rule", ["last", "uniform", "geometric"])
def test_only_broadcast_is_the_gradient_of_the_reward(rule: str) -> None:
    assert np.abs(mean_gradient(estimator_of(RLOO(), rule=rule)) - TRUE).max() > 1e-2
