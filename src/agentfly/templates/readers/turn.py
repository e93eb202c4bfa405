"""Reading one turn: thinking, calls, and the text around them.

A turn is text with marked stretches in it: `text <think>…</think> text <tool_call>…</tool_call> text`. It is
read once, from left to right. What a mark means depends on what is open when it comes, so a call inside
thinking is thinking, and a mark inside a JSON string is text. No text is lost: what stands in no thinking and
no call is content, and a call that could not be read keeps its text. Time is linear in the turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentfly.templates.readers.calls import read_json, with_problem
from agentfly.types import MAX_CALLS, Message, Reply, ToolCall

LOOKAHEAD = 16_384
"""How far a JSON value is followed past a mark that may stand inside one of its strings."""

THINK = ("<think>", "</think>")

ReadBlock = Callable[[str], Sequence[ToolCall] | None]
"""Reads the text of one block: at least one call, or None when it is no call after all and stays content."""


class Block:
    """A marked stretch of a turn that holds a call, or several."""

    def __init__(self, opening: str, closing: str | None, read: ReadBlock, example: str = "") -> None:
        """`opening` is a pattern without groups.

        An empty `closing`: the block runs to the next opening or the end. None: to the end of the turn.
        """
        self.opening = opening
        self.closing = closing
        self.example = example
        """A rightly written call, shown to the model with every problem."""
        self._read = read
        ends = f"{re.escape(closing)}()|{opening}" if closing else opening
        self._end = re.compile(r"(?!)" if closing is None else ends, re.MULTILINE)

    def read(self, text: str, opened: re.Match[str]) -> tuple[list[ToolCall] | None, int]:
        """Read the block that `opened` opens: its calls, and where the turn goes on."""
        start = opened.end()
        end = self._end.search(text, max(start, opened.start() + 1))
        body = text[start : end.start() if end else len(text)]
        calls = self._read(body)
        if end and calls and calls[-1].problem and read_json(body)[2].startswith("Unterminated string"):
            # If the mark stands inside a JSON string, the value reads well when it is followed past the mark.
            _, length, wrong = read_json(text[start : start + LOOKAHEAD])
            if not wrong and length > len(body):
                end = self._end.search(text, start + length)
                body = text[start : end.start() if end else len(text)]
                calls = self._read(body)
        closed = end is not None and end.lastindex is not None
        after = end.end() if end and closed else start + len(body)
        return (None if calls is None else self._explained(calls, body, closed)), after

    def _explained(self, calls: Sequence[ToolCall], body: str, closed: bool) -> list[ToolCall]:
        explained = list(calls)
        if self.closing and not closed:
            explained[-1] = with_problem(explained[-1], f"it is not closed with {self.closing}")
        for index, call in enumerate(explained):
            if call.problem:
                explained[index] = replace(call, problem=f"{call.problem}; write {self.example}", raw=body)
        return explained


class Turn:
    """A reader of turns in which calls stand in blocks."""

    def __init__(
        self,
        *blocks: Block,
        thinking: tuple[str, str] = THINK,
        stray: str = "",
        frame: str = "",
        hint: str = "<",
    ) -> None:
        """`stray` and `frame` are patterns without groups.

        `stray`: marks that mean something only in a block; alone they are a problem, and stay in the content.
        `frame`: marks around the content, which are dropped.
        `hint`: a turn that holds none of these characters is plain text.
        """
        self._opening, self._closing = thinking
        self._example = blocks[0].example if blocks else ""
        self._hint = hint
        self._kinds: list[Block | str] = ["thinking", *blocks, "stray", "frame"]
        patterns = [re.escape(self._opening), *(block.opening for block in blocks)]
        patterns += [re.escape(self._closing) + (stray and f"|{stray}"), *([frame] if frame else [])]
        # Which kind matched is told by an empty group behind it: a group around it would hide from `re` the
        # character that all marks begin with, and with it the fast search.
        self._marks = re.compile("|".join(f"(?:{pattern})()" for pattern in patterns), re.MULTILINE)

    def __call__(self, text: str) -> Reply:
        if not any(map(text.__contains__, self._hint)):
            return Reply(Message("assistant", text))
        outside: list[str] = []
        thinking: list[str] = []
        calls: list[ToolCall] = []
        problems: list[str] = []
        at = kept = 0  # what stands before this is in one of the lists
        while found := self._marks.search(text, at):
            kind, at = self._kinds[(found.lastindex or 1) - 1], found.end()
            if kind == "stray":
                problems.append(self._alone(found[0]))
                continue
            if isinstance(kind, Block):
                read, at = kind.read(text, found)
                if read is None:
                    continue
                calls += read
            outside.append(text[kept : found.start()])
            if kind == "thinking":
                at = self._think(text, at, thinking, problems)
            kept = at
            if len(calls) > MAX_CALLS:
                problems.append(f"there are more than {MAX_CALLS} calls; what follows them was not read")
                break
        content = joined([*outside, text[kept:]]) if kept else text
        message = Message("assistant", content, tuple(calls), joined(thinking))
        return Reply(message, None, tuple(dict.fromkeys(problems)))

    def _think(self, text: str, start: int, thinking: list[str], problems: list[str]) -> int:
        """Read thinking from `start` on; where the turn goes on."""
        end = text.find(self._closing, start)
        if end < 0:
            problems.append(f"the thinking is not closed; write {self._closing} before an answer or a call")
            thinking.append(text[start:])
            return len(text)
        thinking.append(text[start:end])
        return end + len(self._closing)

    def _alone(self, mark: str) -> str:
        right = f"{self._opening}…{self._closing}" if mark == self._closing else self._example
        return f"{mark} stands alone; write {right}"


def joined(stretches: Sequence[str]) -> str:
    """Join the text between marks; the line breaks that set a mark off belong to the mark."""
    return "\n".join(stretch.strip("\n") for stretch in stretches if stretch.strip())
