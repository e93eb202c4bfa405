"""Well-formed turns are parsed completely, without a problem."""

from __future__ import annotations

import pytest

from agentfly.templates.parsers.registry import PARSERS
from tests.templates.parsers.turns import GOOD_TURNS, NAMES, GoodTurn


@pytest.mark.parametrize("turn", GOOD_TURNS, ids=lambda turn: f"{turn.parser}: {turn.text[:40]!r}")
def test_valid_turn_is_parsed_completely(turn: GoodTurn) -> None:
    reply = PARSERS[turn.parser](turn.text)
    assert [(call.name, call.arguments) for call in reply.calls] == turn.calls
    assert (reply.message.content, reply.message.thinking) == (turn.content, turn.thinking)
    assert [(call.problem, call.raw) for call in reply.calls] == [("", "")] * len(turn.calls)
    assert tuple(call.id for call in reply.calls) == (turn.ids or ("",) * len(turn.calls))
    assert (reply.problems, reply.answer, reply.message.role) == ((), None, "assistant")


def test_every_format_has_a_parser_and_turns_to_test_it() -> None:
    assert list(PARSERS) == NAMES
    assert {turn.parser for turn in GOOD_TURNS} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_turn_is_an_empty_message(name: str) -> None:
    reply = PARSERS[name]("")
    assert (reply.message.content, reply.calls, reply.problems) == ("", (), ())
