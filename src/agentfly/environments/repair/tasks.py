"""Repair tasks: a Python package with one wrong line, and tests that fail because of it.

`draw_tasks` takes bugs in the shipped packages, `packages/NAME.toml`. The bugs that make good tasks were found by
running the hidden tests (see `build_index`) and are listed in `index.json`, so drawing a task runs nothing.

`package_tasks` puts bugs into any package that has pytest tests, such as an unpacked source distribution from PyPI, and
runs the tests in the sandbox.

A bug is one mutated line, as in mutation testing: a changed operator, constant, condition, call or return value, or a
removed statement. It is made in the text of the file, so all other lines keep their formatting.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from agentfly.environments.data import validate_split
from agentfly.environments.repair.judge import PytestRun, RepairJudge, is_source, is_test_file, list_test_names
from agentfly.errors import ConfigError, DataError

_COMPARISONS = {
    ast.Lt: ("<", "<=", ">"), ast.LtE: ("<=", "<", ">="), ast.Gt: (">", ">=", "<"), ast.GtE: (">=", ">", "<="),
    ast.Eq: ("==", "!=", "<="), ast.NotEq: ("!=", "==", "<"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
"""Each operator as it is written, and its replacements."""
_ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"), ast.Mod: ("%", "//"), ast.Pow: ("**", "*"),
}  # fmt: skip
_BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any", "True": "False", "False": "True"}
_TWENTIETHS = {"train": range(13), "validation": range(13, 17), "test": range(17, 20)}
"""Twentieths of all source lines in each split."""

Edit = tuple[str, int, int, int, str]
"""Kind, line, first column, last column, replacement text."""
_PACKAGES = Path(__file__).parent / "packages"
NAMES = tuple(sorted(path.stem for path in _PACKAGES.glob("*.toml")))
"""Names of the shipped packages."""
INDEX = Path(__file__).parent / "index.json"
TEST_COMMAND = "python3 -m unittest -q"
_MAX_FILE_BYTES = 1 << 18
_SKIPPED_FOLDERS = {".git", ".github", ".tox", "__pycache__", "build", "dist", "doc", "docs", "node_modules"}
_MAX_TRACEBACK_LINES = 8


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug in one line of a source file."""

    path: str
    line: int
    kind: str
    before: str
    """The correct line."""
    after: str
    """The line with the bug."""

    def apply(self, text: str) -> str:
        """Return the source file with the bug."""
        lines = text.split("\n")
        lines[self.line - 1] = self.after
        return "\n".join(lines)

    @property
    def name(self) -> str:
        """Path, line, and a hash that distinguishes the bugs of one line."""
        digest = hashlib.sha256(f"{self.path}/{self.line}/{self.after}".encode()).hexdigest()
        return f"{self.path}:{self.line}/{digest[:8]}"

    def is_in(self, split: str, package: str) -> bool:
        """Whether the mutation belongs to a split. The correct line decides: a line is mutated in one split only."""
        digest = hashlib.sha256(f"{package}/{self.path}: {self.before.strip()}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % 20 in _TWENTIETHS[split]


def mutations(path: str, text: str) -> Iterator[Mutation]:
    """Yield every mutation of a source file that compiles, in line order."""
    lines = text.split("\n")
    edits = [edit for node in ast.walk(ast.parse(text)) for edit in _edits(node, lines)]
    seen = set[tuple[int, str]]()
    for kind, line, start, end, replacement in sorted(edits, key=lambda edit: edit[1:]):
        correct_line = lines[line - 1]
        mutated_line = correct_line[:start] + replacement + correct_line[end:]
        if mutated_line == correct_line or (line, mutated_line) in seen:
            continue
        seen.add((line, mutated_line))
        mutation = Mutation(path, line, kind, correct_line, mutated_line)
        try:
            compile(mutation.apply(text), "mutated", "exec", dont_inherit=True)
        except SyntaxError:
            continue
        yield mutation


def _edits(node: ast.AST, lines: list[str]) -> Iterator[Edit]:
    """Yield the edits of one syntax node."""

    def source(first: ast.expr, last: ast.expr) -> str:
        return lines[first.lineno - 1][first.col_offset : last.end_col_offset]

    def replace(kind: str, first: ast.expr | ast.stmt, text: str, last: ast.expr | None = None) -> Iterator[Edit]:
        """Replace the source from one node to another."""
        last_node = last or first
        if _are_on_one_line(lines, first, last_node):
            yield kind, first.lineno, first.col_offset, last_node.end_col_offset or 0, text

    def replace_operator(kind: str, left: ast.expr, right: ast.expr, words: tuple[str, ...] | None) -> Iterator[Edit]:
        if words is None or not _are_on_one_line(lines, left, right):
            return
        start = left.end_col_offset or 0
        old, *replacements = words
        between = lines[left.lineno - 1][start : right.col_offset]
        if match := re.search(rf"\b{old}\b" if old.isalpha() else re.escape(old), between):
            for new in replacements:
                yield kind, left.lineno, start + match.start(), start + match.end(), new

    match node:
        case ast.Compare():
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from replace_operator("comparison", left, right, _COMPARISONS.get(type(op)))
        case ast.BinOp():
            yield from replace_operator("arithmetic", node.left, node.right, _ARITHMETIC.get(type(node.op)))
        case ast.AugAssign():
            yield from replace_operator("arithmetic", node.target, node.value, _ARITHMETIC.get(type(node.op)))
        case ast.BoolOp():
            yield from replace_operator("boolean", node.values[0], node.values[1], _BOOLEAN[type(node.op)])
        case ast.Constant() if type(node.value) is bool:
            yield from replace("constant", node, _OPPOSITES[str(node.value)])
        case ast.Name() if node.id in _OPPOSITES:
            yield from replace("function", node, _OPPOSITES[node.id])
        case ast.Constant() if type(node.value) is int:
            yield from replace("constant", node, f"{node.value + 1}")
            if node.value > 0:
                yield from replace("constant", node, f"{node.value - 1}")
        case ast.If(test=test) | ast.IfExp(test=test):
            text = source(test, test)
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                negated = text.removeprefix("not").lstrip()
            else:
                negated = f"not {text}" if isinstance(test, ast.Name | ast.Call | ast.Attribute) else f"not ({text})"
            yield from replace("condition", test, negated)
        case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred | ast.GeneratorExp):
            middle = lines[first.lineno - 1][first.end_col_offset : second.col_offset]
            yield from replace("arguments", first, source(second, second) + middle + source(first, first), second)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield from replace("return", value, "None")
    match node:  # statements without which later statements still have their names
        case (
            ast.AugAssign()
            | ast.Delete()
            | ast.Break()
            | ast.Expr(value=ast.Call())
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
        ):
            yield from replace("missing", node, "pass")


