"""What a template puts around contents, learned once, so that most conversations and deltas need no rendering.

The scaffolding around messages of the same roles is the same every time: only the contents (and, where a template
shows them, the call ids) change. A form is learned from one rendering with slots in their place, and believed only
after it foretold the renderings of all probes. Text that the template could compare with a literal never gets here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agentfly.encoding.codec import Codec
from agentfly.errors import TemplateError

_SLOT = re.compile(r"zX(\d{5})Xz")
_PROBES = ("x", "", " ", "\n\n x \n", 'say "é" \\ {a: [1]}\tb', "7", "{}", "x\ny", "<b>&amp;</b> ``` ''", "e\u0301 %s")
"""Contents that show whether a template writes text as it is, trims it, or does something else to it."""
_IDS = ("call00017", "call00018")

Rendered = Callable[[Sequence[str], Sequence[str]], tuple[int, str]]
"""Contents and call ids to the closing token before them and the text a template makes of them."""


@dataclass(frozen=True, slots=True)
class Form:
    """The scaffolding of messages of one shape, encoded as far as it does not touch the contents."""

    close: int
    trim: bool
    pieces: tuple[str | int, ...]
    """Fixed text, and the numbers of the values in it: first the contents, then the call ids."""
    runs: tuple[tuple[tuple[int, ...], tuple[str | int, ...]], ...]
    """Ids that never change, and behind each a run of plain text with values in it."""

    shows_ids: bool
    """Call ids are among the values."""

    def text(self, contents: Sequence[str], call_ids: Sequence[str]) -> str:
        """What the template would write, by this form."""
        return _fill(self.pieces, self._values(contents, call_ids))

    def ids(
        self, contents: Sequence[str], call_ids: Sequence[str], encode: Callable[[str], Sequence[int]]
    ) -> list[int]:
        """The ids of that text; `encode` encodes the runs that hold a value."""
        values = self._values(contents, call_ids)
        out: list[int] = []
        for fixed, run in self.runs:
            out += fixed
            if run:
                out += encode(_fill(run, values))
        return out

    def _values(self, contents: Sequence[str], call_ids: Sequence[str]) -> list[str]:
        return [*([text.strip() for text in contents] if self.trim else contents), *call_ids]


def learn(rendered: Rendered, messages: int, codec: Codec) -> Form | None:
    """The form of so many messages; None when the template does more than put text between text."""
    contents, call_ids = [_slot(i) for i in range(messages)], [_slot(messages + i) for i in range(messages)]
    try:
        close, text = rendered(contents, call_ids)
        parts = _SLOT.split(text)
        pieces = tuple(int(part) if i % 2 else part for i, part in enumerate(parts) if i % 2 or part)
        if [piece for piece in pieces if isinstance(piece, int) and piece < messages] != list(range(messages)):
            return None
        for trim in (False, True):
            shows_ids = any(isinstance(piece, int) and piece >= messages for piece in pieces)
            form = Form(close, trim, pieces, tuple(_runs(pieces, codec)), shows_ids)
            if all(_foretells(form, rendered, probe, messages) for probe in _PROBES):
                return form
    except TemplateError:
        pass
    return None


def _foretells(form: Form, rendered: Rendered, probe: str, messages: int) -> bool:
    contents, call_ids = [probe] * messages, [_IDS[i % 2] for i in range(messages)]
    return (form.close, form.text(contents, call_ids)) == rendered(contents, call_ids)


def _slot(number: int) -> str:
    """Nine letters and digits: what the pickiest template takes for a call id."""
    return f"zX{number:05d}Xz"


def _fill(pieces: Sequence[str | int], values: Sequence[str]) -> str:
    return "".join([values[piece] if isinstance(piece, int) else piece for piece in pieces])


def _runs(pieces: Sequence[str | int], codec: Codec) -> Iterator[tuple[tuple[int, ...], tuple[str | int, ...]]]:
    """Runs of plain text that hold a value are left to be encoded with it; all else is encoded here."""
    fixed: list[int] = []
    run: list[str | int] = []
    for piece in pieces:
        for part in [piece] if isinstance(piece, int) else codec.pieces(piece):
            if isinstance(piece, str) and isinstance(part, int):  # a control token: nothing merges over it
                if any(isinstance(each, int) for each in run):
                    yield tuple(fixed), tuple(run)
                    fixed.clear()
                else:
                    fixed += codec.plain(_fill(run, ()))
                run.clear()
                fixed.append(part)
            else:
                run.append(part)
    if any(isinstance(each, int) for each in run):
        yield tuple(fixed), tuple(run)
    else:
        yield (*fixed, *codec.plain(_fill(run, ()))), ()
