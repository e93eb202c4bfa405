"""Returns per turn and per token, and their comparison within a group.

A turn is credited with the rewards at or after it: earlier rewards do not depend on it, so leaving them out changes no
expectation. Between segments, credit passes as the chain's `segment_reward` declares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agentfly.algorithms.base import SEGMENT_DECAY, Array, Episode, Group

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""
WHITENING_EPSILON = 1e-8
"""Added to a variance before dividing by its root."""
_SEGMENT_DISCOUNT = {"broadcast": 1.0, "last": 0.0, "uniform": 1.0, "geometric": SEGMENT_DECAY}
"""Factor on credit that passes from a segment to the one before it."""


def discounted_sum(rewards: Array, discounts: Array) -> Array:
    """G[t] = rewards[t] + discounts[t] · G[t + 1], with G = 0 after the end."""
    out = []
    running = 0.0
    for reward, discount in zip(rewards[::-1].tolist(), discounts[::-1].tolist(), strict=True):
        running = reward + discount * running
        out.append(running)
    return np.array(out[::-1], np.float64)


def turn_returns(episode: Episode, gamma: float = 1.0) -> Array:
    """[turns] Return from each turn on, KL penalties included; `gamma` discounts per turn."""
    rewards, segments, _ = _turn_rewards(episode)
    if episode.penalties is not None:
        np.subtract.at(rewards, episode.turn_index, episode.gather_sampled_tokens(episode.penalties))
    return discounted_sum(rewards, _discounts(episode, segments, gamma))


def token_rewards(episode: Episode) -> Array:
    """[sampled] Reward of each sampled token: a turn's reward is on its last token, or on the last one before it."""
    rewards, _, last = _turn_rewards(episode)
    out = np.zeros(len(episode.turn_index))
    np.add.at(out, last[last >= 0], rewards[last >= 0])
    if episode.penalties is not None:
        out -= episode.gather_sampled_tokens(episode.penalties)
    return out


def token_discounts(episode: Episode, gamma: float) -> Array:
    """[sampled] Discount from each sampled token to the next one; tokens that were not sampled take no time."""
    return _discounts(episode, episode.segment_index, gamma)


def _discounts(episode: Episode, segments: npt.NDArray[np.int32], gamma: float) -> Array:
    """`gamma` for each step, times the segment discount for the last step of a segment. segments: of each step."""
    ends = np.diff(segments, append=segments[-1:]) > 0
    return np.where(ends, gamma * _SEGMENT_DISCOUNT[episode.segment_reward], gamma)


def _turn_rewards(episode: Episode) -> tuple[Array, npt.NDArray[np.int32], npt.NDArray[np.intp]]:
    """[turns] each: rewards, which segments share if `uniform`; segments; last sampled tokens in or before the turns.

    A turn without tokens belongs to the segment before it, or to the first; without tokens before it, its last is -1.
    """
    last = np.searchsorted(episode.turn_index, np.arange(len(episode.rewards)), side="right") - 1
    segments = np.append(episode.segment_index, np.int32(0))[last]
    rewards = episode.rewards.astype(np.float64)
    return rewards / (1 + segments) if episode.segment_reward == "uniform" else rewards, segments, last


def group_relative_returns(
    group: Group, gamma: float = 1.0, *, std: bool = False, leave_one_out: bool = False
) -> list[Array]:
    """Per episode, [turns]: G[i, t] − mean_i G[i, t], divided by std_i G[i, t] + ε where `std` is set.

    leave_one_out: the mean is that of the other chains.

    A chain that ended early enters the mean with its last turn's return, so chains whose only reward is at the end are
    compared by that reward in all turns. Of the mean, only the chain's own entry depends on its actions from the turn
    on: subtracting it scales an unbiased gradient by (n−1)/n and changes nothing else. (A mean of rewards per turn,
    summed over the turns a chain took, does not have this property.)

    Chains that were forked from one another (`Trajectory.branch_of`) are one sample of the turns before the fork, worth
    the mean of their returns, which is compared between such families; after the fork they are compared with each
    other. Each of n branches has the weight 1/n: the sum over a family is then an unbiased estimate of what a single
    chain estimates, and the tokens of the prefix, which all of them have, count once.
    """
    returns = [turn_returns(episode, gamma) for episode in group.episodes]
    if not returns:
        return []
    longest = max(map(len, returns))
    table = np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in returns])  # [chains, turns]

    def relative(rows: Array) -> Array:
        scale = len(rows) / max(len(rows) - 1, 1) if leave_one_out else 1.0
        return scale * center(rows, std=std)  # x − mean of the others = n/(n−1) · (x − mean of all)

    chains = [episode.trajectory for episode in group.episodes]
    advantages = relative(table)
    if any(chain.branch_of is not None for chain in chains):
        families: dict[int, list[int]] = {}  # by the number of the chain that was forked
        for index, chain in enumerate(chains):
            families.setdefault(chain.chain if chain.branch_of is None else chain.branch_of, []).append(index)
        between = relative(np.stack([table[family].mean(0) for family in families.values()]))  # [families, turns]
        for family, shared in zip(families.values(), between, strict=True):
            fork = max(chains[index].branch_turn for index in family) if len(family) > 1 else longest
            within = relative(table[family])  # [branches, turns]
            advantages[family] = np.where(np.arange(longest) < fork, shared, within) / len(family)
    return [row[: len(chain_returns)] for row, chain_returns in zip(advantages, returns, strict=True)]


def center(table: Array, *, std: bool = False) -> Array:
    """Subtract the mean over the first axis; with `std`, divide by the standard deviation (ddof=1) plus ε.

    Equal rows give exactly 0, which subtracting a rounded mean would not: hence the difference to row 0 first.
    """
    difference: Array = table - table[0]
    difference -= difference.mean(axis=0)
    if std and len(table) > 1:
        difference /= table.std(axis=0, ddof=1) + STD_EPSILON
    return difference


def whiten(rows: Sequence[Array]) -> list[Array]:
    """Normalize all values of the rows together to mean 0 and variance 1; fewer than two values give 0."""
    values = np.concatenate(rows) if rows else np.zeros(0)
    if len(values) < 2:
        return [np.zeros_like(row) for row in rows]
    scaled = center(values) / np.sqrt(values.var(ddof=1) + WHITENING_EPSILON)
    return np.split(scaled, np.cumsum([len(row) for row in rows])[:-1])


def whiten_episodes(groups: Sequence[Group], rows: Sequence[Array]) -> list[list[Episode]]:
    """The episodes of the groups with one [sampled] array of advantages each, whitened over the batch."""
    scaled = iter(whiten(rows))
    return [[episode.with_advantages(next(scaled)) for episode in group.episodes] for group in groups]
