"""Build `index.json`: the mutations of the shipped packages that make good tasks, found by running the hidden tests.

    python -m agentfly.environments.repair.build_index    # takes some minutes

A mutation makes a good task if at least one hidden test fails, at most half of them fail, none of them hangs, and one
of the package's examples shows the bug in a short line.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agentfly.environments.repair.judge import RepairJudge, build_solution, list_test_names
from agentfly.environments.repair.tasks import INDEX, NAMES, Mutation, Package, load_package, mutations
from agentfly.sandbox import Limits

MAX_FAILING = 0.5
"""Largest fraction of the hidden tests that may fail."""
_MAX_VALUE_LENGTH = 160
"""Characters of a value in a bug report."""
_RUN_EXAMPLES = """
import json
from {package} import *
values = []
for example in {examples!r}:
    space = dict(globals())
    *before, last = example.split("; ")
    try:
        exec("\\n".join(before), space)
        values.append(repr(eval(last, space)))
    except Exception as error:
        values.append(f"{{type(error).__name__}}: {{error}}")
print(json.dumps(values))
"""


class QuickJudge(RepairJudge):
    """Short limits: a bug with which a test hangs would cost every chain that does not repair it."""

    limits = Limits(seconds=3, memory=1 << 30, output=1 << 20)
    total_seconds = 8.0


async def run_examples(judge: RepairJudge, package: Package, sources: Mapping[str, bytes] | None = None) -> list[str]:
    """Return the value of each example as text; an empty list if the package cannot be imported."""
    if sources is None:
        sources = {path: text.encode() for path, text in package.sources.items()}
    program, _ = build_solution(package.name, "", sources)
    printed = await judge.run_program(program + _RUN_EXAMPLES.format(package=package.name, examples=package.examples))
    return [] if printed.error else list(json.loads(printed.text))


async def index_mutation(
    judge: RepairJudge, package: Package, mutation: Mutation, expected: list[str]
) -> dict[str, Any] | None:
    """Return the index entry of a mutation. None if it makes no good task.

    `expected` are the values of the examples without a bug.
    """
    sources = {**package.sources, mutation.path: mutation.apply(package.sources[mutation.path])}
    encoded = {path: text.encode() for path, text in sources.items()}
    verdict = await judge.unit_tests(*build_solution(package.name, package.hidden, encoded))
    if any(failure.endswith(("it took too long", "no time left for it")) for failure in verdict.failures):
        return None
    failed = [failure.partition("(")[0] for failure in verdict.failures]
    if not 0 < len(failed) <= MAX_FAILING * verdict.total:
        return None
    actual = await run_examples(judge, package, encoded)
    for example, mutated_output, right in zip(package.examples, actual, expected, strict=False):
        if (
            mutated_output != right
            and max(len(mutated_output), len(right)) <= _MAX_VALUE_LENGTH
            and " at 0x" not in mutated_output
        ):
            fails = [name for name in list_test_names(package.hidden) if name in failed]
            report = {"example": example, "came": mutated_output, "expected": right}
            return {"package": package.name, **asdict(mutation), "fails": fails, **report}
    return None


async def build_index() -> list[dict[str, Any]]:
    """Return the entries of all shipped packages."""
    judge = QuickJudge()
    await judge.start()
    index = list[dict[str, Any]]()
    for name in NAMES:
        package = load_package(name)
        expected = await run_examples(judge, package)
        candidates = [mutation for path, text in package.sources.items() for mutation in mutations(path, text)]
        entries = await asyncio.gather(*(index_mutation(judge, package, mutation, expected) for mutation in candidates))
        tasks = [entry for entry in entries if entry is not None]
        index += tasks
        print(f"{name}: {len(tasks)} of {len(candidates)} mutations make good tasks", flush=True)
    return index


if __name__ == "__main__":
    INDEX.write_text("[\n" + ",\n".join(map(json.dumps, asyncio.run(build_index()))) + "\n]\n")
