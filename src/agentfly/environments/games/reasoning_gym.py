"""Questions of reasoning-gym's generators, answered once and scored by reasoning-gym.

A row names generator, settings, seed and index; the question is regenerated for scoring, so task files are small and
the scorer sees exactly what its generator made. Questions whose reference answer does not get the full score are not
drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from agentfly.environment import Environment
from agentfly.environments.games.safe_expression import is_safe_expression
from agentfly.environments.task_sampling import sample_tasks
from agentfly.errors import ConfigError, DataError, describe
from agentfly.extras import require_extra
from agentfly.threads import call
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

DATASETS = ("basic_arithmetic", "chain_sum", "gcd", "leg_counting", "number_sequence", "spell_backward")
"""The default generators."""
MAX_ANSWER_LENGTH = 10_000
"""Characters; longer answers are wrong."""
_PROBES = 10
"""Questions tried to find out whether a scorer accepts its generator's answers."""
EVALUATED = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Generators whose scorers evaluate the answer as Python; only safe expressions are passed to them."""


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
        """Questions round-robin over `datasets`. settings: for each generator (None: its defaults)."""
        for name in datasets:
            _require_fair_scorer(name, settings or {})

        def draw(random: Random, number: int) -> tuple[str, dict[str, Any]] | None:
            row: dict[str, Any] = {"dataset": datasets[number % len(datasets)], "settings": dict(settings or {})}
            row |= {"seed": random.randrange(2**31), "index": 0}
            generator, entry = generate_question(row)
            if _run_scorer(generator, entry["answer"], entry) < 1:
                return None
            return entry["question"], {"question": entry["question"], "answer": entry["answer"], **row}

        return sample_tasks("reasoning_gym", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Generate the question of the columns `dataset`, `settings`, `seed` and `index`."""
        _, entry = await call(generate_question, task.columns)  # some take a second
        self._reference_answer = str(entry["answer"])

    @tool(ends_chain=True, max_length=100_000)
    async def answer(self, answer: str) -> str:
        """Give the final answer. Nothing can be done after it.

        Args:
            answer: The final answer, and nothing else.
        """
        return answer

    def expert(self) -> ToolCall | str:
        """The reference answer."""
        return ToolCall("answer", {"answer": self._reference_answer})


def generate_question(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The generator named by a row, and its question."""
    with require_extra("ReasoningGym", "reasoning-gym"):
        from reasoning_gym.factory import DATASETS as known
        from reasoning_gym.factory import create_dataset

    name, settings, index = row.get("dataset"), dict(row.get("settings") or {}), row.get("index", 0)
    if name not in known:
        raise DataError(f"reasoning-gym has no dataset {name!r:.80}; it has {', '.join(sorted(known))}")
    try:
        generator = create_dataset(name, **{"size": index + 1, **settings, "seed": row.get("seed", 0)})
        return generator, generator[index]
    except (TypeError, ValueError, AssertionError, IndexError) as error:
        raise ConfigError(f"{name} cannot generate a question with {settings!r:.200}: {describe(error)}") from error


def _require_fair_scorer(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a generator whose reference answers never get the full score."""
    for seed in range(_PROBES):
        generator, entry = generate_question({"dataset": name, "settings": settings, "seed": seed})
        if _run_scorer(generator, entry["answer"], entry) >= 1:
            return
    raise ConfigError(f"reasoning-gym's scorer of {name!r} gives its own answers less than 1; leave it out")


def score_answer(row: Mapping[str, Any], answer: str) -> float:
    """Reasoning-gym's score of an answer, 0 to 1."""
    generator, entry = generate_question(row)
    if row.get("answer", entry["answer"]) != entry["answer"]:
        raise DataError(
            f"this version of reasoning-gym generates a different question for {row['dataset']!r} than the row has"
        )
    if len(answer) > MAX_ANSWER_LENGTH or (row["dataset"] in EVALUATED and not is_safe_expression(answer)):
        return 0.0
    return _run_scorer(generator, answer, entry)


def _run_scorer(generator: Any, answer: str, entry: dict[str, Any]) -> float:
    try:
        return float(generator.score_answer(answer, entry))
    except Exception:  # some scorers raise on answers in an unexpected format: wrong
        return 0.0