def _are_on_one_line(lines: list[str], *nodes: ast.expr | ast.stmt) -> bool:
    """Whether nodes are on one line of ASCII, where the byte offsets of the syntax tree are character offsets."""
    numbers = {number for node in nodes for number in (node.lineno, node.end_lineno)}
    return len(numbers) == 1 and lines[nodes[0].lineno - 1].isascii()


@dataclass(frozen=True)
class Package:
    """A shipped package without a bug."""

    name: str
    files: dict[str, str]
    """The package and its visible tests, by path."""
    hidden: str
    """The hidden tests, a text of test functions."""
    examples: tuple[str, ...]
    """Calls that a bug report may show: statements separated by `; `, of which the last is an expression."""

    @property
    def sources(self) -> dict[str, str]:
        """The package without its tests."""
        return {path: text for path, text in self.files.items() if path.startswith(f"{self.name}/")}


@cache
def load_package(name: str) -> Package:
    """Load a shipped package."""
    data = tomllib.loads((_PACKAGES / f"{name}.toml").read_text(encoding="utf-8"))
    return Package(name, data["files"], data["hidden"], tuple(data["examples"].splitlines()))


@cache
def load_index() -> list[dict[str, Any]]:
    """Load the bugs of the shipped packages: the fields of a `Mutation`, the hidden tests that fail, and a report."""
    bugs: list[dict[str, Any]] = json.loads(INDEX.read_text(encoding="utf-8"))
    return bugs


def read_mutation(bug: Mapping[str, Any]) -> Mutation:
    """Return the mutation of an entry of the index."""
    return Mutation(**{name: bug[name] for name in Mutation.__slots__})


