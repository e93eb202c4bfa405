"""Rewards for short answers: exact match and F1 as in SQuAD.

Answers are compared without case, punctuation, the articles a, an and the, and extra white space. The right answers are
the column `answer`, `answers` or `golden_answers`, each a text or a list of texts. The best match counts. The answer is
the last `<answer>…</answer>` of the final reply, or the whole reply without one.
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
"""Weight of the format in the rewards `…_format`."""
Answers = str | Sequence[str] | None

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPEN, _CLOSE = "<answer>", "</answer>"
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
"""Answers without partial credit."""


@dataclass(frozen=True, slots=True)
class Match:
    """Agreement of an answer with a right one."""

    em: float = 0.0
    f1: float = 0.0
    precision: float = 0.0
    recall: float = 0.0


def normalize_answer(text: str) -> str:
    """Return a text in lower case without punctuation, articles and extra white space."""
    bare = text.lower().translate(_PUNCTUATION)
    # An answer of articles or punctuation alone, such as the choice "(A)" or "+", must not become empty.
    candidates = (_ARTICLES.sub(" ", bare), bare, text.lower())
    return next((plain for candidate in candidates if (plain := " ".join(candidate.split()))), "")


def match(answer: str, right: str) -> Match:
    """Compute exact match, and F1 over the words of both answers."""
    answer_text, right_text = normalize_answer(answer), normalize_answer(right)
    if not answer_text or not right_text:
        return Match()
    exact = float(answer_text == right_text)
    if not exact and {answer_text, right_text} & _CLOSED_ANSWERS:
        return Match()
    common = (Counter(answer_text.split()) & Counter(right_text.split())).total()
    if not common:
        return Match()
    precision = common / len(answer_text.split())
    recall = common / len(right_text.split())
    return Match(exact, 2 * precision * recall / (precision + recall), precision, recall)


def find_marked_answers(prediction: str) -> list[str]:
    """Return the texts from each `<answer>` to the next `</answer>`."""
    closed = prediction.split(_CLOSE)[:-1]
    return [text.partition(_OPEN)[2] for text in closed if _OPEN in text]


def extract_answer(prediction: str) -> str:
    """Return the last marked answer, or the whole reply if none is marked."""
    return (find_marked_answers(prediction) or [prediction])[-1].strip()


def has_answer_format(prediction: str) -> bool:
    """Whether the reply ends with its only marked answer, which is not empty."""
    marked = find_marked_answers(prediction)
    tags = prediction.count(_OPEN) + prediction.count(_CLOSE)
    return len(marked) == 1 and tags == 2 and bool(marked[0].strip()) and prediction.rstrip().endswith(_CLOSE)


def has_successful_call(trajectory: Trajectory) -> bool:
    """Whether a call succeeded in a turn before the last one, which answers."""
    return any(call.status is CallStatus.OK for turn in trajectory.turns[:-1] for call in turn.calls)


def _score(
    metric: str,
    prediction: str,
    *columns: Answers,
    with_format: bool = False,
    trajectory: Trajectory | None = None,
) -> dict[str, float]:
    """Match the answer of a reply with each right answer of the columns, and score it by a metric of the best match.

    with_format: the format of the reply counts with FORMAT_WEIGHT. trajectory: if given, the score is 0 unless the
    chain ended with an answer tool, after a turn with a successful call of another tool.
    """
    right = list[str]()
    for column in columns:
        texts = [column] if isinstance(column, str) else list(column or ())
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"right answers must be texts, not {column!r:.80}; write numbers in quotes")
        right += texts
    if not right:
        raise DataError("the row needs a right answer in the column answer, answers or golden_answers")
    answer = extract_answer(prediction)
    metrics = asdict(
        max((match(answer, right_answer) for right_answer in right), key=lambda scores: (scores.em, scores.f1))
    )
    score = metrics[metric]
    if with_format:
        formatted = float(has_answer_format(prediction))
        score = (1 - FORMAT_WEIGHT) * score + FORMAT_WEIGHT * formatted
        metrics = {"format": formatted, **metrics}
    if trajectory is not None:
        score *= trajectory.stop is StopReason.TOOL_END and has_successful_call(trajectory)
    return {"reward": score, **metrics}


@reward
def qa_em(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """1 if the answer is a right one, else 0."""
    return _score("em", prediction, answer, answers, golden_answers)


@reward
def qa_f1(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """F1 of the words of the answer and of the best right answer."""
    return _score("f1", prediction, answer, answers, golden_answers)


@reward
def qa_em_format(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """0.9 for an exact match, and 0.1 for one marked answer at the end of the reply, right or wrong."""
    return _score("em", prediction, answer, answers, golden_answers, with_format=True)


@reward
def qa_f1_format(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """0.9 times F1, and 0.1 for one marked answer at the end of the reply, right or wrong."""
    return _score("f1", prediction, answer, answers, golden_answers, with_format=True)


@reward
def qa_em_tool(
    prediction: str,
    trajectory: Trajectory,
    answer: Answers = None,
    answers: Answers = None,
    golden_answers: Answers = None,
) -> dict[str, float]:
    """Exact match of the answer tool's argument, if another call succeeded in an earlier turn; else 0."""
    return _score("em", prediction, answer, answers, golden_answers, trajectory=trajectory)


@reward
def qa_f1_tool(
    prediction: str,
    trajectory: Trajectory,
    answer: Answers = None,
    answers: Answers = None,
    golden_answers: Answers = None,
) -> dict[str, float]:
    """F1 of the answer tool's argument, if another call succeeded in an earlier turn; else 0."""
    return _score("f1", prediction, answer, answers, golden_answers, trajectory=trajectory)
