"""The chains of a step: their seeds follow from the step, and their rewards reach the task sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentfly import reward
from agentfly.backends.scripted import ScriptedTurn
from agentfly.training.async_rollout import AsyncCollector
from agentfly.training.collector import StepCollector
from agentfly.training.config import TrainConfig
from agentfly.training.task_sampler import DifficultySampler, TaskSampler
from agentfly.types import Task
from tests.algorithms.chains import trajectory
from tests.fakes import byte_agent

TASKS = [Task.of({"question": f"q{number}", "number": number}, str(number)) for number in range(4)]


@reward
def reward_odd_numbers(prediction: str, number: int) -> float:
    return float(number % 2)


def pick_number(turn: ScriptedTurn) -> str:
    return str(turn.random.randrange(10**9))


def build_config(**fields: Any) -> TrainConfig:
    return TrainConfig(
        **{"model": "tiny", "tasks_per_step": 4, "num_chains": 2, "max_turns": 1, "zero_variance": "keep", **fields}
    )


async def sample_predictions(steps: list[int], **fields: Any) -> list[tuple[str, ...]]:
    """The replies of each step, of a collector that samples the same tasks in every one."""
    config = build_config(**fields)
    batches = []
    for step in steps:
        collector = StepCollector(
            byte_agent(pick_number, reward=reward_odd_numbers), TaskSampler(TASKS, 0), config, lambda _: None
        )
        batches.append(tuple(chain.prediction for chain in (await collector.collect(step)).trajectories))
    return batches


async def test_sampling_seeds_depend_on_the_step_and_the_seed_of_the_run() -> None:
    first, second, again = await sample_predictions([1, 2, 1])
    (other_seed,) = await sample_predictions([1], seed=1)
    assert first == again
    assert len({*first, *second, *other_seed}) == 3 * 8  # no reply is sampled twice


async def test_groups_of_later_rounds_have_numbers_and_seeds_of_their_own() -> None:
    """Two of four groups never have variance: others are sampled in further rounds, and take their place."""

    @reward
    def vary_odd(prediction: str, number: int) -> float:
        return float(prediction) * (number % 2)

    config = build_config(zero_variance="resample", tasks_per_step=4)
    agent = byte_agent(pick_number, reward=vary_odd)
    batch = await StepCollector(agent, TaskSampler(TASKS, 0), config, lambda _: None).collect(1)
    assert len(batch.trajectories) > 8
    assert len({chain.id for chain in batch.trajectories}) == len(batch.trajectories)
    assert len({chain.prediction for chain in batch.trajectories}) == len(batch.trajectories)
    assert len({group[0].trajectory.group for group in batch.selection.groups}) == 4


async def test_rewards_of_a_step_reach_the_task_sampler() -> None:
    config = build_config(zero_variance="avoid", tasks_per_step=4)
    sampler = DifficultySampler(TASKS, seed=0)
    collector = StepCollector(byte_agent("ok", reward=reward_odd_numbers), sampler, config, lambda _: None)
    await collector.collect(1)
    # Successes and failures of each task, with one of each as the prior: 2 chains, all with the same reward.
    assert sampler.state_dict()["counts"] == {str(n): [3.0, 1.0] if n % 2 else [1.0, 3.0] for n in range(4)}


@pytest.mark.parametrize(("version", "kept"), [(1, True), (2, False)])
def test_resumed_rollout_discards_groups_of_later_weights(tmp_path: Path, version: int, kept: bool) -> None:
    """A checkpoint of step 1 without the journal: weights of version 2 are trained once more, to other values."""
    config = build_config(async_training={"max_staleness": 1}, loss={"correction": "token-truncate"})
    agent = byte_agent("ok", reward=reward_odd_numbers)
    sampler = TaskSampler(TASKS, 0, position=2)
    collector = AsyncCollector(agent, sampler, config, lambda _: None, tmp_path / "rollout.jsonl")
    chains = [trajectory([3], group=0, chain=number).to_json() for number in range(2)]
    for chain in chains:
        for segment in chain["segments"]:
            for span in segment["spans"]:
                if "weight_version" in span:
                    span["weight_version"] = version
    collector.restore(1, {"groups": [{"position": 0, "attempt": 0, "chains": chains}]})
    (group,) = collector.state_dict()["groups"]
    assert (group["attempt"], len(group["chains"])) == ((0, 2) if kept else (1, 0))


async def test_another_attempt_at_a_group_samples_other_chains(tmp_path: Path) -> None:
    config = build_config(
        tasks_per_step=1, steps=2, async_training={"max_staleness": 1}, loss={"correction": "token-truncate"}
    )
    predictions = set()
    for attempt in (0, 1):
        agent = byte_agent(pick_number, reward=reward_odd_numbers)
        sampler = TaskSampler(TASKS, 0, position=1)
        collector = AsyncCollector(agent, sampler, config, lambda _: None, tmp_path / f"{attempt}.jsonl")
        collector.restore(1, {"groups": [{"position": 0, "attempt": attempt, "chains": []}]})
        predictions |= {chain.prediction for chain in (await collector.collect(2)).trajectories}
        await collector.close()
    assert len(predictions) == 2 * config.num_chains
