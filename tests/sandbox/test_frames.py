"""The message format: any chunking, limits, truncated and invalid frames."""

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.sandbox.inside.frames import (
    ANSWER,
    CANCEL,
    DATA,
    BrokenFrame,
    FrameBuffer,
    FrameTooLong,
    PipeChannel,
    pack,
    receive,
)

LIMITS = {ANSWER: 50, DATA: 50}


@given(st.lists(st.tuples(st.sampled_from([ANSWER, DATA]), st.binary(max_size=50))), st.integers(1, 60))
def test_frames_are_assembled_for_any_chunking(messages: list[tuple[bytes, bytes]], size: int) -> None:
    data = b"".join(pack(kind, payload[3:], prefix=payload[:3]) for kind, payload in messages)
    buffer = FrameBuffer(LIMITS)
    frames = []
    for start in range(0, len(data), size):
        buffer.feed(data[start : start + size])
        while (frame := buffer.next()) is not None:
            frames.append(frame)
    assert frames == messages


def test_limits_hold_before_the_payload_arrives() -> None:
    for header, error, words in (
        (pack(ANSWER, b"x" * 51)[:5], FrameTooLong, "a frame of 51 bytes, more than 50"),
        (pack(ANSWER, b"x" * 11)[:5], FrameTooLong, "a frame of 11 bytes, more than 10"),
        (pack(CANCEL, b"")[:5], BrokenFrame, "a frame of kind b'C'"),
        (pack(DATA, b"")[:5], BrokenFrame, "a frame of kind b'D'"),
        (b"\xff" * 5, BrokenFrame, "a frame of kind"),
    ):
        buffer = FrameBuffer(LIMITS)
        buffer.feed(header[:4])
        assert buffer.next() is None
        buffer.feed(header[4:])
        with pytest.raises(error, match=words):
            buffer.next((ANSWER,), 50 if "50" in words else 10)


def test_blocking_end_checks_the_length_and_reports_the_end() -> None:
    host_end, session_end = socket.socketpair()
    with host_end, session_end:
        session_end.sendall(pack(DATA, b"one") + pack(DATA, b"x" * 11))
        assert receive(host_end, 10) == (DATA, b"one")
        with pytest.raises(FrameTooLong):
            receive(host_end, 10)
    host_end, session_end = socket.socketpair()
    with host_end:
        session_end.sendall(pack(DATA, b"truncated")[:-1])
        session_end.close()
        with pytest.raises(EOFError):
            receive(host_end, 10)


def test_pipes_are_a_channel() -> None:
    channel = PipeChannel(*os.pipe())
    channel.sendall(pack(ANSWER, b"yes"))
    assert receive(channel, 10) == (ANSWER, b"yes")
    channel.close()
