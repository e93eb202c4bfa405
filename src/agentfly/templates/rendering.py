"""Rendering of Jinja chat templates: compiled once, with a fixed date; every failure is a TemplateError.

A template is third-party code: any exception that it raises means that it cannot render the conversation.

Renderings are cached as forms: the fixed text around message contents, learned once, so that most messages need no
rendering. For messages of the same roles only the contents (and the call ids, if the template renders them) change. A
form is learned from one rendering with slots in place of the contents, and accepted only if it predicts the renderings
of all probes. Contents that the template could compare with a literal are never encoded through a form.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentfly.errors import TemplateError
from agentfly.templates.codec import Codec
from agentfly.templates.tokenizer import ChatTokenizer
from agentfly.types import Message, ToolCall

_NON_TEXT_FIELDS = ("role", "type")
"""Message fields that templates compare and that never hold text of a message."""
_ATTRIBUTE_FILTERS = frozenset(
    {"attr", "default", "groupby", "join", "map", "rejectattr", "selectattr", "sort", "tojson"}
)


class Renderer:
    """A compiled template with its variables, and the message format that it expects."""

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
        """`variables` are passed by name; `today` is the date that the template may print (None: the current day).

        With a `datetime` also the time of day, which is midnight otherwise. `image` is the image placeholder for
        templates that render text only.
        """
        self.name = name
        self.image = image
        environment = _make_environment()
        now = today or datetime.date.today()
        if not isinstance(now, datetime.datetime):
            now = datetime.datetime.combine(now, datetime.time())
        self.prints_date = self.prints_time = False
        """Whether a rendering has printed the date, and the time of day."""

        def strftime_now(format: str) -> str:
            later = now.replace(hour=(now.hour + 13) % 24, minute=now.minute ^ 1, second=now.second ^ 1)
            text = now.strftime(format)
            self.prints_date = True
            self.prints_time |= later.strftime(format) != text
            return text

        environment.globals["strftime_now"] = strftime_now
        try:
            self._compiled = environment.from_string(source)
            tree = environment.parse(source)
            self.literals = frozenset(_comparison_literals(tree))
            """Strings that the template may compare with the text of a message."""
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"template {name!r} does not compile: line {error.lineno}: {error.message}") from error
        self.reads = frozenset(meta.find_undeclared_variables(tree))
        """Names of the variables that the template reads."""
        self._variables = {"documents": None, **(variables or {}), "tools": [dict(tool) for tool in tools] or None}
        self._needs_content_parts = not self._renders_text("zQ") and self._renders_text([_TEXT])
        self._string_arguments = self._needs_short_ids = False
        text = self._try_call("call00000")
        if text is None or "{'q'" in text:
            # It fails on arguments as an object, or prints them as Python: does it accept a JSON string?
            self._string_arguments = True
            text = self._try_call("call00000")
            self._string_arguments = text is not None and '{"q"' in text
        self._needs_short_ids = self._try_call("c1") is None and self._try_call("call00000") is not None

    def render(
        self, messages: Sequence[Message], *, open_turn: bool = True, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Render a conversation; `open_turn`: with the generation prompt. `tools` replace those of the renderer."""
        return self._run([self._to_dict(message) for message in messages], open_turn, tools)

    def _run(self, messages: list[dict[str, Any]], open_turn: bool, tools: list[dict[str, Any]] | None = None) -> str:
        variables = {**self._variables, "tools": tools} if tools else self._variables
        try:
            return self._compiled.render(variables, messages=messages, add_generation_prompt=open_turn)
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise TemplateError(f"template {self.name!r} cannot render the roles {roles}: {reason}") from error

    def call_id(self, call_id: str) -> str:
        """A call id as the template accepts it: some (Mistral) accept only nine letters or digits."""
        if not self._needs_short_ids or re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    @property
    def shows_tools(self) -> bool:
        """Whether the rendered prompt depends on the tools."""
        with_tools = self._render_user("u")
        variables = self._variables
        self._variables = {**variables, "tools": None}
        without = self._render_user("u")
        self._variables = variables
        return with_tools not in ("", without)

    @cached_property
    def shows_images(self) -> bool:
        """Whether the template itself renders an image placeholder."""
        image = {"type": "image", "image": "data:,"}
        return self._renders_text([_TEXT, image]) and self._render_user([_TEXT, image]) != self._render_user([_TEXT])

    def _to_dict(self, message: Message) -> dict[str, Any]:
        out = message.to_dict()
        if message.thinking:
            out["thinking"] = message.thinking
        for call in out.get("tool_calls", ()):
            if self._string_arguments:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            if self._needs_short_ids:
                call["id"] = self.call_id(call.get("id", ""))
        if self._needs_short_ids and message.role == "tool":
            out["tool_call_id"] = self.call_id(message.tool_call_id)
        if self._needs_content_parts and isinstance(message.content, str):
            out["content"] = [{"type": "text", "text": message.content}]
        elif not isinstance(message.content, str) and not (message.images and self.shows_images):
            if message.images and not self.image:
                raise TemplateError(
                    f"template {self.name!r} has no place for an image, and no image placeholder is known for it"
                )
            out["content"] = "".join(block if isinstance(block, str) else self.image for block in message.content)
        return out

    # ── the message format that the template expects, found by rendering probes ──

    def _render_user(self, content: object) -> str:
        try:
            return self._run([{"role": "user", "content": content}], True)
        except TemplateError:
            return ""

    def _renders_text(self, content: object) -> bool:
        """Whether the template renders the text in such content, instead of printing the list."""
        text = self._render_user(content)
        return "zQ" in text and "'type'" not in text and '"type"' not in text

    def _try_call(self, call_id: str) -> str | None:
        """Render a conversation with a call of this id; None if the template cannot."""
        messages = [
            Message("user", "u"),
            Message("assistant", "", (ToolCall("f", {"q": "x"}, call_id),)),
            Message("tool", "r", name="f", tool_call_id=call_id),
        ]
        try:
            return self.render(messages)
        except TemplateError:
            return None


