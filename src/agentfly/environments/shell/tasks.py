"""Shell tasks: generated file trees with a command to find, and the questions of InterCode-Bash.

Every generated task changes or prints something. Its content decides its split, so no task is in two splits, whatever
the seeds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

from agentfly.environments.data import DatasetSource, read_rows, sample_tasks, validate_split
from agentfly.errors import DataError

KINDS = (
    "find", "count", "count_lines", "grep", "sort", "move", "rename", "endings", "archive", "permissions", "delete",
)  # fmt: skip
FOLDERS = ("data", "docs", "logs", "notes", "src", "tests", "web", "mail", "plans", "photos")
SUBFOLDERS = ("old", "new", "draft", "final", "2023", "2024")
STEMS = ("alpha", "beta", "gamma", "delta", "omega", "north", "south", "east", "west", "first", "last", "main")
EXTENSIONS = ("txt", "log", "md", "csv", "sh", "py")
WORDS = ("river", "stone", "cloud", "maple", "amber", "tiger", "piano", "lemon", "candle", "harbor", "violet", "copper")
FILES_PER_TASK = 10
SYSTEMS = (1, 2, 3, 4)
"""File systems of InterCode-Bash."""
NL2BASH = DatasetSource(
    "InterCode-Bash", "https://github.com/princeton-nlp/intercode (data/nl2bash and docker/bash_scripts)", "bash"
)
_ROOT = re.compile(r"(?<![\w./-])/(testbed|system|workspace|backup)\b")


def draw_tasks(
    split: str = "train", count: int = 100, *, seed: int = 0, kinds: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Draw tasks: find, count, move, rename, pack, sort or delete files, or set permissions. `kinds` take turns."""
    chosen = KINDS if kinds is None else kinds
    if isinstance(chosen, str) or not chosen or any(kind not in KINDS for kind in chosen):
        raise DataError(f"kinds of tasks are {', '.join(KINDS)}, not {kinds!r:.80}; give a list of these")

    def draw(random: Random, index: int) -> tuple[str, dict[str, Any]]:
        kind = chosen[index % len(chosen)]
        folders = random.sample(FOLDERS, 3)
        folders += [f"{folder}/{random.choice(SUBFOLDERS)}" for folder in folders[:2]]
        files: dict[str, str] = {}  # path → text
        while len(files) < FILES_PER_TASK:
            path = f"{random.choice(folders)}/{random.choice(STEMS)}.{random.choice(EXTENSIONS)}"
            lines = [" ".join(random.sample(WORDS, 2)) for _ in range(random.randint(2, 5))]
            files[path] = "".join(f"{line}\n" for line in lines)
        question, gold = _draw_command(random, kind, files)
        return task_key(question, files), {"question": question, "gold": gold, "kind": kind, "files": files}

    return sample_tasks("shell", split, count, seed, draw)


def task_key(question: str, files: dict[str, str]) -> str:
    """Text that only equal tasks share."""
    return json.dumps([question, files], sort_keys=True)


def _draw_command(random: Random, kind: str, files: dict[str, str]) -> tuple[str, str]:
    """Draw a question of a kind and its gold command."""
    if kind == "archive":
        folder = random.choice(sorted({path.partition("/")[0] for path in files}))
        return f"Pack the folder {folder} into {folder}.tar.gz.", f"tar -czf {folder}.tar.gz {folder}"
    path = random.choice(list(files))
    folder, _, name = path.rpartition("/")
    extension = name.rpartition(".")[2]
    match kind:
        case "find":
            question = f"List every .{extension} file below the current folder."
            return question, f"find . -type f -name '*.{extension}'"
        case "count":
            top = path.partition("/")[0]
            question = f"How many .{extension} files are there below {top}? Print only the number."
            return question, f"find {top} -type f -name '*.{extension}' | wc -l"
        case "sort":
            target = f"{random.choice(('result', 'output', 'answer', 'report'))}.txt"
            return f"Sort the lines of {path} by the alphabet into {target}.", f"sort {path} > {target}"
        case "move":
            target = random.choice(("kept", "store", "moved", "attic"))
            question = f"Make a folder {target} and move every .{extension} file that is directly in {folder} into it."
            return question, f"mkdir {target} && mv {folder}/*.{extension} {target}/"
        case "rename":
            new_name = f"{random.choice(WORDS)}.{extension}"
            return f"Rename {path} to {new_name}, in the same folder.", f"mv {path} {folder}/{new_name}"
        case "endings":
            question = f"Change the ending of every .{extension} file that is directly in {folder} to .bak."
            return question, f'for f in {folder}/*.{extension}; do mv "$f" "${{f%.{extension}}}.bak"; done'
        case "permissions":
            text, mode = random.choice(
                (
                    ("Make {} executable for its owner.", "u+x"),
                    ("Take the right to read {} away from all others.", "o-r"),
                )
            )
            question = text.format(f"every .{extension} file below the current folder")
            return question, f"find . -type f -name '*.{extension}' -exec chmod {mode} {{}} +"
    word = random.choice(files[path].split())
    if kind == "count_lines":
        return f"How many lines of {path} have the word {word}? Print only the number.", f"grep -c {word} {path}"
    if kind == "grep":
        return f"List every file below the current folder that has the word {word} in it.", f"grep -rl {word} ."
    question = f"Delete every file below the current folder that has the word {word} in it."
    return question, f"grep -rl {word} . | xargs rm"


def nl2bash_tasks(split: str, *, systems: Sequence[int] = SYSTEMS) -> list[dict[str, Any]]:
    """Read the questions of InterCode-Bash (NL2Bash) about these file systems from the folder `bash` of AGENTFLY_DATA.

    Rows have `id`, `question`, `gold`, `kind` and `setup`, InterCode's script that creates the file system. InterCode
    creates it at the root of a container. Here it is in the session's folder, so `/testbed/dir1` becomes `testbed/dir1`
    in scripts, questions and commands.
    """
    if validate_split(split) != "test":
        raise DataError(f"InterCode-Bash has questions for test only, none for {split}; Shell.draw_tasks draws some")
    if not systems or any(number not in SYSTEMS for number in systems):
        raise DataError(f"there are the file systems 1 to 4, not {systems!r:.80}")
    rows: list[dict[str, Any]] = []
    for system in systems:
        questions = NL2BASH.file(f"nl2bash_fs_{system}.json")
        setup = NL2BASH.file(f"setup_nl2b_fs_{system}.sh").read_text(encoding="utf-8")
        for number, (source_line, row) in enumerate(read_rows(questions)):
            question, gold = row.get("query"), row.get("gold")
            if not isinstance(question, str) or not isinstance(gold, str):
                raise DataError(f"{source_line}: a row has the texts query and gold, not {row!r:.80}")
            texts = {"question": question, "gold": gold, "setup": setup}
            relative = {name: _ROOT.sub(r"\1", text) for name, text in texts.items()}
            rows.append({"id": f"nl2bash/{system}/{number}", **relative, "kind": f"file system {system}"})
    return rows
