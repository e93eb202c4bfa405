"""MiniMax M3: `invoke` elements whose arguments are elements too, nested as the values are.

Every tag follows the token `]<]minimax[>[`: `<invoke name="NAME">`, `<KEY>value`, `</KEY>`. The elements of a list are
called `item`. Values are text; an empty element is an empty string.
"""

from __future__ import annotations

import re

from agentfly.templates.readers.calls import DEPTH, read_name
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import Reply, ToolCall

_NS = "]<]minimax[>["
_PREFIX = re.escape(_NS)
_EXAMPLE = f'{_NS}<tool_call>{_NS}<invoke name="NAME">{_NS}<KEY>value{_NS}</KEY>{_NS}</invoke>{_NS}</tool_call>'
_TAG = re.compile(r"<(/?)([^<>/]+)>")


class _Element:
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


def _read(body: str) -> list[ToolCall]:
    name, quote, inside = body.partition('">')
    name, problem = read_name(name)
    if problem or not quote:
        return [ToolCall(name, problem=problem or 'its name is not closed with "> in <invoke name="…">')]
    text, *tags = inside.split(_NS)
    open_elements = [_Element(name, text)]
    for tag in tags:
        found = _TAG.match(tag)
        if found is None:
            return [ToolCall(name, problem=f"{tag[:40]!r} is not a tag")]
        after = tag[found.end() :]
        if not found[1]:
            element = _Element(found[2], after)
            open_elements[-1].children.append(element)
            open_elements.append(element)
            if len(open_elements) > DEPTH:
                return [ToolCall(name, problem=f"it is nested more than {DEPTH} deep")]
            continue
        if len(open_elements) == 1 or open_elements[-1].name != found[2]:
            return [ToolCall(name, problem=f"</{found[2][:40]}> closes no element")]
        open_elements.pop()
        open_elements[-1].text += after
    if len(open_elements) > 1:
        return [ToolCall(name, problem=f"its argument {open_elements[1].name[:40]} is not closed")]
    invoke = open_elements[0]
    keys = [child.name for child in invoke.children]
    arguments = {child.name: child.value() for child in invoke.children}
    if stray := _stray_text(invoke):
        return [ToolCall(name, arguments, problem=f"there is text that belongs to no argument: {stray[:40]!r}")]
    return [ToolCall(name, arguments, problem="" if len(set(keys)) == len(keys) else "an argument is given twice")]


def _stray_text(element: _Element, top: bool = True) -> str:
    """Text beside the children of an element."""
    beside = element.text.strip() if top or element.children else ""
    return beside or next((found for child in element.children if (found := _stray_text(child, top=False))), "")


_turn = Turn(
    Block(rf'(?:{_PREFIX}<tool_call>\s*+)?{_PREFIX}<invoke name="', f"{_NS}</invoke>", _read, _EXAMPLE),
    thinking=("<mm:think>", "</mm:think>"),
    stray=rf"{_PREFIX}<tool_call>|{_PREFIX}</invoke>",
    frame=f"{_PREFIX}</tool_call>",
    hint="<]",
)


def read(text: str) -> Reply:
    """Read a turn. One without thinking begins with the end of thinking."""
    return _turn(text.removeprefix("</mm:think>"))
