"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true],nested:{a:null}}<tool_call|>`.

Strings stand between `<|"|>` tokens and have no escapes; keys may stand between them too.
"""

from __future__ import annotations

import re

from agentfly.templates.readers.calls import DEPTH, read_json, read_name
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import ToolCall

_QUOTE = '<|"|>'
_EXAMPLE = '<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>'
_SPACE = re.compile(r"\s*+")
_PLAIN_END = re.compile(r"[,\]}]")
_PLAIN = {"None": None, "True": True, "False": False}


class _Values:
    """Values read from left to right; ValueError says what is wrong."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read_object(self, depth: int = 0) -> dict[str, object]:
        self._expect("{")
        values: dict[str, object] = {}
        while not self._take("}"):
            if values:
                self._expect(",", "',' or '}'")
            key = self._quoted() if self._take(_QUOTE) else self._until(":").strip()
            self._expect(":")
            if key in values:
                raise ValueError(f"its argument {key:.40} is given twice")
            values[key] = self._value(depth + 1)
        return values

    def _list(self, depth: int) -> list[object]:
        self._expect("[")
        values: list[object] = []
        while not self._take("]"):
            if values:
                self._expect(",", "',' or ']'")
            values.append(self._value(depth + 1))
        return values

    def _value(self, depth: int) -> object:
        if depth > DEPTH:
            raise ValueError(f"it is nested more than {DEPTH} deep")
        if self._take(_QUOTE):
            return self._quoted()
        if self.text.startswith("{", self.at):
            return self.read_object(depth)
        if self.text.startswith("[", self.at):
            return self._list(depth)
        end = _PLAIN_END.search(self.text, self.at)
        plain = self.text[self.at : end.start() if end else len(self.text)].strip()
        if plain not in _PLAIN:
            value, stop, wrong = read_json(plain)
            if wrong or plain[stop:].strip():
                raise ValueError(f"the value {plain[:40]!r} is neither JSON nor text between {_QUOTE}")
        else:
            value = _PLAIN[plain]
        self.at = end.start() if end else len(self.text)
        return value

    def _quoted(self) -> str:
        return self._until(_QUOTE, skip=True)

    def _until(self, mark: str, skip: bool = False) -> str:
        end = self.text.find(mark, self.at)
        if end < 0:
            raise ValueError(f"{mark} is missing after {self.text[self.at : self.at + 40]!r}")
        found = self.text[self.at : end]
        self.at = end + (len(mark) if skip else 0)
        return found

    def _take(self, mark: str) -> bool:
        if space := _SPACE.match(self.text, self.at):
            self.at = space.end()
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) if found else 0
        return found

    def _expect(self, mark: str, what: str = "") -> None:
        if not self._take(mark):
            there = f"{self.text[self.at : self.at + 16]!r} stands there" if self.at < len(self.text) else "it ends"
            raise ValueError(f"{what or repr(mark)} is missing at character {self.at}, where {there}")


def _read(body: str) -> list[ToolCall]:
    head, brace, rest = body.partition("{")
    name, problem = read_name(head.strip().removeprefix("call:"))
    if not problem and not head.strip().startswith("call:"):
        problem = "it does not begin with call:NAME"
    if problem:
        return [ToolCall(name, problem=problem)]
    values = _Values(brace + rest)
    try:
        arguments = values.read_object()
    except ValueError as error:
        return [ToolCall(name, problem=f"its arguments cannot be read: {error}")]
    if after := values.text[values.at :].strip():
        return [ToolCall(name, arguments, problem=f"there is more after its arguments: {after[:40]!r}")]
    return [ToolCall(name, arguments)]


read = Turn(
    Block(r"<\|tool_call>", "<tool_call|>", _read, _EXAMPLE),
    thinking=("<|channel>thought", "<channel|>"),
    stray=r"<tool_call\|>",
)
