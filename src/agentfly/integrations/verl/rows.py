"""Trajectories ↔ rows of verl: one row per segment that contains sampled tokens; and the advantages of rows.

verl splits a sequence into prompt and response. With `P` the prompt of a segment, `A` what the model sampled and `E`
what an environment answered, the response begins at the first sampled token and ends with the last:

    tokens          P0 P1 A0 A1 E0 A2 A3 E1
    prompts         P0 P1
    responses             A0 A1 E0 A2 A3
    response_mask          1  1  0  1  1

Mask and log-probabilities are those that were recorded; nothing is decoded or encoded again. Advantages are computed by
the code of a local run, `compute_samples`, with the scores that verl has computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from agentfly.algorithms.base import Group, SegmentArrays
from agentfly.algorithms.kl import kl_divergence
from agentfly.algorithms.loss import correction_weights
from agentfly.errors import ConfigError
from agentfly.segment import Floats, Ids, Mask
from agentfly.training.advantages import compute_samples
from agentfly.training.batch import Sample
from agentfly.training.config import TrainConfig
from agentfly.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Row:
    """One segment as verl trains it."""

    chain: int = 0
    """Index of the chain in its group: the session of verl."""
    segment: int = 0
    """Index of the segment in its chain."""
    index: int = 0
    """Index among the rows of its chain."""
    tokens: Ids
    """[prompt + response]"""
    start: int
    """Length of the prompt."""
    mask: Mask
    """[response] True where the model sampled."""
    logprobs: Floats
    """[response] As recorded; 0 where the model did not sample."""
    versions: tuple[int, int]
    """The oldest and the newest weights that sampled a token of it."""
    reward: float = 0.0

    @property
    def response(self) -> slice:
        """The tokens of the response in its segment."""
        return slice(self.start, len(self.tokens))

    def key(self, uid: str) -> str:
        """Its key in the TransferQueue, under the id of its group."""
        return f"{uid}_{self.chain}_{self.index}"

    def fields(self, uid: str) -> dict[str, Any]:
        """The fields that verl's trainer and workers read."""
        tokens = torch.from_numpy(self.tokens.astype(np.int64))
        mask = torch.from_numpy(self.mask.astype(np.int64))
        rewards = torch.zeros(len(mask), dtype=torch.float32)
        rewards[-1] = self.reward
        return {
            "uid": uid,
            "prompts": tokens[: self.start],
            "responses": tokens[self.start :],
            "response_mask": mask,
            "loss_mask": mask,
            "input_ids": tokens,
            "position_ids": torch.arange(len(tokens)),
            "rollout_log_probs": torch.from_numpy(self.logprobs.copy()),
            "rm_scores": rewards,
            "multi_modal_inputs": {},
        }

    def tag(self, step: int) -> dict[str, Any]:
        """What verl reads without the tokens: lengths and weight versions."""
        size = len(self.tokens)
        return {
            "status": "success",
            "prompt_len": self.start,
            "response_len": size - self.start,
            "seq_len": size,
            "global_steps": step,
            "min_global_steps": self.versions[0],
            "max_global_steps": self.versions[1],
            # Without a sampled token, it keeps the place of a group that is not trained: verl's own padding.
            "is_padding": not self.mask.any(),
        }


def build_rows(trajectory: Trajectory) -> list[Row]:
    """The rows of a chain, in the order of its segments; none where the model sampled nothing."""
    rows: list[Row] = []
    for number, segment in enumerate(trajectory.segments):
        if segment.images:
            raise ConfigError(f"chain {trajectory.id} shows images, which cannot be trained on verl yet")
        sampled = np.flatnonzero(segment.mask)
        if not len(sampled):
            continue
        start, end = int(sampled[0]), int(sampled[-1]) + 1
        versions = segment.weight_versions[sampled]
        rows.append(
            Row(
                chain=trajectory.chain,
                segment=number,
                index=len(rows),
                tokens=segment.tokens[:end],
                start=start,
                mask=segment.mask[start:end],
                logprobs=segment.logprobs[start:end],
                versions=(int(versions.min()), int(versions.max())),
                reward=trajectory.reward or 0.0,
            )
        )
    return rows


def build_placeholder(version: int) -> Row:
    """A row without sampled tokens, for a group of which no chain is trained: verl expects rows of every group."""
    empty = np.zeros(1, np.float32)
    return Row(tokens=np.zeros(2, np.int32), start=1, mask=empty > 0, logprobs=empty, versions=(version, version))


