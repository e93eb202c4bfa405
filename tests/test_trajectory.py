"""The record of a chain: append-only, one author per span, a derived mask, and a lossless JSON form."""

import dataclasses
import io
import json
from typing import Any

import numpy as np
import pytest
import rich
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from agentfly.errors import RecordError
from agentfly.segment import AUTHOR_COLORS, Author, Segment, Span, message_to_json
from agentfly.trajectory import (
    MAX_REWARD,
    CallRecord,
    CallStatus,
    Failure,
    FailureKind,
    Score,
    ScoreComponent,
    StopReason,
    TrainingTreatment,
    Trajectory,
    TurnRecord,
)
from agentfly.types import Completion, FinishReason, Image, Message, Task, ToolCall

# ── random builds ──

SHOWN = [author for author in Author if author is not Author.MODEL]
ids = st.integers(0, 2**31 - 1)
logprob = st.floats(-(2.0**100), 0, width=32)
number = st.floats(allow_nan=False, allow_infinity=False)
reward = st.floats(-MAX_REWARD, MAX_REWARD)
count = st.integers(0, 2**53)
text = st.text(max_size=12) | st.sampled_from(["", "\u2028", "\x00", "😀", '"\\', "{image}", "\r\n", "é"])
images = st.builds(Image, st.sampled_from(["data:image/png;base64,AA==", "https://x/ü.png"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
columns = st.dictionaries(text, values, max_size=3)
calls = st.builds(ToolCall, text, columns, text, text, text)
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    text | st.lists(text | images, max_size=3).map(tuple),
    st.lists(calls, max_size=2).map(tuple),
    text,
    text,
    text,
)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    runs = draw(st.lists(st.tuples(st.integers(0, 9), st.lists(st.tuples(ids, logprob), max_size=4)), max_size=3))
    sampled = [(token, lp, version) for version, run in runs for token, lp in run]
    finish = draw(st.sampled_from(FinishReason)) if sampled else FinishReason.ABORTED
    message = draw(st.none() | messages)
    return Completion([s[0] for s in sampled], [s[1] for s in sampled], [s[2] for s in sampled], finish, None, message)


Shown = tuple[Author, list[int], list[Message]]
shows = st.tuples(st.sampled_from(SHOWN), st.lists(ids, max_size=5), st.lists(messages, max_size=2))
builds = st.lists(shows | completions(), max_size=6)


def build(pieces: list[Shown | Completion]) -> Segment:
    segment = Segment()
    for turn, piece in enumerate(pieces):
        if isinstance(piece, Completion):
            segment.append_completion(piece, Message("assistant", "said"), turn=turn)
        else:
            segment.append(piece[0], piece[1], piece[2], turn=turn)
    return segment


segments = builds.map(build).map(Segment.seal)
components = st.dictionaries(text, st.builds(ScoreComponent, number, reward), max_size=2)
trajectories = st.builds(
    Trajectory,
    st.builds(Task, st.lists(messages, min_size=1, max_size=2).map(tuple), columns, text),
    st.lists(segments, max_size=3).map(tuple),
    st.lists(
        st.builds(
            TurnRecord,
            st.sampled_from(FinishReason),
            st.lists(st.builds(CallRecord, text, st.sampled_from(CallStatus), number, columns), max_size=2).map(tuple),
            number,
            number,
        ),
        max_size=2,
    ).map(tuple),
    st.sampled_from(StopReason),
    text,
    count,
    count,
    st.none() | st.builds(Score, reward, st.none() | st.lists(reward, max_size=3).map(tuple), columns, components),
    st.sampled_from(TrainingTreatment),
    st.lists(st.builds(Failure, st.sampled_from(FailureKind), text, count, count), max_size=2).map(tuple),
    number,
    count,
)


@settings(deadline=None)
@given(builds)
def test_mask_is_true_exactly_on_sampled_tokens(parts: list[Shown | Completion]) -> None:
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for part in parts:
        if isinstance(part, Completion):
            tokens += part.token_ids
            mask += [True] * len(part.token_ids)
            logprobs += part.logprobs
            versions += part.weight_versions
        else:
            tokens += part[1]
            mask += [False] * len(part[1])
            logprobs += [0.0] * len(part[1])
            versions += [-1] * len(part[1])
    growing, sealed = build(parts), build(parts).seal()
    for segment in (growing, sealed):
        assert len(segment) == len(tokens)
        assert segment.tokens.tolist() == list(segment.prompt) == tokens
        assert segment.mask.tolist() == mask
        assert segment.logprobs.tolist() == logprobs
        assert segment.weight_versions.tolist() == versions
        assert segment.last_id == (tokens[-1] if tokens else None)
        assert (segment.tokens.dtype, segment.mask.dtype, segment.logprobs.dtype) == (np.int32, np.bool_, np.float32)


@settings(deadline=None)
@given(builds)
def test_turns_token_counts_and_json_of_a_segment_are_those_of_its_spans(parts: list[Shown | Completion]) -> None:
    segment = build(parts)
    spans = segment.spans
    assert segment.turns.tolist() == [span.turn for span in spans for _ in span.ids]
    assert segment.turns.dtype == np.int32
    for author in Author:
        assert author.carries_loss == (author is Author.MODEL)
        assert segment.tokens_by_author[author] == sum(len(span) for span in spans if span.author is author)
    assert segment.to_json()["spans"] == [span.to_json() for span in spans]


@settings(deadline=None)
@given(builds)
def test_a_span_has_one_author_and_one_weight_version(parts: list[Shown | Completion]) -> None:
    for span in build(parts).spans:
        sampled = span.author is Author.MODEL and len(span) > 0
        assert (span.logprobs is not None) == (span.weight_version is not None) == sampled
        assert span.logprobs is None or len(span.logprobs) == len(span)


@settings(deadline=None)
@given(st.lists(builds, max_size=3))
def test_segment_only_grows_at_the_end(stages: list[list[Shown | Completion]]) -> None:
    segment, earlier_tokens = Segment(), []
    for stage in stages:
        for piece in stage:
            if isinstance(piece, Completion):
                segment.append_completion(piece, Message("assistant"), turn=0)
            else:
                segment.append(piece[0], piece[1], turn=0)
        now = segment.prompt.tolist()
        assert now[: len(earlier_tokens)] == earlier_tokens
        earlier_tokens = now


# ── the doors ──


def two_turns() -> Segment:
    """`P0 + A0 + E0 + A1`, with new weights in the middle of A1."""
    segment = Segment(image_token_id=5)
    segment.append(Author.TASK, [1, 2], [Message("user", "Q", ())], turn=0)
    segment.append_completion(
        Completion([3, 4], [-0.5, -1.5], [0, 0], FinishReason.STOP), Message("assistant", "call"), turn=0
    )
    segment.append(Author.TOOL, [5], [Message("tool", ("seen", Image("https://x/y.png")))], turn=1)
    completion = Completion([6, 7, 8], [-0.1, -0.2, -0.3], [0, 1, 1], FinishReason.STOP)
    segment.append_completion(completion, Message("assistant", "done"), turn=1)
    return segment


def test_spans_equal_spans_with_the_same_content_only() -> None:
    first, second, *_ = two_turns().spans
    assert first == two_turns().spans[0]
    assert first != second
    assert first != first.to_json()


def test_images_of_a_segment_survive_json_and_a_copy() -> None:
    segment = two_turns()
    stored = segment.to_json()
    assert stored["image_token_id"] == 5
    assert "image_token_id" not in Segment().to_json()
    for other in (Segment.from_json(stored), segment.copy()):
        assert other.image_token_id == 5
        assert other.images == segment.images == (Image("https://x/y.png"),)
        assert other.exact is segment.exact is True
        assert other.image_positions.tolist() == [4]


def test_new_weights_in_the_middle_of_a_turn_split_its_span() -> None:
    segment = two_turns()
    assert segment.mask.tolist() == [False, False, True, True, False, True, True, True]
    assert segment.weight_versions.tolist() == [-1, -1, 0, 0, -1, 0, 1, 1]
    assert [(s.author, len(s), s.turn, s.weight_version) for s in segment.spans] == [
        (Author.TASK, 2, 0, None),
        (Author.MODEL, 2, 0, 0),
        (Author.TOOL, 1, 1, None),
        (Author.MODEL, 1, 1, 0),
        (Author.MODEL, 2, 1, 1),
    ]
    assert [m.text for m in segment.messages] == ["Q", "call", "seen", "done"]
    assert segment.images == (Image("https://x/y.png"),)


def test_sealed_segment_rejects_changes() -> None:
    segment = two_turns().seal()
    stored = segment.to_json()
    with pytest.raises(RecordError, match="sealed"):
        segment.append(Author.USER, [9], turn=2)
    with pytest.raises(RecordError, match="sealed"):
        segment.append_completion(Completion([9], [-1.0], [0], FinishReason.STOP), Message("assistant"), turn=2)
    with pytest.raises(RecordError, match="sealed"):
        segment.append_completion(Completion([], [], [], FinishReason.ABORTED), Message("assistant"), turn=2)
    assert segment.to_json() == stored
    assert segment.exact


def test_sampled_author_needs_sample() -> None:
    with pytest.raises(RecordError, match="append_completion"):
        Segment().append(Author.MODEL, [1], turn=0)


def test_unequal_lengths_are_rejected() -> None:
    three = np.array([1, 2, 3], np.int32)
    two = np.zeros(2, np.float32)
    for build_span in (
        lambda: Span(Author.MODEL, three, 0, (), two, 0),
        lambda: Span(Author.MODEL, three, 0),
        lambda: Span(Author.MODEL, three, 0, (), np.zeros(3, np.float32)),
        lambda: Span(Author.TOOL, three, 0, (), np.zeros(3, np.float32), 0),
        lambda: Span(Author.TOOL, three, 0, weight_version=0),
    ):
        with pytest.raises(RecordError):
            build_span()


def test_record_is_immutable() -> None:
    segment = two_turns()
    for span in segment.spans:
        for values in (span.ids, span.logprobs):
            if values is not None:
                with pytest.raises(ValueError, match="read-only"):
                    values[0] = 0
                assert values.base is None or not values.base.flags.writeable
        with pytest.raises(dataclasses.FrozenInstanceError):
            span.author = Author.MODEL  # type: ignore[misc]
    for name in ("tokens", "mask", "logprobs", "weight_versions", "images", "spans", "exact", "prompt", "last"):
        with pytest.raises(AttributeError):
            setattr(segment, name, ())
    segment.tokens[0] = 99  # copies: what is done to them is not done to the record
    segment.prompt[0] = 99
    assert segment.tokens[0] == 1
    trajectory = Trajectory(Task.of("Q"), (segment,), (), StopReason.ANSWER, "")
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.prediction = "better"  # type: ignore[misc]


def test_ids_of_the_caller_are_copied() -> None:
    ids, segment = np.array([1, 2], np.int32), Segment()
    segment.append(Author.TASK, ids, turn=0)  # type: ignore[arg-type]
    ids[0] = 99
    assert segment.tokens.tolist() == [1, 2]


def test_a_reply_without_token_ids_makes_the_chain_untrainable() -> None:
    message = Message("assistant", "hello")
    segment = Segment()
    segment.append_completion(Completion([], [], [], FinishReason.STOP, message=message), message, turn=0)
    trajectory = Trajectory(Task.of("Q"), (segment.seal(),), (), StopReason.ANSWER, "hello", group=3, chain=1)
    assert not segment.exact
    assert "chain 3/1" in (trajectory.untrainable or "")
    assert not Trajectory.from_json(trajectory.to_json()).segments[0].exact


def test_turn_aborted_before_its_first_token_keeps_the_record() -> None:
    segment = two_turns()
    segment.append_completion(Completion([], [], [], FinishReason.ABORTED), Message("assistant"), turn=2)
    assert segment.exact
    assert segment.mask.sum() == 5


def test_a_long_chain_is_compact_once_sealed() -> None:
    segment = Segment()
    for turn in range(16):
        segment.append_completion(
            Completion([7] * 128, [-0.5] * 128, [0] * 128, FinishReason.STOP), Message("assistant"), turn=turn
        )
        segment.append(Author.TOOL, [8] * 128, turn=turn)
    segment.seal()
    held = sum(s.ids.nbytes + (0 if s.logprobs is None else s.logprobs.nbytes) for s in segment.spans)
    assert len(segment) == 4096
    assert held == 4096 * 4 + 2048 * 4


# ── JSON ──


@settings(deadline=None, max_examples=150)
@given(trajectories)
def test_json_loses_nothing(trajectory: Trajectory) -> None:
    written = json.dumps(trajectory.to_json(), allow_nan=False)
    read = Trajectory.from_json(json.loads(written))
    assert read == trajectory
    assert json.dumps(read.to_json()) == written
    for one, other in zip(read.segments, trajectory.segments, strict=True):
        assert one.prompt == other.prompt
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.mask.tolist() == other.mask.tolist()
        assert one.images == other.images


def test_segment_read_from_json_is_sealed() -> None:
    trajectory = Trajectory(Task.of("Q"), (two_turns().seal(),), (), StopReason.ANSWER, "done")
    segment = Trajectory.from_json(trajectory.to_json()).segments[0]
    with pytest.raises(RecordError, match="sealed"):
        segment.append(Author.USER, [1], turn=2)


def test_a_difference_anywhere_makes_two_records_unequal() -> None:
    def segment_with(**fields: Any) -> Segment:
        segment = Segment()
        values = {"ids": [3], "logprobs": [-0.5], "versions": [0], "said": "a", "turn": 0, **fields}
        completion = Completion(values["ids"], values["logprobs"], values["versions"], FinishReason.STOP)
        segment.append_completion(completion, Message("assistant", values["said"]), turn=values["turn"])
        return segment

    assert segment_with() == segment_with()
    for difference in ({"ids": [4]}, {"logprobs": [-0.25]}, {"versions": [1]}, {"said": "b"}, {"turn": 1}):
        assert segment_with() != segment_with(**difference)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, (1, 2), b"x", float("nan"), float("inf"), {1: 2}, np.float32(1), np.zeros(2), [{"a": {1}}]],
    ids=lambda value: type(value).__name__,
)
def test_value_that_is_not_json_is_rejected_by_name(value: object) -> None:
    task = Task.of("Q")
    message = Message("assistant", tool_calls=(ToolCall("add", {"odd": value}),))
    info = TurnRecord(FinishReason.STOP, (CallRecord("add", CallStatus.OK, 0.0, {"odd": value}),))
    segment = Segment()
    segment.append(Author.TASK, [1], [message], turn=0)
    ended: tuple[Any, ...] = (StopReason.ANSWER, "")
    for record, origin in (
        (Trajectory(dataclasses.replace(task, columns={"odd": value}, id="t7"), (), (), *ended), "column of task 't7'"),
        (Trajectory(task, (), (info,), *ended), "info of tool 'add'"),
        (Trajectory(task, (), (), *ended, score=Score(1.0, None, {"odd": value})), "metrics of the reward"),
        (Trajectory(task, (segment.seal(),), (), *ended), "arguments of a call of 'add'"),
    ):
        with pytest.raises(RecordError, match=f"{origin}: 'odd' holds a {type(value).__name__}"):
            record.to_json()


