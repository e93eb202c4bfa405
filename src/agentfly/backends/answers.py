"""Read the answers of an OpenAI-compatible server.

A server is not trusted: an answer is read within a size limit and validated before it is used. One that does not follow
the protocol is `wire.Malformed`, which is retried like any server error.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import httpx
import pydantic

from agentfly.backends.base import Request
from agentfly.backends.openai_api import Malformed, Retryable, reason, words_of
from agentfly.errors import BackendFault
from agentfly.http_body import BodyError, parse_json, read_body, stream_body
from agentfly.templates.parsers.calls import parse_json as parse_value
from agentfly.types import FinishReason, Message, ToolCall

T = TypeVar("T")
W = TypeVar("W", bound="_Wire")
_FINISHES = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


class _Wire(pydantic.BaseModel):
    """Part of a server's answer. Unknown fields are ignored, types are not converted."""

    model_config = pydantic.ConfigDict(strict=True)


# A list stops at its first error: a hostile answer may hold millions.
Items = Annotated[list[T], pydantic.Field(fail_fast=True)]
TokenId = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
# Rounding may put the log-probability of a certain token a little above 0. The lower bound is float32's.
Logprob = Annotated[float, pydantic.Field(ge=-3.4e38, le=1e-3, allow_inf_nan=False)]


class _Part(_Wire):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class _Function(_Wire):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(_Wire):
    index: int | None = None
    id: str | None = None
    function: _Function


