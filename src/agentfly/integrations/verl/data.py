"""verl's dataset for us: positions in the stream of tasks. Workers read the tasks themselves, from the recipe."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

NUM_POSITIONS = 2**31 - 1
"""More than any run takes: the stream of tasks has no end."""


class TaskPositions(Dataset[dict[str, Any]]):
    """Row i is position i. verl's data loader reads it in order, and saves how far it has read."""

    def __init__(self, data_files: Any = None, **_: Any) -> None:
        # verl's validation is not used: an evaluation asks the workers directly.
        self._size = NUM_POSITIONS if data_files == "train" else 1

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": "", "position": index, "index": index}
