"""Audit of a template when it is loaded: does appending give the tokens that the template itself would render?

For every context and every kind of delta the appended tokens are compared with the full rendering:

    prompt   render(context + turn) begins with render(context)
    history  render(context + turn) followed by extend(delta) equals render(context + turn + delta)
    suffix   render(context + turn + delta) ends with extend(delta)

A kind whose suffix differs is refused. If only prompt or history differ, the template rewrites earlier turns, and
`history="append"` and `history="template"` differ: both are exact, but the model sees different prompts. Turns are
tried with and without text next to their calls, and, if the template renders thinking, with thinking in the turn or in
an earlier one: many templates render thinking only until the next user message.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentfly.errors import TemplateError
from agentfly.templates.template import Template, delta_kind
from agentfly.types import Message, ToolCall


class AuditVerdict(enum.Enum):
    """The result for one kind of delta."""

    EXACT = "exact"
    """Appending and full rendering give the same tokens."""
    REWRITTEN = "history differs"
    """The appended tokens are correct; the template's full rendering shows earlier turns differently."""
    CORRECTED = "corrected"
    """The appended tokens avoid a known mistake of the template."""
    REFUSED = "refused"
    """`extend` raises: the template has no such continuation, or it depends on earlier messages."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """The verdict on one kind of delta."""

    kind: str
    """See `delta_kind`; with the suffix `after thinking` if the turn before it or an earlier one has thinking."""
    verdict: AuditVerdict
    reason: str = ""
    """Empty for exact."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit results of one template."""

    template: str
    rows: tuple[AuditRow, ...]

    @property
    def rejections(self) -> dict[str, str]:
        """Kinds of delta that must not be appended, with the reason."""
        return self._reasons(AuditVerdict.REFUSED)

    @property
    def rewrites(self) -> dict[str, str]:
        """Kinds of delta after which the template renders earlier turns differently, with the difference."""
        return self._reasons(AuditVerdict.REWRITTEN)

    def _reasons(self, verdict: AuditVerdict) -> dict[str, str]:
        return {row.kind.removesuffix(_AFTER_THINKING): row.reason for row in self.rows if row.verdict is verdict}


_AFTER_THINKING = " after thinking"
_THINKING = "because zQ"


def audit(template: Template, corrected: Mapping[str, str] | None = None) -> Audit:
    """Compare appending with full renderings. `corrected`: known mistakes of the template by kind of delta."""
    plain = _contexts(thinking="")
    with_thinking = _contexts(thinking=_THINKING)
    passes = [("", [("", plain)])]
    if _shows_thinking(template):
        passes.append((_AFTER_THINKING, [(_THINKING, [*plain, *with_thinking]), ("", with_thinking)]))
    rows: list[AuditRow] = []
    for suffix, groups in passes:
        for kind, turns, delta in _cases():
            cases = [
                case
                for thinking, contexts in groups
                for turn in turns
                for context in contexts
                if (case := _compare(template, context, replace(turn, thinking=thinking), delta))
            ]
            rows.append(_summarize(kind + suffix, cases, (corrected or {}).get(kind, "")))
    return Audit(template.name, tuple(rows))


@dataclass(frozen=True, slots=True)
class _AuditCase:
    """One kind of delta in one context."""

    verdict: AuditVerdict
    reason: str = ""
    raised: bool = False
    """The template raised an error; there is nothing to compare."""
    later: bool = False
    """The context contains an earlier round of calls."""


def _summarize(kind: str, cases: Sequence[_AuditCase], corrected: str) -> AuditRow:
    compared = [case for case in cases if not case.raised]
    if not compared:
        return AuditRow(
            kind,
            AuditVerdict.REFUSED,
            cases[0].reason if cases else "the template cannot render the messages before it",
        )
    refused = [case for case in compared if case.verdict is AuditVerdict.REFUSED]
    worst = min(compared, key=lambda case: _SEVERITY.index(case.verdict))
    if refused and corrected and all(case.later for case in refused):
        return AuditRow(kind, AuditVerdict.CORRECTED, corrected)
    return AuditRow(kind, worst.verdict, worst.reason)


_SEVERITY = (AuditVerdict.REFUSED, AuditVerdict.REWRITTEN, AuditVerdict.EXACT)


def _compare(
    template: Template, context: Sequence[Message], turn: Message, delta: Sequence[Message]
) -> _AuditCase | None:
    """Compare one case; None if the template cannot render the context, so that it cannot occur."""
    where = f"after {', '.join(message.role for message in context)}"
    later = any(message.role == "tool" for message in context)
    guard = template.choose_guard([*context, turn, *delta])
    try:
        prompt = template.render(context, guard=guard)
    except TemplateError:
        return None
    try:
        closed = template.render([*context, turn], open_turn=False, guard=guard)
        full = template.render([*context, turn, *delta], guard=guard)
        extended = template.follow(delta)
    except TemplateError as error:
        return _AuditCase(AuditVerdict.REFUSED, str(error.__cause__ or error), raised=True)
    ids = template.codec.encode(full, guard)
    tail = [extended.close, *extended.ids]
    if ids[-len(tail) :] != tail:
        if turn.text and turn.tool_calls:  # without text the suffix is correct: the template moves the text
            return _AuditCase(
                AuditVerdict.REWRITTEN, f"{where} the template writes text next to calls after their results"
            )
        return _AuditCase(
            AuditVerdict.REFUSED, f"{where} the template continues differently than after a first turn", later=later
        )
    # If no token closes a turn (GLM), the last closing token is before the turn.
    turn_ids = template.codec.encode(template.cut_after_close(closed) if template.closes_turns else closed, guard)
    if ids != [*turn_ids, *extended.after(turn_ids[-1])]:
        return _AuditCase(
            AuditVerdict.REWRITTEN, f"{where} the template shows the turns so far differently than before"
        )
    if not closed.startswith(prompt):
        return _AuditCase(AuditVerdict.REWRITTEN, f"{where} the prompt of the turn is not a prefix of its history")
    return _AuditCase(AuditVerdict.EXACT)


def _shows_thinking(template: Template) -> bool:
    """Whether the template renders the thinking of a turn, with or without calls."""
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


def _result(number: int) -> Message:
    return Message("tool", "r", name="search", tool_call_id=f"call{number:05d}")


def _cases() -> Iterator[tuple[str, list[Message], list[Message]]]:
    """Yield kinds of delta with the turns that they may follow and an example."""
    user = Message("user", "next")
    one = (_call(1),)
    two = (_call(1), _call(2))
    for calls, delta in (
        ((), []),
        ((), [user]),
        (one, [_result(1)]),
        (two, [_result(1), _result(2)]),
        (one, [_result(1), user]),
        (two, [_result(1), _result(2), user]),
    ):
        turns = (
            [Message("assistant", "", calls), Message("assistant", "ok", calls)]
            if calls
            else [Message("assistant", "ok")]
        )
        yield delta_kind(delta), turns, delta


def _contexts(thinking: str) -> list[list[Message]]:
    """Conversations before a turn, with `thinking` in all earlier assistant turns."""
    system, user, again = Message("system", "Sys."), Message("user", "q"), Message("user", "q2")
    called = [Message("assistant", "", (_call(8),), thinking=thinking), _result(8)]
    replied, done = Message("assistant", "x", thinking=thinking), Message("assistant", "fin", thinking=thinking)
    contexts = [
        [user, replied, again],
        [user, *called],
        [user, *called, again],
        [system, user, *called],
        [system, user, *called, done, again],
    ]
    return contexts if thinking else [[user], [system, user], *contexts]
