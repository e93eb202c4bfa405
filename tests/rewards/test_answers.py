"""The rewards for short answers: the usual normalization, and no reward for text that is not an answer."""

import json
import re
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.agents import HFAgent
from agentfly.errors import DataError
from agentfly.rewards import qa_em, qa_em_format, qa_em_tool, qa_f1, qa_f1_format
from agentfly.rewards.answers import extract_answer, has_answer_format, match, normalize_answer
from agentfly.tooling import tool
from agentfly.tools import answer


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The Beatles!", "beatles"),
        ("  an   U.S.  Senator ", "us senator"),
        ("Theatre", "theatre"),
        ("12,345", "12345"),
        ("A", "a"),
        ("(A)", "a"),
        ("A.", "a"),
        ("**The**", "the"),
        ("+", "+"),
        ("", ""),
        ("the", "the"),
    ],
)
def test_normalize_answer(text: str, plain: str) -> None:
    assert normalize_answer(text) == plain


@pytest.mark.parametrize(
    ("prediction", "right", "em", "f1"),
    [
        ("Paris", "paris.", 1.0, 1.0),
        ("the city of Paris", "Paris", 0.0, 0.5),
        ("New York City", "new york", 0.0, 0.8),
        ("Paris Paris", "Paris", 0.0, 2 / 3),
        ("London", "Paris", 0.0, 0.0),
        ("yes it is", "yes", 0.0, 0.0),
        ("no", "yes", 0.0, 0.0),
        ("Yes.", "yes", 1.0, 1.0),
        ("", "A", 0.0, 0.0),
        ("!!!", "the", 0.0, 0.0),
        ("", "", 0.0, 0.0),
    ],
)
def test_match(prediction: str, right: str, em: float, f1: float) -> None:
    scores = match(prediction, right)
    assert (scores.em, scores.f1) == (em, pytest.approx(f1))


@pytest.mark.parametrize("letter", "ABCDEI")
@pytest.mark.parametrize("written", ["{}", "{}.", "({})", "{})", "**{}**", "[{}]", "{}:"])
def test_choice_letter_matches_in_any_notation(letter: str, written: str) -> None:
    prediction = written.format(letter)
    assert (
        qa_em(prediction, letter)["reward"]
        == qa_em(letter, prediction)["reward"]
        == qa_f1(prediction, letter)["reward"]
        == 1.0
    )
    assert qa_em(prediction, "F")["reward"] == 0.0


def reference_normalize(text: str) -> str:
    """`normalize_answer` of the SQuAD evaluation script."""
    without = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without).split())


@given(st.text(alphabet="aAnthe .,()!-bB12é\n", max_size=30))
def test_normalization_is_the_reference_unless_that_is_empty(text: str) -> None:
    expected = reference_normalize(text)
    assert normalize_answer(text) == expected or not expected


@given(st.text(max_size=40), st.text(max_size=40))
def test_matches_are_bounded_and_symmetric(prediction: str, right: str) -> None:
    scores = match(prediction, right)
    assert 0.0 <= scores.em <= scores.f1 <= 1.0 + 1e-9
    assert scores.f1 == pytest.approx(match(right, prediction).f1)
    assert match(right, right).em == float(bool(right.split()))


def test_best_right_answer_counts() -> None:
    assert qa_em("NYC", golden_answers=["New York", "NYC"])["reward"] == 1.0
    assert qa_em("NYC", answers=("NYC",))["em"] == 1.0
    assert qa_f1("York", answer="New York", golden_answers=["nothing"])["reward"] == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="needs a right answer"):
        qa_em("NYC")
    with pytest.raises(DataError, match=r"must be texts, not \[5\]"):
        qa_em("5", golden_answers=[5])


def test_last_marked_answer_counts() -> None:
    assert extract_answer("So <answer>Rome</answer>, no: <answer> Paris\n</answer> it is") == "Paris"
    assert extract_answer("Paris <answer>") == "Paris <answer>"
    assert qa_em("Rome? <answer>Paris</answer>", "Paris")["reward"] == 1.0


@pytest.mark.parametrize(
    ("reply", "kept"),
    [
        ("I think <answer>Paris</answer>", True),
        ("<answer>Paris</answer> \n", True),
        ("<answer>Paris</answer> I think", False),
        ("<answer>Rome</answer><answer>Paris</answer>", False),
        ("<answer></answer>", False),
        ("<answer><answer>Paris</answer>", False),
        ("Paris", False),
    ],
)
def test_format(reply: str, kept: bool) -> None:
    assert has_answer_format(reply) is kept


def test_format_weight() -> None:
    def rewards(reply: str) -> list[float]:
        return [pytest.approx(r(reply, "New York")["reward"]) for r in (qa_em_format, qa_f1_format)]

    assert rewards("<answer>New York</answer>") == [1.0, 1.0]
    assert rewards("New York") == [0.9, 0.9]
    assert rewards("<answer>York</answer>") == [0.1, 0.1 + 0.9 * 2 / 3]
    assert rewards("Rome") == [0.0, 0.0]


@tool
async def look(at: str) -> str:
    """Look at something."""
    return at


def format_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ([format_call("look", at="x"), format_call("answer", answer="Paris")], 1.0),
        ([format_call("answer", answer="Paris")], 0.0),
        ([format_call("look", at="x"), "Paris"], 0.0),
        ([format_call("look", what="x"), format_call("answer", answer="Paris")], 0.0),
        ([format_call("look", at="x") + format_call("answer", answer="Paris")], 0.0),
        ([format_call("look", at="x"), format_call("answer", answer="Rome")], 0.0),
    ],
)
async def test_answer_tool_counts_after_another_successful_call(script: list[str], reward: float) -> None:
    settings: Any = {"template": "chatml", "backend": "scripted", "backend_config": {"script": script}}
    agent = HFAgent(tools=[look, answer], reward=qa_em_tool, **settings)
    result = await agent.run([{"question": "Q", "answer": "Paris"}], max_turns=3)
    await agent.close()
    assert result.rewards == [reward]
