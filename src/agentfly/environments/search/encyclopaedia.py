"""A generated encyclopaedia: people, towns, countries, companies and rivers that nobody has ever heard of.

All facts are drawn from a seed, so no model can know them. Every thing has one article, which tells its own facts and
nobody else's: of a person's town, her article says the name. Names belong to one split each, by their letters: no name
of a test encyclopaedia occurs in one for training.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from agentfly.environments.data import validate_split
from agentfly.environments.search.passages import Passage
from agentfly.errors import DataError

SMALLEST, LARGEST = 20, 100_000
"""Articles that an encyclopaedia may have."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Something that articles tell about one kind of thing."""

    kind: str
    """Of what it is told."""
    name: str
    target: str
    """The kind of thing that it leads to; else how a value is drawn: `word`, `sea`, `year` or `number`."""
    sentences: tuple[str, ...]
    """How an article may put it: {x} is the subject, {y} the value."""
    phrase: str
    """How a question points at the value in passing."""
    question: str
    """How a question asks for it."""


_TOLD = """
person   | birthplace | town    | {x} was born in {y}. / {x} first saw the light of day in {y}. | the town where {x} was born | In which town was {x} born?
person   | mentor     | person  | As a young scholar, {x} was taught by {y}. / The mentor of {x} was {y}. | the mentor of {x} | Who was the mentor of {x}?
person   | employer   | company | For most of a long career, {x} worked for {y}. / {y} employed {x} for decades. | the company that employed {x} | Which company employed {x}?
person   | born       | year    | The year of birth is given as {y}. / The birth took place in the year {y}. | the year in which {x} was born | In which year was {x} born?
town     | country    | country | {x} is a town in {y}. / The town of {x} lies in {y}. | the country in which {x} lies | In which country does {x} lie?
town     | river      | river   | It stands on the banks of the {y}. / The {y} flows through its old centre. | the river on which {x} stands | On which river does {x} stand?
town     | mayor      | person  | Its mayor is {y}. / {y} has been elected mayor. | the mayor of {x} | Who is the mayor of {x}?
town     | population | number  | The population is {y}. / At the last census {y} people lived here. | the population of {x} | What is the population of {x}?
country  | capital    | town    | The capital of {x} is {y}. / {x} is governed from its capital, {y}. | the capital of {x} | What is the capital of {x}?
country  | currency   | word    | People pay with the {y}. / Its currency is the {y}. | the currency of {x} | What is the currency of {x}?
country  | language   | word    | The official language is {y}. / Nearly everybody there speaks {y}. | the language of {x} | What is the official language of {x}?
company  | founder    | person  | {x} was founded by {y}. / The founder of {x} was {y}. | the founder of {x} | Who founded {x}?
company  | seat       | town    | Its headquarters are in {y}. / The firm is run from {y}. | the town in which {x} has its headquarters | In which town does {x} have its headquarters?
company  | founded    | year    | Business began in {y}. / It has existed since {y}. | the year in which {x} was founded | In which year was {x} founded?
river    | sea        | sea     | The {x} flows into the {y}. / The mouth of the {x} is at the {y}. | the sea that the {x} flows into | Into which sea does the {x} flow?
river    | source     | town    | Its source is near {y}. / It rises in the hills above {y}. | the town where the {x} rises | Near which town does the {x} rise?
river    | length     | number  | It is {y} metres long. / From source to mouth it measures {y} metres. | the length of the {x} | How many metres long is the {x}?
"""  # noqa: E501


def _relations() -> tuple[Relation, ...]:
    def relation(kind: str, name: str, target: str, sentences: str, phrase: str, question: str) -> Relation:
        return Relation(kind, name, target, tuple(sentences.split(" / ")), phrase, question)

    return tuple(relation(*map(str.strip, line.split(" | "))) for line in _TOLD.strip().splitlines())