def draw_tasks(split: str, count: int, seed: int, packages: Sequence[str] | None) -> list[dict[str, Any]]:
    """Draw `count` tasks of a split without replacement; the seed decides the order."""
    validate_split(split)
    selected = tuple(packages) if packages is not None else NAMES
    if unknown := [name for name in selected if name not in NAMES]:
        raise DataError(f"there is no package {unknown[0]!r:.80}; there are {', '.join(NAMES)}")
    bugs = [bug for bug in load_index() if bug["package"] in selected]
    bugs = [bug for bug in bugs if read_mutation(bug).is_in(split, bug["package"])]
    if not 0 <= count <= len(bugs):
        raise DataError(
            f"{split} has {len(bugs)} tasks of {', '.join(selected)}, not {count}; package_tasks makes more"
        )

    rows = []
    for bug in Random(f"{split}/{seed}").sample(bugs, len(bugs))[:count]:
        package = load_package(bug["package"])
        mutation = read_mutation(bug)
        failing = list(bug["fails"])
        example = "\n".join(f">>> {statement}" for statement in bug["example"].split("; "))
        question = (
            f"The package `{package.name}` in this folder has a bug in {mutation.path}:\n\n{example}\n{bug['came']}\n\n"
            f"It should be: {bug['expected']}\n\nFind the bug and repair the package. `{TEST_COMMAND}` runs some "
            "tests; others, which you cannot see, decide."
        )
        row = {
            "id": mutation.name,
            "question": question,
            "package": package.name,
            "kind": mutation.kind,
            "files": {**package.files, mutation.path: mutation.apply(package.files[mutation.path])},
            "tests": package.hidden,
            "fail_to_pass": failing,
            "pass_to_pass": [name for name in list_test_names(package.hidden) if name not in failing],
            "mutation": asdict(mutation),
            "test_command": TEST_COMMAND,
        }
        rows.append(row)
    return rows


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
    """Make at most `count` tasks from a package with pytest tests. Every bug that is tried costs a run of pytest.

    Args:
        folder: An unpacked source distribution, or a checkout.
        package: The folder (`toolz`, `src/attr`) or module in it to be repaired. None: found, if there is only one.
        split: Split of the bugs.
        count: Largest number of tasks.
        seed: Decides the order in which bugs are tried.
        most_failing: Largest fraction of the tests that may fail with a bug. At least one must fail.
        judge: Runs the tests. None: a new `RepairJudge`.
    """
    validate_split(split)
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; unpack a source distribution (pip download --no-binary :all: …)")
    files = dict[str, str]()
    for path in sorted(root.rglob("*")):
        components = path.relative_to(root).parts
        is_skipped = _SKIPPED_FOLDERS & set(components) or any(
            component.endswith(".egg-info") for component in components
        )
        if is_skipped or not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            continue
        try:
            files[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue

    if not package:
        inits = [path.removesuffix("/__init__.py") for path in files if path.endswith("/__init__.py")]
        tops = {
            folder
            for folder in inits
            if not is_test_file(f"{folder}/x") and folder.removeprefix("src/").count("/") == 0
        }
        modules = {path.removesuffix(".py") for path in files if "/" not in path and path.endswith(".py")}
        packages = sorted(tops or modules - {"setup", "conftest", "noxfile", "tasks"})
        if len(packages) != 1:
            names = ", ".join(packages) or "none"
            raise DataError(f"the package to repair in {root} is not clear: there are {names}; say package=…")
        package = packages[0]
    judge = judge or RepairJudge()
    random = Random(seed)
    return asyncio.run(
        _mutate_package(package, files, split, count=count, random=random, most_failing=most_failing, judge=judge)
    )


async def _mutate_package(
    package: str,
    files: Mapping[str, str],
    split: str,
    *,
    count: int,
    random: Random,
    most_failing: float,
    judge: RepairJudge,
) -> list[dict[str, Any]]:
    """Try mutations in random order until `count` of them are tasks."""
    sources = {path: text for path, text in files.items() if is_source(path, package)}
    tests = {path: text for path, text in files.items() if is_test_file(path)}
    other_files = {path: text for path, text in files.items() if path not in {*sources, *tests}}
    if not sources or not tests:
        raise DataError(f"the package {package!r} has no {'test' if sources else 'source'} files")

    async def run_tests(sources: Mapping[str, str]) -> PytestRun:
        columns = {"package": package, "files": other_files, "tests": tests}
        return await judge.run_pytest(columns, {path: text.encode() for path, text in sources.items()})

    await judge.start()
    # Two runs: a test that passes only sometimes would make the reward random.
    first, second = await run_tests(sources), await run_tests(sources)
    passing = first.passed_tests & second.passed_tests
    if not first.valid or not passing:
        raise ConfigError(
            f"no test of {package!r} passes in the sandbox, even without a bug; it needs pytest (pip install "
            f"'agentfly-rl[repair]') and every package that {package!r} imports. pytest printed: {first.output[-500:]}"
        )
    candidates = [mutation for path, text in sources.items() for mutation in mutations(path, text)]
    random.shuffle(candidates)
    rows = list[dict[str, Any]]()
    for mutation in candidates:
        if len(rows) == count:
            break
        if not mutation.is_in(split, package):
            continue
        mutated = {**sources, mutation.path: mutation.apply(sources[mutation.path])}
        run = await run_tests(mutated)
        failing = sorted(passing - run.passed_tests)
        if not run.valid or not 0 < len(failing) <= most_failing * len(passing):
            continue
        # A test file with a failing test is hidden from the chain. The other ones it may see.
        hidden = {test.partition("::")[0] for test in failing}
        visible = {path: text for path, text in tests.items() if path not in hidden}
        errors = [line for line in run.tracebacks.get(failing[0], "").splitlines() if line[:1] in (">", "E")]
        report = "\n".join(errors[:_MAX_TRACEBACK_LINES]) or "It does not even get to run."
        question = (
            f"The package in `{package}` has a bug. A test that you do not have, `{failing[0]}`, fails:\n\n"
            f"{report}\n\nFind the bug and repair the package; hidden tests decide."
        )
        row = {
            "id": mutation.name,
            "question": question,
            "package": package,
            "kind": mutation.kind,
            "files": {**other_files, **visible, **mutated},
            "tests": {path: tests[path] for path in sorted(hidden)},
            "fail_to_pass": failing,
            "pass_to_pass": sorted(passing & run.passed_tests),
            "mutation": asdict(mutation),
            "test_command": "python3 -m pytest -q" if visible else "ls",
        }
        rows.append(row)
    return rows
