"""Template families, and the one door to them: `load_template`.

None follows the tokenizer: its own template, with what is known of the family that writes such templates. A name
is a family: its format where we write it ourselves, else the tokenizer's own template. Each is audited at the door.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentfly.encoding.tokenizer import ChatTokenizer
from agentfly.errors import ConfigError, TemplateError
from agentfly.template import History, Template
from agentfly.templates import chatml, command_r, deepseek, gemma, glm, gpt_oss, llama, mistral, others, qwen
from agentfly.templates.audit import Audit, audit
from agentfly.templates.family import Family
from agentfly.templates.format import ChatFormat
from agentfly.templates.generic import closing_tokens
from agentfly.templates.readers import READERS
from agentfly.templates.roundtrip import choose_reader

__all__ = ["READERS", "Audit", "ChatFormat", "Family", "audit", "load_template", "names", "register_template"]

_FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (others, qwen, llama, mistral, gemma, deepseek, gpt_oss, command_r, glm, chatml)
    for family in module.FAMILIES
}
"""By name, in the order in which they are tried on an unknown template: the more particular first."""


def names() -> list[str]:
    """The names that `template=` may say, without aliases."""
    return sorted(_FAMILIES)


def register_template(format: ChatFormat) -> ChatFormat:
    """Let `template=format.name` mean this format. A name that is taken is an error."""
    if format.name in _known():
        raise ConfigError(f"a template called {format.name!r} exists already; give yours another name")
    _FAMILIES[format.name] = Family.of(format)
    return format


def load_template(
    name: str | None,
    tokenizer: ChatTokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    history: History | str = History.APPEND,
    variables: Mapping[str, Any] | None = None,
    today: datetime.date | None = None,
) -> Template:
    """The template of this name over this tokenizer, audited; None follows the tokenizer.

    `variables` go to the template by name (Qwen3 reads `enable_thinking`); one it does not read is an error.
    `today` is the date it may print; None takes the day of loading, and it stays.
    """
    policy, problems = _policy(history), []
    tokens = {token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()}
    for family, source in _candidates(name, tokenizer, tokens, bool(tools)):
        label = family.name if name is not None else f"{family.name} (the tokenizer's own)"
        try:
            template = Template(
                tokenizer,
                source,
                close=family.close or closing_tokens(tokenizer, source),
                stop=family.stop,
                reader=READERS[family.reader],
                name=label,
                tools=tools,
                history=policy,
                variables=variables,
                today=today,
                image=family.image_of(tokens),
            )
        except TemplateError as error:
            problems.append(str(error))
            continue
        if unread := set(variables or ()) - template.reads:
            raise ConfigError(
                f"template {label!r} reads no variable {sorted(unread)[0]!r}; "
                f"there may be {', '.join(sorted(template.reads - _OURS)) or 'none'}"
            )
        reader, template.unread_calls = choose_reader(
            template,
            family.reader,
            only=name is not None and family.format is not None,
            trust=not family.writes_calls,
        )
        template.reader = READERS[reader]
        if tools and not template.shows_tools:
            problems.append(f"template {label!r} does not tell the model of its tools. {_with_tools(tokens)}")
            continue
        if tools and template.unread_calls:
            problems.append(
                f"template {label!r} cannot be used with tools: {template.unread_calls}. "
                f"{_with_tools(tokens, but=family if name else None)}"
            )
            continue
        report = audit(template, corrected=family.corrected)
        template.refused.update(report.refused)
        template.rewritten.update(report.rewritten)
        return template
    raise ConfigError("; ".join(dict.fromkeys(problems)))


_OURS = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
"""What every template is given anyway."""


def _policy(history: History | str) -> History:
    try:
        return History(history)
    except ValueError:
        raise ConfigError(f"history is {history!r}; it may be {' or '.join(repr(h.value) for h in History)}") from None


def _candidates(
    name: str | None, tokenizer: ChatTokenizer, tokens: set[str], with_tools: bool
) -> Iterator[tuple[Family, str]]:
    """Families and template sources that may do, the best first."""
    family = _family(name, tokens) if name is not None else None
    if family is not None and family.format is not None:
        yield family, family.format.jinja()
        return
    for source in _own_sources(tokenizer, tokens, with_tools):
        if family is not None:
            yield family, source
        else:
            yield next((f for f in _FAMILIES.values() if f.writes(source, tokens)), _UNKNOWN), source


_UNKNOWN = Family(name="no known family", needs=(), close=())


def _own_sources(tokenizer: ChatTokenizer, tokens: set[str], with_tools: bool) -> list[str]:
    own = tokenizer.chat_template
    if isinstance(own, Mapping):
        wanted = ("tool_use", "default") if with_tools else ("default",)
        own = [own[kind] for kind in wanted if kind in own] or list(own.values())[:1]
    elif isinstance(own, str):
        own = [own]
    if not own:
        raise ConfigError(f"this tokenizer brings no chat template. {_fitting(tokens)}")
    return list(own)


def _known() -> dict[str, Family]:
    return {alias: family for family in _FAMILIES.values() for alias in (family.name, *family.aliases)}


def _family(name: str, tokens: set[str]) -> Family:
    known = _known()
    family = known.get(name.lower())
    if family is None:
        close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ConfigError(
            f"there is no template {name!r}; {meant}There are {', '.join(names())}; None follows the tokenizer"
        )
    if missing := [token for token in (*family.needs, *family.tokens) if token not in tokens]:
        raise ConfigError(
            f"template {name!r} is made of control tokens that this tokenizer lacks: {', '.join(missing)}. "
            f"{_fitting(tokens)}"
        )
    return family


def _fitting(tokens: set[str]) -> str:
    fit = [family.name for family in _FAMILIES.values() if set(family.needs) <= tokens and family.format is not None]
    return (
        f"By its control tokens it could use {', '.join(fit)}." if fit else "No format of ours fits its control tokens."
    )


def _with_tools(tokens: set[str], but: Family | None = None) -> str:
    fit = [
        f.name
        for f in _FAMILIES.values()
        if set(f.needs) <= tokens and f.format is not None and f.format.tools and f is not but
    ]
    said = f"template={' or '.join(map(repr, fit))} does; or describe" if fit else "Describe"
    return f"{said} the tools in the system prompt, as ReactAgent does"
