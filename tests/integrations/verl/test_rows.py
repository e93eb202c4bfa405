"""Rows of verl made of trajectories: token-exact, and back."""

import numpy as np
import pytest

from agentfly.errors import ConfigError
from agentfly.integrations.verl.rows import build_placeholder, build_rows, nest
from agentfly.segment import Author, Segment
from agentfly.trajectory import Score, StopReason, Trajectory, TurnRecord
from agentfly.types import Completion, FinishReason, Image, Message, Task


def complete(*ids: int, version: int = 4) -> Completion:
    return Completion(ids, [-token_id / 10 for token_id in ids], [version] * len(ids), FinishReason.STOP)


def make_chain() -> Trajectory:
    """Two turns in the first segment, a segment without sampled tokens, and a folded third one of newer weights."""
    first, second, third = Segment(), Segment(), Segment()
    first.append(Author.TASK, [1, 2], turn=0)
    first.append_completion(complete(3, 4), Message("assistant", "a"), turn=0)
    first.append(Author.TOOL, [5], turn=0)
    first.append_completion(complete(6), Message("assistant", "b"), turn=1)
    first.append(Author.TOOL, [7, 8], turn=1)
    second.append(Author.HISTORY, [9], turn=2)
    third.append(Author.HISTORY, [10, 11, 12], turn=2)
    third.append_completion(complete(13, 14, version=5), Message("assistant", "c"), turn=2)
    turns = (TurnRecord(FinishReason.STOP),) * 3
    segments = tuple(segment.seal() for segment in (first, second, third))
    return Trajectory(Task.of("q"), segments, turns, StopReason.ANSWER, "c", group=7, chain=2, score=Score(0.5))


def test_one_row_per_segment_with_sampled_tokens() -> None:
    first, third = build_rows(make_chain())
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6]  # what follows the last sampled token is not trained
    assert first.start == 2
    assert first.mask.tolist() == [True, True, False, True]
    assert np.allclose(first.logprobs, [-0.3, -0.4, 0, -0.6])
    assert (third.segment, third.index, third.chain) == (2, 1, 2)
    assert (first.key("u"), third.key("u")) == ("u_2_0", "u_2_1")
    assert (first.versions, third.versions) == ((4, 4), (5, 5))


def test_fields_and_tag_are_those_that_verl_reads() -> None:
    row = build_rows(make_chain())[0]
    fields, tag = row.fields("u"), row.tag(step=6)
    assert fields["prompts"].tolist() == [1, 2]
    assert fields["responses"].tolist() == [3, 4, 5, 6]
    assert fields["response_mask"].tolist() == fields["loss_mask"].tolist() == [1, 1, 0, 1]
    assert fields["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert fields["position_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert np.allclose(fields["rollout_log_probs"], [-0.3, -0.4, 0, -0.6])
    assert fields["rm_scores"].tolist() == [0, 0, 0, 0.5]
    assert (tag["prompt_len"], tag["response_len"], tag["seq_len"]) == (2, 4, 6)
    assert (tag["global_steps"], tag["min_global_steps"], tag["max_global_steps"]) == (6, 4, 4)
    assert not tag["is_padding"]


def test_response_of_a_row_is_its_part_of_the_segment() -> None:
    trajectory = make_chain()
    for row in build_rows(trajectory):
        segment = trajectory.segments[row.segment]
        assert segment.mask[row.response].tolist() == row.mask.tolist()
        assert segment.mask.sum() == row.mask.sum()


def test_placeholder_is_padding_without_sampled_tokens() -> None:
    row = build_placeholder(version=3)
    assert row.tag(4)["is_padding"]
    assert row.fields("u")["response_mask"].tolist() == [0]
    assert row.tag(4)["min_global_steps"] == 3


def test_nested_rows_keep_their_lengths() -> None:
    nested = nest([np.ones(2), np.zeros(3)])
    assert [row.tolist() for row in nested.unbind()] == [[1, 1], [0, 0, 0]]


def test_images_are_refused() -> None:
    chain = make_chain()
    segment = Segment()
    segment.append(Author.TASK, [1], [Message("user", (Image("data:image/png;base64,AA=="),))], turn=0)
    segment.append_completion(complete(3), Message("assistant", "a"), turn=0)
    seen = Trajectory(chain.task, (segment.seal(),), chain.turns, chain.stop, "a")
    with pytest.raises(ConfigError, match="images"):
        build_rows(seen)
