"""Trajectories ↔ rows of verl: one row per segment that contains sampled tokens.

verl splits a sequence into prompt and response. With `P` the prompt of a segment, `A` what the model sampled and `E`
what an environment answered, the response begins at the first sampled token and ends with the last:

    tokens          P0 P1 A0 A1 E0 A2 A3 E1
    prompts         P0 P1
    responses             A0 A1 E0 A2 A3
    response_mask          1  1  0  1  1

Mask and log-probabilities are those that were recorded; nothing is decoded or encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from agentfly.errors import ConfigError
from agentfly.segment import Floats, Ids, Mask
from agentfly.trajectory import Trajectory


@dataclass(frozen=True)
class Row:
    """One segment as verl trains it."""

    chain: int
    """Index of the chain in its group: the session of verl."""
    segment: int
    """Index of the segment in its chain."""
    index: int
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
    num_turns: int
    reward: float

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
            "num_turns": self.num_turns,
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

    def slice(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[tokens of the segment] → [response]."""
        return values[self.start : len(self.tokens)]

    def scatter(self, values: npt.NDArray[Any], length: int) -> Floats:
        """[response] → [tokens of the segment], 0 where the model did not sample."""
        out = np.zeros(length, np.float32)
        out[self.start : len(self.tokens)] = np.where(self.mask, values, 0.0)
        return out


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


def build_rows(trajectory: Trajectory) -> list[Row]:
    """The rows of a chain, in the order of its segments; none where the model sampled nothing."""
    rows: list[Row] = []
    reward = 0.0 if trajectory.reward is None else trajectory.reward
    for number, segment in enumerate(trajectory.segments):
        if segment.images:
            raise ConfigError(f"chain {trajectory.id} shows images, which cannot be trained on verl yet")
        mask = segment.mask
        sampled = np.flatnonzero(mask)
        if not len(sampled):
            continue
        start, end = int(sampled[0]), int(sampled[-1]) + 1
        versions = segment.weight_versions[mask]
        rows.append(
            Row(
                chain=trajectory.chain,
                segment=number,
                index=len(rows),
                tokens=segment.tokens[:end],
                start=start,
                mask=mask[start:end],
                logprobs=segment.logprobs[start:end],
                versions=(int(versions.min()), int(versions.max())),
                num_turns=len(trajectory.turns),
                reward=reward,
            )
        )
    return rows


def build_placeholder(version: int) -> Row:
    """A row without sampled tokens, for a group of which no chain is trained: verl expects rows of every group."""
    return Row(
        chain=0,
        segment=0,
        index=0,
        tokens=np.zeros(2, np.int32),
        start=1,
        mask=np.zeros(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        versions=(version, version),
        num_turns=0,
        reward=0.0,
    )


def nest(values: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    """Arrays of different lengths as one nested tensor [rows, response]."""
    rows = [torch.from_numpy(np.ascontiguousarray(each, np.float32)) for each in values]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
