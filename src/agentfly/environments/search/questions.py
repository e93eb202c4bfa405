"""Questions about a generated encyclopaedia, which take one to four articles to answer.

A row names its encyclopaedia by split, seed and size, so that a file of tasks holds no articles; and it has the path to
its answer, for the expert and for whoever wants to know how far a chain came. Rows of two splits share no name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from random import Random
from typing import Any

from agentfly.environments.data import validate_count
from agentfly.environments.search.encyclopaedia import OF_KIND, Encyclopaedia, Relation
from agentfly.errors import DataError

HOPS = (1, 2, 3, 4)
PER_WORLD = 25
"""Questions that are asked about one encyclopaedia before the next is drawn."""


def draw_tasks(split: str, number: int, seed: int, hops: Sequence[int], articles: int) -> list[dict[str, Any]]:
    """So many questions of a split, as rows of a data set."""
    validate_count(number)
    if not isinstance(hops, Sequence) or not hops or any(each not in HOPS for each in hops):
        raise DataError(f"questions have {HOPS[0]} to {HOPS[-1]} hops, a list of these, not {hops!r:.80}")
    rows: dict[str, dict[str, Any]] = {}
    for world in count():
        if len(rows) >= number:
            return list(rows.values())[:number]
        world_seed = seed * 1_000_000 + world
        for row in _asked(split, world_seed, articles, hops):
            rows.setdefault(row["question"], {"id": f"{split}-{seed}-{len(rows)}", **row})
    raise AssertionError("there is always another encyclopaedia")


def _asked(split: str, seed: int, articles: int, hops: Sequence[int]) -> Iterator[dict[str, Any]]:
    random, world = Random(f"questions {split} {seed}"), Encyclopaedia.draw(split, seed, articles)
    for at in range(PER_WORLD):
        start, path = _path(world, hops[at % len(hops)], random)
        yield {
            "question": _question(start, path),
            "answer": follow(world, start, path)[-1],
            "hops": len(path),
            "start": start,
            "path": [each.name for each in path],
            "encyclopaedia": {"split": split, "seed": seed, "articles": articles},
        }


def _path(world: Encyclopaedia, hops: int, random: Random) -> tuple[str, list[Relation]]:
    """A start, and relations that lead from article to article, never to one that was passed already."""
    titles = list(world.facts)
    while True:
        start, path = random.choice(titles), list[Relation]()
        kind = world.kinds[start]
        for _ in range(hops - 1):
            path.append(random.choice([each for each in OF_KIND[kind] if each.target in OF_KIND]))
            kind = path[-1].target
        path.append(random.choice(OF_KIND[kind]))
        passed = follow(world, start, path)
        if len(set(passed)) == len(passed):
            return start, path


def follow(world: Encyclopaedia, start: str, path: Sequence[Relation]) -> list[str]:
    """Everything that a path passes: the start, and the value of each relation in turn."""
    passed = [start]
    for relation in path:
        passed.append(world.facts[passed[-1]][relation.name])
    return passed


def _question(start: str, path: Sequence[Relation]) -> str:
    who = start
    for relation in path[:-1]:
        who = relation.phrase.format(x=who)
    # "the {x}" of a river, where x already begins with an article
    return path[-1].question.format(x=who).replace("the the ", "the ")
