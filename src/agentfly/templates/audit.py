"""Does appending give what the template itself would render? Asked of every template before the first token is sampled.

For every context and every kind of delta the full rendering is compared with what was appended:

    prompt   render(context) is how render(context + turn) begins
    history  render(context + turn), with what `extend(delta)` says behind it, is render(context + turn + delta)
    suffix   render(context + turn + delta) ends with what `extend(delta)` says

A kind whose suffix differs is refused. Where only prompt or history differ, the template rewrites earlier turns, and
`history="append"` and `history="template"` are two policies: both are exact, but they show the model different things.
Turns are tried with and without text beside their calls, and with thinking in the turn or in an earlier one where the
template shows any: many templates show thinking only until the next user message.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentfly.errors import TemplateError
from agentfly.template import Template, delta_kind
from agentfly.types import Message, ToolCall


class Verdict(enum.Enum):
    """What came out for one kind of delta."""

    EXACT = "exact"
    """Appended and rendered in full, the conversation has the same tokens."""
    REWRITTEN = "history differs"
    """What is appended is right; the template's own rendering shows earlier turns differently."""
    CORRECTED = "corrected"
    """What is appended differs from a known mistake of the template."""
    REFUSED = "refused"
    """`extend` raises: the template has no such continuation, or it depends on what came long before."""


@dataclass(frozen=True, slots=True)
class Row:
    """The verdict on one kind of delta."""

    kind: str
    """See `delta_kind`; `after thinking` where the turn before it, or an earlier one, has thinking in it."""
    verdict: Verdict
    reason: str = ""
    """Empty for exact."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What a template does to conversations that grow."""

    template: str
    rows: tuple[Row, ...]

    @property
    def refused(self) -> dict[str, str]:
        """Kinds that must not be appended, and why."""
        return self._with(Verdict.REFUSED)

    @property
    def rewritten(self) -> dict[str, str]:
        """Kinds after which the template would show earlier turns differently, and how."""
        return self._with(Verdict.REWRITTEN)

    def _with(self, verdict: Verdict) -> dict[str, str]:
        return {row.kind.removesuffix(_THOUGHT): row.reason for row in self.rows if row.verdict is verdict}


_THOUGHT = " after thinking"
_THINKING = "because zQ"


def audit(template: Template, corrected: Mapping[str, str] | None = None) -> Audit:
    """Compare appending with full renderings. `corrected`: kinds where the template is known to be wrong, and how."""
    plain, thought = _contexts(thinking=""), _contexts(thinking=_THINKING)
    passes = [("", [("", plain)])]
    if _shows_thinking(template):
        passes.append((_THOUGHT, [(_THINKING, [*plain, *thought]), ("", thought)]))
    rows: list[Row] = []
    for suffix, groups in passes:
        for kind, turns, delta in _cases():
            cells = [
                cell
                for thinking, contexts in groups
                for turn in turns
                for context in contexts
                if (cell := _compare(template, context, replace(turn, thinking=thinking), delta))
            ]
            rows.append(_row(kind + suffix, cells, (corrected or {}).get(kind, "")))
    return Audit(template.name, tuple(rows))


@dataclass(frozen=True, slots=True)
class _Cell:
    """One kind of delta in one context."""

    verdict: Verdict
    reason: str = ""
    raised: bool = False
    """The template raised, so there is nothing to compare."""
    later: bool = False
    """There was a round of calls before this."""


def _row(kind: str, cells: Sequence[_Cell], corrected: str) -> Row:
    compared = [cell for cell in cells if not cell.raised]
    if not compared:
        return Row(kind, Verdict.REFUSED, cells[0].reason if cells else "the template cannot render what comes before")
    refused = [cell for cell in compared if cell.verdict is Verdict.REFUSED]
    worst = min(compared, key=lambda cell: _WORST_FIRST.index(cell.verdict))
    if refused and corrected and all(cell.later for cell in refused):
        return Row(kind, Verdict.CORRECTED, corrected)
    return Row(kind, worst.verdict, worst.reason)


_WORST_FIRST = (Verdict.REFUSED, Verdict.REWRITTEN, Verdict.EXACT)


def _compare(template: Template, context: Sequence[Message], turn: Message, delta: Sequence[Message]) -> _Cell | None:
    """None when the template cannot render the context: then it does not come up."""
    where = f"after {', '.join(message.role for message in context)}"
    later = any(message.role == "tool" for message in context)
    try:
        prompt = template.render(context)
    except TemplateError:
        return None
    try:
        closed = template.render([*context, turn], open_turn=False)
        full = template.render([*context, turn, *delta])
        extended = template.follow(delta)
    except TemplateError as error:
        return _Cell(Verdict.REFUSED, str(error.__cause__ or error), raised=True)
    encode = template.codec.encode
    ids, tail = encode(full), [extended.close, *extended.ids]
    if ids[-len(tail) :] != tail:
        if turn.text and turn.tool_calls:  # the suffix of a turn without text is right: the template moves the text
            return _Cell(Verdict.REWRITTEN, f"{where} the template writes text beside calls behind their answers")
        return _Cell(Verdict.REFUSED, f"{where} the template goes on differently than after a first turn", later=later)
    # Where no token closes a turn (GLM), the last closing token stands before the turn.
    turn_ids = encode(template.through_close(closed) if template.closes_turns else closed)
    if ids != [*turn_ids, *extended.after(turn_ids[-1])]:
        return _Cell(Verdict.REWRITTEN, f"{where} the template shows the turns so far differently than before")
    if not closed.startswith(prompt):
        return _Cell(Verdict.REWRITTEN, f"{where} the prompt of the turn is not how its history begins")
    return _Cell(Verdict.EXACT)


def _shows_thinking(template: Template) -> bool:
    """The template renders the thinking of a turn, with or without calls."""
    for calls in ((), (_call(1),)):
        try:
            turn = Message("assistant", "" if calls else "ok", calls, thinking=_THINKING)
            if _THINKING in template.render([Message("user", "q"), turn], open_turn=False):
                return True
        except TemplateError:
            continue
    return False


def _call(number: int) -> ToolCall:
    return ToolCall("search", {"q": "a"}, f"call{number:05d}")


def _answer(number: int) -> Message:
    return Message("tool", "r", name="search", tool_call_id=f"call{number:05d}")


def _cases() -> Iterator[tuple[str, list[Message], list[Message]]]:
    """Kinds of delta, with the turns that they may follow and an example."""
    user, said = Message("user", "next"), Message("assistant", "ok")
    one, two = (_call(1),), (_call(1), _call(2))
    for calls, delta in (
        ((), []),
        ((), [user]),
        (one, [_answer(1)]),
        (two, [_answer(1), _answer(2)]),
        (one, [_answer(1), user]),
        (two, [_answer(1), _answer(2), user]),
    ):
        turns = [Message("assistant", "", calls), Message("assistant", "ok", calls)] if calls else [said]
        yield delta_kind(delta), turns, delta


def _contexts(thinking: str) -> list[list[Message]]:
    """Conversations before a turn; with `thinking` in all earlier turns, or without."""
    system, user, again = Message("system", "Sys."), Message("user", "q"), Message("user", "q2")
    called = [Message("assistant", "", (_call(8),), thinking=thinking), _answer(8)]
    spoke, done = Message("assistant", "x", thinking=thinking), Message("assistant", "fin", thinking=thinking)
    contexts = [
        [user, spoke, again],
        [user, *called],
        [user, *called, again],
        [system, user, *called],
        [system, user, *called, done, again],
    ]
    return contexts if thinking else [[user], [system, user], *contexts]
