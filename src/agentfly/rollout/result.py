"""What a run leaves: its trajectories in order, and figures about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from agentfly.outcome import CallStatus
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
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        return list(groups.values())

    @property
    def metrics(self) -> dict[str, float]:
        """What the run was like: ends, failures, calls and rates."""
        calls = Counter(call.status for trajectory in self for call in trajectory.calls)
        rewards = [reward for reward in self.rewards if reward is not None]
        chains, made = max(len(self), 1), max(calls.total(), 1)
        out = {
            "chains": float(len(self)),
            "turns": sum(len(t.turns) for t in self) / chains,
            "sampled_tokens": sum(t.sampled_tokens for t in self) / chains,
            "segments": sum(len(t.segments) for t in self) / chains,
            "calls": calls.total() / chains,
            "retries": float(sum(t.attempts - 1 for t in self)),
            "hallucination_rate": calls[CallStatus.UNKNOWN] / made,
            "invalid_call_rate": calls[CallStatus.INVALID] / made,
            "tool_error_rate": calls[CallStatus.ERROR] / made,
        }
        if rewards:
            out["reward"] = sum(rewards) / len(rewards)
        out.update({f"stop/{stop.value}": n for stop, n in Counter(t.stop for t in self).items()})
        kinds = Counter(failure.kind for trajectory in self for failure in trajectory.failures)
        out.update({f"failure/{kind.value}": n for kind, n in kinds.items()})
        return out
