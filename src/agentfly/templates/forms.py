"""Cached renderings: the fixed text around message contents, learned once, so that most messages need no rendering.

For messages of the same roles only the contents (and the call ids, if the template renders them) change. A form is
learned from one rendering with slots in place of the contents, and accepted only if it predicts the renderings of all
probes. Contents that the template could compare with a literal are never encoded through a form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agentfly.errors import TemplateError
from agentfly.templates.codec import Codec

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
        parts = _SLOT.split(text)
        pieces = tuple(int(part) if i % 2 else part for i, part in enumerate(parts) if i % 2 or part)
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
        for part in [piece] if isinstance(piece, int) else codec.pieces(piece):
            if isinstance(piece, str) and isinstance(part, int):  # a control token: no merge crosses it
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
