"""LFM2: `<|tool_call_start|>[NAME(key="text", other=1)]<|tool_call_end|>`.

Python calls, in which `true`, `false` and `null` stand for the constants and a string may span lines: the templates
write objects as JSON, and some of them line breaks as they are.
"""

from __future__ import annotations

import re

from agentfly.templates.readers.llama_pythonic import EXAMPLE, read_python
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import ToolCall

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_CONSTANTS = {"true": True, "false": False, "null": None}
_PIECE = re.compile(r"""\\.|['"\n\r]""", re.DOTALL)


def _read(body: str) -> list[ToolCall]:
    return read_python(_escape_breaks(body) if "\n" in body or "\r" in body else body, _CONSTANTS)


def _escape_breaks(source: str) -> str:
    """Write the line breaks inside string literals as escapes."""
    quote = ""

    def escape(found: re.Match[str]) -> str:
        nonlocal quote
        piece = found[0]
        if piece in ("\n", "\r"):
            return repr(piece)[1:-1] if quote else piece
        if piece in ("'", '"') and quote in ("", piece):
            quote = "" if quote else piece
        return piece

    return _PIECE.sub(escape, source)


read = Turn(Block(re.escape(_START), _END, _read, f"{_START}{EXAMPLE}{_END}"), stray=re.escape(_END))
