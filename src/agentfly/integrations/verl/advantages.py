"""Advantages of verl's rows, by the code of a local run: `compute_samples`, with scores that verl has computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from agentfly.algorithms.base import Group, SegmentArrays
from agentfly.algorithms.kl import kl_divergence
from agentfly.algorithms.loss import correction_weights
from agentfly.integrations.verl.rows import Row, build_rows
from agentfly.segment import Floats
from agentfly.training.advantages import compute_samples
from agentfly.training.batch import Sample
from agentfly.training.config import TrainConfig


@dataclass(frozen=True)
class RecordedScores:
    """The learner of `compute_samples`: log-probabilities and values that verl computed, in the order of segments."""

    old: Sequence[Floats]
    reference: Sequence[Floats]
    critic: Sequence[Floats]

    def score(self, segments: Sequence[SegmentArrays], temperature: float) -> Sequence[Floats]:
        return self.old

    def score_reference(self, segments: Sequence[SegmentArrays], temperature: float) -> Sequence[Floats]:
        return self.reference

    def values(self, segments: Sequence[SegmentArrays]) -> Sequence[Floats]:
        return self.critic


@dataclass(frozen=True)
class RowAdvantages:
    """What the update of a step reads; the lists have one [response] array per row."""

    samples: list[Sample]
    """The same as in a local run, with the learner's log-probabilities."""
    advantages: list[Floats]
    returns: list[Floats]
    """Regression targets of the critic; 0 without one."""
    correction: list[Floats] | None
    """Factors of the importance-sampling correction on the loss; None without one."""
    metrics: dict[str, float]


def compute_row_advantages(
    groups: Sequence[Group],
    uids: Sequence[str],
    keys: Sequence[str],
    fields: Mapping[str, Sequence[Floats]],
    *,
    config: TrainConfig,
    kl_coef: float,
) -> RowAdvantages:
    """The advantages of the rows `keys`, 0 on tokens the model did not sample and on padding rows.

    uids: verl's ids of the groups, by group number. fields: response_mask, rollout_log_probs, old_log_probs and, where
    the configuration needs them, ref_log_prob and values; one [response] array per row.
    """
    places = {key: place for place, key in enumerate(keys)}
    # The rows of all segments, in the order in which `compute_samples` asks for their scores.
    segments: list[SegmentArrays] = []
    rows: list[tuple[Row, int] | None] = []
    names: list[str] = []
    for group in groups:
        for episode in group.episodes:
            built = {row.segment: row for row in build_rows(episode.trajectory)}
            for number, segment in enumerate(episode.segments):
                row = built.get(number)
                uid = uids[episode.trajectory.group]
                rows.append(None if row is None else (row, places[row.key(uid)]))
                segments.append(segment)
                names.append(f"{episode.trajectory.id}#{number}")

    def gather(name: str) -> list[Floats]:
        """A field of the rows as one [tokens] array per segment."""
        out = [np.zeros(len(segment.tokens), np.float32) for segment in segments]
        for index, found in enumerate(rows):
            if found is not None and name in fields:
                row, place = found
                out[index] = row.scatter(fields[name][place], len(out[index]))
        return out

    scores = RecordedScores(gather("old_log_probs"), gather("ref_log_prob"), gather("values"))
    old_logprobs = dict(zip(names, scores.old, strict=True))
    samples = [
        replace(sample, old_logprobs=old_logprobs[sample.name])
        for sample in compute_samples(groups, scores, config, kl_coef)  # type: ignore[arg-type]
    ]
    by_name = {sample.name: sample for sample in samples}
    masks = fields["response_mask"]
    lengths = [len(mask) for mask in masks]
    advantages = [np.zeros(length, np.float32) for length in lengths]
    returns = [np.zeros(length, np.float32) for length in lengths]
    for name, found in zip(names, rows, strict=True):
        sample = by_name.get(name)
        if found is not None and sample is not None:
            row, place = found
            advantages[place] = row.slice(sample.advantages)
            if sample.returns is not None:
                returns[place] = row.slice(sample.returns)

    # Figures and the correction are over the sampled tokens of all rows: [sampled].
    sampled = np.concatenate(masks) > 0
    flat = {name: torch.from_numpy(np.concatenate(values)[sampled]) for name, values in fields.items()}
    old, sampler = flat["old_log_probs"], flat["rollout_log_probs"]
    metrics = {
        "policy/tokens": float(len(old)),
        "policy/mismatch_kl": float(kl_divergence(sampler, old, "k3").mean()),
        "policy/mismatch_max": float((old - sampler).abs().max()),
    }
    if "ref_log_prob" in flat:
        metrics["policy/kl"] = float(kl_divergence(old, flat["ref_log_prob"], config.kl.estimator).mean())
    correction = None
    if config.loss.correction is not None:
        factors, corrected = correction_weights(
            old,
            sampler,
            torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)[sampled]),
            num_sequences=len(lengths),
            correction=config.loss.correction,  # type: ignore[arg-type]
            cap=config.loss.correction_cap,
        )
        whole = np.ones(len(sampled), np.float32)
        whole[sampled] = factors.numpy()
        correction = np.split(whole, np.cumsum(lengths)[:-1])
        metrics |= {
            "policy/correction_weight": float(factors.mean()),
            "policy/corrected": float(corrected.float().mean()),
        }
    return RowAdvantages(samples, advantages, returns, correction, metrics)