def special_tokens(tokenizer: ChatTokenizer) -> dict[str, str]:
    """The variables that Hugging Face passes to every template: `bos_token`, `eos_token` and so on."""
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}


_TEXT = {"type": "text", "text": "zQ"}


def _make_environment() -> jinja2.Environment:
    """The Jinja environment that chat templates expect, without `strftime_now`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text in some templates; this extension renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _comparison_literals(tree: nodes.Template) -> Iterator[str]:
    """Yield the strings that the text of a message could be compared with or searched for."""

    def field_name(node: nodes.Node) -> str:
        if isinstance(node, nodes.Getattr):
            return node.attr
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            return str(node.arg.value)
        return node.name if isinstance(node, nodes.Name) else ""

    for node in tree.find_all(nodes.Compare):
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        if not any(field_name(operand) in _NON_TEXT_FIELDS for operand in operands):
            yield from _string_constants(operands)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr != "get":
            yield from _string_constants(call.args)
    for used in tree.find_all((nodes.Filter, nodes.Test)):
        if isinstance(used, nodes.Filter | nodes.Test) and used.name not in _ATTRIBUTE_FILTERS:
            yield from _string_constants(used.args)
    for assignment in tree.find_all(nodes.Assign):
        yield from _string_constants([assignment.node])


def _string_constants(operands: Sequence[nodes.Node]) -> Iterator[str]:
    for operand in operands:
        if isinstance(operand, nodes.Const) and isinstance(operand.value, str) and operand.value.strip():
            yield operand.value
        elif isinstance(operand, nodes.List | nodes.Tuple):
            yield from _string_constants(operand.items)


_SLOT = re.compile(r"zX(\d{5})Xz")
_PROBES = ("x", "", " ", "\n\n x \n", 'say "é" \\ {a: [1]}\tb', "7", "{}", "x\ny", "<b>&amp;</b> ``` ''", "e\u0301 %s")
"""Contents that reveal whether a template renders text unchanged, trims it, or transforms it otherwise."""
_IDS = ("call00017", "call00018")

RenderSlots = Callable[[Sequence[str], Sequence[str]], tuple[int, str]]
"""Renders contents and call ids to the closing token before them and their text."""


@dataclass(frozen=True, slots=True)
class Form:
    """The fixed text of messages with the same roles, encoded as far as it does not touch the contents."""

    close: int
    trim: bool
    pieces: tuple[str | int, ...]
    """Fixed text, and the indices of the values in it: first the contents, then the call ids."""
    runs: tuple[tuple[tuple[int, ...], tuple[str | int, ...]], ...]
    """Fixed ids, each followed by plain text with values in it."""
    shows_ids: bool
    """Whether call ids are among the values."""

    def text(self, contents: Sequence[str], call_ids: Sequence[str]) -> str:
        """The text that the template would render, according to this form."""
        return _fill(self.pieces, self._values(contents, call_ids))

    def ids(
        self, contents: Sequence[str], call_ids: Sequence[str], encode: Callable[[str], Sequence[int]]
    ) -> list[int]:
        """The ids of that text; `encode` encodes the runs that contain a value."""
        values = self._values(contents, call_ids)
        out: list[int] = []
        for fixed, run in self.runs:
            out += fixed
            if run:
                out += encode(_fill(run, values))
        return out

    def _values(self, contents: Sequence[str], call_ids: Sequence[str]) -> list[str]:
        return [*([text.strip() for text in contents] if self.trim else contents), *call_ids]


def learn_form(render: RenderSlots, messages: int, codec: Codec) -> Form | None:
    """Learn the form of `messages` messages; None if the template does more than insert their contents."""
    # Nine letters and digits, which every template accepts as a call id.
    slots = [f"zX{number:05d}Xz" for number in range(2 * messages)]
    contents = slots[:messages]
    call_ids = slots[messages:]
    try:
        close, text = render(contents, call_ids)
        # `split` puts the number of every slot between the texts: texts have even indices, slots odd ones.
        pieces = tuple(int(piece) if i % 2 else piece for i, piece in enumerate(_SLOT.split(text)) if i % 2 or piece)
        if [piece for piece in pieces if isinstance(piece, int) and piece < messages] != list(range(messages)):
            return None
        for trim in (False, True):
            shows_ids = any(isinstance(piece, int) and piece >= messages for piece in pieces)
            form = Form(close, trim, pieces, tuple(_encode_runs(pieces, codec)), shows_ids)
            probe_ids = [_IDS[i % 2] for i in range(messages)]
            probes = [[probe] * messages for probe in _PROBES]
            if all((close, form.text(probe, probe_ids)) == render(probe, probe_ids) for probe in probes):
                return form
    except TemplateError:
        pass
    return None


def _fill(pieces: Sequence[str | int], values: Sequence[str]) -> str:
    return "".join([values[piece] if isinstance(piece, int) else piece for piece in pieces])


def _encode_runs(pieces: Sequence[str | int], codec: Codec) -> Iterator[tuple[tuple[int, ...], tuple[str | int, ...]]]:
    """Encode everything except runs of plain text that contain a value."""
    fixed: list[int] = []
    run: list[str | int] = []
    for piece in pieces:
        for item in [piece] if isinstance(piece, int) else codec.pieces(piece):
            if isinstance(piece, str) and isinstance(item, int):  # a control token: no merge crosses it
                if any(isinstance(value, int) for value in run):
                    yield tuple(fixed), tuple(run)
                    fixed.clear()
                else:
                    fixed += codec.plain(_fill(run, ()))
                run.clear()
                fixed.append(item)
            else:
                run.append(item)
    if any(isinstance(value, int) for value in run):
        yield tuple(fixed), tuple(run)
    else:
        yield (*fixed, *codec.plain(_fill(run, ()))), ()
