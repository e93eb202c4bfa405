"""Parsers for Gemma 2 and 3 (`gemma`), Gemma 4 (`gemma-4`) and FunctionGemma (`functiongemma`).

Gemma 2 and 3 have no call markers; the prompt defines the form. The parser accepts a `tool_code` fence with Python
calls, a `json` fence with a call object, or either without a fence. Other fences, and JSON without the keys of a call,
are content.

    Gemma 4: <|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true],nested:{a:null}}<tool_call|>

    FunctionGemma: <start_function_call>call:NAME{key:<escape>text<escape>,other:[1,true]}<end_function_call>

Strings are delimited by `<|"|>` or `<escape>` tokens and have no escapes; keys may be delimited by them too.
"""

from __future__ import annotations

import re
from functools import partial

from agentfly.templates.parsers.calls import MAX_DEPTH, parse_json, parse_name
from agentfly.templates.parsers.json_calls import LLAMA_EXAMPLE, LLAMA_OBJECT, parse_llama_if_call
from agentfly.templates.parsers.pythonic import FENCE, PYTHON_EXAMPLE, PYTHON_LIST, parse_python_calls
from agentfly.templates.parsers.turn import BlockParser, CallBlock
from agentfly.types import ToolCall

parse_gemma = BlockParser(
    CallBlock("```tool_code", "```", parse_python_calls, "```tool_code\nNAME(key=1)\n```"),
    CallBlock("```json", "```", parse_llama_if_call, f"```json\n{LLAMA_EXAMPLE}\n```"),
    FENCE,
    CallBlock(PYTHON_LIST, None, parse_python_calls, PYTHON_EXAMPLE),
    CallBlock(LLAMA_OBJECT, "", parse_llama_if_call, LLAMA_EXAMPLE),
    hint="`[{<",
)

_GEMMA4_EXAMPLE = '<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>'
_SPACE = re.compile(r"\s*+")
_VALUE_END = re.compile(r"[,\]}]")
_PYTHON_CONSTANTS = {"None": None, "True": True, "False": False}


class _ValueParser:
    """Recursive-descent parser for the arguments of Gemma 4; raises ValueError on malformed text."""

    def __init__(self, text: str, quote: str) -> None:
        """`quote`: the token on both sides of a string."""
        self.text = text
        self.quote = quote
        self.at = 0

    def parse_object(self, depth: int = 0) -> dict[str, object]:
        self._expect("{")
        values: dict[str, object] = {}
        while not self._take("}"):
            if values:
                self._expect(",", "',' or '}'")
            key = self._parse_quoted_text() if self._take(self.quote) else self._read_until(":").strip()
            self._expect(":")
            if key in values:
                raise ValueError(f"its argument {key:.40} is given twice")
            values[key] = self._parse_value(depth + 1)
        return values

    def _parse_list(self, depth: int) -> list[object]:
        self._expect("[")
        values: list[object] = []
        while not self._take("]"):
            if values:
                self._expect(",", "',' or ']'")
            values.append(self._parse_value(depth + 1))
        return values

    def _parse_value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if self._take(self.quote):
            return self._parse_quoted_text()
        if self.text.startswith("{", self.at):
            return self.parse_object(depth)
        if self.text.startswith("[", self.at):
            return self._parse_list(depth)
        end = _VALUE_END.search(self.text, self.at)
        plain = self.text[self.at : end.start() if end else len(self.text)].strip()
        if plain not in _PYTHON_CONSTANTS:
            value, stop, error = parse_json(plain)
            if error or plain[stop:].strip():
                raise ValueError(f"the value {plain[:40]!r} is neither JSON nor text between {self.quote}")
        else:
            value = _PYTHON_CONSTANTS[plain]
        self.at = end.start() if end else len(self.text)
        return value

    def _parse_quoted_text(self) -> str:
        return self._read_until(self.quote, skip=True)

    def _read_until(self, mark: str, skip: bool = False) -> str:
        end = self.text.find(mark, self.at)
        if end < 0:
            raise ValueError(f"{mark} is missing after {self.text[self.at : self.at + 40]!r}")
        text = self.text[self.at : end]
        self.at = end + (len(mark) if skip else 0)
        return text

    def _take(self, mark: str) -> bool:
        if space := _SPACE.match(self.text, self.at):
            self.at = space.end()
        is_next = self.text.startswith(mark, self.at)
        self.at += len(mark) if is_next else 0
        return is_next

    def _expect(self, mark: str, what: str = "") -> None:
        if not self._take(mark):
            position = f"{self.text[self.at : self.at + 16]!r} stands there" if self.at < len(self.text) else "it ends"
            raise ValueError(f"{what or repr(mark)} is missing at character {self.at}, where {position}")


def _parse_gemma_call(body: str, quote: str) -> list[ToolCall]:
    head, brace, fields = body.partition("{")
    name, problem = parse_name(head.strip().removeprefix("call:"))
    if not problem and not head.strip().startswith("call:"):
        problem = "it does not begin with call:NAME"
    if problem:
        return [ToolCall(name, problem=problem)]
    parser = _ValueParser(brace + fields, quote)
    try:
        arguments = parser.parse_object()
    except ValueError as error:
        return [ToolCall(name, problem=f"its arguments cannot be read: {error}")]
    if surplus := parser.text[parser.at :].strip():
        return [ToolCall(name, arguments, problem=f"there is more after its arguments: {surplus[:40]!r}")]
    return [ToolCall(name, arguments)]


parse_gemma4 = BlockParser(
    CallBlock(r"<\|tool_call>", "<tool_call|>", partial(_parse_gemma_call, quote='<|"|>'), _GEMMA4_EXAMPLE),
    thinking=("<|channel>thought", "<channel|>"),
    stray=r"<tool_call\|>",
)

parse_functiongemma = BlockParser(
    CallBlock(
        "<start_function_call>",
        "<end_function_call>",
        partial(_parse_gemma_call, quote="<escape>"),
        "<start_function_call>call:NAME{key:<escape>text<escape>,other:1}<end_function_call>",
    ),
    stray="<end_function_call>",
)
