"""Finds the bugs that are worth a task, by running the hidden tests on every mutation of the shipped packages.

python -m agentfly.environments.repair.indexing    # writes index.json again; some minutes
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from agentfly.environments.code_judge import Verdict
from agentfly.environments.repair.generated import INDEX
from agentfly.environments.repair.judge import RepairJudge, names_of_tests, taken_apart
from agentfly.environments.repair.mutation import Mutation, mutations
from agentfly.environments.repair.package import NAMES, Package, shipped
from agentfly.sandbox import Limits

MOST_FAILING = 0.5
"""Of the hidden tests: where more fail, the bug is where everything is."""
_LONGEST = 160
"""Characters of a value in a report."""
_SHOW = """
import json
from {package} import *
shown = []
for example in {examples!r}:
    space = dict(globals())
    *before, last = example.split("; ")
    try:
        exec("\\n".join(before), space)
        shown.append(repr(eval(last, space)))
    except Exception as error:
        shown.append(f"{{type(error).__name__}}: {{error}}")
print(json.dumps(shown))
"""


class QuickJudge(RepairJudge):
    """Gives up early: a bug that makes a test hang would cost every chain that leaves it."""

    limits = Limits(seconds=3, memory=1 << 30, output=1 << 20)
    total_seconds = 8.0


async def worth_a_task(
    judge: RepairJudge, package: Package, mutation: Mutation, expected: list[str]
) -> dict[str, Any] | None:
    """The entry of a bug in the index; None where it is not worth a task. `expected` is what the examples come to."""
    sources = {**package.sources, mutation.path: mutation.applied(package.sources[mutation.path])}
    encoded = {path: text.encode() for path, text in sources.items()}
    verdict = await judge.unit_tests(*taken_apart(package.name, package.hidden, encoded))
    failed = [failure.partition("(")[0] for failure in verdict.failures]
    if not 0 < len(failed) <= MOST_FAILING * verdict.total or _hangs(verdict):
        return None
    report = _report(package, await shown(judge, package, encoded), expected)
    fails = [name for name in names_of_tests(package.hidden) if name in failed]
    return report and {"package": package.name, **mutation.to_json(), "fails": fails, **report}


def _hangs(verdict: Verdict) -> bool:
    return any(failure.endswith(("it took too long", "no time left for it")) for failure in verdict.failures)


def _report(package: Package, came: list[str], expected: list[str]) -> dict[str, str] | None:
    """The first example that comes out otherwise than it should, in few enough words."""
    for example, wrong, right in zip(package.examples, came, expected, strict=False):
        if wrong != right and max(len(wrong), len(right)) <= _LONGEST and " at 0x" not in wrong:
            return {"example": example, "came": wrong, "expected": right}
    return None


async def shown(judge: RepairJudge, package: Package, sources: Mapping[str, bytes] | None = None) -> list[str]:
    """What each example comes to; nothing where the package does not even run."""
    if sources is None:
        sources = {path: text.encode() for path, text in package.sources.items()}
    program, _ = taken_apart(package.name, "", sources)
    printed = await judge.output(program + _SHOW.format(package=package.name, examples=package.examples))
    return [] if printed.wrong else list(json.loads(printed.text))


async def index() -> list[dict[str, Any]]:
    """Every bug that is worth a task."""
    judge = QuickJudge()
    await judge.start()
    found = list[dict[str, Any]]()
    for name in NAMES:
        package = shipped(name)
        expected = await shown(judge, package)
        tried = [each for path, text in package.sources.items() for each in mutations(path, text)]
        judged = await asyncio.gather(*(worth_a_task(judge, package, each, expected) for each in tried))
        entries = [entry for entry in judged if entry is not None]
        found += entries
        print(f"{name}: {len(entries)} of {len(tried)} bugs are worth a task", flush=True)
    return found


def main() -> None:
    entries = asyncio.run(index())
    INDEX.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")


if __name__ == "__main__":
    main()