def test_column_name_that_is_not_a_string_is_rejected() -> None:
    task = Task((Message("user", "Q"),), {7: "x"})  # type: ignore[dict-item]
    with pytest.raises(RecordError, match="7 holds"):
        Trajectory(task, (), (), StopReason.ANSWER, "").to_json()


@pytest.mark.parametrize("numbers", [(float("nan"),), (1.0, (float("inf"),))])
def test_a_score_is_finite(numbers: Any) -> None:
    with pytest.raises(RecordError, match="finite"):
        Score(*numbers)


def test_records_are_objects_with_the_names_of_their_fields() -> None:
    call = CallRecord("add", CallStatus.ERROR, 0.5, {"hits": 3}, retries=2, blocked=0.25)
    trajectory = Trajectory(
        Task.of("Q"),
        (),
        (TurnRecord(FinishReason.STOP, (call, CallRecord("add", CallStatus.OK)), 1.5, 0.75),),
        StopReason.ANSWER,
        "",
        score=Score(1.0, (0.5, 0.5), {"exact": True}),
        failures=(Failure(FailureKind.TOOL, "it broke", 0),),
    )
    stored = trajectory.to_json()
    assert stored["turns"] == [
        {
            "finish": "stop",
            "calls": [
                {
                    "name": "add",
                    "status": "error",
                    "seconds": 0.5,
                    "info": {"hits": 3},
                    "retries": 2,
                    "blocked": 0.25,
                },
                {"name": "add", "status": "ok", "seconds": 0.0},
            ],
            "generate_seconds": 1.5,
            "tool_seconds": 0.75,
        }
    ]
    assert stored["score"] == {"total": 1.0, "per_turn": [0.5, 0.5], "metrics": {"exact": True}}
    assert stored["failures"] == [{"kind": "tool", "message": "it broke", "turn": 0, "attempt": 0}]
    assert Trajectory.from_json(stored) == trajectory
    message = Message("assistant", tool_calls=(ToolCall("add", {"a": 1}, "c1"), ToolCall("", problem="no", raw="{")))
    assert message_to_json(message)["tool_calls"] == [
        {"name": "add", "arguments": {"a": 1}, "id": "c1"},
        {"name": "", "arguments": {}, "id": "", "problem": "no", "raw": "{"},
    ]


