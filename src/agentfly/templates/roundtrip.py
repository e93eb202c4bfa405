"""Choose the reader of a template's tool calls by rendering calls and parsing them back.

Turn markers do not determine the call syntax: Qwen2.5 and Qwen3-Coder share theirs, and one writes JSON where the other
writes XML. A template whose calls no reader parses is refused with tools: every call would pass for an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentfly.encoding.codec import any_of
from agentfly.errors import TemplateError
from agentfly.template import Reader, Template
from agentfly.templates.readers import READERS
from agentfly.templates.readers.calls import read_json
from agentfly.types import Message, ToolCall

_MARK = "zQvalue"
_SECOND = "zQsecond"
_TEXT = "zQtext"


@dataclass(frozen=True, slots=True)
class _Probe:
    """A turn with calls, and the name of what it tests."""

    what: str
    turn: Message


def _call(number: int, **arguments: object) -> ToolCall:
    # Kimi K2 takes a call's name from its id; no other template minds an id of this form.
    return ToolCall("search", arguments, f"functions.search:{number}")


_NESTED = {"n": 3, "x": -1.5, "flag": True, "tags": ["a", "b c"], "where": {"near": {"lat": 48, "name": "é"}}}
_PROBES = (
    _Probe("a call with a string argument", Message("assistant", "", (_call(0, q=_MARK),))),
    _Probe("number, list and object arguments", Message("assistant", "", (_call(0, q=_MARK, **_NESTED),))),
    _Probe("two calls in one turn", Message("assistant", "", (_call(0, q=_MARK), _call(1, q=_SECOND)))),
    _Probe("a call after text", Message("assistant", _TEXT, (_call(0, q=_MARK),))),
)


class _CallsDropped(TemplateError):
    """The template writes a turn without its calls."""


def choose_reader(template: Template, preferred: str, *, only: bool = False, trust: bool = False) -> tuple[str, str]:
    """Return the name of the first reader that parses all calls of this template, and "".

    When no reader does, return `preferred` and the reason. `only` tries no other reader than `preferred`; `trust` takes
    `preferred` where the template writes no calls.
    """
    try:
        turns = list(_render(template))
    except _CallsDropped as error:
        return preferred, "" if trust else str(error)
    except TemplateError as error:
        return preferred, str(error.__cause__ or error).rstrip(".")
    for name in (preferred,) if only else dict.fromkeys((preferred, *READERS)):
        if all(not _mismatch(READERS[name], probe, text) for probe, text in turns):
            return name, ""
    return preferred, next(
        f"{f'its reader {preferred!r} does not parse' if only else 'no reader parses'} {probe.what}. The template "
        f"writes {text[:160]!r}; as {preferred!r}: {wrong}"
        for probe, text in turns
        if (wrong := _mismatch(READERS[preferred], probe, text))
    )


def _render(template: Template) -> Iterator[tuple[_Probe, str]]:
    """Yield the probes that this template can write, with the text of the turn as a model would sample it."""
    for probe in _PROBES:
        try:
            text, rest = render_turn(template, probe.turn)
        except TemplateError:
            if probe is _PROBES[0]:
                raise
            continue
        # Templates that write one call a turn (Llama, gpt-oss) or no text beside calls skip those probes.
        if all(str(call.arguments["q"]) in text for call in probe.turn.tool_calls):
            yield probe, text
        elif probe is _PROBES[0]:
            if _MARK in rest:
                raise TemplateError(f"a stop token comes before the call: the template writes {(text + rest)[:160]!r}")
            raise _CallsDropped(f"it writes turns without their calls: a turn with a call is {(text + rest)[:160]!r}")


def render_turn(template: Template, turn: Message) -> tuple[str, str]:
    """Return the text of a turn as a model would sample it, up to the first stop token, and what comes after it."""
    asked = [Message("user", "u")]
    prompt, whole = template.render(asked), template.render([*asked, turn], open_turn=False)
    start = next(
        (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )
    if start < len(prompt) and whole.rfind("<", 0, start) > whole.rfind(">", 0, start):
        start = whole.rfind("<", 0, start)  # the common prefix ends inside a tag
    text = whole[start:]
    # Templates that show no thinking in history may close in the turn what the prompt opened.
    closing = re.match(r"\s*</([^<>]+)>", text)
    if closing and f"<{closing[1]}>" in prompt[start:]:
        text = text[closing.end() :]
    else:
        text = template.opened_thinking(whole[:start]) + text
    stop = re.search(any_of(token for token, i in template.codec.control.items() if i in template.stop_ids), text)
    end = stop.start() if stop else len(text)
    return text[:end], text[end:]


def _mismatch(reader: Reader, probe: _Probe, text: str) -> str:
    """Say how what the reader found differs from what was written; "" when it is the same."""
    reply = reader(text)
    if problem := next((call.problem for call in reply.calls if call.problem), ""):
        return problem[:120]
    if len(reply.calls) != len(probe.turn.tool_calls):
        return f"it finds {len(reply.calls)} calls, not {len(probe.turn.tool_calls)}"
    for found, written in zip(reply.calls, probe.turn.tool_calls, strict=True):
        if found.name != written.name or not _same(found.arguments, written.arguments):
            return f"it finds {found.name}({json.dumps(dict(found.arguments), ensure_ascii=False)[:120]})"
    said = reply.message.text.strip()
    if said != (probe.turn.text if _TEXT in said else ""):
        return f"it takes {said[:80]!r} for text"
    if _TEXT in text and _TEXT not in said + reply.message.thinking:
        return "it loses the text before the call"
    return ""


def _same(found: object, written: object) -> bool:
    """The values are equal, where formats without types give numbers and objects as text."""
    if isinstance(written, Mapping) and isinstance(found, Mapping):
        return found.keys() == written.keys() and all(_same(found[key], written[key]) for key in written)
    if isinstance(written, list) and isinstance(found, Sequence) and not isinstance(found, str):
        return len(found) == len(written) and all(map(_same, found, written))
    if isinstance(found, str) and not isinstance(written, str):
        return found == str(written) or read_json(found)[0] == written
    return found == written
