"""The host's side of the protocol against a session that breaks it: a fake at the socket, and random bytes."""

import asyncio
import base64
import contextlib
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from agentfly.sandbox import EndReason, FileAccessError, Limits, SessionClosed, channel
from agentfly.sandbox import host as host_module
from agentfly.sandbox import session as session_module
from agentfly.sandbox.session import Session

LIMITS = Limits(seconds=0.5, output=1000)
OK = {"status": "ok", "value": "1"}


def frame(kind: bytes, payload: object) -> bytes:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return struct.pack(">Ic", len(data), kind) + data


class FakeHost:
    """A session's far end that the test plays itself."""

    folder = "/session"
    limits = LIMITS

    def __init__(self) -> None:
        host_end, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.channel = channel.SessionChannel(host_end)
        self.ended = 0

    def memory_kills(self) -> int:
        return 0

    def start_closing(self) -> asyncio.Task[int | None]:
        return asyncio.get_running_loop().create_task(self._release())

    async def close(self) -> int | None:
        return await self.start_closing()

    async def _release(self) -> int | None:
        self.ended += 1
        self.channel.close()
        return 9

    async def pause(self, paused: bool) -> None:
        raise AssertionError("no test pauses a session")

    async def question(self) -> dict[str, object]:
        """What the host asks."""
        loop = asyncio.get_running_loop()
        head = await loop.sock_recv(self.theirs, 5)
        (length, _) = struct.unpack(">Ic", head)
        data = b""
        while len(data) < length:
            data += await loop.sock_recv(self.theirs, length - len(data))
        return dict(json.loads(data))

    async def say(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self.theirs, data)


async def open_another(limits: Limits) -> FakeHost:
    return FakeHost()


@pytest.fixture
async def host(monkeypatch) -> AsyncIterator[FakeHost]:
    monkeypatch.setattr(host_module, "GRACE", 0.05)
    fake = FakeHost()
    yield fake
    fake.theirs.close()
    fake.channel.close()


async def play(host: FakeHost, answer: Callable[[int], bytes], use: Callable[[Session], Awaitable[object]]) -> object:
    """Let the session be used while the far end answers its first question with these bytes."""
    session = Session(open_another, host)

    async def far_end() -> None:
        question = await host.question()
        await host.say(answer(question["id"]))

    far = asyncio.create_task(far_end())
    try:
        return await asyncio.wait_for(use(session), 60)
    finally:
        far.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await far


def reply_frames(number: int, reply: dict[str, object], **fields: object) -> bytes:
    return frame(b"A", {"id": number, "dropped": 0, "reply": True, **fields}) + frame(b"R", {"id": number, **reply})


async def test_valid_answers_are_accepted(host) -> None:
    outcome = await play(host, lambda n: frame(b"O", b"out\n") + reply_frames(n, OK), lambda s: s.run("x"))
    assert (outcome.end, outcome.value, outcome.output) == (EndReason.OK, "1", "out\n")
    assert host.ended == 0


PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
INVALID_MESSAGES = {
    "nothing at all": lambda n: b"",
    "half a head": lambda n: b"\x00\x00",
    "half a frame": lambda n: struct.pack(">Ic", 100, b"A") + b"{",
    "no frame": lambda n: b"hello, world, this is no frame\n" * 3,
    "an unknown kind": lambda n: frame(b"Z", b"x"),
    "a reply first": lambda n: frame(b"R", {"id": n, **OK}),
    "data first": lambda n: frame(b"D", b"x"),
    "a question": lambda n: frame(b"Q", {"do": "run"}),
    "a huge frame": lambda n: struct.pack(">Ic", 0xFFFFFFFF, b"A"),
    "a frame over the budget": lambda n: struct.pack(">Ic", 23 << 20, b"O"),
    "no JSON": lambda n: frame(b"A", b"{"),
    "JSON of another kind": lambda n: frame(b"A", [1, 2]),
    "text that is no UTF-8": lambda n: frame(b"A", b'{"id": "\xff"}'),
    "deep JSON": lambda n: frame(b"A", b"[" * 200_000),
    "a huge number": lambda n: frame(b"A", b'{"id": ' + b"9" * 100_000 + b"}"),
    "another call's answer": lambda n: reply_frames(n + 1, OK),
    "another call's reply": lambda n: reply_frames(n, {**OK, "id": n + 1}),
    "no reply": lambda n: frame(b"A", {"id": n, "dropped": 0, "reply": True}),
    "neither reply nor end": lambda n: frame(b"A", {"id": n, "dropped": 0}),
    "a shell's answer": lambda n: frame(b"A", {"id": n, "dropped": 0, "status": 0}),
    "an unknown end": lambda n: frame(b"A", {"id": n, "dropped": 0, "ended": "happily", "status": 0}),
    "another key": lambda n: reply_frames(n, OK, extra=1),
    "a missing key": lambda n: reply_frames(n, {"value": "1"}),
    "a key too many": lambda n: reply_frames(n, {**OK, "more": 1}),
    "a negative count": lambda n: reply_frames(n, {**OK, "dropped": -1}),
    "a fractional count": lambda n: reply_frames(n, {**OK, "dropped": 0.5}),
    "true as a count": lambda n: reply_frames(n, {**OK, "dropped": True}),
    "not a number": lambda n: frame(b"A", {"id": n, "dropped": 0, "reply": True}) + frame(b"R", b'{"id": NaN}'),
    "an unknown status": lambda n: reply_frames(n, {**OK, "status": "great"}),
    "a status that is no text": lambda n: reply_frames(n, {**OK, "status": ["ok"]}),
    "a value that is no text": lambda n: reply_frames(n, {**OK, "value": {"a": 1}}),
    "a long value": lambda n: reply_frames(n, {**OK, "value": "x" * 100_000}),
    "a long traceback": lambda n: reply_frames(n, {**OK, "traceback": "x" * 100_000}),
    "figures that are no list": lambda n: reply_frames(n, {**OK, "figures": "x"}),
    "a figure that is no base64": lambda n: reply_frames(n, {**OK, "figures": ["%%%"]}),
    "a figure that is no image": lambda n: reply_frames(n, {**OK, "figures": ["aGVsbG8="]}),
    "too many figures": lambda n: reply_frames(n, {**OK, "figures": [PNG] * 9}),
    "a null byte frame": lambda n: frame(b"\0", b""),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_MESSAGES)
async def test_invalid_messages_end_the_session(host, case: str) -> None:
    outcome = await play(host, INVALID_MESSAGES[case], lambda s: s.run("x"))
    assert outcome.end in (EndReason.DIED, EndReason.TIMEOUT, EndReason.FLOODED)
    assert not outcome.files_kept
    assert "session" in outcome.message
    assert host.ended


@pytest.mark.parametrize("case", ["frames without end", "empty frames without end", "half frames"])
async def test_floods_of_messages_end_the_session(host, case: str) -> None:
    pieces = {
        "frames without end": frame(b"O", b"x" * 60_000) * 20,
        "empty frames without end": frame(b"O", b"") * 100_000,
        "half frames": struct.pack(">Ic", 60_000, b"O"),
    }
    session = Session(open_another, host)

    async def flood() -> None:
        while True:
            await host.say(pieces[case])
            await asyncio.sleep(0)

    flooding = asyncio.create_task(flood())
    outcome = await asyncio.wait_for(session.run("x"), 60)
    flooding.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await flooding
    assert outcome.end in (EndReason.FLOODED, EndReason.TIMEOUT, EndReason.DIED)
    assert len(outcome.output) <= LIMITS.output
    with pytest.raises(SessionClosed):
        await session.run("x")


async def test_early_reply_ends_the_next_call(host) -> None:
    """An unrequested answer is in the socket when the next question is sent."""
    session = Session(open_another, host)
    far = asyncio.create_task(_answer_twice(host))
    assert (await session.run("x")).end is EndReason.OK
    await far
    outcome = await session.run("y")
    assert outcome.end is EndReason.DIED
    assert "protocol" in outcome.message


async def _answer_twice(host: FakeHost) -> None:
    number = (await host.question())["id"]
    await host.say(reply_frames(number, OK) + reply_frames(number, {**OK, "value": "'forged'"}))