RELATIONS = _relations()
OF_KIND = {kind: [each for each in RELATIONS if each.kind == kind] for kind in dict.fromkeys(r.kind for r in RELATIONS)}
_SHARES = {"person": 0.45, "town": 0.25, "country": 0.05, "company": 0.15, "river": 0.10}
_STARTS = [consonant + vowel for consonant in "BDFGKLMNPRSTVZ" for vowel in "aeiou"]
_ENDS = (
    "ban", "bex", "dir", "dul", "fin", "gor", "kel", "lam", "mip", "mut", "nis", "pod", "rek", "sal", "tem", "tof",
    "vun", "zor",
)  # fmt: skip


@dataclass(frozen=True)
class Encyclopaedia:
    """The articles of one drawn world, and the facts that they tell."""

    facts: Mapping[str, Mapping[str, str]]
    """The title of each article, with the value of each relation."""
    kinds: Mapping[str, str]
    """The title of each article, with what it is about."""
    passages: tuple[Passage, ...] = field(repr=False)

    @classmethod
    def draw(cls, split: str, seed: int, articles: int) -> Encyclopaedia:
        """The encyclopaedia of this split, seed and size; always the same one."""
        validate_split(split)
        if not isinstance(articles, int) or not SMALLEST <= articles <= LARGEST:
            raise DataError(f"an encyclopaedia has {SMALLEST} to {LARGEST} articles, not {articles!r:.80}")
        random = Random(f"{split} {seed} {articles}")
        words = _Words(random, split)
        titles = {kind: [words.name(kind) for _ in range(count)] for kind, count in _counts(articles).items()}
        kinds = {title: kind for kind, there in titles.items() for title in there}
        facts = {title: _facts(title, kind, titles, words, random) for title, kind in kinds.items()}
        passages = [Passage(title, _article(title, kinds[title], facts[title], random), title) for title in facts]
        random.shuffle(passages)
        return cls(facts, kinds, tuple(passages))


def split_of(word: str) -> str:
    """The split that a name belongs to."""
    return {0: "test", 1: "validation"}.get(zlib.crc32(word.encode()) % 8, "train")


def _counts(articles: int) -> dict[str, int]:
    counts = {kind: max(2, int(share * articles)) for kind, share in _SHARES.items()}
    counts["person"] += articles - sum(counts.values())
    return counts


class _Words:
    """Names and values, each of which is drawn once."""

    def __init__(self, random: Random, split: str) -> None:
        self._random, self._split, self._taken = random, split, set[str]()

    def word(self) -> str:
        for tries in range(10_000):
            middle = self._random.choices(_ENDS, k=tries // 50)  # longer ones, as the short ones are used up
            drawn = self._random.choice(_STARTS) + "".join(middle) + self._random.choice(_ENDS)
            if drawn not in self._taken and split_of(drawn) == self._split:
                self._taken.add(drawn)
                return drawn
        raise AssertionError("longer names are always left")

    def name(self, kind: str) -> str:
        if kind == "person":  # her first name is her own, so that a name in a question is never half another's
            return f"{self.word()} {self.word()}"
        return f"{self.word()} Works" if kind == "company" else self.word()

    def value(self, kind: str) -> str:
        if kind in ("word", "sea"):
            return f"Sea of {self.word()}" if kind == "sea" else self.word()
        return str(self._random.randint(1200, 1999) if kind == "year" else self._random.randint(10_000, 999_999))


def _facts(title: str, kind: str, titles: Mapping[str, list[str]], words: _Words, random: Random) -> dict[str, str]:
    def value(target: str) -> str:
        if target not in titles:
            return words.value(target)
        return random.choice([each for each in titles[target] if each != title])

    return {each.name: value(each.target) for each in OF_KIND[kind]}


def _article(title: str, kind: str, facts: Mapping[str, str], random: Random) -> str:
    said = [random.choice(each.sentences).format(x=title, y=facts[each.name]) for each in OF_KIND[kind]]
    return " ".join(random.sample(said, len(said)))
