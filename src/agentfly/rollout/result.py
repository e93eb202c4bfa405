"""What a run leaves: its trajectories in order, and figures about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentfly.runs.metrics import chain_metrics, groups
from agentfly.trajectory import Trajectory


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The trajectories of a run, in the order of tasks and chains."""

    trajectories: tuple[Trajectory, ...]

    def __repr__(self) -> str:
        return f"<RunResult of {len(self)} chains>"

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, index: int) -> Trajectory:
        return self.trajectories[index]

    @property
    def rewards(self) -> list[float | None]:
        """One number a chain; None where there was no reward or none could be had."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def groups(self) -> list[list[Trajectory]]:
        """The chains of each task together."""
        return groups(self.trajectories)

    @property
    def metrics(self) -> dict[str, float]:
        """What the run was like: rewards, ends, failures, calls and rates."""
        return chain_metrics(self.trajectories)
