"""The shipped packages: small, whole, and ours, so that anybody may train on them.

packages/NAME/NAME/          the package
packages/NAME/test_NAME.py   tests that a chain can see and run
packages/NAME/hidden.py      tests that decide; no chain ever has them
packages/NAME/examples.txt   calls of which one that goes wrong becomes the report of a bug
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "packages"
NAMES = ("calc", "intervals", "lru", "matrix", "planner", "roman", "texttable", "trie")


@dataclass(frozen=True)
class Package:
    """A package with its tests."""

    name: str
    files: dict[str, str]
    """What a chain finds in its folder, without the bug."""
    hidden: str
    examples: tuple[str, ...]
    """Statements in a line, the last of them an expression."""

    @property
    def sources(self) -> dict[str, str]:
        """The package itself."""
        return {path: text for path, text in self.files.items() if path.startswith(f"{self.name}/")}


@cache
def shipped(name: str) -> Package:
    """A shipped package."""
    folder = _FOLDER / name
    paths = [*sorted((folder / name).glob("*.py")), folder / f"test_{name}.py"]
    files = {path.relative_to(folder).as_posix(): path.read_text() for path in paths}
    examples = tuple((folder / "examples.txt").read_text().splitlines())
    return Package(name, files, (folder / "hidden.py").read_text(), examples)
