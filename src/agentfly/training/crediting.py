"""From groups of chains to samples: what the learner says of each token, and what the algorithm makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentfly.algorithm import Credit, Episode, Group, Needs
from agentfly.algorithms.divergence import penalty
from agentfly.segment import Floats
from agentfly.training.batch import Sample
from agentfly.training.config import TrainConfig
from agentfly.training.learner import Learner


@dataclass(frozen=True, slots=True)
class _View:
    """What the learner says of one piece; None where nobody asked."""

    old: Floats | None
    reference: Floats | None
    value: Floats | None


def credited(groups: Sequence[Group], learner: Learner, config: TrainConfig, kl: float) -> list[Sample]:
    """A sample for each piece in which the model said something; `kl` is the price of straying at this step."""
    views = iter(_views(groups, learner, config))
    seen = [[_seen(episode, views) for episode in group.episodes] for group in groups]
    judged = [_judged_group(group, of, config, kl) for group, of in zip(groups, seen, strict=True)]
    credits = config.algorithm.credit(judged)
    return [
        sample
        for group, of, earned in zip(judged, seen, credits, strict=True)
        for episode, said, credit in zip(group.episodes, of, earned, strict=True)
        for sample in _samples(episode, said, credit, config)
    ]


def _views(groups: Sequence[Group], learner: Learner, config: TrainConfig) -> list[_View]:
    """All pieces in one go each, and only what somebody will ask for."""
    pieces = [piece for group in groups for episode in group.episodes for piece in episode.pieces]
    nothing = [None] * len(pieces)
    temperature = config.sampling.temperature
    old = learner.score(pieces, temperature) if config.kl and config.kl_in == "reward" else nothing
    reference = learner.reference(pieces, temperature) if config.kl else nothing
    values = learner.values(pieces) if Needs.VALUES in config.algorithm.needs else nothing
    return [_View(*each) for each in zip(old, reference, values, strict=True)]


def _seen(episode: Episode, views: Iterator[_View]) -> list[_View]:
    return [next(views) for _ in episode.pieces]


def _judged_group(group: Group, seen: Sequence[Sequence[_View]], config: TrainConfig, kl: float) -> Group:
    pairs = zip(group.episodes, seen, strict=True)
    return replace(group, episodes=tuple(_judged(episode, views, config, kl) for episode, views in pairs))


def _judged(episode: Episode, views: Sequence[_View], config: TrainConfig, kl: float) -> Episode:
    """The episode with values and, where straying costs reward, with its price."""
    values = tuple(view.value for view in views if view.value is not None) or None
    if not kl or config.kl_in != "reward":
        return replace(episode, values=values)
    charged = tuple(
        penalty(view.old, view.reference, config.kl_estimator, kl)
        for view in views
        if view.old is not None and view.reference is not None
    )
    return replace(episode, values=values, penalties=charged)


def _samples(episode: Episode, views: Sequence[_View], credit: Credit, config: TrainConfig) -> Iterator[Sample]:
    returns = credit.returns or (None,) * len(views)
    rows = zip(episode.pieces, views, credit.advantages, returns, strict=True)
    for number, (piece, view, worth, goal) in enumerate(rows):
        if piece.mask.any():
            yield Sample(
                piece, worth, config.sampling.temperature,
                returns=goal, reference=view.reference, old=view.old,
                name=f"{episode.trajectory.id}#{number}",
            )  # fmt: skip
