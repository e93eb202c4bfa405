"""Parsers for calls written as XML-like elements. Values have no escapes: a value ends at its first closing tag.

qwen-xml        <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>
glm             <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>
minimax-m2      <minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke>…
deepseek-dsml   the same with the prefix `｜DSML｜`; every value is declared as a string or as JSON
muse            the same with the prefix `atem:`; every message has a recipient (`to=NAME`, `to=self`, `to=user`)
minicpm         <function name="NAME"><param name="KEY">value</param></function>; values may be CDATA
kimi-k3         <|open|>call tool="NAME" index="1"<|sep|>…; strings are written as is, other values as JSON
minimax-m3      nested elements; every tag follows the token `]<]minimax[>[`, list elements are called `item`
"""

from __future__ import annotations

import html
import re
from dataclasses import replace

from agentfly.templates.parsers.calls import MAX_DEPTH, add_problem, parse_name, parse_tagged_call
from agentfly.templates.parsers.turn import BlockParser, CallBlock, make_reply
from agentfly.types import Reply, ToolCall

_QWEN_EXAMPLE = "<function=NAME><parameter=KEY>value</parameter></function>"
_QWEN_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_QWEN_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")


def _parse_qwen_block(body: str) -> list[ToolCall]:
    function = _QWEN_FUNCTION.match(body)
    if function is None:
        return [ToolCall("", problem="it does not begin with <function=NAME>")]
    inside, closing, surplus = body[function.end() :].rpartition("</function>")
    if not closing:
        return [add_problem(_parse_qwen_arguments(function[1], surplus), "its function is not closed with </function>")]
    call = _parse_qwen_arguments(function[1], inside)
    surplus = surplus.strip()
    return [add_problem(call, f"there is more after </function>: {surplus[:40]!r}") if surplus else call]


def _parse_qwen_function(body: str) -> list[ToolCall]:
    name, _, inside = body.partition(">")
    return [_parse_qwen_arguments(name, inside)]


def _parse_qwen_arguments(name: str, inside: str) -> ToolCall:
    # A line break next to a value belongs to its tags: the opening tag matches one, the other is removed here.
    return parse_tagged_call(name, inside.replace("\n</parameter>", "</parameter>"), _QWEN_PARAMETER, "</parameter>")


parse_qwen_xml = BlockParser(
    CallBlock("<tool_call>", "</tool_call>", _parse_qwen_block, f"<tool_call>{_QWEN_EXAMPLE}</tool_call>"),
    CallBlock("<function=", "</function>", _parse_qwen_function, _QWEN_EXAMPLE),
    stray="</tool_call>|</function>",
)


_GLM_EXAMPLE = "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>")


def _parse_glm_call(body: str) -> list[ToolCall]:
    name, mark, arguments = body.partition("<arg_key>")
    return [parse_tagged_call(name, mark + arguments, _GLM_ARGUMENT, "</arg_value>")]


parse_glm = BlockParser(CallBlock("<tool_call>", "</tool_call>", _parse_glm_call, _GLM_EXAMPLE), stray="</tool_call>")


def _make_invoke_parser(prefix: str, wrapper: str, example: str, *, typed: bool = False) -> BlockParser:
    """Build a parser for `invoke` elements whose tags have this prefix, inside elements that match `wrapper`."""
    closing = f"</{prefix}parameter>"
    string = ' string="(true|false)"' if typed else ""
    parameter = re.compile(rf'\s*+<{prefix}parameter name="([^"<>]+)"{string}>')

    def parse_call(body: str) -> list[ToolCall]:
        name, quote, inside = body.partition('">')
        if not quote:
            return [
                ToolCall(parse_name(name)[0], problem=f'its name is not closed with "> in <{prefix}invoke name="…">')
            ]
        return [parse_tagged_call(name, inside, parameter, closing, text="true" if typed else "")]

    declared_type = ' string="true"' if typed else ""
    value = f'<{prefix}parameter name="KEY"{declared_type}>value{closing}'
    call = f'<{prefix}invoke name="NAME">{value}</{prefix}invoke>'
    return BlockParser(
        CallBlock(
            rf'(?:<{wrapper}>\s*+)?<{prefix}invoke name="',
            f"</{prefix}invoke>",
            parse_call,
            f"<{example}>{call}</{example}>",
        ),
        stray=rf"<{wrapper}>|</{prefix}(?:invoke|parameter)>",
        frame=rf"</{wrapper}>",
    )


