"""A chat template as Jinja: compiled once, with the date frozen, its failures told as TemplateErrors.

A template is code that somebody else wrote. Whatever it raises is its answer to the conversation, not a bug of ours.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentfly.encoding.tokenizer import ChatTokenizer
from agentfly.errors import TemplateError
from agentfly.types import Message, ToolCall

_NEVER_TEXT = ("role", "type")
"""Fields that are compared in every template, and hold no text of a message."""
_FILTERS_OF_NAMES = frozenset(
    {"attr", "default", "groupby", "join", "map", "rejectattr", "selectattr", "sort", "tojson"}
)


class Renderer:
    """One compiled template with everything it is given but the messages, and what it wants messages to look like."""

    def __init__(
        self,
        source: str,
        *,
        name: str,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        today: datetime.date | None = None,
        image: str = "",
    ) -> None:
        """`variables` go to the template by name; `today` is the date it may print, None the day of construction.

        `image` is written where a picture stands, for templates that can only show text.
        """
        self.name, self.image = name, image
        environment = _environment(today or datetime.date.today())
        try:
            self._compiled = environment.from_string(source)
            self.literals = frozenset(_literals(environment.parse(source)))
            """Texts the template may compare a message's text with."""
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"template {name!r} does not compile: line {error.lineno}: {error.message}") from error
        self.reads = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        """Names of the variables that the template looks up."""
        self._given = {"documents": None, **(variables or {}), "tools": [dict(tool) for tool in tools] or None}
        self._only_parts = not self._sees("zQ") and self._sees([_TEXT])
        self._string_arguments = self._nine_ids = False
        self._string_arguments = self._wants_string_arguments()
        self._nine_ids = self._try(_called("c1")) is None and self._try(_called("call00000")) is not None

    def render(self, messages: Sequence[Message], *, open_turn: bool = True) -> str:
        """The template's own text of a conversation; `open_turn`: with the opening of the model's turn."""
        return self._run([self._shown(message) for message in messages], open_turn)

    def _run(self, messages: list[dict[str, Any]], open_turn: bool) -> str:
        try:
            return self._compiled.render(self._given, messages=messages, add_generation_prompt=open_turn)
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            said = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise TemplateError(f"template {self.name!r} cannot render the roles {roles}: {said}") from error

    def call_id(self, given: str) -> str:
        """A call's id as the template takes it: some (Mistral) take nine letters or digits and nothing else."""
        if not self._nine_ids or re.fullmatch(r"[A-Za-z0-9]{9}", given):
            return given
        return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    @property
    def shows_tools(self) -> bool:
        """The model is told of the tools."""
        with_tools, given = self._user("u"), self._given
        self._given = {**given, "tools": None}
        without = self._user("u")
        self._given = given
        return with_tools not in ("", without)

    @cached_property
    def shows_images(self) -> bool:
        """The template itself writes something where a picture stands."""
        picture = {"type": "image", "image": "data:,"}
        return self._sees([_TEXT, picture]) and self._user([_TEXT, picture]) != self._user([_TEXT])

    def _shown(self, message: Message) -> dict[str, Any]:
        out = message.to_dict()
        if message.thinking:
            out["thinking"] = message.thinking
        for call in out.get("tool_calls", ()):
            if self._string_arguments:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            if self._nine_ids:
                call["id"] = self.call_id(call.get("id", ""))
        if self._nine_ids and message.role == "tool":
            out["tool_call_id"] = self.call_id(message.tool_call_id)
        if self._only_parts and isinstance(message.content, str):
            out["content"] = [{"type": "text", "text": message.content}]
        elif not isinstance(message.content, str) and not (message.images and self.shows_images):
            if message.images and not self.image:
                raise TemplateError(
                    f"template {self.name!r} has no place for a picture, and no image marker is known for it"
                )
            out["content"] = "".join(part if isinstance(part, str) else self.image for part in message.content)
        return out

    # ── what the template expects of messages, found by trying ──

    def _user(self, content: object) -> str:
        try:
            return self._run([{"role": "user", "content": content}], True)
        except TemplateError:
            return ""

    def _sees(self, content: object) -> bool:
        """The template finds the text in such content, and does not just print the list."""
        text = self._user(content)
        return "zQ" in text and "'type'" not in text and '"type"' not in text

    def _try(self, messages: Sequence[Message]) -> str | None:
        try:
            return self.render(messages)
        except TemplateError:
            return None

    def _wants_string_arguments(self) -> bool:
        """Either an object makes the template fail, or it writes it the way Python does; a string does neither."""
        text = self._try(_called("call00000"))
        if text is not None and "{'q'" not in text:
            return False
        self._string_arguments = True
        return '{"q"' in (self._try(_called("call00000")) or "")


def special_tokens(tokenizer: ChatTokenizer) -> dict[str, str]:
    """The variables that Hugging Face gives every template: `bos_token` and the like."""
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}


_TEXT = {"type": "text", "text": "zQ"}


def _called(call_id: str) -> list[Message]:
    call = ToolCall("f", {"q": "x"}, call_id)
    return [
        Message("user", "u"),
        Message("assistant", "", (call,)),
        Message("tool", "r", name="f", tool_call_id=call_id),
    ]


def _environment(today: datetime.date) -> jinja2.Environment:
    """Jinja as chat templates expect it; the date stays, for a run over midnight must not change prompts."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = to_json
    midnight = datetime.datetime.combine(today, datetime.time())
    environment.globals.update(raise_exception=raise_exception, strftime_now=midnight.strftime)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks assistant text in some templates: here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _literals(tree: nodes.Template) -> Iterator[str]:
    """Strings in a place where a message's text could be held against them, or searched for them."""
    for node in tree.find_all(nodes.Compare):
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        if not any(_field(operand) in _NEVER_TEXT for operand in operands):
            yield from _strings(operands)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr != "get":
            yield from _strings(call.args)
    for used in tree.find_all((nodes.Filter, nodes.Test)):
        if isinstance(used, nodes.Filter | nodes.Test) and used.name not in _FILTERS_OF_NAMES:
            yield from _strings(used.args)
    for assignment in tree.find_all(nodes.Assign):
        yield from _strings([assignment.node])


def _field(node: nodes.Node) -> str:
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return str(node.arg.value)
    return node.name if isinstance(node, nodes.Name) else ""


def _strings(operands: Sequence[nodes.Node]) -> Iterator[str]:
    for operand in operands:
        if isinstance(operand, nodes.Const) and isinstance(operand.value, str) and operand.value.strip():
            yield operand.value
        elif isinstance(operand, nodes.List | nodes.Tuple):
            yield from _strings(operand.items)
