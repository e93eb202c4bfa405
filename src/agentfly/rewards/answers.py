"""Rewards for short answers: exact match and F1, after the usual normalisation.

Case, punctuation, the articles a, an and the, and white space do not count. The right answers are the row's column
`answer`, `answers` or `golden_answers`, each a text or a list of them; the best one counts. What is judged is the last
`<answer>…</answer>` of the final reply, or all of it where it has none.
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

FORMAT = 0.1
"""What keeping the format is worth, where it is worth something."""
Answers = str | Sequence[str] | None

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPEN, _CLOSE = "<answer>", "</answer>"
_CLOSED = frozenset({"yes", "no", "noanswer"})
"""Answers of which a part is worth nothing."""


@dataclass(frozen=True, slots=True)
class Match:
    """How near a given answer is to the right one."""

    em: float = 0.0
    f1: float = 0.0
    precision: float = 0.0
    recall: float = 0.0


def normalised(text: str) -> str:
    """Text as answers are compared: lower case, without punctuation, articles and needless space."""
    bare = text.lower().translate(_PUNCTUATION)
    # An answer of articles or punctuation alone, such as the choice "(A)" or "+", is more than nothing.
    candidates = (_ARTICLES.sub(" ", bare), bare, text.lower())
    return next((plain for each in candidates if (plain := " ".join(each.split()))), "")


def match(given: str, right: str) -> Match:
    """Exact match, and the F1 of the words that both have."""
    ours, theirs = normalised(given), normalised(right)
    if not ours or not theirs:
        return Match()
    exact = float(ours == theirs)
    if not exact and {ours, theirs} & _CLOSED:
        return Match()
    common = (Counter(ours.split()) & Counter(theirs.split())).total()
    if not common:
        return Match()
    precision, recall = common / len(ours.split()), common / len(theirs.split())
    return Match(exact, 2 * precision * recall / (precision + recall), precision, recall)


def marked_answers(prediction: str) -> list[str]:
    """The texts from each `<answer>` to the next `</answer>`."""
    closed = prediction.split(_CLOSE)[:-1]
    return [text.partition(_OPEN)[2] for text in closed if _OPEN in text]


def answer_in(prediction: str) -> str:
    """The last marked answer, or all that was said where none is marked."""
    return (marked_answers(prediction) or [prediction])[-1].strip()


def keeps_format(prediction: str) -> bool:
    """Whether there is one marked answer that says something, and nothing behind it."""
    marked = marked_answers(prediction)
    tags, ends = prediction.count(_OPEN) + prediction.count(_CLOSE), prediction.rstrip().endswith(_CLOSE)
    return len(marked) == 1 and tags == 2 and bool(marked[0].strip()) and ends


def best_match(given: str, *columns: Answers) -> Match:
    """The match with that right answer to which the given one is nearest."""
    right = [each for column in columns for each in _texts(column)]
    if not right:
        raise DataError("the row needs a right answer in the column answer, answers or golden_answers")
    return max((match(given, each) for each in right), key=lambda found: (found.em, found.f1))


def _texts(column: Answers) -> list[str]:
    texts = [column] if isinstance(column, str) else list(column or ())
    if not all(isinstance(each, str) for each in texts):
        raise DataError(f"right answers must be texts, not {column!r:.80}; write numbers in quotes")
    return texts


@reward
def qa_em(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """One if the answer is a right one, else nothing."""
    found = best_match(answer_in(prediction), answer, answers, golden_answers)
    return {"reward": found.em, **asdict(found)}


@reward
def qa_f1(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """The F1 of the words of the answer and of the nearest right one."""
    found = best_match(answer_in(prediction), answer, answers, golden_answers)
    return {"reward": found.f1, **asdict(found)}


@reward
def qa_em_format(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """Exact match, of which a tenth is paid for one marked answer at the end, right or wrong."""
    return _with_format(prediction, "em", answer, answers, golden_answers)


@reward
def qa_f1_format(
    prediction: str, answer: Answers = None, answers: Answers = None, golden_answers: Answers = None
) -> dict[str, float]:
    """F1, of which a tenth is paid for one marked answer at the end, right or wrong."""
    return _with_format(prediction, "f1", answer, answers, golden_answers)


@reward
def qa_em_tool(
    prediction: str,
    trajectory: Trajectory,
    answer: Answers = None,
    answers: Answers = None,
    golden_answers: Answers = None,
) -> dict[str, float]:
    """Exact match of what an answer tool was given, after at least one other call that went well; else nothing."""
    found = best_match(answer_in(prediction), answer, answers, golden_answers)
    return {"reward": found.em * used_tools(trajectory), **asdict(found)}


@reward
def qa_f1_tool(
    prediction: str,
    trajectory: Trajectory,
    answer: Answers = None,
    answers: Answers = None,
    golden_answers: Answers = None,
) -> dict[str, float]:
    """F1 of what an answer tool was given, after at least one other call that went well; else nothing."""
    found = best_match(answer_in(prediction), answer, answers, golden_answers)
    return {"reward": found.f1 * used_tools(trajectory), **asdict(found)}


def used_tools(trajectory: Trajectory) -> bool:
    """Whether the chain ended with an answer tool, in a turn after one in which another call went well."""
    earlier = (call.status for turn in trajectory.turns[:-1] for call in turn.calls)
    return trajectory.stop is StopReason.TOOL_END and CallStatus.OK in earlier


def _with_format(prediction: str, by: str, *columns: Answers) -> dict[str, float]:
    found, kept = asdict(best_match(answer_in(prediction), *columns)), float(keeps_format(prediction))
    return {"reward": (1 - FORMAT) * found[by] + FORMAT * kept, "format": kept, **found}
