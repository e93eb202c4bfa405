"""Questions of reasoning-gym's generators, answered once and scored by reasoning-gym.

A row names generator, settings, seed and index. The question is regenerated for scoring, so task files are small and
the scorer sees exactly what its generator made. Questions whose reference answer does not get the full score are not
drawn.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from agentfly.environment import Environment
from agentfly.environments.data import sample_tasks
from agentfly.errors import ConfigError, DataError, describe, require_extra
from agentfly.threads import call
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

DATASETS = ("basic_arithmetic", "chain_sum", "gcd", "leg_counting", "number_sequence", "spell_backward")
"""The default generators."""
MAX_ANSWER_LENGTH = 10_000
"""Characters. Longer answers are wrong."""
_PROBES = 10
"""Questions tried to find out whether a scorer accepts its generator's answers."""
EVALUATED = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Generators whose scorers evaluate the answer as Python. Only safe expressions are passed to them."""
_FUNCTIONS = frozenset(
    {"Abs", "acos", "asin", "atan", "cos", "cosh", "exp", "log", "sin", "sinh", "sqrt", "tan", "tanh"}
)
_MAX_SIZE = 100
"""Maximum exponent, and maximum length of a number or string in characters."""
_MAX_CALL_DEPTH = 2
"""Nested calls: exp(exp(exp(9))) cannot be computed."""
_ALLOWED = (
    ast.Expression, ast.List, ast.Tuple, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub, ast.BinOp, ast.Add, ast.Sub,
    ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.Call, ast.Name, ast.Constant,
)  # fmt: skip


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
            for probe in range(_PROBES):
                generator, entry = generate_question({"dataset": name, "settings": settings, "seed": probe})
                if _run_scorer(generator, entry["answer"], entry) >= 1:
                    break
            else:
                raise ConfigError(f"reasoning-gym's scorer of {name!r} gives its own answers less than 1; leave it out")

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


def is_safe_expression(text: str) -> bool:
    """Whether text can be evaluated as Python safely: a plain expression, or not Python and without special characters.

    Only lists, names and small arithmetic expressions are: no attribute access, no calls but a few functions, no huge
    results.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        # Some evaluators accept more than Python: sympy's takes `5!`, for example.
        return not any(sign in text for sign in "*!(.=:@`\\")
    except (ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _ALLOWED) and _is_safe_node(node) for node in ast.walk(tree))


def _is_safe_node(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in _FUNCTIONS and _call_depth(node) <= _MAX_CALL_DEPTH
        case ast.Call():
            return False
        case ast.Name(id=name):
            return "__" not in name
        case ast.Constant(value=value):
            return isinstance(value, int | float | str) and len(str(value)) <= _MAX_SIZE
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            nodes = list(ast.walk(exponent))
            numbers = [node.value for node in nodes if isinstance(node, ast.Constant)]
            is_small = all(isinstance(number, int | float) and abs(number) <= _MAX_SIZE for number in numbers)
            nested = any(isinstance(node, ast.Pow) for node in (*nodes, *ast.walk(base)))
            return is_small and not nested and not any(isinstance(node, ast.Call) for node in nodes)
        case ast.BinOp(op=ast.Mult(), left=ast.List() | ast.Tuple() | ast.Constant(value=str())):
            return False
        case ast.BinOp(op=ast.Mult(), right=ast.List() | ast.Tuple() | ast.Constant(value=str())):
            return False
    return True


def _call_depth(node: ast.AST) -> int:
    inner = max((_call_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, ast.Call)
