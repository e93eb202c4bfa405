"""Model families: what is known of a family beyond its chat template (how its turns end, which parser it needs).

The built-in chat formats and families are in `families.toml`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Set
from dataclasses import dataclass, replace
from importlib import resources

from agentfly.templates.chat_format import ChatFormat


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
