"""Search tasks: multi-hop questions about a generated encyclopedia, HotpotQA and 2WikiMultihopQA.

All facts of an Encyclopedia are drawn from a seed, so no model can know them. An article states the facts of its own
subject only: of a person's birthplace it gives the name. Each name belongs to one split by its checksum, so no name of
a test encyclopedia occurs in one for training. A row refers to its encyclopedia by split, seed and size instead of
containing articles.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from agentfly.environments.data import (
    DatasetSource,
    in_dataset_split,
    load_toml,
    read_rows,
    validate_count,
    validate_split,
)
from agentfly.environments.search.index import Passage, read_corpus
from agentfly.errors import DataError

MIN_ARTICLES, MAX_ARTICLES = 20, 100_000
"""Allowed numbers of articles of an encyclopedia."""
HOPS = (1, 2, 3, 4)
"""Articles that it can take to answer a question."""
QUESTIONS_PER_ENCYCLOPEDIA = 25


@dataclass(frozen=True, slots=True)
class Relation:
    """A property of one kind of article."""

    kind: str
    """Kind of the subject."""
    name: str
    target: str
    """Kind of article that the value refers to; otherwise the type of value: `word`, `sea`, `year` or `number`."""
    sentences: Sequence[str]
    """Templates of the sentence in the article: {x} is the subject, {y} the value."""
    phrase: str
    """Template of a noun phrase for the value, for questions with several hops."""
    question: str
    """Template of a question for the value."""


RELATIONS = tuple(Relation(**relation) for relation in load_toml(__package__, "relations.toml")["relations"])
_ARTICLE_SHARES = {"person": 0.45, "town": 0.25, "country": 0.05, "company": 0.15, "river": 0.10}
_RELATIONS_OF = {kind: [relation for relation in RELATIONS if relation.kind == kind] for kind in _ARTICLE_SHARES}
_FIRST_SYLLABLES = [consonant + vowel for consonant in "BDFGKLMNPRSTVZ" for vowel in "aeiou"]
_LAST_SYLLABLES = (
    "ban", "bex", "dir", "dul", "fin", "gor", "kel", "lam", "mip", "mut", "nis", "pod", "rek", "sal", "tem", "tof",
    "vun", "zor",
)  # fmt: skip


def split_of(word: str) -> str:
    """The split that a name belongs to."""
    return {0: "test", 1: "validation"}.get(zlib.crc32(word.encode()) % 8, "train")


@dataclass(frozen=True)
class Encyclopedia:
    """Generated articles and the facts that they state."""

    facts: Mapping[str, Mapping[str, str]]
    """Article title → relation name → value."""
    kinds: Mapping[str, str]
    """Article title → kind of its subject."""
    passages: tuple[Passage, ...] = field(repr=False)

    @classmethod
    def draw(cls, split: str, seed: int, articles: int) -> Encyclopedia:
        """Generate the encyclopedia of a split, seed and size. Deterministic."""
        validate_split(split)
        if not isinstance(articles, int) or not MIN_ARTICLES <= articles <= MAX_ARTICLES:
            raise DataError(f"an encyclopedia has {MIN_ARTICLES} to {MAX_ARTICLES} articles, not {articles!r:.80}")
        random = Random(f"{split} {seed} {articles}")
        used = set[str]()

        def draw_word() -> str:
            """Draw an unused word of this split; longer ones as the short ones are used up."""
            for attempt in itertools.count():
                middle = random.choices(_LAST_SYLLABLES, k=attempt // 50)
                word = random.choice(_FIRST_SYLLABLES) + "".join(middle) + random.choice(_LAST_SYLLABLES)
                if word not in used and split_of(word) == split:
                    break
            used.add(word)
            return word

        def draw_title(kind: str) -> str:
            if kind == "person":  # the first name is unique too: no name in a question is part of another one
                return f"{draw_word()} {draw_word()}"
            return f"{draw_word()} Works" if kind == "company" else draw_word()

        def draw_value(target: str, title: str) -> str:
            if target in titles:
                return random.choice([other_title for other_title in titles[target] if other_title != title])
            if target in ("word", "sea"):
                return f"Sea of {draw_word()}" if target == "sea" else draw_word()
            return str(random.randint(1200, 1999) if target == "year" else random.randint(10_000, 999_999))

        counts = {kind: max(2, int(share * articles)) for kind, share in _ARTICLE_SHARES.items()}
        counts["person"] += articles - sum(counts.values())
        titles = {kind: [draw_title(kind) for _ in range(number)] for kind, number in counts.items()}
        kinds = {title: kind for kind, titles_of_kind in titles.items() for title in titles_of_kind}
        facts = {
            title: {relation.name: draw_value(relation.target, title) for relation in _RELATIONS_OF[kind]}
            for title, kind in kinds.items()
        }
        passages = []
        for title, values in facts.items():
            relations = _RELATIONS_OF[kinds[title]]
            sentences = [
                random.choice(relation.sentences).format(x=title, y=values[relation.name]) for relation in relations
            ]
            passages.append(Passage(title, " ".join(random.sample(sentences, len(sentences))), title))
        random.shuffle(passages)
        return cls(facts, kinds, tuple(passages))


def draw_tasks(
    split: str = "train", count: int = 100, *, seed: int = 0, hops: Sequence[int] = HOPS, articles: int = 200
) -> list[dict[str, Any]]:
    """Draw questions about generated encyclopedias of `articles` articles; the numbers of `hops` take turns."""
    validate_count(count)
    if not isinstance(hops, Sequence) or not hops or any(hop_count not in HOPS for hop_count in hops):
        raise DataError(f"questions have {HOPS[0]} to {HOPS[-1]} hops, a list of these, not {hops!r:.80}")
    rows: dict[str, dict[str, Any]] = {}
    for own_seed in itertools.count(seed * 1_000_000):
        if len(rows) >= count:
            break
        random, encyclopedia = Random(f"questions {split} {own_seed}"), Encyclopedia.draw(split, own_seed, articles)
        for index in range(QUESTIONS_PER_ENCYCLOPEDIA):
            start, path, answer = _draw_path(encyclopedia, hops[index % len(hops)], random)
            subject = start
            for relation in path[:-1]:
                subject = relation.phrase.format(x=subject)
            question = path[-1].question.format(x=subject).replace("the the ", "the ")  # "the {x}" of a river
            row = {
                "id": f"{split}-{seed}-{len(rows)}",
                "question": question,
                "answer": answer,
                "hops": len(path),
                "start": start,
                "path": [relation.name for relation in path],
                "encyclopedia": {"split": split, "seed": own_seed, "articles": articles},
            }
            rows.setdefault(question, row)
    return list(rows.values())[:count]


def _draw_path(encyclopedia: Encyclopedia, hops: int, random: Random) -> tuple[str, list[Relation], str]:
    """Draw a start article and relations that visit no article twice. Returns the value of the last one, too."""
    titles = list(encyclopedia.facts)
    while True:
        start, path = random.choice(titles), list[Relation]()
        kind = encyclopedia.kinds[start]
        for _ in range(hops - 1):
            path.append(
                random.choice([relation for relation in _RELATIONS_OF[kind] if relation.target in _RELATIONS_OF])
            )
            kind = path[-1].target
        path.append(random.choice(_RELATIONS_OF[kind]))
        visited = [start]
        for relation in path:
            visited.append(encyclopedia.facts[visited[-1]][relation.name])
        if len(set(visited)) == len(visited):
            return start, path, visited[-1]


HOTPOTQA = DatasetSource("HotpotQA", "https://hotpotqa.github.io", "retrieval")
TWO_WIKI = DatasetSource("2WikiMultihopQA", "https://github.com/Alab-NII/2wikimultihop", "retrieval")
_TRAIN_FILES = {HOTPOTQA: ("hotpot_train_v1.1.json",), TWO_WIKI: ("2wiki_train.json", "2wikimultihop/train.json")}
"""File names, the preferred ones first. The published test sets have no answers: dev is test."""
_DEV_FILES = {
    HOTPOTQA: ("hotpot_dev_distractor_v1.json", "hotpotqa_closed_60.json", "hotpotqa_dev_pairs.json"),
    TWO_WIKI: ("2wiki_dev.json", "2wikimultihop/dev.json"),
}


def hotpotqa_tasks(split: str, *, file: str | None = None) -> list[dict[str, Any]]:
    """Read the questions of HotpotQA from `file`, or from the preferred file that exists."""
    return _read_questions(HOTPOTQA, split, file)


def two_wiki_tasks(split: str, *, file: str | None = None) -> list[dict[str, Any]]:
    """Read the questions of 2WikiMultihopQA."""
    return _read_questions(TWO_WIKI, split, file)


def two_wiki_passages() -> list[Passage]:
    """Read a corpus of about six thousand Wikipedia passages for questions of 2WikiMultihopQA."""
    return list(read_corpus(TWO_WIKI.file("2wiki_passages.json")))


def _read_questions(dataset: DatasetSource, split: str, file: str | None) -> list[dict[str, Any]]:
    """Read rows with `question`, `answer`, `kind`, `titles` of the supporting passages and, if the file has them, the
    `passages` to search. Every twentieth training question, by its checksum, is for validation."""
    validate_split(split)
    names = (file,) if file is not None else (_DEV_FILES if split == "test" else _TRAIN_FILES)[dataset]
    rows: list[dict[str, Any]] = []
    for source_line, source in read_rows(dataset.file(*names)):
        if not all(isinstance(source.get(name), str) for name in ("question", "answer")):
            raise DataError(f"{source_line}: a row has the texts question and answer, not {source!r:.80}")
        row = {"question": source["question"], "answer": source["answer"], "kind": source.get("type", "")}
        if "_id" in source or "id" in source:
            row["id"] = str(source.get("_id", source.get("id")))
        try:
            if source.get("supporting_facts"):
                facts = _read_pairs(source["supporting_facts"], "sent_id")
                row["titles"] = list(dict.fromkeys(title for title, _ in facts))
            if source.get("context"):
                row["passages"] = [
                    {"title": title, "text": "".join(map(str, sentences)).strip()}
                    for title, sentences in _read_pairs(source["context"], "sentences")
                ]
        except (TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"{source_line}: its context or supporting facts have an unknown shape: {error!r}"
            ) from None
        if in_dataset_split(row["question"], split):
            rows.append(row)
    return rows


def _read_pairs(value: Any, second: str) -> list[tuple[str, Any]]:
    """Read a list of pairs (the authors' format), or an object of two lists (the format on the hub)."""
    if isinstance(value, str | bytes):
        value = json.loads(value)
    if isinstance(value, Mapping):
        return list(zip(value["title"], value[second], strict=True))
    return [(title, other) for title, other in value]
