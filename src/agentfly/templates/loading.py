"""Templates by name: `load_template` loads, checks and audits one.

A name selects a family: its built-in `ChatFormat` if it has one, else the tokenizer's own template. None selects the
tokenizer's own template and detects its family. Every template is audited when it is loaded.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentfly.errors import ConfigError, TemplateError
from agentfly.templates.audit import audit
from agentfly.templates.chat_format import FAMILIES, UNKNOWN, ChatFormat, Family
from agentfly.templates.parsers.registry import PARSERS
from agentfly.templates.roundtrip import choose_parser, find_closing_tokens, find_reply_prefix
from agentfly.templates.template import History, Template
from agentfly.templates.tokenizer import ChatTokenizer
from agentfly.vision.processor import ImageProcessor

_STANDARD_VARIABLES = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables that every template is given."""


def names() -> list[str]:
    """The names that `template=` accepts, without aliases."""
    return sorted(FAMILIES)


def register_template(format: ChatFormat) -> ChatFormat:
    """Make `template=format.name` select this format. Raises ConfigError if the name is taken."""
    if format.name in _families_by_alias():
        raise ConfigError(f"a template called {format.name!r} exists already; give yours another name")
    FAMILIES[format.name] = Family.from_format(format)
    return format


def load_template(
    name: str | None,
    tokenizer: ChatTokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    history: History | str = History.APPEND,
    variables: Mapping[str, Any] | None = None,
    today: datetime.date | None = None,
    image_processor: ImageProcessor | None = None,
) -> Template:
    """Load a template over a tokenizer and audit it; None selects the tokenizer's own template.

    `variables` are passed to the template by name (Qwen3 reads `enable_thinking`); one that it does not read is an
    error. `today` is the date that the template may print; None is the day of loading. It does not change afterwards.
    The variable `now`, such as "2026-03-01T14:30", replaces it, and the time of day, which is midnight otherwise.
    `image_processor`: the model's image processor; None leaves one placeholder per image.
    """
    try:
        history_mode = History(history)
    except ValueError:
        choices = " or ".join(repr(mode.value) for mode in History)
        raise ConfigError(f"history is {history!r}; it may be {choices}") from None
    variables = dict(variables or {})
    if now := variables.pop("now", None):
        try:
            today = datetime.datetime.fromisoformat(now)
        except (TypeError, ValueError):
            raise ConfigError(f"now={now!r} is not a date with a time, such as '2026-03-01T14:30'") from None
    problems: list[str] = []
    tokens = {token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()}
    for family, source in _candidates(name, tokenizer, tokens, with_tools=bool(tools)):
        label = family.name if name is not None else f"{family.name} (the tokenizer's own)"
        try:
            template = Template(
                tokenizer,
                source,
                close=family.close or find_closing_tokens(tokenizer, source),
                stop=family.stop,
                parser=PARSERS[family.parser],
                name=label,
                tools=tools,
                history=history_mode,
                variables=variables,
                today=today,
                image=family.image_placeholder(tokens),
                image_processor=image_processor,
            )
        except TemplateError as error:
            problems.append(str(error))
            continue
        if now and not template.prints_date:
            raise ConfigError(f"template {label!r} prints no date or time: now={now!r} has no effect")
        if unknown := set(variables) - template.reads:
            raise ConfigError(
                f"template {label!r} reads no variable {sorted(unknown)[0]!r}; "
                f"it reads {', '.join(sorted(template.reads - _STANDARD_VARIABLES)) or 'none'}"
            )
        parser, template.parser_problem = choose_parser(
            template, family.parser, only=name is not None and family.format is not None, trust=not family.writes_calls
        )
        template.parser = PARSERS[parser]
        template.reply_prefix = find_reply_prefix(template)
        if tools and not template.shows_tools:
            problems.append(f"template {label!r} does not show the tools to the model. {_suggest(tokens, tools=True)}")
            continue
        if tools and template.parser_problem:
            problems.append(
                f"template {label!r} cannot be used with tools: {template.parser_problem}. "
                f"{_suggest(tokens, tools=True, exclude=family if name else None)}"
            )
            continue
        tool_kinds = ("tool", "tools", "tool, user", "tools, user")
        report = audit(template, corrected=dict.fromkeys(tool_kinds, family.corrected))
        template.rejections.update(report.rejections)
        template.rewrites.update(report.rewrites)
        return template
    raise ConfigError("; ".join(dict.fromkeys(problems)))


def _candidates(
    name: str | None, tokenizer: ChatTokenizer, tokens: set[str], *, with_tools: bool
) -> Iterator[tuple[Family, str]]:
    """Families and template sources to try, best first."""
    family = _find_family(name, tokens) if name is not None else None
    if family is not None and family.format is not None:
        yield family, family.format.jinja()
        return
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        preferred = ("tool_use", "default") if with_tools else ("default",)
        sources = [template[key] for key in preferred if key in template] or list(template.values())[:1]
    else:
        sources = [template] if isinstance(template, str) else list(template or ())
    if not sources:
        raise ConfigError(f"this tokenizer has no chat template. {_suggest(tokens)}")
    for source in sources:
        chosen = family or next((f for f in FAMILIES.values() if f.matches(source, tokens)), UNKNOWN)
        yield chosen, source
        if with_tools and chosen.tools_source:
            yield chosen, chosen.tools_source + source


def _families_by_alias() -> dict[str, Family]:
    return {alias: family for family in FAMILIES.values() for alias in (family.name, *family.aliases)}


def _find_family(name: str, tokens: set[str]) -> Family:
    families = _families_by_alias()
    family = families.get(name.lower())
    if family is None:
        close = difflib.get_close_matches(name.lower(), families, n=3, cutoff=0.5)
        suggestion = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ConfigError(
            f"there is no template {name!r}; {suggestion}There are {', '.join(names())}; None follows the tokenizer"
        )
    if missing := [token for token in (*family.needs, *family.tokens) if token not in tokens]:
        raise ConfigError(
            f"template {name!r} needs special tokens that this tokenizer lacks: {', '.join(missing)}. "
            f"{_suggest(tokens)}"
        )
    return family


def _suggest(tokens: set[str], *, tools: bool = False, exclude: Family | None = None) -> str:
    """Name the built-in formats for a tokenizer with these tokens; `tools`: those that describe tools."""
    fit = []
    for family in FAMILIES.values():
        if not {*family.needs, *family.tokens} <= tokens or family is exclude:
            continue
        if (tools and family.tools_source) or (family.format and (family.format.tools or not tools)):
            fit.append(family.name)
    if tools:
        suggestion = f"template={' or '.join(map(repr, fit))} does; or describe" if fit else "Describe"
        return f"{suggestion} the tools in the system prompt, as ReactAgent does"
    if not fit:
        return "No built-in format fits its special tokens."
    return f"By its special tokens it could use {', '.join(fit)}."
