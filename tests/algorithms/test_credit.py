"""Each algorithm compared with slow plain Python, and properties that hold for all of them."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.algorithms import (
    ALGORITHMS,
    GDPO,
    GRPO,
    PPO,
    RLOO,
    DrGRPO,
    GiGPO,
    ReinforcePP,
    ReinforcePPBaseline,
    ReMax,
    build_algorithm,
)
from agentfly.algorithms.base import SEGMENT_DECAY, Algorithm, Episode, Group
from agentfly.algorithms.returns import whiten
from agentfly.errors import ConfigError, RecordError
from agentfly.trajectory import TrainingTreatment
from tests.algorithms.chains import advantages, episode

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
EVERY = [pytest.param(kind(), id=name) for name, kind in ALGORITHMS.items()]
RULES = ("broadcast", "last", "uniform", "geometric")
COMPARING = [GRPO(), DrGRPO(), RLOO(), ReinforcePPBaseline(), GiGPO(), GDPO()]

turns = st.lists(st.integers(0, 3), min_size=1, max_size=4)
reward = st.floats(-3, 3, allow_nan=False, width=32).map(lambda x: round(x, 3))


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    """A chain of a few turns, some without tokens, in one to three segments, with a critic's values and a penalty."""
    lengths = draw(turns)
    steps = draw(st.lists(st.integers(0, 1), min_size=len(lengths) - 1, max_size=len(lengths) - 1))
    earned = draw(st.one_of(reward, st.lists(reward, min_size=len(lengths), max_size=len(lengths))))
    numbers = {
        name: draw(st.lists(reward, min_size=sum(lengths), max_size=sum(lengths))) for name in ("values", "penalties")
    }
    segments = np.cumsum([0, *steps]).tolist()
    return episode(lengths, earned, segments=segments, rule=draw(st.sampled_from(RULES)), **numbers)


groups = st.lists(episodes(), min_size=1, max_size=4)


# ── slow references ──


def slow_rewards(chain: Episode) -> list[float]:
    """What each turn earned, its penalties paid, shared by the segment rule."""
    segment = slow_segments(chain)
    out = [float(r) / (1 + segment[k] if chain.segment_reward == "uniform" else 1) for k, r in enumerate(chain.rewards)]
    for number, piece in enumerate(chain.segments):
        for at in range(len(piece.mask)):
            if piece.mask[at] and chain.penalties is not None:
                out[piece.turns[at]] -= float(chain.penalties[number][at])
    return out


def slow_segments(chain: Episode) -> list[int]:
    """The segment of each turn, counting those with tokens."""
    used = [number for number, piece in enumerate(chain.segments) if piece.mask.any()]
    out, now = [], 0
    for turn in range(len(chain.rewards)):
        for rank, number in enumerate(used):
            if turn in chain.segments[number].turns[chain.segments[number].mask]:
                now = rank
        out.append(now)
    return out


def slow_return(chain: Episode, turn: int, gamma: float = 1.0) -> float:
    """What came at the turn or after, as much of it as the rule lets through."""
    rewards, segment = slow_rewards(chain), slow_segments(chain)
    through = {"broadcast": 1.0, "uniform": 1.0, "last": 0.0, "geometric": SEGMENT_DECAY}[chain.segment_reward]
    total = 0.0
    for later in range(turn, len(rewards)):
        total += rewards[later] * gamma ** (later - turn) * through ** (segment[later] - segment[turn])
    return total


def list_slow_returns(group: Sequence[Episode], index: int, turn: int) -> tuple[float, list[float]]:
    returns = [slow_return(chain, min(turn, len(chain.rewards) - 1)) for chain in group]
    return returns[index], returns