async def test_peer_that_sends_instead_of_reading_does_not_fill_the_memory(host) -> None:
    """Bytes that arrive while a long message is sent stay in the socket until an answer is expected."""
    session = Session(open_another, host)
    await play(host, lambda n: reply_frames(n, OK), lambda _: session.run("x"))
    running = asyncio.create_task(session.run("#" * (4 << 20)))
    flood = asyncio.create_task(host.say(bytes(64 << 20)))
    outcome = await running
    assert (outcome.end, outcome.files_kept) == (EndReason.TIMEOUT, False)
    assert len(host.channel._buffer._data) < 1 << 20
    await flood


async def test_notice_of_an_unknown_interpreter_ends_the_session(host) -> None:
    outcome = await play(host, lambda n: frame(b"N", {"ended": "died", "status": 0}), lambda s: s.run("x"))
    assert (outcome.end, outcome.files_kept) == (EndReason.DIED, False)


INVALID_FILE_ANSWERS = {
    "a size too large": lambda n: frame(b"A", {"id": n, "size": 1 << 40}),
    "less data than announced": lambda n: frame(b"A", {"id": n, "size": 10}) + frame(b"D", b"123"),
    "a listing instead": lambda n: frame(b"A", {"id": n, "entries": [], "more": False}),
    "output instead": lambda n: frame(b"O", b"x"),
    "nothing": lambda n: b"",
    "another id": lambda n: frame(b"A", {"id": n + 1, "size": 0}),
    "a size that is no number": lambda n: frame(b"A", {"id": n, "size": "3"}),
}


@pytest.mark.parametrize("case", INVALID_FILE_ANSWERS)
async def test_invalid_file_answers_end_the_session(host, monkeypatch, case: str) -> None:
    monkeypatch.setattr(session_module, "_FILE_SECONDS", 0.1)
    with pytest.raises(SessionClosed):
        await play(host, INVALID_FILE_ANSWERS[case], lambda s: s.get("f", max_bytes=1000))
    assert host.ended


async def test_listings_are_checked(host, monkeypatch) -> None:
    monkeypatch.setattr(session_module, "_FILE_SECONDS", 0.1)
    bad = {"entries": [["name", "file", "large"]], "more": False}
    with pytest.raises(SessionClosed):
        await play(host, lambda n: frame(b"A", {"id": n, **bad}), lambda s: s.list_files())


async def test_file_error_is_raised(host) -> None:
    with pytest.raises(FileAccessError, match="no such thing"):
        await play(host, lambda n: frame(b"A", {"id": n, "error": "no such thing"}), lambda s: s.get("f"))
    assert host.ended == 0


async def test_vanished_session_is_reported(host) -> None:
    session = Session(open_another, host)
    asking = asyncio.create_task(session.run("x"))
    await host.question()
    host.theirs.close()
    outcome = await asking
    assert outcome.end is EndReason.DIED
    assert "signal 9" in outcome.message


@pytest.mark.parametrize("seed", range(60))
async def test_random_bytes_end_in_an_outcome(host, seed: int) -> None:
    """Truth with some of its bytes changed, cut, doubled or moved: an outcome or a closed session, never a crash."""
    chance = random.Random(seed)

    def mangle(number: int) -> bytes:
        truth = bytearray(frame(b"O", b"output") + reply_frames(number, {**OK, "figures": [PNG]}))
        for _ in range(chance.randint(1, 6)):
            spot, kind = chance.randrange(len(truth)), chance.randrange(4)
            if kind == 0:
                truth[spot] = chance.randrange(256)
            elif kind == 1:
                del truth[spot : spot + chance.randint(1, 20)]
            elif kind == 2:
                truth[spot:spot] = chance.randbytes(chance.randint(1, 30))
            else:
                truth += truth[spot:]
            truth = truth or bytearray(b"x")
        return bytes(truth)

    outcome = await play(host, mangle, lambda s: s.run("x", timeout=0.05))
    assert isinstance(outcome.end, EndReason)
    outcome.text.encode()
    assert outcome.files_kept == (host.ended == 0)
