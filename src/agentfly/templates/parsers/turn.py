"""Parsing of one assistant turn into thinking, tool calls and content.

A turn is text with delimited blocks: `text <think>…</think> text <tool_call>…</tool_call> text`. It is scanned once,
left to right. The meaning of a marker depends on the block that is open: a call inside thinking is thinking, and a
marker inside a JSON string is text. No text is lost: everything outside thinking and calls is content, and a call that
cannot be parsed keeps its text. Time is linear in the length of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentfly.templates.parsers.calls import add_problem, parse_json
from agentfly.types import MAX_CALLS, Message, Reply, ToolCall

LOOKAHEAD = 16_384
"""Characters by which a JSON value is followed past a marker that may be inside one of its strings."""

THINK = ("<think>", "</think>")

BlockBodyParser = Callable[[str], Sequence[ToolCall] | None]
"""Parses the text of one block into at least one call; None if it is not a call and stays content."""


class CallBlock:
    """A delimited part of a turn that holds one or more calls."""

    def __init__(self, opening: str, closing: str | None, parse_body: BlockBodyParser, example: str = "") -> None:
        """`opening` is a pattern without groups.

        `closing` "": the block ends at the next opening or at the end of the turn. None: at the end of the turn.
        """
        self.opening = opening
        self.closing = closing
        self.example = example
        """A correct call, shown to the model with every problem."""
        self._parse_body = parse_body
        ends = f"{re.escape(closing)}()|{opening}" if closing else opening
        self._end = re.compile(r"(?!)" if closing is None else ends, re.MULTILINE)

    def parse(self, text: str, opened: re.Match[str]) -> tuple[list[ToolCall] | None, int]:
        """Parse the block that starts at `opened`. Return its calls and the index at which the turn continues."""
        start = opened.end()
        end = self._end.search(text, max(start, opened.start() + 1))
        body = text[start : end.start() if end else len(text)]
        parsed = self._parse_body(body)
        if end and parsed and parsed[-1].problem and parse_json(body)[2].startswith("Unterminated string"):
            # The end marker may be inside a JSON string: then the value is valid when followed past the marker.
            _, length, error = parse_json(text[start : start + LOOKAHEAD])
            if not error and length > len(body):
                end = self._end.search(text, start + length)
                body = text[start : end.start() if end else len(text)]
                parsed = self._parse_body(body)
        closed = end is not None and end.lastindex is not None
        next_index = end.end() if end and closed else start + len(body)
        if parsed is None:
            return None, next_index
        calls = list(parsed)
        if self.closing and not closed:
            calls[-1] = add_problem(calls[-1], f"it is not closed with {self.closing}")
        for index, call in enumerate(calls):
            if call.problem:
                calls[index] = replace(call, problem=f"{call.problem}; write {self.example}", raw=body)
        return calls, next_index


class BlockParser:
    """A parser for turns whose calls are delimited blocks."""

    def __init__(
        self, *blocks: CallBlock, thinking: tuple[str, str] = THINK, stray: str = "", frame: str = "", hint: str = "<"
    ) -> None:
        """`stray` and `frame` are patterns without groups.

        `stray`: markers that are valid only inside a block. Outside they are reported and stay in the content.
        `frame`: markers around the content, which are dropped.
        `hint`: a turn without any of these characters is plain text.
        """
        self._opening, self._closing = thinking
        self._example = blocks[0].example if blocks else ""
        self._hint = hint
        self._kinds: list[CallBlock | str] = ["thinking", *blocks, "stray", "frame"]
        patterns = [re.escape(self._opening), *(block.opening for block in blocks)]
        patterns += [re.escape(self._closing) + (stray and f"|{stray}"), *([frame] if frame else [])]
        # An empty group after each alternative identifies it. A group around it would hide the markers' common first
        # character from `re` and disable its literal-prefix search.
        self._markers = re.compile("|".join(f"(?:{pattern})()" for pattern in patterns), re.MULTILINE)

    def __call__(self, text: str) -> Reply:
        if not any(map(text.__contains__, self._hint)):
            return Reply(Message("assistant", text))
        content: list[str] = []
        thinking: list[str] = []
        calls: list[ToolCall] = []
        problems: list[str] = []
        at = consumed = 0  # text[:consumed] is in one of the lists
        while marker := self._markers.search(text, at):
            kind = self._kinds[(marker.lastindex or 1) - 1]
            at = marker.end()
            if kind == "stray":
                example = f"{self._opening}…{self._closing}" if marker[0] == self._closing else self._example
                problems.append(f"{marker[0]} stands alone; write {example}")
                continue
            if isinstance(kind, CallBlock):
                parsed, at = kind.parse(text, marker)
                if parsed is None:
                    continue
                calls += parsed
            content.append(text[consumed : marker.start()])
            if kind == "thinking":
                end = text.find(self._closing, at)
                if end < 0:
                    problems.append(f"the thinking is not closed; write {self._closing} before an answer or a call")
                thinking.append(text[at:end] if end >= 0 else text[at:])
                at = end + len(self._closing) if end >= 0 else len(text)
            consumed = at
            if len(calls) > MAX_CALLS:
                problems.append(f"there are more than {MAX_CALLS} calls; what follows them was not read")
                break
        return make_reply([*content, text[consumed:]] if consumed else text, thinking, calls, problems)


def make_reply(
    content: str | Sequence[str], thinking: Sequence[str], calls: Sequence[ToolCall], problems: Sequence[str]
) -> Reply:
    """Build the reply of a turn from its parts; each problem is reported once."""
    text = content if isinstance(content, str) else join_text(content)
    message = Message("assistant", text, tuple(calls), join_text(thinking) if thinking else "")
    return Reply(message, None, tuple(dict.fromkeys(problems)) if problems else ())


def join_text(texts: Sequence[str]) -> str:
    """Join the text between markers; line breaks next to a marker belong to the marker."""
    return "\n".join([text.strip("\n") for text in texts if text.strip()])


_parse_thinking = BlockParser()


def parse_plain(text: str) -> Reply:
    """Parse a turn without a call syntax: everything is content, except thinking at its start."""
    return _parse_thinking(text) if text.lstrip().startswith(THINK[0]) else Reply(Message("assistant", text))
