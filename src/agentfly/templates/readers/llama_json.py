"""Llama 3.1 and 3.2: `{"name": …, "parameters": {…}}`, several with `;` between, or after `<|python_tag|>`.

Without the tag, an object at the start of a line with a name and parameters is a call; other JSON is content.
"""

from __future__ import annotations

import re

from agentfly.templates.readers.calls import JsonCall, read_json, with_problem
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import ToolCall

EXAMPLE = '{"name": "…", "parameters": {…}}'
BARE = r'^[ \t]*(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)'
_SEPARATOR = re.compile(r"\s*(?:;|\Z)")
_JSON = JsonCall(arguments=("parameters", "arguments"))


def read_objects(body: str) -> list[ToolCall]:
    """Read call objects with `;` between them."""
    calls: list[ToolCall] = []
    body, at = body.rstrip().removesuffix(";"), 0
    while not calls or at < len(body):
        value, at, wrong = read_json(body, at)
        if wrong:
            return [*calls, _JSON.broken(body[at:], wrong)]
        calls.append(_JSON.call(value))
        separator = _SEPARATOR.match(body, at)
        if separator is None:
            calls[-1] = with_problem(calls[-1], f"there is more after its JSON: {body[at : at + 40]!r}")
            break
        at = separator.end()
    return calls


def read_if_call(body: str) -> list[ToolCall] | None:
    """Read call objects where the text has the keys of one."""
    return read_objects(body) if '"parameters"' in body or '"arguments"' in body else None


read = Turn(
    Block(r"<\|python_tag\|>", "", read_objects, EXAMPLE),
    Block(BARE, "", read_if_call, EXAMPLE),
    hint="{<",
)
