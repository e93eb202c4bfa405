"""A chat format in a few lines of text, for models that come without a template or with a poor one.

A format is written out as Jinja, and that Jinja is what runs: a format has no path of its own through the house.

    ChatFormat(
        name="plain-turns",
        user="<|user|>{content}<|end|>",
        assistant="<|bot|>{content}<|end|>",
        opening="<|bot|>",
        close=("<|end|>",),
    )
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from agentfly.errors import ConfigError
from agentfly.templates.readers import READERS
from agentfly.types import ROLES, Role

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_NEEDS = {
    "user": ("content",),
    "assistant": ("content",),
    "system": ("content",),
    "tool": ("content",),
    "tool_group": ("answers",),
    "tools": ("tools",),
    "tool_line": ("tool",),
    "call": ("name", "arguments"),
    "thinking": ("thinking",),
}
"""The placeholders each text must hold, once each."""
_MAY = {"tool": ("name", "id"), "call": ("id",)}
"""The placeholders a text may hold besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """How a conversation is written for one family of models. `{content}` and the like are filled in."""

    name: str
    """What `template=` says to choose it."""
    user: str
    """A user turn, around `{content}`."""
    assistant: str
    """A turn of the model, around `{content}`: thinking, then text, then calls."""
    opening: str
    """What opens the model's turn: all of `assistant` up to its content, and perhaps the beginning of thinking."""
    close: tuple[str, ...]
    """Control tokens that end the model's turn. The first of them in `assistant` closes a turn that was cut off."""
    begin: str = ""
    """Once, before everything."""
    system: str = ""
    """A system turn, around `{content}`. Empty: system messages are refused."""
    default_system: str | None = None
    """The system text of a conversation that brings none; None: such a conversation has no system turn."""
    system_in_user: bool = False
    """The system text is put in front of the first user turn's content, in that turn."""
    tools: str = ""
    """How `{tools}` are described, in the system turn below its text. Empty: tools are refused."""
    tool_line: str = "\n{tool}"
    """One tool in that list; `{tool}` is its JSON schema."""
    call: str = ""
    """One call of the model: `{name}`, `{arguments}` (JSON), `{id}`."""
    between_calls: str = "\n"
    """Between the text of a turn and its first call, and between calls."""
    tool: str = ""
    """One tool's answer: `{content}`, `{name}`, `{id}`. Empty: answers are refused."""
    tool_group: str = "{answers}"
    """What the answers to one turn share."""
    thinking: str = ""
    """Earlier thinking, in front of the text of a turn. Empty: earlier thinking is not shown."""
    trim: tuple[Role, ...] = ()
    """Roles whose text loses the white space around it."""
    image: str = ""
    """What stands for a picture. Empty: pictures are refused."""
    reader: str = "plain"
    """The name of the reader of calls, one of `agentfly.templates.readers.READERS`."""

    def __post_init__(self) -> None:
        for field, needed in _NEEDS.items():
            self._check(field, needed)
        head, _, tail = self.assistant.partition("{content}")
        if not self.close or not any(token in tail for token in self.close):
            self._refuse("close", f"{self.close} must end a turn: write one of them into assistant, behind {{content}}")
        if not self.opening.startswith(head):
            self._refuse(
                "opening",
                f"{self.opening!r} must begin like assistant, with {head!r}: what was sampled is history later",
            )
        if self.tools and not (self.call and self.tool):
            self._refuse("tools", "are described, but call or tool (the answer) is missing")
        if self.system_in_user and not self.system:
            self._refuse("system_in_user", "needs system, for instance '{content}\\n\\n'")
        if unknown := set(self.trim) - set(ROLES):
            self._refuse("trim", f"{sorted(unknown)} are no roles; roles are {', '.join(ROLES)}")
        if self.reader not in READERS:
            self._refuse("reader", f"{self.reader!r} is none of {', '.join(READERS)}")

    def _check(self, field: str, needed: tuple[str, ...]) -> None:
        text: str = getattr(self, field)
        if not text and field not in ("user", "assistant", "tool_group", "tool_line"):
            return
        found = _PLACEHOLDER.findall(text)
        known = (*needed, *_MAY.get(field, ()))
        if missing := [name for name in needed if found.count(name) != 1]:
            self._refuse(field, f"must hold {{{missing[0]}}} once, and has it {found.count(missing[0])} times")
        if unknown := [name for name in found if name not in known]:
            self._refuse(field, f"knows no {{{unknown[0]}}}; it may hold {', '.join(f'{{{name}}}' for name in known)}")

    def _refuse(self, field: str, why: str) -> None:
        raise ConfigError(f"chat format {self.name!r}: {field} {why}")

    def jinja(self) -> str:
        """The format written out as a Jinja chat template."""
        head, tail = self.tool_group.split("{answers}")
        system = _written(self.system, content="system") if self.system else self._lacks("system turn")
        if self.system_in_user:
            system = f"{{%- set first.prefix %}}{system}{{%- endset %}}"
        parts = {
            "begin": _written(self.begin),
            "trim": json.dumps(self.trim),
            "image": _written(self.image) if self.image else self._lacks("place for a picture"),
            "default_system": "none" if self.default_system is None else _quoted(self.default_system),
            "tool_line": _written(self.tool_line, tool="tool | tojson"),
            "tools": _written(self.tools, tools="told") if self.tools else self._lacks("way to describe tools"),
            "system": system,
            "user": _written(self.user, content="first.prefix ~ say(message.content, 'user')"),
            "thinking": _written(self.thinking, thinking="message.thinking or message.reasoning_content"),
            "between_calls": _written(self.between_calls),
            "call": _written(
                self.call, name="call.function.name", arguments="call.function.arguments | tojson", id="call.id"
            )
            if self.call
            else self._lacks("way to write a call"),
            "assistant": _written(self.assistant, content="said ~ calls"),
            "head": _written(head),
            "tool": _written(
                self.tool, content="say(message.content, 'tool')", name="message.name", id="message.tool_call_id"
            )
            if self.tool
            else self._lacks("way to show a tool's answer"),
            "tail": _written(tail),
            "later_system": self._lacks("place for a later system message")
            if self.system_in_user or not self.system
            else _written(self.system, content="say(message.content, 'system')"),
            "opening": _written(self.opening),
        }
        return re.sub(r"<<(\w+)>>", lambda part: parts[part[1]], _SKELETON).strip()

    def _lacks(self, what: str) -> str:
        return f"{{{{- raise_exception({_quoted(f'chat format {self.name} has no {what}')}) }}}}"


