"""Parse the responses of an OpenAI-compatible server into completions.

The server is not trusted: a response is read within a size limit and validated before it is used. One that violates the
protocol raises `MalformedResponse`, which is retried like a 5xx.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import httpx
import pydantic

from agentfly.backends.base import Request
from agentfly.backends.http_body import BodyError, parse_json, read_body, stream_body
from agentfly.backends.openai_api import MalformedResponse, Retryable, error_message, reason
from agentfly.errors import BackendFault
from agentfly.templates.parsers.calls import parse_json as parse_arguments
from agentfly.types import Completion, FinishReason, Message, ToolCall

T = TypeVar("T")
S = TypeVar("S", bound="_ResponseModel")
_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


# ── schemas ──


class _ResponseModel(pydantic.BaseModel):
    """Part of a response. Unknown fields are ignored; types are not coerced."""

    model_config = pydantic.ConfigDict(strict=True)


# Validation of a list stops at its first error: a hostile response may hold millions.
_List = Annotated[list[T], pydantic.Field(fail_fast=True)]
_TokenId = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
# Rounding may put the log-probability of a certain token slightly above 0. The lower bound is that of float32.
_Logprob = Annotated[float, pydantic.Field(ge=-3.4e38, le=1e-3, allow_inf_nan=False)]


class _ContentPart(_ResponseModel):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class _Function(_ResponseModel):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _ResponseToolCall(_ResponseModel):
    index: int | None = None
    id: str | None = None
    function: _Function


class _ResponseMessage(_ResponseModel):
    """A message, or the delta of one."""

    content: str | _List[_ContentPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: _List[_ResponseToolCall] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(block.text or block.refusal for block in self.content)
        return self.content or self.refusal or ""

    @property
    def thinking(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class _LogprobEntry(_ResponseModel):
    logprob: _Logprob | None = None


class _Logprobs(_ResponseModel):
    token_logprobs: _List[_Logprob | None] | None = None
    """Of /completions."""
    content: _List[_LogprobEntry] | None = None
    """Of /chat/completions."""


class _Choice(_ResponseModel):
    message: _ResponseMessage | None = None
    delta: _ResponseMessage | None = None
    finish_reason: str | None = None
    token_ids: _List[_TokenId] | None = None
    prompt_token_ids: _List[_TokenId] | None = None
    prompt_logprobs: _List[dict[str, _LogprobEntry] | None] | None = None
    """By token id, the token itself among them; None for the first token."""
    logprobs: _Logprobs | None = None


class _Response(_ResponseModel):
    choices: _List[_Choice] | None = None
    prompt_token_ids: _List[_TokenId] | None = None


class ModelCard(_ResponseModel):
    """A model that the server lists."""

    id: str | None = None
    max_model_len: int | None = None


class _ModelList(_ResponseModel):
    data: _List[ModelCard] | None = None


class ResponseLimits(NamedTuple):
    """Limits of a response."""

    max_bytes: int
    vocab_size: int | None = None
    """Token ids must be below it; None if unknown."""

    def check_ids(self, ids: Sequence[int]) -> None:
        if self.vocab_size is not None and (largest := max(ids, default=0)) >= self.vocab_size:
            raise MalformedResponse(
                f"the server sampled token id {largest}, which is outside the vocabulary of {self.vocab_size}; check "
                "that it serves the model whose tokenizer is loaded here (vocab_size= allows more: a padded embedding)"
            )


# ── responses ──


async def read_models(response: httpx.Response, limits: ResponseLimits) -> list[ModelCard]:
    """Read a response of /models."""
    return _validate(_ModelList, _parse_object(await read_body(response, limits.max_bytes))).data or []


async def read_completion(
    response: httpx.Response, limits: ResponseLimits, *, request: Request, version: int
) -> Completion:
    """Read a response of /completions, whole or streamed, and pass tokens to `request.on_tokens` as they arrive.

    Raises BackendFault if ids or log-probabilities are missing, or if the server sampled from another prompt.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    finish: FinishReason | None = None
    try:
        async with aclosing(_read_choices(response, limits.max_bytes)) as choices:
            async for choice in choices:
                new_ids = choice.token_ids
                entries = (choice.logprobs and choice.logprobs.token_logprobs) or []
                new_logprobs = [value for value in entries if value is not None]
                new_finish = finish if choice.finish_reason is None else _finish_reason(choice.finish_reason)
                if new_ids is None or not len(new_ids) == len(entries) == len(new_logprobs):
                    raise BackendFault(
                        "the server did not return the ids it sampled with a log-probability for each; it must know "
                        "`return_token_ids` and `logprobs` on /completions (vLLM does, from 0.10.2 on). "
                        "prompt_format='messages' works without them, but what it samples then cannot train"
                    )
                prompt = choice.prompt_token_ids
                if prompt is not None and prompt != list(request.prompt):
                    raise BackendFault(
                        f"the server sampled from another prompt, of {len(prompt)} tokens, "
                        f"than the {len(request.prompt)} it was sent"
                    )
                limits.check_ids(new_ids)
                ids += new_ids
                logprobs += new_logprobs
                finish = new_finish  # last: an error in the event with the finish_reason must not be ignored below
                if new_ids and request.on_tokens:
                    request.on_tokens(new_ids)
    except (httpx.TransportError, BodyError, Retryable) as error:
        if not _is_stream(response):
            raise
        if finish is None:  # after the finish_reason the completion is whole
            raise _stream_error(len(ids), "tokens", reason(error)) from None
    if finish is None:
        raise _stream_error(len(ids), "tokens", "no finish_reason came")
    if not ids and finish is not FinishReason.ABORTED:
        raise BackendFault(f"{response.url} ended the turn without one sampled token")
    return Completion(ids, logprobs, [version] * len(ids), finish)