def slow_advantages(name: str, group: Sequence[Episode], index: int) -> list[float]:
    out = []
    for turn in group[index].turn_index.tolist():
        chain_return, returns = list_slow_returns(group, index, turn)
        if name == "dr_grpo":
            out.append(chain_return - mean(returns))
        elif name == "grpo":
            out.append((chain_return - mean(returns)) / ((stdev(returns) if len(returns) > 1 else 0) + 1e-6))
        elif name == "rloo":
            others = [value for at, value in enumerate(returns) if at != index]
            out.append(chain_return - mean(others) if others else 0.0)
    return out


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(group=groups)
@settings(max_examples=60, deadline=None)
def test_group_comparisons_by_hand(name: str, group: list[Episode]) -> None:
    (credits,) = advantages(build_algorithm(name), group)
    for index, got in enumerate(credits):
        expected = slow_advantages(name, group, index)
        if name != "grpo":
            np.testing.assert_allclose(got, expected, **CLOSE)
        elif len(expected):  # a variance of nothing but rounding is divided by 1e-6: compare where there is one
            spread = [np.ptp(list_slow_returns(group, index, t)[1]) for t in group[index].turn_index]
            sure = [at for at, wide in enumerate(spread) if wide > 1e-3]
            np.testing.assert_allclose(got[sure], np.array(expected)[sure], rtol=1e-5, atol=1e-5)


@given(chain=episodes(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.7, 0.0]))
@settings(max_examples=80, deadline=None)
def test_advantages_of_a_critic_by_hand(chain: Episode, gamma: float, lam: float) -> None:
    """Written as the sum it is: surprises of later tokens, each factor of the way multiplied."""
    rewards, values, factors = slow_tokens(chain, gamma)
    n = len(values)
    surprise = [rewards[t] + (factors[t] * values[t + 1] if t + 1 < n else 0) - values[t] for t in range(n)]
    expected = [sum(surprise[s] * np.prod([lam * f for f in factors[t:s]]) for s in range(t, n)) for t in range(n)]
    ((credit,),) = PPO(gamma, lam, whiten=False).compute_advantages([Group((chain,))])
    np.testing.assert_allclose(chain.gather_sampled_tokens(credit.advantages), expected, rtol=1e-4, atol=1e-5)
    assert credit.returns is not None
    np.testing.assert_allclose(
        chain.gather_sampled_tokens(credit.returns), np.add(expected, values), rtol=1e-4, atol=1e-5
    )


def slow_tokens(chain: Episode, gamma: float) -> tuple[list[float], list[float], list[float]]:
    """For each sampled token: what it earned, the value before it, and the factor on the way to the next one."""
    assert chain.values is not None
    assert chain.penalties is not None
    segment = slow_segments(chain)
    scale = [1 / (1 + s) if chain.segment_reward == "uniform" else 1.0 for s in segment]
    through = {"last": 0.0, "geometric": SEGMENT_DECAY}.get(chain.segment_reward, 1.0)
    tokens = [(n, at) for n, piece in enumerate(chain.segments) for at in range(len(piece.mask)) if piece.mask[at]]
    rewards, values, factors = [], [], []
    for index, (n, at) in enumerate(tokens):
        turn = chain.segments[n].turns[at]
        following = tokens[index + 1] if index + 1 < len(tokens) else None
        until = chain.segments[following[0]].turns[following[1]] if following else len(chain.rewards)
        earned = sum(chain.rewards[k] * scale[k] for k in range(turn, until))
        rewards.append(float(earned) - float(chain.penalties[n][at]))
        values.append(float(chain.values[n][at]))
        factors.append(gamma * (through if following and following[0] != n else 1.0))
    return rewards, values, factors


def test_reinforce_pp_by_hand() -> None:
    chains = [episode([2, 1], 1.0), episode([1], -2.0)]
    raw = [0.25, 0.5, 1.0, -2.0]
    expected = [(x - mean(raw)) / (stdev(raw) ** 2 + 1e-8) ** 0.5 for x in raw]
    (credits,) = advantages(ReinforcePP(gamma=0.5), chains)
    np.testing.assert_allclose(np.concatenate(credits), expected, **CLOSE)


def test_reinforce_pp_baseline_by_hand() -> None:
    first, second = [episode([2], 1.0), episode([1], 0.0)], [episode([1], 3.0), episode([3], 1.0)]
    raw = [0.5, 0.5, -0.5, 1.0, -1.0, -1.0, -1.0]
    expected = [(x - mean(raw)) / (stdev(raw) ** 2 + 1e-8) ** 0.5 for x in raw]
    credits = advantages(ReinforcePPBaseline(), first, second)
    np.testing.assert_allclose(np.concatenate([row for group in credits for row in group]), expected, **CLOSE)