def _quoted(text: str) -> str:
    """A Jinja string. Control tokens in it stay as they are, so that they can be found in the template's source."""
    return json.dumps(text, ensure_ascii=False)


def _written(text: str, **values: str) -> str:
    """Jinja that writes the text with the values of expressions in it."""
    pieces = _PLACEHOLDER.split(text) if values else [text]
    outputs = [f"({values[piece]})" if i % 2 else _quoted(piece) for i, piece in enumerate(pieces) if piece]
    return "".join(f"{{{{- {output} }}}}" for output in outputs)


_SKELETON = """
{%- macro say(content, role) %}
  {%- for part in ([content] if content is string else content or []) %}
    {%- if part is string or part.type == 'text' %}
      {%- set text = part if part is string else part.text %}
      {{- text | trim if role in <<trim>> else text }}
    {%- else %}
      <<image>>
    {%- endif %}
  {%- endfor %}
{%- endmacro %}
<<begin>>
{%- set first = namespace(prefix='') %}
{%- set given = messages[0].role == 'system' %}
{%- set system = say(messages[0].content, 'system') if given else <<default_system>> %}
{%- if tools %}
  {%- set told %}{% for tool in tools %}<<tool_line>>{% endfor %}{% endset %}
  {%- set told %}<<tools>>{% endset %}
  {%- set system = told if system is none else system ~ '\n\n' ~ told %}
{%- endif %}
{%- if system is not none %}
  <<system>>
{%- endif %}
{%- for message in (messages[1:] if given else messages) %}
  {%- if message.role == 'user' %}
    <<user>>
    {%- set first.prefix = '' %}
  {%- elif message.role == 'assistant' %}
    {%- set said %}
      {%- if message.thinking or message.reasoning_content %}<<thinking>>{% endif %}
      {{- say(message.content, 'assistant') }}
    {%- endset %}
    {%- set calls %}
      {%- for call in message.tool_calls or [] %}
        {%- if message.content or not loop.first %}<<between_calls>>{% endif %}
        <<call>>
      {%- endfor %}
    {%- endset %}
    <<assistant>>
  {%- elif message.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}<<head>>{% endif %}
    <<tool>>
    {%- if loop.last or loop.nextitem.role != 'tool' %}<<tail>>{% endif %}
  {%- else %}
    <<later_system>>
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  <<opening>>
{%- endif %}
"""