async def read_prompt_logprobs(
    response: httpx.Response, limits: ResponseLimits, *, prompt: Sequence[int]
) -> list[float]:
    """Read the log-probabilities of a prompt's tokens from a response of /completions; 0 for the first token."""
    _, choice = _parse_response(await read_body(response, limits.max_bytes))
    entries = (choice and choice.prompt_logprobs) or []
    of_prompt = [(entry or {}).get(str(token)) for token, entry in zip(prompt[1:], entries[1:], strict=False)]
    logprobs = [entry.logprob for entry in of_prompt if entry is not None and entry.logprob is not None]
    if len(entries) != len(prompt) or len(logprobs) != len(prompt) - 1:
        raise BackendFault(
            f"the server returned log-probabilities of {len(logprobs)} of the {len(prompt)} tokens it was sent; it "
            "must know `prompt_logprobs` on /completions (vLLM does)"
        )
    return [0.0, *logprobs]


async def read_prompt_ids(response: httpx.Response, limits: ResponseLimits) -> list[int]:
    """Read the token ids of a prompt that was sent as text from a response of /completions."""
    _, choice = _parse_response(await read_body(response, limits.max_bytes))
    if choice is None or choice.prompt_token_ids is None:
        raise BackendFault(
            "the server did not return the token ids of the prompt; it must know `return_token_ids` on /completions "
            "(vLLM does, from 0.10.2 on)"
        )
    return choice.prompt_token_ids


async def read_chat(response: httpx.Response, limits: ResponseLimits, *, request: Request, version: int) -> Completion:
    """Read a response of /chat/completions, whole or streamed.

    The completion has token ids only if the server returned the ids of prompt and reply and all log-probabilities.
    """
    if _is_stream(response):
        message, finish = await _read_chat_stream(response, limits, request)
        return Completion((), (), (), finish, message=message)
    body, choice = _parse_response(await read_body(response, limits.max_bytes))
    if choice is None or choice.message is None:
        raise MalformedResponse("the server's response holds no message")
    calls = [_to_tool_call(x.id, x.function.name, x.function.arguments) for x in choice.message.tool_calls or ()]
    message = Message("assistant", choice.message.text, tuple(calls), choice.message.thinking)
    finish = _finish_reason(choice.finish_reason)
    if request.on_text and message.text:
        request.on_text(message.text)
    ids = choice.token_ids
    prompt_ids = body.prompt_token_ids
    entries = (choice.logprobs and choice.logprobs.content) or ()
    logprobs = [entry.logprob for entry in entries if entry.logprob is not None]
    if not ids or not prompt_ids or not len(ids) == len(entries) == len(logprobs):
        return Completion((), (), (), finish, message=message)
    limits.check_ids(ids)
    limits.check_ids(prompt_ids)
    if request.on_tokens:
        request.on_tokens(ids)
    return Completion(ids, logprobs, [version] * len(ids), finish, prompt_ids=prompt_ids, message=message)


