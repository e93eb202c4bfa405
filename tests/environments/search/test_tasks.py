"""The generated encyclopedia and its questions: deterministic, disjoint splits, answerable only by searching."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from agentfly.environments.data import SPLITS
from agentfly.environments.search import Encyclopedia, Search
from agentfly.environments.search.tasks import RELATIONS, split_of
from agentfly.errors import DataError
from agentfly.types import Task

NAME = re.compile(r"\b[A-Z][a-z]{4,}\b")
INVENTED = {
    split: {w for s in range(4) for t in Encyclopedia.draw(split, s, 100).facts for w in t.split()} for split in SPLITS
}


def test_same_seed_draws_the_same_encyclopedia() -> None:
    assert Encyclopedia.draw("train", 3, 60) == Encyclopedia.draw("train", 3, 60)
    assert Encyclopedia.draw("train", 3, 60).facts != Encyclopedia.draw("train", 4, 60).facts
    assert Search.draw_tasks("test", 60, seed=1) == Search.draw_tasks("test", 60, seed=1)
    assert Search.draw_tasks("test", 30, seed=1) == Search.draw_tasks("test", 60, seed=1)[:30]


def test_no_name_belongs_to_two_splits() -> None:
    for split, words in INVENTED.items():
        assert {split_of(word) for word in words - {"Works"}} == {split}
    questions = {split: Search.draw_tasks(split, 200) for split in SPLITS}
    questions_of = {split: {row["question"] for row in rows} for split, rows in questions.items()}
    assert all(len(drawn) == 200 for drawn in questions_of.values())
    assert not questions_of["train"] & questions_of["test"]
    assert not questions_of["train"] & questions_of["validation"]
    assert not questions_of["test"] & questions_of["validation"]


def test_article_states_only_its_own_facts() -> None:
    world = Encyclopedia.draw("train", 0, 100)
    assert len(world.passages) == 100
    for passage in world.passages:
        article_facts = world.facts[passage.title]
        assert all(value in passage.text for value in article_facts.values())
        allowed = {word for text in (passage.title, *article_facts.values()) for word in text.split()}
        strangers = {word for title in world.facts for word in title.split()} - allowed
        assert not strangers & set(NAME.findall(passage.text))


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_question_needs_its_number_of_hops(hops: int) -> None:
    relations = {(relation.kind, relation.name): relation for relation in RELATIONS}
    for row in Search.draw_tasks("validation", 60, hops=[hops], articles=60):
        world = Encyclopedia.draw(**row["encyclopedia"])
        passed = [row["start"]]
        for name in row["path"]:
            assert (world.kinds[passed[-1]], name) in relations
            passed.append(world.facts[passed[-1]][name])
        assert row["hops"] == len(row["path"]) == hops
        assert passed[-1] == row["answer"]
        assert len(set(passed)) == hops + 1
        assert row["start"] in row["question"]
        assert row["answer"] not in row["question"]
        assert not any(name in row["question"] for name in passed[1:])  # none of the way is given away
        assert "the the" not in row["question"]


def test_no_answer_is_frequent() -> None:
    answers = Counter(row["answer"] for row in Search.draw_tasks("train", 1000))
    assert answers.most_common(1)[0][1] <= 10


def test_rows_are_json_and_valid_tasks() -> None:
    rows = Search.draw_tasks("train", 30)
    assert json.loads(json.dumps(rows)) == rows
    assert len({Task.of(row).id for row in rows}) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "dev"}, "there are train, validation, test"),
        ({"articles": 3}, "20 to 100000 articles, not 3"),
        ({"hops": [5]}, r"1 to 4 hops, a list of these, not \[5\]"),
        ({"hops": []}, r"1 to 4 hops"),
        ({"hops": 2}, r"a list of these, not 2"),
        ({"count": -1}, r"0 or more, not -1"),
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Search.draw_tasks(**{"split": "train", "count": 5, **options})


def test_large_encyclopedia_has_unique_titles() -> None:
    world = Encyclopedia.draw("test", 0, 3000)
    assert len(world.facts) == len(set(world.facts)) == 3000
