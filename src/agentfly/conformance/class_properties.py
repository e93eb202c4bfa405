"""Properties of the class: constructor, tool documentation, start, and the tasks that it draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfly.conformance.clock import WALL, Stopwatch
from agentfly.conformance.subject import NO_TASK, SPLITS, NotApplicable, PropertyFailed, Subject, format_error
from agentfly.data import read_tasks
from agentfly.environment import Scope, has_tasks, validate_constructor
from agentfly.errors import ConfigError, DataError, EnvironmentFault
from agentfly.resources.manager import resolve_runtime
from agentfly.resources.pool import Instance
from agentfly.types import Task

CONSTRUCTOR_SECONDS = 1.0
"""CPU time limit of a constructor, in the best of three calls."""
COUNT = 20
"""Tasks drawn of a split."""
_TYPE_KEYS = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")


async def constructor(subject: Subject) -> str:
    """The constructor takes no arguments and does nothing slow."""
    try:
        validate_constructor(subject.env_class)
    except ConfigError as error:
        raise PropertyFailed(str(error)) from None
    for _ in range(3):
        watch = Stopwatch()
        started_at = time.perf_counter()
        subject.env_class()
        seconds = time.perf_counter() - started_at
        if not watch.exceeds(CONSTRUCTOR_SECONDS):
            return f"takes no arguments; created in {1000 * seconds:.1f} ms"
    raise PropertyFailed(f"it takes {seconds:.1f} s; slow work goes into start")


async def tools_have_descriptions(subject: Subject) -> str:
    """Every tool has a description, and every argument a description and a type."""
    subject.require_tools()
    for tool in subject.toolbox:
        function = tool.schema["function"]
        if not function["description"].strip():
            raise PropertyFailed(f"{tool.name} has no description; write a docstring")
        for name, spec in function["parameters"]["properties"].items():
            if not str(spec.get("description") or "").strip():
                raise PropertyFailed(
                    f"{tool.name}: the argument {name!r} has no description; write it under Args: in the docstring"
                )
            if not any(key in spec for key in _TYPE_KEYS):
                raise PropertyFailed(f"{tool.name}: the argument {name!r} has no type; annotate it")
    return f"{len(subject.toolbox)} tools described, with all their arguments"


async def starts(subject: Subject) -> str:
    """An instance starts, is reset for a task, passes its health check, and closes."""
    env_class = subject.env_class
    pool = env_class.pool
    (task,) = subject.tasks(1)
    instance = Instance(env_class, await resolve_runtime(pool.runtime).create(env_class))
    try:
        await instance.step("start", pool.start_timeout)
        if pool.scope is not Scope.GLOBAL:
            await instance.step("reset", pool.reset_timeout, task)
        await instance.step("check", pool.reset_timeout)
    except EnvironmentFault as fault:
        if isinstance(fault.__cause__, ConfigError) and not isinstance(fault.__cause__, DataError):
            raise fault.__cause__ from None
        empty = task is NO_TASK and ".reset failed" in str(fault)
        hint = "; it was reset for an empty task, use --tasks FILE for real ones" if empty else ""
        raise PropertyFailed(f"{format_error(fault)}{hint}") from None
    finally:
        try:
            await instance.step("close", pool.reset_timeout)
        finally:
            await instance.handle.terminate()
    subject.started = True
    return f"reset for {task.id or task.question!r:.60}"


def seeds_reproduce_tasks(subject: Subject) -> str:
    """Equal arguments draw equal tasks in any process, another seed draws others, and n tasks are a prefix of more."""
    rows = _draw(subject, "train", COUNT)
    if len(rows) != COUNT:
        raise PropertyFailed(f"{COUNT} tasks were requested, {len(rows)} returned")
    if rows != _draw(subject, "train", COUNT):
        raise PropertyFailed("the same arguments drew other tasks the second time")
    if _draw(subject, "train", COUNT // 2) != rows[: COUNT // 2]:
        raise PropertyFailed(f"{COUNT // 2} tasks are not the first {COUNT // 2} of {COUNT}")
    if rows == _draw(subject, "train", COUNT, 1):
        raise PropertyFailed("another seed draws the same tasks")
    other_process = _draw_in_new_process(subject)
    if other_process and other_process != json.dumps(rows, sort_keys=True, default=repr):
        raise PropertyFailed(
            "another process draws other tasks for the same seed: they depend on the order of a set or on hash()"
        )
    return f"seed {subject.seed} draws the same tasks{' in another process too' if other_process else ''}"


def splits_disjoint(subject: Subject) -> str:
    """No task is in two splits, for any seeds; an unknown split is rejected."""
    split_of: dict[str, str] = {}
    for split in SPLITS:
        for seed_offset in range(2):
            for row in _draw(subject, split, COUNT, seed_offset):
                content = json.dumps({name: row[name] for name in row if name != "id"}, sort_keys=True, default=repr)
                if split_of.setdefault(content, split) != split:
                    question = row.get("question", content)
                    raise PropertyFailed(f"{question!r:.100} is in {split_of[content]} and in {split}")
    try:
        subject.env_class.draw_tasks("no such split", 1)
    except (ConfigError, ValueError):
        return f"{len(split_of)} different tasks of {', '.join(SPLITS)}"
    raise PropertyFailed(
        "an unknown split is not rejected; raise a DataError (agentfly.environments.data.validate_split)"
    )


def rows_are_json(subject: Subject) -> str:
    """Rows are plain JSON with unique ids, and equal after writing and reading a file."""
    for split in SPLITS:
        rows = _draw(subject, split, COUNT)
        ids = [str(row.get("id") or "") for row in rows]
        if not all(ids) or len(set(ids)) < len(ids):
            raise PropertyFailed(f"ids of {split} are empty or not unique: {', '.join(ids[:5])}, …")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tasks.jsonl"
            try:
                path.write_text("".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows))
                tasks = read_tasks(path)
            except (DataError, TypeError, ValueError) as error:
                raise PropertyFailed(f"a row of {split} cannot be written and read: {error}") from None
        for row, task in zip(rows, tasks, strict=True):
            if task != Task.of(row):
                raise PropertyFailed(f"{row['id']!r} of {split} changes when it is written to a file and read")
    return f"{COUNT} rows of each split are unchanged after writing and reading a file"


def _draw(subject: Subject, split: str, count: int, seed_offset: int = 0) -> list[dict[str, Any]]:
    if not has_tasks(subject.env_class):
        raise NotApplicable("it draws no tasks of its own")
    rows = subject.env_class.draw_tasks(split, count, seed=subject.seed + seed_offset)
    if not isinstance(rows, Sequence) or not all(isinstance(row, dict) for row in rows):
        raise PropertyFailed(f"draw_tasks returned {rows!r:.80}, not a list of rows")
    return list(rows)


_NEW_PROCESS = """
import functools, importlib, importlib.util, json, sys
paths, module_name, file, name, seed, count = json.loads(sys.argv[1])
sys.path[:] = paths
try:
    module = importlib.import_module(module_name)
except ImportError:
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
env_class = functools.reduce(getattr, name.split("."), module)
rows = env_class.draw_tasks("train", count, seed=seed)
print("\\n" + json.dumps(rows, sort_keys=True, default=repr))
"""


def _draw_in_new_process(subject: Subject) -> str:
    """Draw the tasks in a process with another hash seed. Returns them as JSON. Empty if it cannot import the class."""
    env_class = subject.env_class
    file = getattr(sys.modules.get(env_class.__module__), "__file__", None)
    if file is None or "<locals>" in env_class.__qualname__:
        return ""
    arguments = json.dumps([sys.path, env_class.__module__, file, env_class.__qualname__, subject.seed, COUNT])
    result = subprocess.run(
        [sys.executable, "-c", _NEW_PROCESS, arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": str(subject.seed % 1000 + 1)},
        timeout=WALL * subject.seconds,
        check=False,
    )
    if result.returncode:
        raise PropertyFailed(f"another process cannot draw them: {result.stderr.strip().splitlines()[-1]:.200}")
    return result.stdout.splitlines()[-1]
