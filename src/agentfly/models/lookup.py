"""Tasks and demonstrations of the lookup task, which the tiny model is trained on.

A question takes two lookups: what is the color of the friend of Fotem? Each task has its own facts, so the answer
cannot be memorized. Demonstrations use the tool correctly and incorrectly, which leaves room for learning from
rewards. The environment is `agentfly.environments.lookup.Lookup`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

RELATIONS = ("friend", "boss", "teacher", "neighbor", "cousin")
ATTRIBUTES = {
    "color": ("red", "blue", "green", "black", "white", "pink"),
    "pet": ("cat", "dog", "fish", "horse", "snake", "bird"),
    "food": ("rice", "soup", "bread", "cheese", "cake", "beans"),
    "job": ("cook", "judge", "baker", "nurse", "pilot", "farmer"),
    "city": ("rome", "paris", "cairo", "lima", "oslo", "delhi"),
}
_WRONG_ATTRIBUTE = dict(zip(ATTRIBUTES, [*ATTRIBUTES][1:] + [*ATTRIBUTES][:1], strict=True))
"""The attribute that the "other key" demonstrations look up instead of the right one."""
QUESTIONS = (
    "What is the {attribute} of the {relation} of {who}?",
    "{who} has a {relation}. What is the {attribute} of that {relation}?",
    "Tell me the {attribute} of the {relation} of {who}.",
)
UNKNOWN = "unknown"
_SYLLABLES = [consonant + vowel for consonant in "BDFGKLMNPRSTVZ" for vowel in "aeiou"]
_ENDINGS = (
    "ban", "bex", "dir", "dul", "fin", "gor", "kel", "lam", "mip", "mut", "nis", "pod", "rek", "sal", "tem", "tof",
    "vun", "zor",
)  # fmt: skip
_HELD_OUT = 240
NAMES = Random(0).sample([start + end for start in _SYLLABLES for end in _ENDINGS], len(_SYLLABLES) * len(_ENDINGS))
"""1260 names; the last 240 appear in no demonstration."""

TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up one fact about a person.",
        "parameters": {
            "type": "object",
            "properties": {
                "who": {"type": "string", "description": "The person's name."},
                "what": {"type": "string", "description": "A relation or a property."},
            },
            "required": ["who", "what"],
            "additionalProperties": False,
        },
    },
}
"""Schema of the tool `Lookup.lookup`."""

STRATEGIES = {"right": 20, "other key": 50, "one hop": 10, "guesses": 5, "wanders": 15}
"""Strategies of the demonstrations, with their share in percent. The most frequent one is wrong."""


@dataclass(frozen=True, slots=True)
class LookupDemonstration:
    """One conversation, as text that the model would have sampled."""

    question: str
    calls: tuple[tuple[str, str], ...]
    """Each call as text, with its observation."""
    answer: str

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the conversation."""
        return (self.question, *(text for pair in self.calls for text in pair), self.answer)


def find_fact(facts: Mapping[str, Mapping[str, str]], who: str, what: str) -> str:
    """Return the fact, or `UNKNOWN`."""
    return facts.get(who, {}).get(what, UNKNOWN)


def draw(random: Random, *, held_out: bool = False) -> dict[str, Any]:
    """Draw a dataset row: `question`, `answer`, and the `facts` about the two people that the answer depends on."""
    who, other, *strangers = random.sample(NAMES[-_HELD_OUT:] if held_out else NAMES[:-_HELD_OUT], 12)
    relation = random.choice(RELATIONS)
    attribute = random.choice(list(ATTRIBUTES))
    facts: dict[str, dict[str, str]] = {}
    for person in (who, other):
        facts[person] = {name: strangers.pop() for name in RELATIONS}
        facts[person] |= {name: random.choice(values) for name, values in ATTRIBUTES.items()}
    facts[who][relation] = other
    question = random.choice(QUESTIONS).format(attribute=attribute, relation=relation, who=who)
    columns = {"who": who, "relation": relation, "attribute": attribute}
    return {"question": question, "answer": facts[other][attribute], "facts": facts, **columns}


def demonstrations(count: int, seed: int = 0) -> Iterator[LookupDemonstration]:
    """Yield scripted conversations; the same seed yields the same ones."""
    random = Random(seed)
    for strategy in random.choices(list(STRATEGIES), list(STRATEGIES.values()), k=count):
        task = draw(random)
        who, relation, attribute = task["who"], task["relation"], task["attribute"]
        lookups = {
            "right": [relation, attribute],
            "other key": [relation, _WRONG_ATTRIBUTE[attribute]],
            "one hop": [attribute],
            "guesses": [],
            "wanders": random.choices([*RELATIONS, *ATTRIBUTES], k=random.randint(1, 3)),
        }[strategy]
        calls = []
        observation = who
        for what in lookups:
            subject = observation if observation in task["facts"] else who
            observation = find_fact(task["facts"], subject, what)
            calls.append((format_call(subject, what), observation))
        answer = observation if calls else random.choice(ATTRIBUTES[attribute])
        yield LookupDemonstration(task["question"], tuple(calls), answer)


def format_call(who: str, what: str) -> str:
    """Format a call of the tool the way the tiny model writes it."""
    call = {"name": "lookup", "arguments": {"who": who, "what": what}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"