def nest(values: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    """Arrays of different lengths as one nested tensor [rows, response]."""
    rows = [torch.from_numpy(np.ascontiguousarray(array, np.float32)) for array in values]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class TaskPositions(Dataset[dict[str, Any]]):
    """verl's dataset: row i is position i in the stream of tasks, which the workers read from the recipe.

    verl's data loader reads it in order, and saves how far it has read.
    """

    def __init__(self, data_files: Any = None, **_: Any) -> None:
        # The stream of tasks has no end. verl's validation is not used: an evaluation asks the workers directly.
        self._size = 2**31 - 1 if data_files == "train" else 1

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": "", "position": index, "index": index}


@dataclass(frozen=True)
class RowAdvantages:
    """What the update of a step reads; the lists have one [response] array per row."""

    samples: list[Sample]
    """The same as in a local run."""
    learner_logprobs: dict[str, Floats]
    """[sampled] Log-probabilities before the update, by the name of the sample."""
    advantages: list[Floats]
    returns: list[Floats]
    """Regression targets of the critic; 0 without one."""


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
    indices = {key: index for index, key in enumerate(keys)}
    names: list[str] = []  # of all segments, in the order in which `compute_samples` asks for their scores
    rows: dict[str, tuple[Row, int]] = {}  # the row of a segment with sampled tokens, and its index in `keys`
    for group in groups:
        for chain in (episode.trajectory for episode in group.episodes):
            names += [f"{chain.id}#{number}" for number in range(len(chain.segments))]
            for row in build_rows(chain):
                rows[f"{chain.id}#{row.segment}"] = row, indices[row.key(uids[chain.group])]

    def read_scores(field: str, segments: Sequence[SegmentArrays], temperature: float = 1.0) -> list[Floats]:
        """What verl computed, as one [tokens] array per segment."""
        out = [np.zeros(len(segment.tokens), np.float32) for segment in segments]
        for name, values in zip(names, out, strict=True):
            if name in rows:
                row, index = rows[name]
                values[row.response] = np.where(row.mask, fields[field][index], 0.0)
        return out

    learner: Any = SimpleNamespace(
        score=partial(read_scores, "old_log_probs"),
        score_reference=partial(read_scores, "ref_log_prob"),
        values=partial(read_scores, "values"),
    )
    samples = compute_samples(groups, learner, config, kl_coef)
    masks = fields["response_mask"]
    advantages = [np.zeros(len(mask), np.float32) for mask in masks]
    returns = [np.zeros(len(mask), np.float32) for mask in masks]
    learner_logprobs = {}
    for sample in samples:
        row, index = rows[sample.name]
        advantages[index] = sample.advantages[row.response]
        if sample.returns is not None:
            returns[index] = sample.returns[row.response]
        learner_logprobs[sample.name] = fields["old_log_probs"][index][row.mask]
    return RowAdvantages(samples, learner_logprobs, advantages, returns)


def measure_mismatch(
    fields: Mapping[str, Sequence[Floats]], config: TrainConfig
) -> tuple[dict[str, float], list[Floats] | None]:
    """Metrics of the sampled tokens before the update, from the fields of `compute_row_advantages`.

    Also returns the factors of the importance-sampling correction on the loss, one [response] array per row; None
    without one.
    """
    masks = fields["response_mask"]
    sampled = np.concatenate(masks) > 0  # [tokens of all rows]
    flat = {name: torch.from_numpy(np.concatenate(values)[sampled]) for name, values in fields.items()}
    old, sampler = flat["old_log_probs"], flat["rollout_log_probs"]
    metrics = {
        "policy/tokens": float(len(old) * config.epochs),
        "policy/mismatch_kl": float(kl_divergence(sampler, old, "k3").mean()),
        "policy/mismatch_max": float((old - sampler).abs().max()),
    }
    if "entropy" in flat:  # verl's own mean is weighted as the loss is
        metrics["policy/entropy"] = float(flat["entropy"].mean())
    if "ref_log_prob" in flat:
        metrics["policy/kl"] = float(kl_divergence(old, flat["ref_log_prob"], config.kl.estimator).mean())
    if config.loss.correction is None:
        return metrics, None
    lengths = [len(mask) for mask in masks]
    factors, corrected = correction_weights(
        old,
        sampler,
        torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)[sampled]),
        num_sequences=len(lengths),
        correction=config.loss.correction,  # type: ignore[arg-type]
        cap=config.loss.correction_cap,
    )
    metrics["policy/correction_weight"] = float(factors.mean())
    metrics["policy/corrected"] = float(corrected.float().mean())
    whole = np.ones(len(sampled), np.float32)
    whole[sampled] = factors.numpy()
    return metrics, np.split(whole, np.cumsum(lengths)[:-1])
