"""What a chain earned from a turn, or a token, on; and how that compares with the other chains of its task.

A turn is credited with what came at or after it. What came before it, the turn cannot have caused, so leaving that out
changes no expectation. Between segments, credit passes as the chain's `segment_reward` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agentfly.algorithm import SEGMENT_DECAY, Credit, Episode, Group
from agentfly.segment import Ids

Numbers = npt.NDArray[np.float64]
EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""
WHITENING_EPSILON = 1e-8
"""Added to a variance before dividing by its root."""
_PASSED = {"broadcast": 1.0, "last": 0.0, "uniform": 1.0, "geometric": SEGMENT_DECAY}
"""How much credit a segment passes to the one before it."""


def accumulate(rewards: Numbers, factors: Numbers) -> Numbers:
    """From each place on, the sum of the rewards, where a step from one place to the next multiplies by its factor."""
    out, running = [], 0.0
    for reward, factor in zip(rewards[::-1].tolist(), factors[::-1].tolist(), strict=True):
        running = reward + factor * running
        out.append(running)
    return np.array(out[::-1], np.float64)


def turn_returns(episode: Episode, gamma: float = 1.0) -> Numbers:
    """What the chain earned from each turn on; `gamma` discounts by the turn."""
    rewards = _shared(episode, episode.rewards.astype(np.float64))
    if episode.penalties is not None:
        np.subtract.at(rewards, episode.turns, episode.sampled(episode.penalties))
    return accumulate(rewards, _factors(episode, _segments_of_turns(episode), gamma))


def token_rewards(episode: Episode) -> Numbers:
    """What each sampled token earned: a turn's reward falls on its last token, or on the last one before it."""
    out = np.zeros(len(episode.turns))
    last = _last_tokens(episode)
    np.add.at(out, last[last >= 0], _shared(episode, episode.rewards.astype(np.float64))[last >= 0])
    if episode.penalties is not None:
        out -= episode.sampled(episode.penalties)
    return out


def token_factors(episode: Episode, gamma: float) -> Numbers:
    """How much of what comes after it each sampled token is credited with; tokens of others take no time."""
    return _factors(episode, episode.segments, gamma)


def _factors(episode: Episode, segments: Ids, gamma: float) -> Numbers:
    ends = np.diff(segments, append=segments[-1:]) > 0
    return np.where(ends, gamma * _PASSED[episode.segment_reward], gamma)


def _segments_of_turns(episode: Episode) -> Ids:
    """The segment each turn was sampled in; a turn without tokens counts to the one before it, or to the first."""
    return np.append(episode.segments, np.int32(0))[_last_tokens(episode)]


def _last_tokens(episode: Episode) -> npt.NDArray[np.intp]:
    """For each turn, the last token sampled in it or before it, counted in a row; -1 where there is none."""
    return np.searchsorted(episode.turns, np.arange(len(episode.rewards)), side="right") - 1


def _shared(episode: Episode, rewards: Numbers) -> Numbers:
    return rewards / (1 + _segments_of_turns(episode)) if episode.segment_reward == "uniform" else rewards


def compared(group: Group, gamma: float = 1.0, *, std: bool = False) -> list[Numbers]:
    """By how much each chain's return from each turn on differs from the mean of its group from the same turn on.

    A chain that ended sooner stands in the mean with its last turn's, so chains whose only reward is at their end are
    compared by that reward in all turns. No number of the mean but the chain's own depends on what it does from the
    turn on: taking the mean away makes an unbiased gradient (n−1)/n as large, and changes it in no other way. (The mean
    of rewards turn by turn, summed over the turns a chain happened to take, does not have this property.)
    """
    returns = [turn_returns(episode, gamma) for episode in group.episodes]
    if not returns:
        return []
    longest = max(map(len, returns))
    table = np.stack([np.pad(each, (0, longest - len(each)), mode="edge") for each in returns])
    difference = centred(table, std=std)
    return [row[: len(own)] for row, own in zip(difference, returns, strict=True)]


def centred(table: Numbers, *, std: bool = False) -> Numbers:
    """The numbers less their mean, down the first axis; where asked, over their standard deviation.

    Where all are equal the result is exactly 0, which a rounded mean alone would not give.
    """
    apart: Numbers = table - table[0]
    apart -= apart.mean(axis=0)
    if std and len(table) > 1:
        apart /= table.std(axis=0, ddof=1) + EPSILON
    return apart


def turn_credit(episode: Episode, of_turns: Numbers) -> Credit:
    """A number a turn as a credit: on each token that the model sampled in it."""
    return Credit(episode.spread(of_turns[episode.turns]))


def whitened(rows: Sequence[Numbers]) -> list[Numbers]:
    """Numbers of all tokens of a batch less their mean and over their standard deviation."""
    together = np.concatenate(rows) if rows else np.zeros(0)
    if len(together) < 2:  # no variance to speak of
        return [np.zeros_like(row) for row in rows]
    scaled = centred(together) / np.sqrt(together.var(ddof=1) + WHITENING_EPSILON)
    return np.split(scaled, np.cumsum([len(row) for row in rows])[:-1])
