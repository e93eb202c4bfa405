"""DeepSeek: `<｜tool▁call▁begin｜>…<｜tool▁call▁end｜>`, all of them inside `<｜tool▁calls▁begin｜>` and its end.

V3 and R1 write `function<｜tool▁sep｜>NAME` and the arguments in a fence; V3.1 `NAME<｜tool▁sep｜>{…}`.
"""

from __future__ import annotations

from agentfly.templates.readers.calls import named_call, read_name
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import ToolCall

_SEPARATOR = "<｜tool▁sep｜>"
_CLOSING = "<｜tool▁call▁end｜>"
_EXAMPLE = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME{_SEPARATOR}{{…}}{_CLOSING}<｜tool▁calls▁end｜>"


def _read(body: str) -> list[ToolCall]:
    kind, separator, rest = body.partition(_SEPARATOR)
    if not separator:
        return [ToolCall(read_name(kind)[0], problem=f"it has no {_SEPARATOR}")]
    name, fence, arguments = rest.partition("```json")
    if not fence or "{" in name:
        return [named_call(kind, rest)]
    return [named_call(name, arguments.rstrip().removesuffix("```"))]


read = Turn(
    Block(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>", _CLOSING, _read, _EXAMPLE),
    stray=f"{_CLOSING}|<｜tool▁calls▁begin｜>|{_SEPARATOR}",
    frame="<｜tool▁calls▁end｜>",
)
