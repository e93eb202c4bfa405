"""Local names say what a variable holds, and functions are verbs: no `each`, `own` or `found`, no `def measured()`."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VAGUE = {
    *("each", "own", "mine", "theirs", "ours", "given", "found", "known", "wrong", "asked", "place", "there", "why"),
    *("said", "told", "made", "shown", "wanted", "rest", "begun", "taught"),
}
LIMIT = 1.0
"""Vague names per 1,000 lines."""
OTHERS = ("src/agentfly", "tests", "src/agentfly_verifiers", "examples", "benchmarks")
"""Folders besides the packages; of the first two, the modules that lie directly in them."""
NOT_OURS = {"__pycache__", "repair", "thirdparty"}
"""Folders that hold no code of the project: packages to repair, and packages as users write them."""


def find_vague_names(source: str) -> list[str]:
    """The vague names that a module binds, as `line: name`."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            names.append(f"{node.lineno}: {node.id}")
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            names.append(f"{node.lineno}: {node.arg}")
    return names


def packages(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name not in NOT_OURS]


@pytest.mark.parametrize(
    "package",
    [*packages(ROOT / "src" / "agentfly"), *packages(ROOT / "tests"), *(ROOT / name for name in OTHERS)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_vague_names_are_rare(package: Path) -> None:
    lines = 0
    names = []
    modules = package.glob("*.py") if package.name in ("agentfly", "tests") else package.rglob("*.py")
    for path in sorted(path for path in modules if not NOT_OURS & set(path.parts)):
        source = path.read_text()
        lines += source.count("\n")
        names += [f"{path.relative_to(ROOT)}:{name}" for name in find_vague_names(source)]
    assert 1000 * len(names) <= LIMIT * lines, "\n".join(names)


def test_vague_names_are_found() -> None:
    source = "def f(own, count):\n    for each in own:\n        total = count\n"
    assert sorted(find_vague_names(source)) == ["1: own", "2: each"]


PARTICIPLE = re.compile(
    r"_?[a-z]*(ed|told|said|kept|lent|made|held|known|given|taken|shown|found|heard|built|chosen|done)"
)
VERBS = {"embed", "exceed", "feed", "proceed", "seed"}
VALUES = {"cached_property", "property", "reward"}
"""Decorators of what reads as a value. A reward is named after what it looks for."""
FOREIGN = {"unwrapped"}
"""Functions that override one of another package."""


def find_participles(source: str) -> list[str]:
    """The functions that a module names by a single participle, as `line: name`."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and PARTICIPLE.fullmatch(node.name):
            decorators = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
            if node.name.strip("_") not in VERBS | FOREIGN and not decorators & VALUES:
                names.append(f"{node.lineno}: {node.name}")
    return names


@pytest.mark.parametrize("folder", ["src", "tests", "examples", "benchmarks"])
def test_functions_are_verbs(folder: str) -> None:
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if not NOT_OURS & set(path.parts)]
    assert paths
    names = [f"{path.relative_to(ROOT)}:{name}" for path in paths for name in find_participles(path.read_text())]
    assert names == []


def test_participles_are_found() -> None:
    source = "def measured(): ...\ndef measure(): ...\n@reward\ndef reached(): ...\n@fixture\ndef started(): ...\n"
    assert sorted(find_participles(source)) == ["1: measured", "6: started"]