# ── what it says of itself ──


def test_every_stop_reason_has_a_failure_kind_or_none() -> None:
    fine = {
        StopReason.ANSWER,
        StopReason.TOOL_END,
        StopReason.TOOL_TIMEOUT,
        StopReason.MAX_TURNS,
        StopReason.NO_CALL,
        StopReason.REPEATED_CALL,
    }
    assert {stop for stop in StopReason if stop.failure is None} == fine
    assert StopReason.CONTEXT_LIMIT.failure is FailureKind.TRUNCATION


def test_trajectory_summary() -> None:
    turns = (TurnRecord(FinishReason.STOP, (CallRecord("add", CallStatus.OK),)), TurnRecord(FinishReason.STOP))
    record = Trajectory(Task.of("Q"), (two_turns().seal(),), turns, StopReason.ANSWER, "done", 2, 1, score=Score(0.5))
    assert repr(record) == "<Trajectory 2/1: answer after 2 turns, reward 0.5>"
    assert (record.id, record.reward, record.sampled_tokens, record.untrainable) == ("2/1", 0.5, 5, None)
    assert [m.text for m in record.messages] == ["Q", "call", "seen", "done"]
    assert [call.name for call in record.calls] == ["add"]
    assert Trajectory(Task.of("Q"), (), (), StopReason.CANCELLED, "").messages == (Message("user", "Q"),)


