"""Samples, and their split into batches."""

import numpy as np
import pytest

from agentfly.algorithms.base import SegmentArrays
from agentfly.errors import RecordError
from agentfly.training.batch import Sample, split_micro_batches, split_mini_batches
from tests.training.pieces import piece, sample


def build_segment(tokens: list[int], mask: list[int]) -> SegmentArrays:
    ids, zeros = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
    return SegmentArrays(ids, np.array(mask, bool), zeros, ids * 0, ids * 0)


def test_logits_are_taken_before_each_sampled_token_and_trailing_tokens_are_dropped() -> None:
    chain = build_segment([10, 11, 12, 20, 21, 30, 31, 22, 23, 32], [0, 0, 0, 1, 1, 0, 0, 1, 1, 0])
    got = [chain, build_segment([5, 6], [0, 1])]
    assert [arrays.input_ids.tolist() for arrays in got] == [[10, 11, 12, 20, 21, 30, 31, 22], [5]]
    assert [arrays.positions.tolist() for arrays in got] == [[2, 3, 6, 7], [0]]
    assert [arrays.num_sampled_tokens for arrays in got] == [4, 1]
    assert chain.num_input_tokens == 8


def test_a_first_token_cannot_have_been_sampled() -> None:
    with pytest.raises(RecordError, match="nothing before it"):
        _ = build_segment([1, 2], [1, 1]).positions


@pytest.mark.parametrize("field", ["advantages", "returns", "reference_logprobs", "old_logprobs"])
def test_every_token_has_its_own_index(field: str) -> None:
    settings = {"advantages": np.zeros(5, np.float32), field: np.zeros(4, np.float32)}
    with pytest.raises(RecordError, match=f"sample 3/1#0 has 5 tokens but 4 {field}"):
        Sample(piece(5), name="3/1#0", **settings)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 20, 1000])
def test_micro_batches_keep_to_the_budget_and_split_nothing(budget: int, padded: bool) -> None:
    lengths = [3, 9, 1, 4, 4, 12, 2, 6]
    batches = split_micro_batches(lengths, budget, int, padded=padded)
    assert sorted(length for batch in batches for length in batch) == sorted(lengths)
    for batch in batches:
        assert len(batch) == 1 or (max(batch) * len(batch) if padded else sum(batch)) <= budget
    assert budget < 1000 or len(batches) == 1


def test_mini_batches_are_of_similar_size_and_never_empty() -> None:
    assert [list(batch) for batch in split_mini_batches(range(7), 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [list(batch) for batch in split_mini_batches(range(2), 5)] == [[0], [1]]


def test_empty_input_gives_no_batches() -> None:
    assert split_micro_batches([], 5, len) == []
    assert sample(9).num_sampled_tokens == int(sample(9).segment.mask.sum()) > 0
