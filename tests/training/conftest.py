"""Short runs: the recipe of the vowels with a small model, and reward curves that are not drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@pytest.fixture
def vowels_model(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the recipe of the vowels a small model, on one thread."""
    import torch

    monkeypatch.setenv("VOWELS_MODEL", str(small_model))
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def empty_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the reward curve empty: drawing it takes half of a short run. The tests of reports draw it."""

    def draw(*_: Any) -> Figure:
        from matplotlib.figure import Figure

        return Figure(figsize=(1, 1))

    monkeypatch.setattr("agentfly.runs.report.draw_curve", draw)