parse_minimax_m2 = _make_invoke_parser("", "minimax:tool_call", "minimax:tool_call")
parse_deepseek_dsml = _make_invoke_parser(
    "｜DSML｜", "｜DSML｜(?:function|tool)_calls", "｜DSML｜function_calls", typed=True
)
_parse_atem = _make_invoke_parser("atem:", "atem:function_calls", "atem:function_calls")

_MUSE_HEADER = re.compile(r"\s*+(?:<\|start\|>assistant)?+\s*+(?:to=([^\s<]++))?+\s*+")


def parse_muse(text: str) -> Reply:
    """Parse the messages of one turn, each with its recipient."""
    if "<|message|>" not in text:
        return _parse_atem(text)
    content: list[str] = []
    thinking: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    for message in text.split("<|eom|>"):
        header, mark, body = message.partition("<|message|>")
        header_match = _MUSE_HEADER.fullmatch(header)
        recipient = header_match[1] if header_match else None
        if not mark or header_match is None:
            content.append(message)
            if message.strip():
                problems.append(f"the header {header[:60]!r} is not one of to=self, to=user and to=NAME")
            continue
        if recipient == "self":
            thinking.append(body)
            continue
        reply = _parse_atem(body)
        if recipient not in (None, "user") and not reply.calls:
            content.append(header)
            problems.append(f"the message to={recipient:.40} holds no call")
        content.append(reply.message.text)
        thinking.append(reply.message.thinking)
        calls += reply.calls
        problems += reply.problems
    return make_reply(content, thinking, calls, problems)


_MINICPM_EXAMPLE = '<function name="NAME"><param name="KEY">value</param></function>'
_MINICPM_PARAMETER = re.compile(r'\s*+<param name="([^"<>]+)">')


def _parse_minicpm_call(body: str) -> list[ToolCall]:
    name, quote, inside = body.partition('">')
    if not quote:
        return [ToolCall(parse_name(name)[0], problem='its name is not closed with "> in <function name="…">')]
    call = parse_tagged_call(name, inside, _MINICPM_PARAMETER, "</param>")
    values = dict(call.arguments)
    for key, value in values.items():
        if isinstance(value, str) and value.startswith("<![CDATA[") and value.endswith("]]>"):
            values[key] = value[len("<![CDATA[") : -len("]]>")]
    return [replace(call, arguments=values)]


parse_minicpm = BlockParser(
    CallBlock('<function name="', "</function>", _parse_minicpm_call, _MINICPM_EXAMPLE), stray="</function>|</param>"
)


_KIMI_K3_EXAMPLE = (
    '<|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="KEY" type="string"<|sep|>value'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)
_KIMI_K3_HEAD = re.compile(r'([^"<]*)"(?: index="\d*")?<\|sep\|>')
_KIMI_K3_ARGUMENT = re.compile(r'\s*+<\|open\|>argument key="([^"<]*)" type="(\w*)"<\|sep\|>')


def _parse_kimi_k3_call(body: str) -> list[ToolCall]:
    head = _KIMI_K3_HEAD.match(body)
    if head is None:
        return [ToolCall("", problem='its tag is not <|open|>call tool="NAME" index="1"<|sep|>')]
    inside = body[head.end() :]
    name = html.unescape(head[1])
    return [parse_tagged_call(name, inside, _KIMI_K3_ARGUMENT, "<|close|>argument<|sep|>", text="string")]


