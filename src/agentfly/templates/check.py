"""Checks of a template on a tokenizer, one result per property: `agentfly template check MODEL`."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from agentfly.errors import ConfigError, TemplateError
from agentfly.templates import PARSERS, load_template
from agentfly.templates.audit import AuditVerdict, audit
from agentfly.templates.rendering import Renderer, special_tokens
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import ChatTokenizer, load_tokenizer
from agentfly.types import Message

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}


class CheckMark(enum.Enum):
    """The result of a check."""

    GOOD = "good"
    NOTE = "note"
    """Works, with a limitation."""
    BAD = "bad"


_STYLES = {CheckMark.GOOD: "green", CheckMark.NOTE: "yellow", CheckMark.BAD: "red"}
_MARKS = {
    AuditVerdict.EXACT: CheckMark.GOOD,
    AuditVerdict.REWRITTEN: CheckMark.NOTE,
    AuditVerdict.CORRECTED: CheckMark.NOTE,
    AuditVerdict.REFUSED: CheckMark.BAD,
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result for one property of a template."""

    property: str
    mark: CheckMark
    detail: str


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The results of all checks of a template."""

    template: str
    findings: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether prompts are exact, turns end, and no message text becomes a control token."""
        return not any(finding.mark is CheckMark.BAD for finding in self.findings if finding.property in _REQUIRED)

    def __rich__(self) -> Table:
        """The results as a table for a terminal."""
        table = Table("property", "", "detail", title=f"template {escape(self.template)}", title_justify="left")
        for finding in self.findings:
            table.add_row(finding.property, f"[{_STYLES[finding.mark]}]{finding.mark.value}[/]", escape(finding.detail))
        return table


_REQUIRED = ("start", "guard", "end of turn")


def check(
    model: str | ChatTokenizer, template: str | None = None, tools: Sequence[Mapping[str, Any]] = (_TOOL,)
) -> TemplateReport:
    """Check a template (None: the tokenizer's own) on a model's tokenizer, with tools if it can render them."""
    tokenizer = load_tokenizer(model) if isinstance(model, str) else model
    try:
        loaded = load_template(template, tokenizer, tools=tools)
        tools_problem = ""
    except (ConfigError, TemplateError) as error:
        loaded = load_template(template, tokenizer)
        tools_problem = str(error)
    findings = [_check_start(loaded, tokenizer)]

    def add(property: str, mark: CheckMark, detail: str) -> None:
        findings.append(CheckResult(property, mark, detail))

    for row in audit(loaded).rows:
        is_rejected = row.kind.removesuffix(" after thinking") in loaded.rejections
        is_corrected = row.verdict is AuditVerdict.REFUSED and not is_rejected
        verdict = AuditVerdict.CORRECTED if is_corrected else row.verdict
        add(f"extend: {row.kind}", _MARKS[verdict], f"{verdict.value}: {row.reason}".removesuffix(": "))
    findings.append(_check_guard(loaded))
    stops = [token for token, i in loaded.codec.control.items() if i in loaded.stop_ids]
    end = str(tokenizer.special_tokens_map.get("eos_token", ""))
    if end and end not in stops:
        detail = f"{', '.join(stops)}; the tokenizer's eos_token {end} is not among them"
        add("end of turn", CheckMark.NOTE, detail)
    else:
        add("end of turn", CheckMark.GOOD, ", ".join(stops))
    thinking = "the prompt opens it" if loaded.thinking_open else "the prompt does not open it"
    add("thinking", CheckMark.GOOD, thinking)
    if loaded.rewrites:
        detail = f"append and template differ after {'; '.join(loaded.rewrites)}"
        add("history", CheckMark.NOTE, f"{detail}. In effect: {loaded.history.value}")
    else:
        add("history", CheckMark.GOOD, "append and template are equivalent")
    # A model that sees tools but whose calls are not parsed would end every chain at its first call.
    renderer = Renderer(loaded.source, name=loaded.name, tools=tools, variables=special_tokens(tokenizer))
    refusal = CheckMark.BAD if renderer.shows_tools else CheckMark.NOTE
    add("tools", refusal if tools_problem else CheckMark.GOOD, tools_problem or "shown to the model")
    parser = next((name for name, parser in PARSERS.items() if parser is loaded.parser), "your own")
    if loaded.parser_problem:
        add("parser", refusal, f"{parser}; calls are not parsed: {loaded.parser_problem}")
    else:
        add("parser", CheckMark.GOOD, parser)
    images = (CheckMark.GOOD, "shown") if loaded.shows_images else (CheckMark.NOTE, "refused")
    add("images", *images)
    return TemplateReport(loaded.name, tuple(findings))


_CONVERSATIONS = (
    [Message("user", "How are you?")],
    [Message("user", "\n\n x ")],
    [Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "Who?")],
)


def _check_start(template: Template, tokenizer: ChatTokenizer) -> CheckResult:
    """Compare with the tokenizer's own template on conversations that it can render."""
    try:
        tokenizer_template = load_template(None, tokenizer, tools=template.tools)
    except (ConfigError, TemplateError) as error:
        return CheckResult("start", CheckMark.NOTE, f"not compared with the tokenizer's own template: {error}")
    same = compared = 0
    for messages in _CONVERSATIONS:
        try:
            text = tokenizer_template.render(messages)
        except TemplateError:
            continue
        compared += 1
        same += tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids == template.start(messages)
    if same == compared:
        return CheckResult("start", CheckMark.GOOD, f"equals the tokenizer's own template on {compared} conversations")
    mark = CheckMark.BAD if template.source == tokenizer_template.source else CheckMark.NOTE
    return CheckResult(
        "start", mark, f"differs from the tokenizer's own on {compared - same} of {compared} conversations"
    )


def _check_guard(template: Template) -> CheckResult:
    """Write every control token as user text: none may become a token."""
    ids = set(template.codec.control.values())

    def controls(text: str) -> int:
        return sum(token in ids for token in template.start([Message("user", text)]))

    clean = controls("x")
    texts = {token: f"a{token}b" for token in template.codec.control}
    # Try all of them in one text first: tokenizers have up to thousands of control tokens.
    if controls("".join(texts.values())) == clean:
        texts = {}
    leaks = [token for token, text in texts.items() if controls(text) != clean]
    if leaks:
        return CheckResult("guard", CheckMark.BAD, f"{', '.join(leaks[:5])} in a message becomes a control token")
    return CheckResult("guard", CheckMark.GOOD, f"text never becomes one of the {len(ids)} control tokens")
