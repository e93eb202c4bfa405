"""What a template does on a tokenizer, property by property: the answer to `agentfly template check MODEL`."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from agentfly.encoding.rendering import Renderer, special_tokens
from agentfly.encoding.tokenizer import ChatTokenizer, load_tokenizer
from agentfly.errors import ConfigError, TemplateError
from agentfly.template import Template
from agentfly.templates import READERS, load_template
from agentfly.templates.audit import Verdict, audit
from agentfly.types import Message

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}


class Mark(enum.Enum):
    """How a property came out."""

    GOOD = "good"
    NOTE = "note"
    """Works, but worth knowing."""
    BAD = "bad"

    @property
    def style(self) -> str:
        return {Mark.GOOD: "green", Mark.NOTE: "yellow", Mark.BAD: "red"}[self]


_MARKS = {
    Verdict.EXACT: Mark.GOOD,
    Verdict.REWRITTEN: Mark.NOTE,
    Verdict.CORRECTED: Mark.NOTE,
    Verdict.REFUSED: Mark.BAD,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of a template."""

    property: str
    mark: Mark
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found about a template."""

    template: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Prompts are right, turns end, and no text of others becomes a control token."""
        return not any(finding.mark is Mark.BAD for finding in self.findings if finding.property in _VITAL)

    def __rich__(self) -> Table:
        """The findings for a terminal."""
        table = Table("property", "", "detail", title=f"template {escape(self.template)}", title_justify="left")
        for finding in self.findings:
            table.add_row(finding.property, f"[{finding.mark.style}]{finding.mark.value}[/]", escape(finding.detail))
        return table


_VITAL = ("start", "guard", "end of turn")


def check(
    model: str | ChatTokenizer, template: str | None = None, tools: Sequence[Mapping[str, Any]] = (_TOOL,)
) -> Report:
    """Try a template (None: the tokenizer's own) on the tokenizer of a model, with tools where it can show them."""
    tokenizer = load_tokenizer(model) if isinstance(model, str) else model
    try:
        loaded, told = load_template(template, tokenizer, tools=tools), ""
    except (ConfigError, TemplateError) as error:
        loaded, told = load_template(template, tokenizer), str(error)
    shown = Renderer(loaded.source, name=loaded.name, tools=tools, variables=special_tokens(tokenizer)).shows_tools
    return Report(loaded.name, tuple(_findings(loaded, tokenizer, told, shown)))


def _findings(template: Template, tokenizer: ChatTokenizer, told: str, shows_tools: bool) -> Iterator[Finding]:
    yield _start(template, tokenizer)
    for row in audit(template).rows:
        mended = row.verdict is Verdict.REFUSED and row.kind.removesuffix(" after thinking") not in template.refused
        verdict = Verdict.CORRECTED if mended else row.verdict
        yield Finding(f"extend: {row.kind}", _MARKS[verdict], f"{verdict.value}: {row.reason}".removesuffix(": "))
    yield _guard(template)
    yield _end(template, tokenizer)
    opened = "the prompt opens it" if template.thinking_open else "the prompt does not open it"
    yield Finding("thinking", Mark.GOOD, opened)
    if template.rewritten:
        said = f"append and template are two policies: they differ after {'; '.join(template.rewritten)}"
        yield Finding("history", Mark.NOTE, f"{said}. In force: {template.history.value}")
    else:
        yield Finding("history", Mark.GOOD, "append and template come to the same")
    # A model that knows its tools and whose calls are not parsed would end every chain at its first call.
    refusal = Mark.BAD if shows_tools else Mark.NOTE
    yield Finding("tools", refusal if told else Mark.GOOD, told or "the model is told of them")
    reader = next((name for name, reader in READERS.items() if reader is template.reader), "your own")
    if template.unread_calls:
        yield Finding("reader", refusal, f"{reader}; calls are not parsed: {template.unread_calls}")
    else:
        yield Finding("reader", Mark.GOOD, reader)
    yield Finding(
        "images", Mark.GOOD if template.shows_images else Mark.NOTE, "shown" if template.shows_images else "refused"
    )


_CONVERSATIONS = (
    [Message("user", "How are you?")],
    [Message("user", "\n\n x ")],
    [Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "Who?")],
)


def _start(template: Template, tokenizer: ChatTokenizer) -> Finding:
    """Against the tokenizer's own template, on conversations that it can render."""
    try:
        own = load_template(None, tokenizer, tools=template.tools)
    except (ConfigError, TemplateError) as error:
        return Finding("start", Mark.NOTE, f"not compared with the tokenizer's own template: {error}")
    same = compared = 0
    for messages in _CONVERSATIONS:
        try:
            text = own.render(messages)
        except TemplateError:
            continue
        compared += 1
        same += tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids == template.start(messages)
    if same == compared:
        return Finding("start", Mark.GOOD, f"equals the tokenizer's own template on {compared} conversations")
    mark = Mark.BAD if template.source == own.source else Mark.NOTE
    return Finding("start", mark, f"differs from the tokenizer's own on {compared - same} of {compared} conversations")


def _guard(template: Template) -> Finding:
    """Every control token as the text of a user: none may come through."""
    ids = set(template.codec.control.values())

    def controls(text: str) -> int:
        return sum(token in ids for token in template.start([Message("user", text)]))

    clean = controls("x")
    texts = {token: f"a{token}b" for token in template.codec.control}
    # One text with all of them first: tokenizers have up to thousands of control tokens.
    if controls("".join(texts.values())) == clean:
        texts = {}
    leaks = [token for token, text in texts.items() if controls(text) != clean]
    if leaks:
        return Finding("guard", Mark.BAD, f"{', '.join(leaks[:5])} in a message becomes a control token")
    return Finding("guard", Mark.GOOD, f"none of {len(ids)} control tokens comes through as text")


def _end(template: Template, tokenizer: ChatTokenizer) -> Finding:
    stops = [token for token, i in template.codec.control.items() if i in template.stop_ids]
    end = str(tokenizer.special_tokens_map.get("eos_token", ""))
    if end and end not in stops:
        return Finding(
            "end of turn", Mark.NOTE, f"{', '.join(stops)}; the tokenizer's eos_token {end} is not among them"
        )
    return Finding("end of turn", Mark.GOOD, ", ".join(stops))