parse_kimi_k3 = BlockParser(
    CallBlock(r'<\|open\|>call tool="', "<|close|>call<|sep|>", _parse_kimi_k3_call, _KIMI_K3_EXAMPLE),
    thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    stray=r"<\|close\|>(?:call|argument)<\|sep\|>",
    frame=r"<\|(?:open|close)\|>(?:response|tools|message)<\|sep\|>",
)


_M3_TOKEN = "]<]minimax[>["
_M3_PREFIX = re.escape(_M3_TOKEN)
_M3_EXAMPLE = "".join(
    f"{_M3_TOKEN}{tag}"
    for tag in ("<tool_call>", '<invoke name="NAME">', "<KEY>value", "</KEY>", "</invoke>", "</tool_call>")
)
_M3_TAG = re.compile(r"<(/?)([^<>/]+)>")


class _Element:
    """An open or closed element of a MiniMax M3 call."""

    def __init__(self, name: str, text: str = "") -> None:
        self.name = name
        self.text = text
        self.children: list[_Element] = []

    def value(self) -> object:
        if not self.children:
            return self.text
        if all(child.name == "item" for child in self.children):
            return [child.value() for child in self.children]
        return {child.name: child.value() for child in self.children}


def _parse_m3_call(body: str) -> list[ToolCall]:
    name, quote, inside = body.partition('">')
    name, problem = parse_name(name)
    if problem or not quote:
        return [ToolCall(name, problem=problem or 'its name is not closed with "> in <invoke name="…">')]
    text, *tags = inside.split(_M3_TOKEN)
    open_elements = [_Element(name, text)]
    for tag in tags:
        tag_match = _M3_TAG.match(tag)
        if tag_match is None:
            return [ToolCall(name, problem=f"{tag[:40]!r} is not a tag")]
        tail = tag[tag_match.end() :]
        if not tag_match[1]:
            element = _Element(tag_match[2], tail)
            open_elements[-1].children.append(element)
            open_elements.append(element)
            if len(open_elements) > MAX_DEPTH:
                return [ToolCall(name, problem=f"it is nested more than {MAX_DEPTH} deep")]
            continue
        if len(open_elements) == 1 or open_elements[-1].name != tag_match[2]:
            return [ToolCall(name, problem=f"</{tag_match[2][:40]}> closes no element")]
        open_elements.pop()
        open_elements[-1].text += tail
    if len(open_elements) > 1:
        return [ToolCall(name, problem=f"its argument {open_elements[1].name[:40]} is not closed")]
    invoke = open_elements[0]
    keys = [child.name for child in invoke.children]
    arguments = {child.name: child.value() for child in invoke.children}
    if stray := _find_stray_text(invoke):
        return [ToolCall(name, arguments, problem=f"there is text that belongs to no argument: {stray[:40]!r}")]
    return [ToolCall(name, arguments, problem="" if len(set(keys)) == len(keys) else "an argument is given twice")]


def _find_stray_text(element: _Element, top: bool = True) -> str:
    """Return text next to the children of an element; "" if there is none."""
    text = element.text.strip() if top or element.children else ""
    return text or next(filter(None, (_find_stray_text(child, top=False) for child in element.children)), "")


_parse_m3_turn = BlockParser(
    CallBlock(
        rf'(?:{_M3_PREFIX}<tool_call>\s*+)?{_M3_PREFIX}<invoke name="',
        f"{_M3_TOKEN}</invoke>",
        _parse_m3_call,
        _M3_EXAMPLE,
    ),
    thinking=("<mm:think>", "</mm:think>"),
    stray=rf"{_M3_PREFIX}<tool_call>|{_M3_PREFIX}</invoke>",
    frame=f"{_M3_PREFIX}</tool_call>",
    hint="<]",
)


def parse_minimax_m3(text: str) -> Reply:
    """Parse a turn. A turn without thinking begins with the end marker of thinking."""
    return _parse_m3_turn(text.removeprefix("</mm:think>"))