def test_images_in_prompts_that_a_server_rendered_cannot_be_trained() -> None:
    segment = Segment()
    segment.append(Author.TASK, [1, 2], [Message("user", ("Q", Image("https://x/y.png")))], turn=0)
    record = Trajectory(Task.of("Q"), (segment.seal(),), (), StopReason.ANSWER, "done")
    assert "images whose tokens are unknown" in str(record.untrainable)


def shown_in_colour(trajectory: Trajectory, decode: Any = None) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    console.print(trajectory.render(decode))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_printed_tokens_are_colored_by_author() -> None:
    trajectory = Trajectory(Task.of("Q"), (two_turns().seal(),), (), StopReason.ANSWER, "", score=Score(1.0))
    rendered = trajectory.render(lambda tokens: "".join(f"<{token}>" for token in tokens))
    colours = {rendered.plain[span.start : span.end]: span.style for span in rendered.spans}
    assert rendered.plain.startswith("<1><2><3><4><5><6><7><8>\n── answer, reward 1")
    assert colours["<1><2>"] == AUTHOR_COLORS[Author.TASK]
    assert colours["<3><4>"] == colours["<6>"] == colours["<7><8>"] == AUTHOR_COLORS[Author.MODEL]
    assert colours["<5>"] == AUTHOR_COLORS[Author.TOOL]
    assert len(set(AUTHOR_COLORS.values())) == len(Author)
    assert "\x1b[1;32m<3><4>" in shown_in_colour(trajectory, lambda ids: "".join(f"<{i}>" for i in ids))


def test_without_a_decoder_the_print_shows_the_messages_and_their_calls() -> None:
    segment = Segment()
    segment.append(Author.TASK, [1], [Message("user", ("look [bold]", Image("https://x/y.png")))], turn=0)
    message = Message("assistant", "Hm.", (ToolCall("add", {"a": 1}), ToolCall("", problem="no name")), "let me think")
    segment.append_completion(Completion([2], [-1.0], [0], FinishReason.STOP), message, turn=0)
    trajectory = Trajectory(Task.of("Q"), (segment.seal(),) * 2, (), StopReason.MAX_TURNS, "")
    plain = trajectory.render().plain
    expected = 'user: look [bold]\n(image)\nassistant: let me think\nHm.\n→ add({"a": 1})\n→ ({}) (no name)\n'
    assert plain == f"── segment 0 ──\n{expected}\n── segment 1 ──\n{expected}\n── max_turns"
    console = Console(file=io.StringIO(), width=200)
    console.print(trajectory)
    assert isinstance(console.file, io.StringIO)
    assert "look [bold]" in console.file.getvalue()
    assert rich.protocol.is_renderable(trajectory)