def test_gdpo_by_hand() -> None:
    """Rewards of other scales count by their weights; one that abstained compares the other chains alone."""
    weights = {"large": 1.0, "small": 0.5}
    group = [
        episode([2, 1], components={"large": 300.0, "small": 0.0}, weights=weights),
        episode([1], components={"large": 100.0, "small": 0.02}, weights=weights),
        episode([3], components={"large": 200.0}, weights=weights),
        episode([1], components={"large": 5.0, "small": 9.0}, treatment=TrainingTreatment.ZERO),
    ]
    other = [
        episode([1], components={"large": 1.0, "small": 1.0}),
        episode([1], components={"large": 1.0, "small": 0.0}),
    ]
    large = [300.0, 100.0, 200.0, 0.0]
    sums = [(value - mean(large)) / stdev(large) for value in large]
    small = {0: 0.0, 1: 0.02, 3: 0.0}
    for index, value in small.items():
        sums[index] += 0.5 * (value - mean(small.values())) / (stdev(small.values()) + 1e-6)
    sums += [2**-0.5, -(2**-0.5)]
    tokens = np.repeat(sums, [3, 1, 3, 1, 1, 1])
    expected = (tokens - tokens.mean()) / tokens.std(ddof=1)
    by_group = advantages(GDPO(), group, other)
    np.testing.assert_allclose(np.concatenate([row for rows in by_group for row in rows]), expected, rtol=1e-4)


def test_gdpo_tells_chains_of_equal_sums_apart() -> None:
    values = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}]
    weights = {"a": 2.0, "b": 1.0}
    group = [episode([1], 1.0, components=components, weights=weights) for components in values]
    assert not np.concatenate(advantages(GRPO(), group)[0]).any()
    first, second, third, _ = np.concatenate(advantages(GDPO(), group)[0])
    assert first == third > 0 > second


def test_remax_compares_with_the_greedy_chain_at_the_same_turn() -> None:
    greedy = episode([1, 1], [0.5, 2.0])
    ((credit,),) = advantages(ReMax(), [episode([1, 2, 1], [1.0, 1.0, 4.0])], greedy=greedy)
    np.testing.assert_allclose(credit, [6 - 2.5, 5 - 2, 5 - 2, 4 - 2], **CLOSE)


def test_observation_tokens_are_not_time_steps() -> None:
    """The discount counts the model's own tokens: an answer of a thousand tokens costs no more than one of two."""
    short, long = (episode([1, 1], 1.0, observations={0: range(n)}, values=[0, 0]) for n in (2, 1000))
    for algorithm in (PPO(gamma=0.5, whiten=False), PPO(gamma=0.5, lam=0.5, whiten=False)):
        ((a, b),) = advantages(algorithm, [short, long])
        assert a.tolist() == b.tolist() == [0.5 * (algorithm.lam if algorithm.lam < 1 else 1), 1.0]


def test_value_is_of_the_state_before_the_token() -> None:
    """With λ = 0 a token is worth its reward and the next value less its own; the last has no next."""
    ((credit,),) = advantages(PPO(lam=0.0, whiten=False), [episode([2, 1], 10.0, values=[1, 2, 4])])
    assert credit.tolist() == [2 - 1, 4 - 2, 10 - 4]


@pytest.mark.parametrize("algorithm", [PPO(whiten=False), DrGRPO()], ids=["ppo", "dr_grpo"])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [("broadcast", [6, 6, 6]), ("last", [0, 0, 6]), ("uniform", [2, 2, 2]), ("geometric", [4.86, 5.4, 6])],
)
def test_reward_of_a_chain_with_several_segments(rule: Any, expected: list[float], algorithm: Algorithm) -> None:
    """Doubled by a chain that earned nothing, which takes half of it away where groups are compared."""
    earning = episode([2, 2, 2], 6.0, segments=[0, 1, 2], rule=rule, values=[0.0] * 6)
    idle = episode([2, 2, 2], 0.0, segments=[0, 1, 2], rule=rule, values=[0.0] * 6)
    ((credit, _),) = advantages(algorithm, [earning, idle])
    scale = 2 if isinstance(algorithm, DrGRPO) else 1
    np.testing.assert_allclose(scale * credit, np.repeat(expected, 2), **CLOSE)


