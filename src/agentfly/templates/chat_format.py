"""Declarative chat formats, for models without a chat template or with an unsuitable one.

A format is compiled to a Jinja template (`chat_format.jinja` with its texts in place of `<<…>>`), which is then used
like any other template.

    ChatFormat(
        name="plain-turns",
        user="<|user|>{content}<|end|>",
        assistant="<|bot|>{content}<|end|>",
        opening="<|bot|>",
        close=("<|end|>",),
    )

A model family is what is known beyond the chat template: how its turns end, which parser it needs. The built-in formats
and families are in `families.toml`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Set
from dataclasses import dataclass, replace
from importlib import resources

from agentfly.errors import ConfigError
from agentfly.templates.parsers.registry import PARSERS
from agentfly.types import ROLES, Role

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_REQUIRED = {
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
"""The placeholders that each text must contain exactly once."""
_OPTIONAL = {"tool": ("name", "id"), "call": ("id",)}
"""Optional placeholders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The text of a conversation for one family of models, with placeholders such as `{content}`."""

    name: str
    """The name that selects it in `template=`."""
    user: str
    """A user turn, around `{content}`."""
    assistant: str
    """An assistant turn, around `{content}`: thinking, then text, then calls."""
    opening: str
    """The generation prompt: `assistant` up to its content, optionally followed by the opening of thinking."""
    close: tuple[str, ...]
    """Special tokens that end an assistant turn. The first of them in `assistant` closes a truncated turn."""
    begin: str = ""
    """Text at the start of every conversation."""
    system: str = ""
    """A system turn, around `{content}`. Empty: system messages are refused."""
    default_system: str | None = None
    """System text for conversations without one; None: they have no system turn."""
    system_in_user: bool = False
    """Put the system text before the content of the first user turn, in that turn."""
    tools: str = ""
    """Description of `{tools}`, in the system turn after its text. Empty: tools are refused."""
    tool_line: str = "\n{tool}"
    """One tool in that list; `{tool}` is its JSON schema."""
    call: str = ""
    """One call: `{name}`, `{arguments}` (JSON), `{id}`."""
    between_calls: str = "\n"
    """Between the text of a turn and its first call, and between calls."""
    tool: str = ""
    """One tool result: `{content}`, `{name}`, `{id}`. Empty: tool results are refused."""
    tool_group: str = "{answers}"
    """Text around all tool results of one turn (`{answers}`)."""
    thinking: str = ""
    """Earlier thinking, before the text of a turn. Empty: earlier thinking is not rendered."""
    trim: tuple[Role, ...] = ()
    """Roles whose text is stripped of surrounding whitespace."""
    image: str = ""
    """The image placeholder. Empty: images are refused."""
    parser: str = "plain"
    """The name of the tool-call parser, a key of `agentfly.templates.parsers.registry.PARSERS`."""

    def __post_init__(self) -> None:
        for field, needed in _REQUIRED.items():
            self._check(field, needed)
        head, _, tail = self.assistant.partition("{content}")
        if not self.close or not any(token in tail for token in self.close):
            self._refuse("close", f"{self.close} must end a turn: write one of them into assistant, behind {{content}}")
        if not self.opening.startswith(head):
            self._refuse(
                "opening", f"{self.opening!r} must begin like assistant, with {head!r}: a sampled turn becomes history"
            )
        if self.tools and not (self.call and self.tool):
            self._refuse("tools", "are described, but call or tool (the answer) is missing")
        if self.system_in_user and not self.system:
            self._refuse("system_in_user", "needs system, for instance '{content}\\n\\n'")
        if unknown := set(self.trim) - set(ROLES):
            self._refuse("trim", f"{sorted(unknown)} are not roles; roles are {', '.join(ROLES)}")
        if self.parser not in PARSERS:
            self._refuse("parser", f"{self.parser!r} is none of {', '.join(PARSERS)}")

    def _check(self, field: str, needed: tuple[str, ...]) -> None:
        text: str = getattr(self, field)
        if not text and field not in ("user", "assistant", "tool_group", "tool_line"):
            return
        names = _PLACEHOLDER.findall(text)
        allowed = (*needed, *_OPTIONAL.get(field, ()))
        if missing := [name for name in needed if names.count(name) != 1]:
            self._refuse(field, f"must hold {{{missing[0]}}} once, and has it {names.count(missing[0])} times")
        if unknown := [name for name in names if name not in allowed]:
            self._refuse(
                field, f"knows no {{{unknown[0]}}}; it may hold {', '.join(f'{{{name}}}' for name in allowed)}"
            )

    def _refuse(self, field: str, problem: str) -> None:
        raise ConfigError(f"chat format {self.name!r}: {field} {problem}")

    def jinja(self) -> str:
        """Compile the format to a Jinja chat template."""
        head, tail = self.tool_group.split("{answers}")
        system = self._output("system turn", self.system, content="system")
        if self.system and self.system_in_user:
            system = f"{{%- set first.prefix %}}{system}{{%- endset %}}"
        later_system = "" if self.system_in_user else self.system
        call = {"name": "call.function.name", "arguments": "call.function.arguments | tojson", "id": "call.id"}
        answer = {"content": "text_of(message.content, 'tool')", "name": "message.name", "id": "message.tool_call_id"}
        texts = {
            "begin": _jinja_output(self.begin),
            "trim": json.dumps(self.trim),
            "image": self._output("place for a picture", self.image),
            "default_system": "none" if self.default_system is None else _jinja_string(self.default_system),
            "tool_line": _jinja_output(self.tool_line, tool="tool | tojson"),
            "tools": self._output("way to describe tools", self.tools, tools="described"),
            "system": system,
            "user": _jinja_output(self.user, content="first.prefix ~ text_of(message.content, 'user')"),
            "thinking": _jinja_output(self.thinking, thinking="message.thinking or message.reasoning_content"),
            "between_calls": _jinja_output(self.between_calls),
            "call": self._output("way to write a call", self.call, **call),
            "assistant": _jinja_output(self.assistant, content="text ~ calls"),
            "head": _jinja_output(head),
            "tool": self._output("way to show a tool's answer", self.tool, **answer),
            "tail": _jinja_output(tail),
            "later_system": self._output(
                "place for a later system message", later_system, content="text_of(message.content, 'system')"
            ),
            "opening": _jinja_output(self.opening),
        }
        skeleton = (resources.files(__package__) / "chat_format.jinja").read_text(encoding="utf-8")
        return re.sub(r"<<(\w+)>>", lambda placeholder: texts[placeholder[1]], skeleton).strip()

    def _output(self, what: str, text: str, **values: str) -> str:
        """Jinja that outputs the text; without a text, one that raises an error that says what the format lacks."""
        if text:
            return _jinja_output(text, **values)
        return f"{{{{- raise_exception({_jinja_string(f'chat format {self.name} has no {what}')}) }}}}"


def _jinja_string(text: str) -> str:
    """A Jinja string literal. Special tokens in it stay readable, because families are detected by the source."""
    return json.dumps(text, ensure_ascii=False)


def _jinja_output(text: str, **values: str) -> str:
    """Jinja that outputs the text with its placeholders replaced by expressions."""
    pieces = _PLACEHOLDER.split(text) if values else [text]
    outputs = [f"({values[piece]})" if i % 2 else _jinja_string(piece) for i, piece in enumerate(pieces) if piece]
    return "".join(f"{{{{- {output} }}}}" for output in outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models."""

    name: str
    needs: tuple[str, ...]
    """Special tokens of the format: the tokenizer must have them, and a template of the family writes them."""
    close: tuple[str, ...]
    """Special tokens that may end an assistant turn."""
    tokens: tuple[str, ...] = ()
    """Added tokens that the tokenizer must have, whether or not the template writes them."""
    stop: tuple[str, ...] = ()
    """The tokens of `close` that end sampling; empty: all of them."""
    parser: str = "plain"
    """The parser that is tried first on the calls that the template writes (see `choose_parser`)."""
    writes_calls: bool = True
    """False: some templates of the family write no calls; `parser` is used for those without a check."""
    image: str = ""
    """The image placeholder for templates that render text only; empty: unknown."""
    format: ChatFormat | None = None
    """The built-in chat format; None: the tokenizer's own template is used."""
    tools_source: str = ""
    """Jinja before a template of the family that shows no tools: it adds `tools` to the system message."""
    corrected: str = ""
    """How the template renders tool results incorrectly from the second round of calls on; empty: it does not."""
    aliases: tuple[str, ...] = ()

    @classmethod
    def from_format(cls, format: ChatFormat, **fields: object) -> Family:
        """The family of a built-in format; `close`, `parser` and `image` default to the format's."""
        defaults: dict[str, object] = {
            "needs": format.close[:1],
            "close": format.close,
            "parser": format.parser,
            "image": format.image,
        }
        return cls(name=format.name, format=format, **{**defaults, **fields})  # type: ignore[arg-type]

    def matches(self, source: str, tokens: Set[str]) -> bool:
        """Whether a template source, on a tokenizer with these added tokens, belongs to this family."""
        default_system = self.format.default_system if self.format else None
        has_tokens = {*self.needs, *self.tokens} <= tokens
        return has_tokens and all(token in source for token in self.needs) and (default_system or "") in source

    def image_placeholder(self, tokens: Set[str]) -> str:
        """`image` if the tokenizer has its tokens, else ""."""
        return self.image if set(re.findall(r"<[^<>]+>|\[[^\[\]]+\]", self.image)) <= tokens else ""


def _load_families() -> tuple[dict[str, ChatFormat], dict[str, Family]]:
    data = tomllib.loads((resources.files(__package__) / "families.toml").read_text(encoding="utf-8"))
    formats: dict[str, ChatFormat] = {}
    for name, fields in data["formats"].items():
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        base = formats.get(fields.pop("extends", ""))
        formats[name] = ChatFormat(name=name, **fields) if base is None else replace(base, name=name, **fields)
    families: dict[str, Family] = {}
    for fields in data["families"]:
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        name = fields.pop("name")
        format = fields.pop("format", None)
        families[name] = (
            Family(name=name, **fields) if format is None else Family.from_format(formats[format], **fields)
        )
    return formats, families


FORMATS, FAMILIES = _load_families()
"""The built-in chat formats and all families, by name."""
UNKNOWN = Family(name="no known family", needs=(), close=())