class _Message(_Wire):
    """A message, or a piece of one."""

    content: str | Items[_Part] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[_Call] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal for part in self.content)
        return self.content or self.refusal or ""

    @property
    def thinking(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class _Entry(_Wire):
    logprob: Logprob | None = None


class _Logprobs(_Wire):
    token_logprobs: Items[Logprob | None] | None = None
    """Of /completions."""
    content: Items[_Entry] | None = None
    """Of /chat/completions."""


class _Choice(_Wire):
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None
    token_ids: Items[TokenId] | None = None
    prompt_token_ids: Items[TokenId] | None = None
    logprobs: _Logprobs | None = None


class _Answer(_Wire):
    choices: Items[_Choice] | None = None
    prompt_token_ids: Items[TokenId] | None = None


class Card(_Wire):
    """A model that a server lists."""

    id: str | None = None
    max_model_len: int | None = None


class _Models(_Wire):
    data: Items[Card] | None = None


class Limits(NamedTuple):
    """What an answer may hold."""

    max_bytes: int
    vocab_size: int | None = None
    """Token ids are below it; None: not known."""

    def check_ids(self, ids: Sequence[int]) -> None:
        if self.vocab_size is not None and (largest := max(ids, default=0)) >= self.vocab_size:
            raise Malformed(
                f"the server sampled token id {largest}, which is outside the vocabulary of {self.vocab_size}; check "
                "that it serves the model whose tokenizer is loaded here (vocab_size= allows more: a padded embedding)"
            )


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply of a chat server."""

    message: Message
    finish: FinishReason
    ids: Sequence[int] = ()
    """Empty where the server did not return all of prompt, ids and log-probabilities."""
    logprobs: Sequence[float] = ()
    prompt_ids: Sequence[int] | None = None


async def read_answer(response: httpx.Response, limits: Limits, request: Request) -> Answer:
    """Read a chat completion, whole or streamed."""
    if "text/event-stream" in response.headers.get("content-type", ""):
        whole, finish = await _put_together(response, limits, request)
        return Answer(_message_in(whole), finish)
    answer, choice = _parse(await read_body(response, limits.max_bytes))
    if choice is None or choice.message is None:
        raise Malformed("the server's answer holds no message")
    message, finish = _message_in(choice.message), _finish(choice.finish_reason)
    if request.on_text and message.text:
        request.on_text(message.text)
    ids, prompt = choice.token_ids, answer.prompt_token_ids
    entries = (choice.logprobs and choice.logprobs.content) or ()
    logprobs = [entry.logprob for entry in entries if entry.logprob is not None]
    if not ids or not prompt or not len(ids) == len(entries) == len(logprobs):
        return Answer(message, finish)
    limits.check_ids(ids)
    limits.check_ids(prompt)
    return Answer(message, finish, ids, logprobs, prompt)


async def _put_together(response: httpx.Response, limits: Limits, request: Request) -> tuple[_Message, FinishReason]:
    """A streamed message as it would have been in one piece."""
    fields: dict[str, str] = {}
    calls: dict[int, _Call] = {}
    finish, pieces = None, 0
    try:
        async with aclosing(_events(response, limits.max_bytes)) as events:
            async for choice in events:
                delta = choice.delta or _Message()
                said = {"content": delta.text, "reasoning": delta.thinking}
                for name, text in said.items():
                    if text:
                        fields[name], pieces = fields.get(name, "") + text, pieces + 1
                for piece in delta.tool_calls or ():
                    _add_call(calls, piece)
                    pieces += 1
                if request.on_text and delta.text:
                    request.on_text(fields["content"])
                finish = choice.finish_reason or finish  # last, as in Turn.add
    except (httpx.TransportError, BodyError, Retryable) as error:
        if finish is None:
            raise _broken(pieces, "pieces", reason(error)) from error
    if finish is None:
        raise _broken(pieces, "pieces", "no finish_reason came")
    return _Message(**fields, tool_calls=list(calls.values())), _finish(finish)


def _add_call(calls: dict[int, _Call], piece: _Call) -> None:
    """Add a piece to the call it belongs to: the id and the name come once, the arguments bit by bit."""
    call = calls.setdefault(piece.index or 0, _Call(function=_Function(name="", arguments="")))
    call.id = call.id or piece.id
    for name in ("name", "arguments"):
        more = getattr(piece.function, name) or ""
        if not isinstance(more, str):
            raise Malformed("the server streamed the arguments of a call as an object, not as text")
        setattr(call.function, name, getattr(call.function, name) + more)


@dataclass(slots=True)
class Turn:
    """A turn of sampled tokens, as it arrives."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, choice: _Choice, request: Request, limits: Limits) -> None:
        """Take the whole of a choice, or the next piece of it."""
        ids, given = choice.token_ids, (choice.logprobs and choice.logprobs.token_logprobs) or []
        logprobs = [value for value in given if value is not None]
        finish = self.finish if choice.finish_reason is None else _finish(choice.finish_reason)
        if ids is None or not len(ids) == len(given) == len(logprobs):
            raise BackendFault(
                "the server did not return the ids it sampled with a log-probability for each; it must know "
                "`return_token_ids` and `logprobs` on /completions (vLLM does, from 0.10.2 on). "
                "prompt_format='messages' works without them, but what it samples then cannot train"
            )
        shown = choice.prompt_token_ids
        if shown is not None and shown != list(request.prompt):
            raise BackendFault(
                f"the server showed the model another prompt, of {len(shown)} tokens, "
                f"than the {len(request.prompt)} it was sent"
            )
        limits.check_ids(ids)
        self.ids += ids
        self.logprobs += logprobs
        self.finish = finish  # last: an error in a stream that has its finish is taken for a break behind the end
        if ids and request.on_tokens:
            request.on_tokens(ids)


async def read_turn(response: httpx.Response, limits: Limits, request: Request) -> Turn:
    """Read a completion, whole or streamed."""
    turn = Turn()
    if "text/event-stream" not in response.headers.get("content-type", ""):
        _, choice = _parse(await read_body(response, limits.max_bytes))
        if choice is None:
            raise Malformed("the server's answer has no choice in it")
        turn.add(choice, request, limits)
    else:
        await _follow(response, limits, request, turn)
    if turn.finish is None:
        raise _broken(len(turn.ids), "tokens", "no finish_reason came")
    return turn


async def _follow(response: httpx.Response, limits: Limits, request: Request, turn: Turn) -> None:
    """Fill the turn from a stream; a break after its finish_reason loses nothing."""
    try:
        async with aclosing(_events(response, limits.max_bytes)) as events:
            async for choice in events:
                turn.add(choice, request, limits)
    except (httpx.TransportError, BodyError, Retryable) as error:
        if turn.finish is None:
            raise _broken(len(turn.ids), "tokens", reason(error)) from error


def _broken(came: int, what: str, why: str) -> BackendFault:
    """Only what nobody has seen may be sampled anew."""
    said = f"the server's answer broke off after {came} {what}: {why}"
    return BackendFault(said) if came else Retryable(said)


async def _events(response: httpx.Response, max_bytes: int) -> AsyncGenerator[_Choice, None]:
    """The choices of a stream. A line ends at a line feed only: JSON may hold Unicode's other separators."""
    data: list[bytes] = []
    rest: list[bytes] = []
    async with aclosing(stream_body(response, max_bytes)) as chunks:
        async for chunk in chunks:
            *ends, last = chunk.split(b"\n")
            for end in ends:
                line = b"".join([*rest, end]).removesuffix(b"\r")
                rest.clear()
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    event, data = b"\n".join(data), []
                    if event != b"[DONE]" and (choice := _parse(event)[1]) is not None:
                        yield choice
            rest.append(last)


def _parse(data: bytes | bytearray) -> tuple[_Answer, _Choice | None]:
    """An answer and its one choice, None where it has none; an error may stand in its place, under status 200."""
    value = _object(data)
    if error := value.get("error"):
        code = error.get("code") if isinstance(error, Mapping) else None
        passing = isinstance(code, int) and (code == 429 or code >= 500)
        said = f"the server failed while sampling: {words_of(value)[:500]}"
        raise Retryable(said) if passing else BackendFault(said)
    answer = _validate(_Answer, value)
    return answer, answer.choices[0] if answer.choices else None


async def read_models(response: httpx.Response, limits: Limits) -> list[Card]:
    """Read the models that a server lists."""
    return _validate(_Models, _object(await read_body(response, limits.max_bytes))).data or []


def _object(data: bytes | bytearray) -> dict[str, Any]:
    value = parse_json(data)
    if not isinstance(value, dict):
        raise Malformed(f"the server's answer is not a JSON object: {data[:200].decode(errors='replace')!r}")
    return value


def _validate(kind: type[W], value: Mapping[str, Any]) -> W:
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Malformed(
            f"the server's answer is malformed: {place}: {first['msg']}, not {reprlib.repr(first['input'])}"
        ) from error


def _finish(given: str | None) -> FinishReason:
    if given == "content_filter":
        raise BackendFault("the server's content filter withheld the reply (finish_reason 'content_filter')")
    if given not in _FINISHES:
        raise BackendFault(f"the server gave the finish_reason {given!r:.80}; known are {', '.join(_FINISHES)}")
    return _FINISHES[given]


def _message_in(message: _Message) -> Message:
    return Message("assistant", message.text, tuple(map(_call_in, message.tool_calls or ())), message.thinking)


def _call_in(call: _Call) -> ToolCall:
    """A call; arguments that a record could not keep (NaN, half a surrogate pair, deep nesting) are its problem."""
    given = call.function.arguments or ""
    text = given if isinstance(given, str) else json.dumps(given)
    if text.strip() and (wrong := parse_value(text)[2]):
        return ToolCall(
            call.function.name or "", id=call.id or "", problem=f"its arguments are not JSON: {wrong}", raw=text
        )
    return ToolCall.of(call.model_dump())
