"""What is known of a family of models beyond its template: how its turns end, and how its calls are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from agentfly.templates.format import ChatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models."""

    name: str
    needs: tuple[str, ...]
    """Control tokens the format is made of: the tokenizer must have them, a template of the family writes them."""
    close: tuple[str, ...]
    """Control tokens a turn of the model may end with."""
    tokens: tuple[str, ...] = ()
    """Added tokens that the tokenizer must have, whether or not the template writes them."""
    stop: tuple[str, ...] = ()
    """Those of `close` that end the sampling; empty: all."""
    reader: str = "plain"
    """The reader that is tried first on the calls that the template writes (see `choose_reader`)."""
    writes_calls: bool = True
    """False: some templates of the family write no calls, and `reader` is taken on trust for those."""
    image: str = ""
    """What stands for a picture in a template that shows only text; empty: none is known."""
    format: ChatFormat | None = None
    """How the family writes, by our own hand; None: the tokenizer's own template is used."""
    corrected: Mapping[str, str] = field(default_factory=dict)
    """Kinds of delta where the template makes a mistake from the second round of calls on that we do not make."""
    aliases: tuple[str, ...] = ()

    @classmethod
    def of(cls, format: ChatFormat, **facts: object) -> Family:
        """The family of a format; its close, reader and image are the format's."""
        given: dict[str, object] = {
            "needs": format.close[:1], "close": format.close, "reader": format.reader, "image": format.image, **facts,
        }  # fmt: skip
        return cls(name=format.name, format=format, **given)  # type: ignore[arg-type]

    def writes(self, source: str, tokens: Set[str]) -> bool:
        """A template with this source, on a tokenizer with these added tokens, is this family's."""
        default = self.format.default_system if self.format else None
        has_tokens = {*self.needs, *self.tokens} <= tokens
        return has_tokens and all(token in source for token in self.needs) and (default or "") in source

    def image_of(self, tokens: Set[str]) -> str:
        """The image marker, where the tokenizer has it."""
        return self.image if set(re.findall(r"<[^<>]+>|\[[^\[\]]+\]", self.image)) <= tokens else ""
