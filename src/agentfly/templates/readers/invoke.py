"""Calls as `invoke` elements with a `parameter` element for every argument: MiniMax M2, DeepSeek V3.2 and V4, Muse.

    <minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter>…</invoke></minimax:tool_call>

DeepSeek prefixes the tags with `｜DSML｜` and marks every value as a string or as JSON. Muse prefixes them with `atem:`
and addresses every message (`to=NAME`, `to=self` for thinking, `to=user`). MiniCPM 5 names the elements `function`
and `param`, and may put a value into CDATA. Values have no escapes: one ends at its first closing tag.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agentfly.templates.readers.calls import read_json, read_name, tagged_call, with_problem
from agentfly.templates.readers.turn import Block, Turn, joined
from agentfly.types import Message, Reply, ToolCall


def read_typed_call(name: str, inside: str, opening: re.Pattern[str], closing: str, text: str) -> ToolCall:
    """Make a call of a name and arguments in tags that give the type of the value.

    `opening` has the argument's name and type as groups. A value of type `text` is a string, any other is JSON.
    """
    name, problem = read_name(name)
    call = ToolCall(name, {}, problem=problem)
    arguments: dict[str, object] = {}
    at = 0
    while found := opening.match(inside, at):
        key, start = found[1], found.end()
        end = inside.find(closing, start)
        if end < 0:
            call = with_problem(call, f"its argument {key:.40} is not closed with {closing}")
            return replace(call, arguments=arguments)
        if key in arguments:
            call = with_problem(call, f"its argument {key:.40} is given twice")
        arguments[key] = inside[start:end]
        if found[2] != text:
            value, stop, wrong = read_json(inside[start:end])
            if wrong or inside[start + stop : end].strip():
                call = with_problem(call, f"its argument {key:.40} is not JSON: {wrong or 'there is more after it'}")
            else:
                arguments[key] = value
        at = end + len(closing)
    if rest := inside[at:].strip():
        call = with_problem(call, f"there is text that belongs to no argument: {rest[:40]!r}")
    return replace(call, arguments=arguments)


def _reader(prefix: str, wrapper: str, example: str, *, typed: bool = False) -> Turn:
    """A reader of `invoke` elements whose tags have this prefix, in elements that match the pattern `wrapper`."""
    closing = f"</{prefix}parameter>"
    string = ' string="(true|false)"' if typed else ""
    parameter = re.compile(rf'\s*+<{prefix}parameter name="([^"<>]+)"{string}>')

    def read(body: str) -> list[ToolCall]:
        name, quote, inside = body.partition('">')
        if not quote:
            return [
                ToolCall(read_name(name)[0], problem=f'its name is not closed with "> in <{prefix}invoke name="…">')
            ]
        if typed:
            return [read_typed_call(name, inside, parameter, closing, text="true")]
        return [tagged_call(name, inside, parameter, closing)]

    value = f'<{prefix}parameter name="KEY"{" string=" + chr(34) + "true" + chr(34) if typed else ""}>value{closing}'
    call = f'<{prefix}invoke name="NAME">{value}</{prefix}invoke>'
    return Turn(
        Block(
            rf'(?:<{wrapper}>\s*+)?<{prefix}invoke name="',
            f"</{prefix}invoke>",
            read,
            f"<{example}>{call}</{example}>",
        ),
        stray=rf"<{wrapper}>|</{prefix}(?:invoke|parameter)>",
        frame=rf"</{wrapper}>",
    )


read_minimax = _reader("", "minimax:tool_call", "minimax:tool_call")
read_dsml = _reader("｜DSML｜", "｜DSML｜(?:function|tool)_calls", "｜DSML｜function_calls", typed=True)
_read_atem = _reader("atem:", "atem:function_calls", "atem:function_calls")

_HEADER = re.compile(r"\s*+(?:<\|start\|>assistant)?+\s*+(?:to=([^\s<]++))?+\s*+")


def read_muse(text: str) -> Reply:
    """Read the messages of one turn, each with its recipient."""
    if "<|message|>" not in text:
        return _read_atem(text)
    content: list[str] = []
    thinking: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    for part in text.split("<|eom|>"):
        header, mark, body = part.partition("<|message|>")
        found = _HEADER.fullmatch(header)
        recipient = found[1] if found else None
        if not mark or found is None:
            content.append(part)
            if part.strip():
                problems.append(f"the header {header[:60]!r} is not one of to=self, to=user and to=NAME")
            continue
        if recipient == "self":
            thinking.append(body)
            continue
        reply = _read_atem(body)
        if recipient not in (None, "user") and not reply.calls:
            content.append(header)
            problems.append(f"the message to={recipient:.40} holds no call")
        content.append(reply.message.text)
        thinking.append(reply.message.thinking)
        calls += reply.calls
        problems += reply.problems
    message = Message("assistant", joined(content), tuple(calls), joined(thinking))
    return Reply(message, None, tuple(dict.fromkeys(problems)))


_CPM_EXAMPLE = '<function name="NAME"><param name="KEY">value</param></function>'
_CPM_PARAMETER = re.compile(r'\s*+<param name="([^"<>]+)">')


def _read_minicpm(body: str) -> list[ToolCall]:
    name, quote, inside = body.partition('">')
    if not quote:
        return [ToolCall(read_name(name)[0], problem='its name is not closed with "> in <function name="…">')]
    call = tagged_call(name, inside, _CPM_PARAMETER, "</param>")
    values = {key: _without_cdata(value) for key, value in call.arguments.items()}
    return [replace(call, arguments=values)]


def _without_cdata(value: object) -> object:
    if isinstance(value, str) and value.startswith("<![CDATA[") and value.endswith("]]>"):
        return value[len("<![CDATA[") : -len("]]>")]
    return value


read_minicpm = Turn(
    Block('<function name="', "</function>", _read_minicpm, _CPM_EXAMPLE),
    stray="</function>|</param>",
)
