"""DeepSeek: `<｜tool▁call▁begin｜>…<｜tool▁call▁end｜>`, all inside `<｜tool▁calls▁begin｜>` and its end.

V3 and R1 write `function<｜tool▁sep｜>NAME` and the arguments in a fence; V3.1 `NAME<｜tool▁sep｜>{…}`.
"""

from __future__ import annotations

from agentfly.templates.readers.calls import named_call, read_name, with_problem
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
    call = named_call(name, arguments.rstrip().removesuffix("```"))
    wrong = f"before {_SEPARATOR} stands {kind.strip()[:40]!r}, not 'function'"
    return [call if kind.strip() == "function" else with_problem(call, wrong)]


read = Turn(
    Block(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>", _CLOSING, _read, _EXAMPLE),
    stray=f"{_CLOSING}|<｜tool▁calls▁begin｜>|{_SEPARATOR}",
    frame="<｜tool▁calls▁end｜>",
)
