"""Questions of reasoning-gym's generators, answered once and scored by their own scorers.

A row names its generator, settings, seed and index, and no more: the question is made again where it is scored, so a
file of tasks is small and the scorer sees exactly what its generator made. Questions whose own answer their scorer
does not give full marks are not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from agentfly.environment import Environment
from agentfly.environments.drawing import drawn
from agentfly.environments.games.harmless import is_harmless
from agentfly.errors import ConfigError, DataError, describe
from agentfly.extras import needed
from agentfly.threads import call
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

DATASETS = ("basic_arithmetic", "chain_sum", "gcd", "leg_counting", "number_sequence", "spell_backward")
"""What is drawn where nobody says what."""
LONGEST = 10_000
"""Characters of the longest answer that is scored; longer ones are wrong."""
_TRIED = 10
"""Questions by which it is found out whether a scorer accepts its generator's answers."""
EVALUATED = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Generators whose scorers evaluate the answer as Python, which may therefore be a plain expression only."""


class ReasoningGym(Environment):
    """Questions of reasoning-gym, answered once (extra `reasoning-gym`)."""

    scored_by = "reasoning_gym_score"

    @classmethod
    def draw_tasks(
        cls,
        split: str = "train",
        count: int = 100,
        *,
        seed: int = 0,
        datasets: Sequence[str] = DATASETS,
        settings: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Questions of these generators, in turn. `settings` are for each of them; None: their own."""

        for name in datasets:
            _refuse_unfair(name, settings or {})

        def draw(random: Random, number: int) -> tuple[str, dict[str, Any]] | None:
            row: dict[str, Any] = {"dataset": datasets[number % len(datasets)], "settings": dict(settings or {})}
            row |= {"seed": random.randrange(2**31), "index": 0}
            generator, entry = generated(row)
            if _scored(generator, entry["answer"], entry) < 1:
                return None
            return entry["question"], {"question": entry["question"], "answer": entry["answer"], **row}

        return drawn("reasoning_gym", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """The question of the columns `dataset`, `settings`, `seed` and `index`."""
        _, entry = await call(generated, task.columns)  # some questions take a second to make
        self._right = str(entry["answer"])

    @tool(ends_chain=True, max_length=100_000)
    async def answer(self, answer: str) -> str:
        """Give the final answer. Nothing can be done after it.

        Args:
            answer: The final answer, and nothing else.
        """
        return answer

    def expert(self) -> ToolCall | str:
        """The right answer."""
        return ToolCall("answer", {"answer": self._right})


def generated(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The generator that a row names, and the question that it makes."""
    with needed("ReasoningGym", "reasoning-gym"):
        from reasoning_gym.factory import DATASETS as there
        from reasoning_gym.factory import create_dataset

    name, settings, index = row.get("dataset"), dict(row.get("settings") or {}), row.get("index", 0)
    if name not in there:
        raise DataError(f"reasoning-gym has no dataset {name!r:.80}; it has {', '.join(sorted(there))}")
    try:
        generator = create_dataset(name, **{"size": index + 1, **settings, "seed": row.get("seed", 0)})
        return generator, generator[index]
    except (TypeError, ValueError, AssertionError, IndexError) as error:
        raise ConfigError(f"{name} makes no question of {settings!r:.200}: {describe(error)}") from error


def _refuse_unfair(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse a generator whose answers its scorer does not accept: nobody could learn from it."""
    for seed in range(_TRIED):
        generator, entry = generated({"dataset": name, "settings": settings, "seed": seed})
        if _scored(generator, entry["answer"], entry) >= 1:
            return
    raise ConfigError(f"reasoning-gym's scorer of {name!r} gives its own answers less than 1; leave it out")


def score(row: Mapping[str, Any], answer: str) -> float:
    """What reasoning-gym gives for an answer, from 0 to 1."""
    generator, entry = generated(row)
    if row.get("answer", entry["answer"]) != entry["answer"]:
        raise DataError(f"this version of reasoning-gym makes another question of {row['dataset']!r} than the row has")
    if len(answer) > LONGEST or (row["dataset"] in EVALUATED and not is_harmless(answer)):
        return 0.0
    return _scored(generator, answer, entry)


def _scored(generator: Any, answer: str, entry: dict[str, Any]) -> float:
    try:
        return float(generator.score_answer(answer, entry))
    except Exception:  # some scorers raise where an answer is not written as they expect: it is wrong
        return 0.0
