"""ProgramSynthesis: a function to write, with a Python interpreter to try it in. Generated tasks, and MBPP.

The hidden tests are a column of the task and never in the model's session: the reward `unit_tests` runs them in a
session of the judge.

A generated task has one example in the question and hidden tests. The functions are in `functions.toml`. Most are
composed of parts. The body of the function decides the split of a task, whatever the function is called.

MBPP (mostly basic Python problems) is read from the folder `code` of AGENTFLY_DATA. The splits are the authors', by
task number.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from textwrap import indent
from typing import Any

from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.data import DatasetSource, belongs_to, load_toml, read_rows, sample_tasks, validate_split
from agentfly.errors import ConfigError, DataError
from agentfly.types import Task, ToolCall

HIDDEN_TESTS = 5
"""Hidden tests of a generated task."""
_MAX_ATTEMPTS = 20
"""Sets of tests that are tried for one function."""
MBPP = DatasetSource("MBPP", "https://github.com/google-research/google-research/tree/master/mbpp (mbpp.jsonl)", "code")
MBPP_SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
"""Task numbers of each split. `prompt` tasks are examples for few-shot prompts."""
_MBPP_COLUMNS = {"question": ("query", "text", "prompt"), "solution": ("gold", "code"), "tests": ("tests", "test_list")}
"""Column names in InterCode's file and in the authors' own."""
KINDS = ("numbers", "strings", "lists")


def _draw_arguments(random: Random, kind: str | Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """Draw the arguments of a call: a list of numbers, a text, or one number from each range."""
    if kind == "list":
        return ([random.randint(-20, 40) for _ in range(random.randint(5, 9))],)
    if isinstance(kind, str):
        words = load_toml(__package__, "functions.toml")["words"]["texts"]
        return (" ".join(random.choices(words, k=random.randint(4, 8))),)
    return tuple(random.randint(low, high) for low, high in kind)


def mbpp_tasks(split: str, *, shown: int = 1) -> list[dict[str, Any]]:
    """Load the tasks of MBPP.

    Args:
        split: `prompt`, `test`, `validation` or `train`.
        shown: Number of tests in the question, from which the model learns the function's name. The other ones decide
            the reward. If all are shown, all decide.
    """
    numbers = MBPP_SPLITS[validate_split(split, tuple(MBPP_SPLITS))]
    if shown < 1:
        raise DataError(f"shown={shown}: at least one test must be shown, or the function's name is unknown")
    tasks = []
    for source, row in read_rows(MBPP.file("mbpp.json", "mbpp.jsonl")):
        if not isinstance(row.get("task_id"), int):
            raise DataError(
                f"{source}: a task of MBPP has its number as task_id, by which it is in a split, not {row!r:.80}"
            )
        if row["task_id"] not in numbers:
            continue
        columns = {name: next((row[key] for key in keys if key in row), None) for name, keys in _MBPP_COLUMNS.items()}
        tests = columns["tests"]
        texts = [columns["question"], columns["solution"], *(tests if isinstance(tests, list) else [None])]
        if not tests or not all(isinstance(test, str) for test in texts):
            raise DataError(f"{source}: a task of MBPP has a question, a solution and a list of tests, not {row!r:.80}")
        statement, solution, *tests = (text.replace("\r\n", "\n").strip() for text in texts)
        examples = "\n".join(tests[:shown])
        task = {
            "id": f"mbpp/{row['task_id']}",
            "question": f"{statement}\nIt must pass tests such as:\n{examples}",
            "tests": tests[shown:] or tests,
            "setup": str(row.get("test_setup_code") or "").replace("\r\n", "\n"),
            "solution": solution,
            "example": tests[0],
        }
        tasks.append(task)
    return tasks


class ProgramSynthesis(CodeInterpreter):
    """A code interpreter with functions to write; the answer is the code."""

    scored_by = "unit_tests"

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, kinds: Sequence[str] = KINDS
    ) -> list[dict[str, Any]]:
        """Draw functions whose `kinds` take turns: over numbers, strings or lists.

        Rows have `id`, `question`, `kind`, the hidden `tests`, `solution` and `example`.
        """
        if isinstance(kinds, str) or not kinds or any(kind not in KINDS for kind in kinds):
            raise DataError(f"functions are over {', '.join(KINDS)}, not {kinds!r:.80}; give a list of these")

        def draw(random: Random, number: int) -> tuple[str, dict[str, Any]] | None:
            kind = kinds[number % len(kinds)]
            functions = load_toml(__package__, "functions.toml")
            function = random.choice(functions[kind])
            if "items" in function:
                # A pipeline: draw a condition, a change and a result for its items.
                phrases = functions["parts"][function["parts"]]
                condition_words, condition = random.choice(phrases["conditions"]) if random.random() < 0.8 else ("", "")
                change_words, change = random.choice(phrases["changes"]) if random.random() < 0.7 else ("", "x")
                result_words, result = random.choice(phrases["results"])
                items = function["items"]
                first = f"Take {items} that {condition_words}." if condition_words else f"Take {items}."
                statement = " ".join(phrase for phrase in (first, change_words, result_words) if phrase)
                generator = f"{change} for x in {function['expression']}" + (f" if {condition}" if condition else "")
                body = f"return {result.replace('@', generator)}"
            else:
                statement, body = function["statement"], function["body"]
            small = random.randint(2, 9)
            values = {
                "k": small, "p": random.randint(2, 9), "q": small + random.randint(2, 9), "l": random.randint(2, 4),
                "m": random.randint(4, 6), "c": random.choice("abcdehiklmnorstu"),
            }  # fmt: skip
            for letter, value in values.items():  # not by str.format: the code has braces of its own
                statement, body = (text.replace(f"{{{letter}}}", str(value)) for text in (statement, body))
            if not belongs_to(body, split):  # checked here too, before the slow search for tests
                return None
            # Draw a name, then tests that a constant, or a function that returns an argument, passes at most once: all
            # arguments and all values differ, and no value equals an argument.
            name = random.choice(functions["words"]["names"])
            signature = f"{name}({function['parameters']})"
            solution = f"def {signature}:\n{indent(body, '    ')}"
            names: dict[str, Any] = {}
            exec(solution, names)  # code of `functions.toml`
            for _ in range(_MAX_ATTEMPTS):
                calls = [_draw_arguments(random, function["arguments"]) for _ in range(HIDDEN_TESTS + 1)]
                results = [names[name](*arguments) for arguments in calls]
                if len(set(map(repr, calls))) < len(calls) or len(set(map(repr, results))) < len(results):
                    continue
                if any(result in arguments for arguments, result in zip(calls, results, strict=True)):
                    continue
                example, *tests = (
                    f"assert {name}({', '.join(map(repr, arguments))}) == {result!r}"
                    for arguments, result in zip(calls, results, strict=True)
                )
                question = f"Write {signature}. {statement}\n{example}"
                columns = {"question": question, "kind": kind, "tests": tests, "solution": solution, "example": example}
                return body, columns
            return None

        return sample_tasks("programs", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        self._solution = task.columns.get("solution")
        self._example = task.columns.get("example")
        await super().reset(task)

    def expert(self) -> ToolCall | str:
        """Run the solution on the example of the question, then answer with it."""
        if not isinstance(self._solution, str) or not isinstance(self._example, str):
            raise ConfigError(
                "only rows with the columns `solution` and `example` have an expert; draw_tasks makes such rows"
            )
        if self.last_output is None:
            return ToolCall("code_interpreter", {"code": f"{self._solution}\n{self._example}"})
        return f"```python\n{self._solution}\n```"
