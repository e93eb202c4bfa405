"""File trees drawn by a seed, and things to do in them, each with a command that does it.

Every task changes something or prints something. What is in a task decides which split it belongs to, so no task is in
two, whatever the seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from agentfly.environments.task_sampling import sample_tasks
from agentfly.errors import DataError

FOLDERS = ("data", "docs", "logs", "notes", "src", "tests", "web", "mail", "plans", "photos")
INNER = ("old", "new", "draft", "final", "2023", "2024")
STEMS = ("alpha", "beta", "gamma", "delta", "omega", "north", "south", "east", "west", "first", "last", "main")
ENDINGS = ("txt", "log", "md", "csv", "sh", "py")
WORDS = ("river", "stone", "cloud", "maple", "amber", "tiger", "piano", "lemon", "candle", "harbor", "violet", "copper")
Files = dict[str, str]
Asked = tuple[str, str]
"""What is to be done, and the command that does it."""


class Tree:
    """The files of one task, and what can be drawn from them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.folders = random.sample(FOLDERS, 3)
        places = [*self.folders, *(f"{folder}/{random.choice(INNER)}" for folder in self.folders[:2])]
        self.files: Files = {}
        while len(self.files) < 10:
            name = f"{random.choice(places)}/{random.choice(STEMS)}.{random.choice(ENDINGS)}"
            self.files[name] = "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for _ in range(self.random.randint(2, 5)):
            yield " ".join(self.random.sample(WORDS, 2))

    def file(self) -> str:
        """The path of a file."""
        return self.random.choice(list(self.files))

    def ending(self) -> str:
        """An ending that some file has."""
        return _ending(self.file())

    def word(self) -> str:
        """A word that is in some file."""
        return self.random.choice(self.files[self.file()].split())

    def fresh(self, ending: str) -> str:
        """The name of a file that is not there."""
        return f"{self.random.choice(('result', 'output', 'answer', 'report'))}.{ending}"


def _ending(path: str) -> str:
    return path.rpartition(".")[2]


def find(tree: Tree) -> Asked:
    ending = tree.ending()
    return f"List every .{ending} file below the current folder.", f"find . -type f -name '*.{ending}'"


def count(tree: Tree) -> Asked:
    path = tree.file()
    folder, ending = path.partition("/")[0], _ending(path)
    question = f"How many .{ending} files are there below {folder}? Print only the number."
    return question, f"find {folder} -type f -name '*.{ending}' | wc -l"


def count_lines(tree: Tree) -> Asked:
    path = tree.file()
    word = tree.random.choice(tree.files[path].split())
    return f"How many lines of {path} have the word {word}? Print only the number.", f"grep -c {word} {path}"


def grep(tree: Tree) -> Asked:
    word = tree.word()
    return f"List every file below the current folder that has the word {word} in it.", f"grep -rl {word} ."


def sort(tree: Tree) -> Asked:
    path, fresh = tree.file(), tree.fresh("txt")
    return f"Sort the lines of {path} by the alphabet into {fresh}.", f"sort {path} > {fresh}"


def move(tree: Tree) -> Asked:
    path, target = tree.file(), tree.random.choice(("kept", "store", "moved", "attic"))
    folder, ending = path.rpartition("/")[0], _ending(path)
    question = f"Make a folder {target} and move every .{ending} file that is directly in {folder} into it."
    return question, f"mkdir {target} && mv {folder}/*.{ending} {target}/"


def rename(tree: Tree) -> Asked:
    path = tree.file()
    folder, _, name = path.rpartition("/")
    new = f"{tree.random.choice(WORDS)}.{_ending(name)}"
    return f"Rename {path} to {new}, in the same folder.", f"mv {path} {folder}/{new}"


def endings(tree: Tree) -> Asked:
    path = tree.file()
    folder, ending = path.rpartition("/")[0], _ending(path)
    question = f"Change the ending of every .{ending} file that is directly in {folder} to .bak."
    return question, f'for f in {folder}/*.{ending}; do mv "$f" "${{f%.{ending}}}.bak"; done'


def archive(tree: Tree) -> Asked:
    folder = tree.random.choice(sorted({path.partition("/")[0] for path in tree.files}))
    return f"Pack the folder {folder} into {folder}.tar.gz.", f"tar -czf {folder}.tar.gz {folder}"


def permissions(tree: Tree) -> Asked:
    ending = tree.ending()
    words, mode = tree.random.choice(
        (("Make {} executable for its owner.", "u+x"), ("Take the right to read {} away from all others.", "o-r"))
    )
    question = words.format(f"every .{ending} file below the current folder")
    return question, f"find . -type f -name '*.{ending}' -exec chmod {mode} {{}} +"


def delete(tree: Tree) -> Asked:
    word = tree.word()
    return (
        f"Delete every file below the current folder that has the word {word} in it.",
        f"grep -rl {word} . | xargs rm",
    )


Family = Callable[[Tree], Asked]
FAMILIES: tuple[Family, ...] = (
    find, count, count_lines, grep, sort, move, rename, endings, archive, permissions, delete,
)  # fmt: skip
KINDS = {each.__name__: each for each in FAMILIES}


def draw_tasks(split: str, number: int, seed: int, kinds: Sequence[str] | None) -> list[dict[str, Any]]:
    """So many tasks of a split, as rows of a data set."""
    chosen = list(KINDS) if kinds is None else kinds
    if isinstance(chosen, str) or not chosen or any(kind not in KINDS for kind in chosen):
        raise DataError(f"kinds of tasks are {', '.join(KINDS)}, not {kinds!r:.80}; give a list of these")

    def draw(random: Random, place: int) -> tuple[str, dict[str, Any]]:
        kind, tree = chosen[place % len(chosen)], Tree(random)
        question, gold = KINDS[kind](tree)
        return essence(question, tree.files), {"question": question, "gold": gold, "kind": kind, "files": tree.files}

    return sample_tasks("shell", split, number, seed, draw)


def essence(question: str, files: Files) -> str:
    """What only the same task has."""
    return json.dumps([question, files], sort_keys=True)
