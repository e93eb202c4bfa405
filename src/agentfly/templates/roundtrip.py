"""Properties of an unknown template, found by rendering probes: its closing tokens and the parser of its tool calls.

Turn markers do not determine the call syntax: Qwen2.5 and Qwen3-Coder share theirs, but one writes JSON and the other
XML. So probe calls are rendered and parsed back. A template whose calls no parser parses is refused with tools: every
call would be taken for an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from agentfly.errors import TemplateError
from agentfly.templates.codec import Codec, match_any
from agentfly.templates.parsers.calls import parse_json
from agentfly.templates.parsers.registry import PARSERS
from agentfly.templates.rendering import Renderer, special_tokens
from agentfly.templates.template import Template, TurnParser
from agentfly.templates.tokenizer import ChatTokenizer
from agentfly.types import Message, ToolCall

_MARK = "zQvalue"
_SECOND = "zQsecond"
_TEXT = "zQtext"


def _call(number: int, **arguments: object) -> ToolCall:
    # Kimi K2 takes the name of a call from its id; all other templates accept an id of this form.
    return ToolCall("search", arguments, f"functions.search:{number}")


_NESTED = {"n": 3, "x": -1.5, "flag": True, "tags": ["a", "b c"], "where": {"near": {"lat": 48, "name": "é"}}}
_FIRST_PROBE = "a call with a string argument"
_PROBES = {
    _FIRST_PROBE: Message("assistant", "", (_call(0, q=_MARK),)),
    "number, list and object arguments": Message("assistant", "", (_call(0, q=_MARK, **_NESTED),)),
    "two calls in one turn": Message("assistant", "", (_call(0, q=_MARK), _call(1, q=_SECOND))),
    "a call after text": Message("assistant", _TEXT, (_call(0, q=_MARK),)),
}
"""Turns with calls, by what they test."""


class _CallsDropped(TemplateError):
    """The template renders a turn without its calls."""


def find_closing_tokens(tokenizer: ChatTokenizer, source: str) -> tuple[str, ...]:
    """Return the control tokens that end an assistant turn in this template; empty if none is rendered."""
    codec = Codec(tokenizer)
    renderer = Renderer(source, name="the tokenizer's own", variables=special_tokens(tokenizer))
    turn = [Message("user", "u"), Message("assistant", _TEXT)]
    for messages in (turn, [*turn, Message("user", "v")]):
        try:
            text = renderer.render(messages, open_turn=False)
        except TemplateError:
            continue
        for piece in codec.pieces(text[text.rfind(_TEXT) + len(_TEXT) :]):
            if isinstance(piece, int):
                return tuple(token for token, token_id in codec.control.items() if token_id == piece)
    return ()


def choose_parser(template: Template, preferred: str, *, only: bool = False, trust: bool = False) -> tuple[str, str]:
    """Return the name of the first parser that parses all calls of this template, and "".

    If no parser does, return `preferred` and the reason. `only`: try no parser but `preferred`. `trust`: accept
    `preferred` if the template renders no calls.
    """
    try:
        turns = list(_render_probes(template))
    except _CallsDropped as error:
        return preferred, "" if trust else str(error)
    except TemplateError as error:
        return preferred, str(error.__cause__ or error).rstrip(".")
    for name in (preferred,) if only else dict.fromkeys((preferred, *PARSERS)):
        if all(not _mismatch(PARSERS[name], probe, text) for probe, text in turns):
            return name, ""
    return preferred, next(
        f"{f'its parser {preferred!r} does not parse' if only else 'no parser parses'} {probe}. "
        f"The template writes {text[:160]!r}; as {preferred!r}: {mismatch}"
        for probe, text in turns
        if (mismatch := _mismatch(PARSERS[preferred], probe, text))
    )


def find_reply_prefix(template: Template) -> str:
    """Return what the template writes before the text of a reply without calls, and the parser leaves in the content.

    Hunyuan's generation prompt is empty, and the model writes its role before each answer.
    """
    try:
        text, _ = render_turn(template, Message("assistant", _TEXT))
    except TemplateError:
        return ""
    prefix, mark, suffix = template.parser(text).message.text.partition(_TEXT)
    return prefix.lstrip() if mark and not suffix.strip() else ""


def _render_probes(template: Template) -> Iterator[tuple[str, str]]:
    """Yield the probes that this template can render, with the text of the turn as a model would sample it."""
    for probe, turn in _PROBES.items():
        try:
            text, suffix = render_turn(template, turn)
        except TemplateError:
            if probe == _FIRST_PROBE:
                raise
            continue
        # Probes are skipped if the template renders one call per turn (Llama, gpt-oss) or no text with calls.
        if all(str(call.arguments["q"]) in text for call in turn.tool_calls):
            yield probe, text
        elif probe == _FIRST_PROBE:
            if _MARK in suffix:
                raise TemplateError(
                    f"a stop token comes before the call: the template writes {(text + suffix)[:160]!r}"
                )
            raise _CallsDropped(f"it writes turns without their calls: a turn with a call is {(text + suffix)[:160]!r}")


def render_turn(template: Template, turn: Message) -> tuple[str, str]:
    """Return the text of a turn as a model would sample it, up to the first stop token, and what comes after it."""
    question = [Message("user", "u")]
    prompt = template.render(question)
    whole = template.render([*question, turn], open_turn=False)
    start = next(
        (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )
    if start < len(prompt) and whole.rfind("<", 0, start) > whole.rfind(">", 0, start):
        start = whole.rfind("<", 0, start)  # the common prefix ends inside a tag
    text = whole[start:]
    # Templates that render no thinking in history may close in the turn the tag that the prompt opened.
    closing = re.match(r"\s*</([^<>]+)>", text)
    if closing and f"<{closing[1]}>" in prompt[start:]:
        text = text[closing.end() :]
    else:
        text = template.thinking_opening(whole[:start]) + text
    stop = re.search(match_any(token for token, i in template.codec.control.items() if i in template.stop_ids), text)
    end = stop.start() if stop else len(text)
    return text[:end], text[end:]


def _mismatch(parser: TurnParser, probe: str, text: str) -> str:
    """Return how the parsed turn differs from the probe; "" if it is the same."""
    turn = _PROBES[probe]
    reply = parser(text)
    if problem := next((call.problem for call in reply.calls if call.problem), ""):
        return problem[:120]
    if len(reply.calls) != len(turn.tool_calls):
        return f"it finds {len(reply.calls)} calls, not {len(turn.tool_calls)}"
    for parsed, written in zip(reply.calls, turn.tool_calls, strict=True):
        if parsed.name != written.name or not _equal(parsed.arguments, written.arguments):
            return f"it finds {parsed.name}({json.dumps(dict(parsed.arguments), ensure_ascii=False)[:120]})"
    content = reply.message.text.strip()
    if content != (turn.text if _TEXT in content else ""):
        return f"it takes {content[:80]!r} for text"
    if _TEXT in text and _TEXT not in content + reply.message.thinking:
        return "it loses the text before the call"
    return ""


def _equal(parsed: object, written: object) -> bool:
    """Whether the values are equal; formats without types return numbers and objects as text."""
    if isinstance(written, Mapping) and isinstance(parsed, Mapping):
        return parsed.keys() == written.keys() and all(_equal(parsed[key], written[key]) for key in written)
    if isinstance(written, list) and isinstance(parsed, Sequence) and not isinstance(parsed, str):
        return len(parsed) == len(written) and all(map(_equal, parsed, written))
    if isinstance(parsed, str) and not isinstance(written, str):
        return parsed == str(written) or parse_json(parsed)[0] == written
    return parsed == written