async def _read_chat_stream(
    response: httpx.Response, limits: ResponseLimits, request: Request
) -> tuple[Message, FinishReason]:
    """Assemble the message from the deltas of a stream."""
    text = thinking = ""
    calls: dict[int, tuple[str, str, str]] = {}  # by index: id, name, arguments
    finish: str | None = None
    received = 0
    try:
        async with aclosing(_read_choices(response, limits.max_bytes)) as choices:
            async for choice in choices:
                delta = choice.delta or _ResponseMessage()
                text += delta.text
                thinking += delta.thinking
                received += bool(delta.text) + bool(delta.thinking)
                # The id and the name of a call come once, its arguments in parts.
                for fragment in delta.tool_calls or ():
                    new_arguments = fragment.function.arguments or ""
                    if not isinstance(new_arguments, str):
                        raise MalformedResponse("the server streamed the arguments of a call as an object, not as text")
                    call_id, name, arguments = calls.get(fragment.index or 0, ("", "", ""))
                    name += fragment.function.name or ""
                    calls[fragment.index or 0] = (call_id or fragment.id or "", name, arguments + new_arguments)
                    received += 1
                if request.on_text and delta.text:
                    request.on_text(text)
                finish = choice.finish_reason or finish  # last, as in read_completion
    except (httpx.TransportError, BodyError, Retryable) as error:
        if finish is None:
            raise _stream_error(received, "deltas", reason(error)) from None
    if finish is None:
        raise _stream_error(received, "deltas", "no finish_reason came")
    tool_calls = tuple(_to_tool_call(*call) for call in calls.values())
    return Message("assistant", text, tool_calls, thinking), _finish_reason(finish)


# ── parsing ──


def _is_stream(response: httpx.Response) -> bool:
    return "text/event-stream" in response.headers.get("content-type", "")


def _stream_error(received: int, unit: str, cause: str) -> BackendFault:
    """Retryable only if nothing was received: what an observer has seen must not be sampled a second time."""
    message = f"the server's response broke off after {received} {unit}: {cause}"
    return BackendFault(message) if received else Retryable(message)


async def _read_choices(response: httpx.Response, max_bytes: int) -> AsyncGenerator[_Choice, None]:
    """Yield the choice of each server-sent event, or the one of a whole response."""
    if not _is_stream(response):
        _, choice = _parse_response(await read_body(response, max_bytes))
        if choice is None:
            raise MalformedResponse("the server's response has no choice in it")
        yield choice
        return
    data: list[bytes] = []
    line_parts: list[bytes] = []
    async with aclosing(stream_body(response, max_bytes)) as chunks:
        async for chunk in chunks:
            # Only a line feed ends a line: JSON may hold the other line separators of Unicode.
            *ends, last = chunk.split(b"\n")
            for end in ends:
                line = b"".join([*line_parts, end]).removesuffix(b"\r")
                line_parts.clear()
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    event = b"\n".join(data)
                    data = []
                    if event != b"[DONE]" and (choice := _parse_response(event)[1]) is not None:
                        yield choice
            line_parts.append(last)


def _parse_response(data: bytes | bytearray) -> tuple[_Response, _Choice | None]:
    """Parse a response and its first choice, None if it has none. Raises the error that came with status 200."""
    value = _parse_object(data)
    if error := value.get("error"):
        code = error.get("code") if isinstance(error, Mapping) else None
        message = f"the server failed while sampling: {error_message(value)[:500]}"
        raise Retryable(message) if isinstance(code, int) and (code == 429 or code >= 500) else BackendFault(message)
    response = _validate(_Response, value)
    return response, response.choices[0] if response.choices else None


def _parse_object(data: bytes | bytearray) -> dict[str, Any]:
    value = parse_json(data)
    if not isinstance(value, dict):
        raise MalformedResponse(f"the server's response is not a JSON object: {data[:200].decode(errors='replace')!r}")
    return value


def _validate(schema: type[S], value: Mapping[str, Any]) -> S:
    try:
        return schema.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(map(str, first["loc"]))
        raise MalformedResponse(
            f"the server's response is malformed: {location}: {first['msg']}, not {reprlib.repr(first['input'])}"
        ) from error


def _finish_reason(value: str | None) -> FinishReason:
    if value == "content_filter":
        raise BackendFault("the server's content filter withheld the reply (finish_reason 'content_filter')")
    if value not in _FINISH_REASONS:
        raise BackendFault(f"the server gave the finish_reason {value!r:.80}; known are {', '.join(_FINISH_REASONS)}")
    return _FINISH_REASONS[value]


def _to_tool_call(call_id: str | None, name: str | None, arguments: str | dict[str, Any] | None) -> ToolCall:
    """Convert a call; arguments that cannot be stored (NaN, a lone surrogate, deep nesting) become its `problem`."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    if text.strip() and (problem := parse_arguments(text)[2]):
        return ToolCall(name or "", id=call_id or "", problem=f"its arguments are not JSON: {problem}", raw=text)
    return ToolCall.of({"id": call_id, "function": {"name": name, "arguments": text}})
