"""A small world to ask about, where one answer leads to the next: what is the colour of the friend of Fotem?

Facts are drawn anew for each task, so an answer can only be looked up, never remembered. The demonstrations show every
way of using the tool, right and wrong, so that a model that imitates them has much to learn from rewards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from agentfly.environment import Environment
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

RELATIONS = ("friend", "boss", "teacher", "neighbor", "cousin")
ATTRIBUTES = {
    "color": ("red", "blue", "green", "black", "white", "pink"),
    "pet": ("cat", "dog", "fish", "horse", "snake", "bird"),
    "food": ("rice", "soup", "bread", "cheese", "cake", "beans"),
    "job": ("cook", "judge", "baker", "nurse", "pilot", "farmer"),
    "city": ("rome", "paris", "cairo", "lima", "oslo", "delhi"),
}
_NEXT = dict(zip(ATTRIBUTES, [*ATTRIBUTES][1:] + [*ATTRIBUTES][:1], strict=True))
"""What is mistaken for what."""
QUESTIONS = (
    "What is the {attribute} of the {relation} of {who}?",
    "{who} has a {relation}. What is the {attribute} of that {relation}?",
    "Tell me the {attribute} of the {relation} of {who}.",
)
UNKNOWN = "unknown"
_STARTS = [consonant + vowel for consonant in "BDFGKLMNPRSTVZ" for vowel in "aeiou"]
_ENDS = (
    "ban", "bex", "dir", "dul", "fin", "gor", "kel", "lam", "mip", "mut", "nis", "pod", "rek", "sal", "tem", "tof",
    "vun", "zor",
)  # fmt: skip
_HELD_OUT = 240
NAMES = Random(0).sample([start + end for start in _STARTS for end in _ENDS], len(_STARTS) * len(_ENDS))
"""1260 people; the last 240 appear in no demonstration."""


class Lookup(Environment):
    """The facts of one task, which lie in its column `facts`."""

    async def reset(self, task: Task) -> None:
        self.facts: Mapping[str, Mapping[str, str]] = task.columns["facts"]
        self.asked = task.columns
        self.seen: set[tuple[str, str]] = set()

    @tool
    async def lookup(self, who: str, what: str) -> str:
        """Look up one fact about a person.

        Args:
            who: The person's name.
            what: A relation or a property.
        """
        self.seen.add((who, what))
        return known(self.facts, who, what)

    def expert(self) -> ToolCall | str:
        """Look up who is meant, then what is asked about them, then say it."""
        who, relation, attribute = (self.asked[name] for name in ("who", "relation", "attribute"))
        meant = known(self.facts, who, relation)
        for subject, what in ((who, relation), (meant, attribute)):
            if (subject, what) not in self.seen:
                return ToolCall("lookup", {"who": subject, "what": what})
        return known(self.facts, meant, attribute)


def known(facts: Mapping[str, Mapping[str, str]], who: str, what: str) -> str:
    """What the facts say."""
    return facts.get(who, {}).get(what, UNKNOWN)


def draw(random: Random, *, held_out: bool = False) -> dict[str, Any]:
    """A row of a data set: `question`, `answer`, and the `facts` about the two people that it takes to answer it."""
    who, other, *strangers = random.sample(NAMES[-_HELD_OUT:] if held_out else NAMES[:-_HELD_OUT], 12)
    relation, attribute = random.choice(RELATIONS), random.choice(list(ATTRIBUTES))
    facts = {person: _facts(random, strangers) for person in (who, other)}
    facts[who][relation] = other
    question = random.choice(QUESTIONS).format(attribute=attribute, relation=relation, who=who)
    asked = {"who": who, "relation": relation, "attribute": attribute}
    return {"question": question, "answer": facts[other][attribute], "facts": facts, **asked}


def _facts(random: Random, strangers: list[str]) -> dict[str, str]:
    relations = {relation: strangers.pop() for relation in RELATIONS}
    return relations | {attribute: random.choice(values) for attribute, values in ATTRIBUTES.items()}


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation, in the words that a model would have sampled."""

    question: str
    calls: tuple[tuple[str, str], ...]
    """Each call as it is written, and what came back."""
    answer: str

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything that is said in it."""
        return (self.question, *(text for pair in self.calls for text in pair), self.answer)


WAYS = {"right": 20, "other key": 50, "one hop": 10, "guesses": 5, "wanders": 15}
"""Ways to go about a task, and how often out of a hundred each is shown. The likeliest is a wrong one."""


def demonstrations(count: int, seed: int = 0) -> Iterator[Demonstration]:
    """Scripted conversations, the same for the same seed."""
    random = Random(seed)
    for way in random.choices(list(WAYS), list(WAYS.values()), k=count):
        yield _demonstration(draw(random), way, random)


def _demonstration(task: Mapping[str, Any], way: str, random: Random) -> Demonstration:
    who, relation, attribute = task["who"], task["relation"], task["attribute"]
    keys = [*RELATIONS, *ATTRIBUTES]
    plans = {
        "right": [relation, attribute],
        "other key": [relation, _NEXT[attribute]],
        "one hop": [attribute],
        "guesses": [],
        "wanders": random.choices(keys, k=random.randint(1, 3)),
    }
    calls, found = [], who
    for what in plans[way]:
        subject = found if found in task["facts"] else who
        found = known(task["facts"], subject, what)
        calls.append((call(subject, what), found))
    answer = found if calls else random.choice(ATTRIBUTES[attribute])
    return Demonstration(task["question"], tuple(calls), answer)


def call(who: str, what: str) -> str:
    """A call of the tool, as the tiny model writes it."""
    said = {"name": "lookup", "arguments": {"who": who, "what": what}}
    return f"<tool_call>{json.dumps(said)}</tool_call>"
