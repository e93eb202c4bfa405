"""Properties of the tasks that an environment draws: by seed, in splits, as rows that a file can keep."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfly.conformance.clock import WALL
from agentfly.conformance.report import Broken, NotApplicable
from agentfly.conformance.subject import SPLITS, Subject
from agentfly.environment import draws_tasks
from agentfly.errors import ConfigError, DataError
from agentfly.training.data import read_tasks
from agentfly.types import Task

COUNT = 20
MANY = 30
Rows = list[dict[str, Any]]


def drawn_by_seed(subject: Subject) -> str:
    """The same arguments draw the same tasks, in any process; another seed draws others; more begin with fewer."""
    _refuse_without_tasks(subject)
    rows = _draw(subject, "train", COUNT)
    if len(rows) != COUNT:
        raise Broken(f"{COUNT} were asked for, and {len(rows)} came")
    if rows != _draw(subject, "train", COUNT):
        raise Broken("the same arguments drew other tasks the second time")
    if _draw(subject, "train", COUNT // 2) != rows[: COUNT // 2]:
        raise Broken(f"{COUNT // 2} tasks are not the first {COUNT // 2} of {COUNT}")
    if rows == _draw(subject, "train", COUNT, 1):
        raise Broken("another seed draws the same tasks")
    elsewhere = _drawn_elsewhere(subject)
    if elsewhere and elsewhere != _print(rows):
        raise Broken("another process draws other tasks by the same seed: something follows the order of a set or hash")
    return f"seed {subject.seed} draws the same tasks{' in another process too' if elsewhere else ''}"


def splits_disjoint(subject: Subject) -> str:
    """No task is in two splits, whatever the seeds; a split that is not there is refused."""
    _refuse_without_tasks(subject)
    seen: dict[str, str] = {}
    for split in SPLITS:
        for more in range(2):
            for row in _draw(subject, split, MANY, more):
                content = json.dumps({name: row[name] for name in row if name != "id"}, sort_keys=True, default=repr)
                if seen.setdefault(content, split) != split:
                    raise Broken(f"{row.get('question', content)!r:.100} is in {seen[content]} and in {split}")
    try:
        subject.kind.draw_tasks("no such split", 1)
    except (ConfigError, ValueError):
        return f"{len(seen)} different tasks of {', '.join(SPLITS)}"
    raise Broken(
        "a split that is not there is not refused; raise a DataError (agentfly.environments.data.checked_split)"
    )


def rows_kept(subject: Subject) -> str:
    """Rows are plain JSON, have an id of their own, and a file gives them back as they were."""
    _refuse_without_tasks(subject)
    for split in SPLITS:
        rows = _draw(subject, split, COUNT)
        ids = [str(row.get("id") or "") for row in rows]
        if not all(ids) or len(set(ids)) < len(ids):
            raise Broken(f"ids of {split} are empty or there twice: {', '.join(ids[:5])}, …")
        try:
            tasks = _through_a_file(rows)
        except (DataError, TypeError, ValueError) as error:
            raise Broken(f"a row of {split} cannot be written and read: {error}") from None
        for row, task in zip(rows, tasks, strict=True):
            if task != Task.of(row):
                raise Broken(f"{row['id']!r} of {split} comes back from a file as something else")
    return f"{COUNT} rows of each split come back from a file as they were"


def _refuse_without_tasks(subject: Subject) -> None:
    if not draws_tasks(subject.kind):
        raise NotApplicable("it draws no tasks of its own")


def _draw(subject: Subject, split: str, count: int, more: int = 0) -> Rows:
    rows = subject.kind.draw_tasks(split, count, seed=subject.seed + more)
    if not isinstance(rows, Sequence) or not all(isinstance(row, dict) for row in rows):
        raise Broken(f"draw_tasks gave {rows!r:.80}, and no list of rows")
    return list(rows)


def _through_a_file(rows: Rows) -> list[Task]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.jsonl"
        path.write_text("".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows))
        return read_tasks(path)


def _print(rows: Rows) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=repr).encode()).hexdigest()


# ── in another process, in which texts have other hashes ──

_ELSEWHERE = """
import functools, importlib, importlib.util, json, sys
paths, module, file, name, seed, count = json.loads(sys.argv[1])
sys.path[:] = paths
try:
    there = importlib.import_module(module)
except ImportError:
    spec = importlib.util.spec_from_file_location(module, file)
    there = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(there)
kind = functools.reduce(getattr, name.split("."), there)
from agentfly.conformance.drawing import _print
print(_print(kind.draw_tasks("train", count, seed=seed)))
"""


def _drawn_elsewhere(subject: Subject) -> str:
    """The print of what another process draws; empty where it cannot have the class."""
    kind = subject.kind
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or "<locals>" in kind.__qualname__:
        return ""
    asked = json.dumps([sys.path, kind.__module__, file, kind.__qualname__, subject.seed, COUNT])
    surroundings = {**os.environ, "PYTHONHASHSEED": str(subject.seed % 1000 + 1)}
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, asked],
        capture_output=True, text=True, env=surroundings, timeout=WALL * subject.seconds, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Broken(f"another process cannot draw them: {done.stderr.strip().splitlines()[-1]:.200}")
    return done.stdout.split()[-1]
