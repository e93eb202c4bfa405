"""Rewards for short answers: exact match and token F1 after SQuAD normalization.

Case, punctuation, the articles a, an and the, and white space are ignored. The references are the column `answer`,
`answers` or `golden_answers`, each a text or a list of texts; the best match counts. The answer is the last
`<answer>…</answer>` of the final reply, or the whole reply if it has none.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from agentfly.errors import DataError
from agentfly.scoring import reward
from agentfly.trajectory import CallStatus, StopReason, Trajectory

FORMAT_WEIGHT = 0.1
"""Weight of the format in the rewards that include it."""
Answers = str | Sequence[str] | None

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPEN, _CLOSE = "<answer>", "</answer>"
_CLOSED = frozenset({"yes", "no", "noanswer"})
"""Answers without partial credit."""


@dataclass(frozen=True, slots=True)
class Match:
    """Agreement of an answer with a reference."""

    em: float = 0.0
    f1: float = 0.0
    precision: float = 0.0
    recall: float = 0.0


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous white space."""
    bare = text.lower().translate(_PUNCTUATION)
    # An answer that consists of articles or punctuation, such as the choice "(A)" or "+", must not become empty.
    candidates = (_ARTICLES.sub(" ", bare), bare, text.lower())
    return next((plain for text in candidates if (plain := " ".join(text.split()))), "")


def match(answer: str, reference: str) -> Match:
    """Compute exact match, and F1 over the words."""
    answer = normalize(answer)
    reference = normalize(reference)
    if not answer or not reference:
        return Match()
    exact = float(answer == reference)
    if not exact and {answer, reference} & _CLOSED:
        return Match()
    common = (Counter(answer.split()) & Counter(reference.split())).total()
    if not common:
        return Match()
    precision = common / len(answer.split())
    recall = common / len(reference.split())
    return Match(exact, 2 * precision * recall / (precision + recall), precision, recall)


def find_tagged_answers(prediction: str) -> list[str]:
    """The texts from each `<answer>` to the next `</answer>`."""
    closed = prediction.split(_CLOSE)[:-1]
    return [text.partition(_OPEN)[2] for text in closed if _OPEN in text]


def extract_answer(prediction: str) -> str:
    """The last tagged answer, or the whole text if there is none."""
    return (find_tagged_answers(prediction) or [prediction])[-1].strip()


def has_answer_format(prediction: str) -> bool:
    """Whether the text ends with its only tagged answer, which is not empty."""
    tagged = find_tagged_answers(prediction)
    tags = prediction.count(_OPEN) + prediction.count(_CLOSE)
    at_end = prediction.rstrip().endswith(_CLOSE)
    return len(tagged) == 1 and tags == 2 and bool(tagged[0].strip()) and at_end


def best_match(answer: str, *columns: Answers) -> Match:
    """The match with the closest reference of the columns."""
    references: list[str] = []
    for column in columns:
        texts = [column] if isinstance(column, str) else list(column or ())
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"right answers must be texts, not {column!r:.80}; write numbers in quotes")
        references += texts
    if not references:
        raise DataError("the row needs a right answer in the column answer, answers or golden_answers")
    return max((match(answer, text) for text in references), key=lambda found: (found.em, found.f1))


@reward
def qa_em(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """1 if the answer equals a reference, else 0."""
    found = best_match(extract_answer(prediction), answer, answers, golden_answers)
    return {"reward": found.em, **asdict(found)}


@reward
def qa_f1(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """F1 with the closest reference."""
    found = best_match(extract_answer(prediction), answer, answers, golden_answers)
    return {"reward": found.f1, **asdict(found)}


@reward
def qa_em_format(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """0.9 × exact match + 0.1 × whether the reply ends with its only tagged answer."""
    return _with_format(prediction, "em", answer, answers, golden_answers)


@reward
def qa_f1_format(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """0.9 × F1 + 0.1 × whether the reply ends with its only tagged answer."""
    return _with_format(prediction, "f1", answer, answers, golden_answers)


@reward
def qa_em_tool(
    prediction: str,
    trajectory: Trajectory,
    answer: Answers = None,
    answers: Answers = None,
    golden_answers: Answers = None,
) -> dict[str, float]:
    """Exact match, if the chain ended with an answer tool after another successful call; else 0."""
    found = best_match(extract_answer(prediction), answer, answers, golden_answers)
    return {"reward": found.em * used_tools(trajectory), **asdict(found)}


@reward
def qa_f1_tool(
    prediction: str,
    trajectory: Trajectory,
    answer: Answers = None,
    answers: Answers = None,
    golden_answers: Answers = None,
) -> dict[str, float]:
    """F1, if the chain ended with an answer tool after another successful call; else 0."""
    found = best_match(extract_answer(prediction), answer, answers, golden_answers)
    return {"reward": found.f1 * used_tools(trajectory), **asdict(found)}


def used_tools(trajectory: Trajectory) -> bool:
    """Whether the chain ended with an answer tool, and a call in an earlier turn succeeded."""
    earlier = (call.status for turn in trajectory.turns[:-1] for call in turn.calls)
    return trajectory.stop is StopReason.TOOL_END and CallStatus.OK in earlier


def _with_format(prediction: str, by: str, *columns: Answers) -> dict[str, float]:
    found = asdict(best_match(extract_answer(prediction), *columns))
    formatted = float(has_answer_format(prediction))
    return {"reward": (1 - FORMAT_WEIGHT) * found[by] + FORMAT_WEIGHT * formatted, "format": formatted, **found}
