"""Tasks from any package that comes with its tests, such as an unpacked source distribution of PyPI.

A bug is put into a line, and kept where some of the tests that passed now fail. Test files in which one fails are
hidden from the chain; the others it may see. Everything runs in the sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from agentfly.environments.data import checked_split
from agentfly.environments.repair.judge import RepairJudge
from agentfly.environments.repair.mutation import Mutation, mutations
from agentfly.environments.repair.pytest_run import Run, is_source, is_test_file
from agentfly.errors import ConfigError, DataError

_LARGEST = 1 << 18
_SKIPPED = {".git", ".github", ".tox", "__pycache__", "build", "dist", "doc", "docs", "node_modules"}
_TOLD_LINES = 8


def package_tasks(
    folder: str | Path,
    package: str | None = None,
    *,
    split: str = "train",
    count: int = 10,
    seed: int = 0,
    most_failing: float = 0.3,
    judge: RepairJudge | None = None,
) -> list[dict[str, Any]]:
    """At most so many tasks of a package: bugs with which some tests fail, but no more than the part `most_failing`.

    `package` is the folder (`toolz`, `src/attr`) or module that is repaired; None finds it. Each bug that is tried
    costs a run of pytest.
    """
    checked_split(split)
    files = dict(_read(Path(folder)))
    name = package or _found(files, Path(folder))
    finding = _Finding(name, files, most_failing, judge or RepairJudge())
    return asyncio.run(finding.tasks(split, count, Random(seed)))


def _read(folder: Path) -> Iterator[tuple[str, str]]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; unpack a source distribution (pip download --no-binary :all: …)")
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        skipped = _SKIPPED & set(inside.parts) or any(part.endswith(".egg-info") for part in inside.parts)
        if skipped or not path.is_file() or path.stat().st_size > _LARGEST:
            continue
        try:
            yield inside.as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def _found(files: Mapping[str, str], folder: Path) -> str:
    """The one package of a folder."""
    roots = [path.removesuffix("/__init__.py") for path in files if path.endswith("/__init__.py")]
    tops = {root for root in roots if not is_test_file(f"{root}/x") and root.removeprefix("src/").count("/") == 0}
    modules = {path.removesuffix(".py") for path in files if "/" not in path and path.endswith(".py")}
    found = tops or modules - {"setup", "conftest", "noxfile", "tasks"}
    if len(found) != 1:
        said = ", ".join(sorted(found)) or "none"
        raise DataError(f"which package of {folder} is to be repaired? There are: {said}; say package=…")
    return found.pop()


class _Finding:
    """The search for bugs in one package."""

    def __init__(self, package: str, files: dict[str, str], most_failing: float, judge: RepairJudge) -> None:
        self.package, self.files, self.most_failing, self.judge = package, files, most_failing, judge
        self.sources = {path: text for path, text in files.items() if is_source(path, package)}
        self.tests = {path: text for path, text in files.items() if is_test_file(path)}
        self.others = {path: text for path, text in files.items() if path not in {*self.sources, *self.tests}}
        if not self.sources or not self.tests:
            lacks = "source files" if not self.sources else "test files"
            raise DataError(f"the package {package!r} has no {lacks}")

    async def tasks(self, split: str, count: int, random: Random) -> list[dict[str, Any]]:
        await self.judge.start()
        good, again = await self._run(self.sources), await self._run(self.sources)
        passing = good.passed & again.passed  # twice: what passes by chance would break a chain's reward
        if not good.honest or not passing:
            raise ConfigError(
                f"no test of {self.package!r} passes in the sandbox, even without a bug; it needs pytest "
                f"(pip install 'agentfly-rl[repair]') and whatever the package imports. "
                f"pytest said: {good.output[-500:]}"
            )
        tried = [each for path, text in self.sources.items() for each in mutations(path, text)]
        random.shuffle(tried)
        rows = list[dict[str, Any]]()
        for mutation in tried:
            if len(rows) == count:
                break
            if mutation.is_in(split, self.package) and (row := await self._task(mutation, passing)):
                rows.append(row)
        return rows

    async def _run(self, sources: Mapping[str, str]) -> Run:
        columns = {"package": self.package, "files": self.others, "tests": self.tests}
        return await self.judge.run_pytest(columns, {path: text.encode() for path, text in sources.items()})

    async def _task(self, mutation: Mutation, passing: frozenset[str]) -> dict[str, Any] | None:
        sources = {**self.sources, mutation.path: mutation.applied(self.sources[mutation.path])}
        run = await self._run(sources)
        fails = sorted(passing - run.passed)
        if not run.honest or not 0 < len(fails) <= self.most_failing * len(passing):
            return None
        hidden = {test.partition("::")[0] for test in fails}
        visible = {path: text for path, text in self.tests.items() if path not in hidden}
        return {
            "id": mutation.name,
            "question": self._question(fails[0], run),
            "package": self.package,
            "kind": mutation.kind,
            "files": {**self.others, **visible, **sources},
            "tests": {path: self.tests[path] for path in sorted(hidden)},
            "fail_to_pass": fails,
            "pass_to_pass": sorted(passing & run.passed),
            "mutation": mutation.to_json(),
            "test_command": "python3 -m pytest -q" if visible else "ls",
        }

    def _question(self, test: str, run: Run) -> str:
        shown = [line for line in run.told.get(test, "").splitlines() if line[:1] in (">", "E")]
        told = "\n".join(shown[:_TOLD_LINES]) or "It does not even get to run."
        return (
            f"The package in `{self.package}` has a bug. A test that you do not have, `{test}`, fails:\n\n"
            f"{told}\n\nFind the bug and repair the package; hidden tests decide."
        )
