"""Chains as algorithms receive them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentfly.algorithms import GRPO, PPO, RLOO, ReMax
from agentfly.algorithms.base import Episode
from agentfly.errors import ConfigError, RecordError
from agentfly.segment import Segment
from agentfly.trajectory import TrainingTreatment
from agentfly.types import Completion, FinishReason, Message
from tests.algorithms.chains import episode, trajectory


def test_chain_is_converted_to_arrays() -> None:
    """P + A0 + E0 in the first segment, H + A1 + E1 in the second."""
    chain = Episode.from_trajectory(trajectory([2, 1], [0.5, 1.0], segments=[0, 1]))
    assert [piece.mask.astype(int).tolist() for piece in chain.segments] == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0]]
    assert [piece.turns.tolist() for piece in chain.segments] == [[0] * 5 + [1] * 2, [1] * 4 + [2] * 2]
    assert chain.segments[0].logprobs.tolist() == [0, 0, 0, -0.5, -0.5, 0, 0]
    assert chain.segments[0].weight_versions.tolist() == [-1, -1, -1, 0, 0, -1, -1]
    assert chain.rewards.tolist() == [0.5, 1.0]
    assert chain.total_reward == 1.5
    assert chain.turn_index.tolist() == [0, 0, 1]
    assert chain.segment_index.tolist() == [0, 0, 1]


def test_token_values_are_placed_on_sampled_tokens_and_0_elsewhere() -> None:
    chain = episode([2, 0, 1], 1.0, segments=[0, 1, 2])
    rows = chain.scatter_sampled_tokens(np.array([1.0, 2.0, 3.0]))
    assert [row.tolist() for row in rows] == [[0, 0, 0, 1, 2, 0, 0], [0] * 5, [0, 0, 0, 3, 0, 0]]
    assert chain.gather_sampled_tokens(rows).tolist() == [1, 2, 3]
    assert chain.segment_index.tolist() == [0, 0, 1]


@pytest.mark.parametrize("reward", [3.0, [0.0, 0.0, 3.0]])
def test_total_reward_counts_at_the_last_turn(reward: Any) -> None:
    assert Episode.from_trajectory(trajectory([1, 1, 1], reward)).rewards.tolist() == [0, 0, 3]


def test_zeroed_chain_has_reward_zero() -> None:
    failed = trajectory([1, 1], [1.0, 2.0], treatment=TrainingTreatment.ZERO)
    assert Episode.from_trajectory(failed).rewards.tolist() == [0, 0]
    assert Episode.from_trajectory(replace(failed, score=None)).total_reward == 0


def test_a_chain_without_turns_or_segments() -> None:
    bare = replace(trajectory([], 1.0), segments=())
    chain = Episode.from_trajectory(bare)
    assert (chain.segments, chain.rewards.tolist(), chain.scatter_sampled_tokens(np.zeros(0))) == ((), [1.0], ())
    assert len(chain.turn_index) == len(chain.segment_index) == 0


@pytest.mark.parametrize("treatment", [TrainingTreatment.MASK, TrainingTreatment.DROP_GROUP])
def test_chain_that_failed_without_the_models_fault_is_not_trained(treatment: TrainingTreatment) -> None:
    with pytest.raises(RecordError, match=f"chain 0/0 carries no loss: its failure policy is '{treatment.value}'"):
        Episode.from_trajectory(trajectory([1], 1.0, treatment=treatment))


def test_chain_without_a_reward_is_rejected() -> None:
    with pytest.raises(RecordError, match="chain 2/1 has no reward"):
        Episode.from_trajectory(trajectory([1], 1.0, score=None, group=2, chain=1))


def test_chain_without_token_ids_is_rejected() -> None:
    segment = Segment()
    segment.append_completion(
        Completion((), (), (), FinishReason.STOP, message=Message("assistant", "hi")), Message("assistant"), turn=0
    )
    with pytest.raises(RecordError, match="returned no token ids"):
        Episode.from_trajectory(replace(trajectory([1], 1.0), segments=(segment.seal(),)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rewards": np.array([np.nan, 0], np.float32)},
            r"chain 0/0 has the rewards \[nan, 0.0\]: a reward must be finite",
        ),
        ({"rewards": np.array([0, np.inf], np.float32)}, "a reward must be finite"),
        ({"rewards": np.zeros(1, np.float32)}, "turns without a reward"),
        ({"values": ()}, "one of `values` for each token of each segment"),
        ({"penalties": (np.zeros(2, np.float32),)}, "one of `penalties` for each token of each segment"),
        ({"values": (np.full(9, np.nan, np.float32),)}, "`values` that are not finite"),
    ],
)
def test_impossible_numbers_are_rejected(changes: dict[str, Any], message: str) -> None:
    chain = Episode.from_trajectory(trajectory([1, 1], 1.0))
    with pytest.raises(RecordError, match=message):
        replace(chain, **changes)


def test_critic_values_of_other_tokens_are_ignored() -> None:
    chain = Episode.from_trajectory(trajectory([1, 1], 1.0))
    values = np.where(chain.segments[0].mask, 1.0, np.nan).astype(np.float32)
    assert replace(chain, values=(values,)).values is not None


def test_unknown_segment_reward_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match="no segment reward is named 'first'; there are broadcast, last, uniform, geo"
    ):
        Episode.from_trajectory(trajectory([1], 1.0), "first")  # type: ignore[arg-type]


def test_advantages_of_bare_rewards() -> None:
    assert RLOO().advantages([[1, 0], [1, 1]]) == [[1.0, -1.0], [0.0, 0.0]]
    assert GRPO().advantages([[3, 1]]) == [pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)]
    with pytest.raises(ConfigError, match="PPO needs a critic's values beside rewards"):
        PPO().advantages([[1, 0]])
    with pytest.raises(ConfigError, match="ReMax needs the reward of a greedy chain"):
        ReMax().advantages([[1, 0]])