# ── what holds for all ──


def credit_of(algorithm: Algorithm, group: Sequence[Episode]) -> list[Any]:
    return advantages(algorithm, group, greedy=episode([1, 2], 0.5))[0]


@pytest.mark.parametrize("algorithm", EVERY)
@given(group=groups, data=st.data())
@settings(max_examples=25, deadline=None)
def test_order_does_not_matter(algorithm: Algorithm, group: list[Episode], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(group))))
    straight, shuffled = credit_of(algorithm, group), credit_of(algorithm, [group[at] for at in order])
    for new, old in enumerate(order):
        np.testing.assert_allclose(shuffled[new], straight[old], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("algorithm", COMPARING, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("constant", [1.0, -8.0])
def test_constant_added_to_all_rewards_changes_nothing(algorithm: Algorithm, constant: float) -> None:
    """GiGPO discounts, so for it the chains have the same length."""
    lengths = [[2, 1], [1, 1], [2, 2]] if isinstance(algorithm, GiGPO) else [[2], [1, 1, 1], [2, 2]]
    plain = credit_of(algorithm, [episode(length, r) for length, r in zip(lengths, (1.0, 0.0, 0.5), strict=True)])
    lifted = credit_of(
        algorithm, [episode(length, r + constant) for length, r in zip(lengths, (1.0, 0.0, 0.5), strict=True)]
    )
    for a, b in zip(plain, lifted, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


@pytest.mark.parametrize("algorithm", COMPARING, ids=lambda a: type(a).__name__)
@given(chains=st.lists(turns, min_size=1, max_size=5), earned=reward)
@settings(max_examples=25, deadline=None)
def test_equal_rewards_give_zero_advantages(algorithm: Algorithm, chains: list[list[int]], earned: float) -> None:
    if isinstance(algorithm, GiGPO):  # a longer way to the same reward is worse to it
        chains = [chains[0]] * len(chains)
    assert not np.concatenate(credit_of(algorithm, [episode(lengths, earned) for lengths in chains])).any()


@pytest.mark.parametrize("algorithm", EVERY)
def test_unusual_chains(algorithm: Algorithm) -> None:
    """No tokens at all, an empty turn, a segment in which nothing was sampled, a group of one, no group."""
    empty, hollow = episode([], 1.0, values=[]), episode([0, 0], 1.0, values=[])
    gap = episode([1, 0, 2], [1.0, 5.0, 2.0], segments=[0, 1, 2], values=[0.0] * 3)
    greedy = episode([1], 0.0)
    assert algorithm.compute_advantages([]) == []
    for group in ([empty], [hollow], [gap], [empty, gap], [gap, hollow, gap]):
        for chain, credit in zip(group, advantages(algorithm, group, greedy=greedy)[0], strict=True):
            assert len(credit) == len(chain.turn_index)
            assert np.isfinite(credit).all()


def test_reward_of_a_turn_without_tokens_goes_to_the_turns_before_it() -> None:
    gap = episode([1, 0, 2], [1.0, 5.0, 2.0], values=[0.0] * 3)
    ((credit,),) = advantages(PPO(whiten=False), [gap])
    assert credit.tolist() == [8, 2, 2]


@pytest.mark.parametrize("algorithm", EVERY)
def test_advantages_do_not_depend_on_observation_tokens(algorithm: Algorithm) -> None:
    """Other tokens, values and penalties where the model did not sample change nothing. Anchors are told apart."""

    def group(fill: float) -> list[Episode]:
        chains = [
            episode([2, 1], r, values=[1, 2, 3], penalties=[0.1, 0.2, 0.3], observations={0: s}) for r, s in SHOWN
        ]
        for chain in chains:
            for numbers in (chain.values, chain.penalties):
                assert numbers is not None
                numbers[0][~chain.segments[0].mask] = fill
        return chains

    for a, b in zip(credit_of(algorithm, group(0.0)), credit_of(algorithm, group(np.nan)), strict=True):
        assert a.tolist() == b.tolist()


SHOWN = [(1.0, [4, 5]), (0.0, [4, 6]), (3.0, [4, 5])]


def test_missing_input_is_named_in_the_error() -> None:
    chain = episode([1], 1.0)
    with pytest.raises(RecordError, match=r"PPO needs a critic's values, and chain 0/0"):
        PPO().compute_advantages([Group((chain,))])
    with pytest.raises(RecordError, match="ReMax compares with a greedy chain"):
        ReMax().compute_advantages([Group((chain,))])


# ── names ──


def test_chains_of_one_reward_have_nothing_to_normalize() -> None:
    with pytest.raises(RecordError, match="was scored by one reward, and GDPO compares the values of several"):
        advantages(GDPO(), [episode([1], 1.0, components={}), episode([1], 0.0, components={})])
    with pytest.raises(ConfigError, match="GDPO needs the values of several rewards"):
        GDPO().advantages([[1.0, 0.0]])


def test_needs() -> None:
    assert {name for name, kind in ALGORITHMS.items() if kind.needs_groups} == {
        "grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "gigpo", "gdpo",
    }  # fmt: skip
    assert {name for name, kind in ALGORITHMS.items() if kind.needs_values} == {"ppo"}
    assert {name for name, kind in ALGORITHMS.items() if kind.needs_greedy} == {"remax"}
    assert {name for name, kind in ALGORITHMS.items() if kind.needs_components} == {"gdpo"}


def test_an_algorithm_by_name_with_settings() -> None:
    assert build_algorithm("ppo", lam=0.95) == PPO(lam=0.95)
    assert build_algorithm(PPO(gamma=0.9), lam=0.5) == PPO(gamma=0.9, lam=0.5)
    assert build_algorithm("reinforce_pp_baseline") == ReinforcePPBaseline()


def test_plain_dataclass_that_extends_an_algorithm_keeps_defaults_and_bounds() -> None:
    @dataclass(frozen=True)
    class ClippedPPO(PPO):
        limit: float = 5.0

    assert (ClippedPPO().gamma, ClippedPPO(lam=0.5).lam, ClippedPPO(limit=2).limit) == (1.0, 0.5, 2)
    with pytest.raises(ConfigError, match=r"PPO: lam must be at most 1, not 1\.5"):
        ClippedPPO(lam=1.5)


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        ("gropo", {}, r"no algorithm is named 'gropo'; there are ppo, .*\. Did you mean grpo"),
        ("REINFORCE++", {}, r"Did you mean reinforce_pp\?"),
        ("Dr. GRPO", {}, r"Did you mean dr_grpo\?"),
        ("ppo", {"lambda_": 1}, r"PPO has no setting 'lambda_'; it has gamma, lam, whiten"),
        ("grpo", {"std": 1}, "GRPO has no setting 'std'; it has no settings"),
        (PPO, {}, r"an algorithm is a name or an object such as PPO\(lam=0.95\)"),
        ("ppo", {"lam": 1.5}, "PPO: lam must be at most 1, not 1.5"),
        ("gigpo", {"gamma": float("nan")}, "GiGPO: gamma must be a finite number, not nan"),
    ],
)
def test_wrong_name_or_setting_is_rejected(algorithm: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(algorithm, **settings)


def test_naming_an_algorithm_imports_no_torch() -> None:
    code = "import sys, agentfly.algorithms; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ppo_whitens_over_the_batch_unless_told_not_to() -> None:
    chains = [episode([2], reward, values=[0.0, 0.0]) for reward in (0.0, 4.0, 1.0)]
    whitened, plain = (
        np.concatenate([row for rows in advantages(PPO(whiten=whiten), chains) for row in rows])
        for whiten in (True, False)
    )
    assert plain.tolist() == [0, 0, 4, 4, 1, 1]
    assert (whitened.mean(), whitened.var(ddof=1)) == pytest.approx((0, 1), abs=1e-5)


def test_two_values_are_whitened() -> None:
    assert np.concatenate(whiten([np.array([1.0]), np.array([3.0])])) == pytest.approx(
        [-(0.5**0.5), 0.5**0.5], abs=1e-5
    )
    assert whiten([np.array([5.0])])[0].tolist() == [0.0]
    assert whiten([]) == []
