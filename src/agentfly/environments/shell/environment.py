"""Shell environment: a sandbox session with the file tree of the task, and its rewards.

The files that a chain leaves and the output of its last command are compared with those of the gold command, which runs
on a copy of the tree in a separate session. A file is compared by type, permissions and content, an archive by the
names and contents of its members, since packing the same files twice rarely gives the same bytes. Times are ignored.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import tarfile
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from gzip import GzipFile
from typing import Any, ClassVar

from agentfly.environments.code_interpreter import TOOL_TIMEOUT, SandboxEnvironment
from agentfly.environments.shell import tasks
from agentfly.errors import ConfigError, DataError
from agentfly.sandbox import EndReason, FileAccessError, Limits, Outcome, Session
from agentfly.scoring import reward
from agentfly.tooling import cut_middle, tool
from agentfly.types import Task, ToolCall

FileState = Mapping[str, tuple[str, ...]]
"""Path → file type, permissions, and digest of the content (or target of a link)."""
MAX_FILES = 1000
_MAX_BYTES = 8 << 20
"""Largest file, and largest content of an archive."""
_LIST_COMMAND = r"/usr/bin/find . -mindepth 1 -printf '%y\t%m\t%l\t%P\0'"
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip", ".gz")
_WORD = re.compile(r"\w\w+")
_SORT = re.compile(r"\bsort\b")
_COMPLETED = (EndReason.OK, EndReason.ERROR)
"""A nonzero exit status is not a failure: `grep` has one if nothing matches."""


class UnreadableState(Exception):
    """The file tree cannot be read: too many files, or folders without permission."""


async def read_state(session: Session) -> FileState:
    """Read the file tree of a session. Raises UnreadableState."""
    listing: Outcome = await session.shell(_LIST_COMMAND)
    lines = [line.split("\t", 3) for line in listing.output.split("\0") if line]
    if not listing.ok or listing.dropped or len(lines) > MAX_FILES:
        raise UnreadableState(listing.message or f"{len(lines)} files")
    state = {}
    for kind, mode, target, path in lines:
        if kind != "f":
            state[path] = kind, mode, target
            continue
        try:
            data = await session.get(path, _MAX_BYTES)
        except FileAccessError as error:
            state[path] = kind, mode, f"not read: {error}"
            continue
        if path.endswith(_ARCHIVES):
            data = _unpack(data) or data
        state[path] = kind, mode, hashlib.sha256(data).hexdigest()
    return state


def _unpack(data: bytes) -> bytes:
    """Serialize the sorted names and contents of an archive's members, or return the decompressed data."""
    members: list[tuple[str, str]] = []
    try:
        if data[:2] == b"\x1f\x8b":
            with GzipFile(fileobj=io.BytesIO(data)) as compressed:
                data = compressed.read(_MAX_BYTES)
        if data[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(data)) as zip_file:
                if sum(member.file_size for member in zip_file.infolist()) > _MAX_BYTES:
                    raise ValueError("too large")
                members = [
                    (info.filename, hashlib.sha256(zip_file.read(info)).hexdigest()) for info in zip_file.infolist()
                ]
        else:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar_file:
                for member in tar_file:
                    file = tar_file.extractfile(member) if member.isreg() else None
                    digest = hashlib.sha256(file.read()).hexdigest() if file else member.linkname
                    members.append((member.name, digest))
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, RuntimeError):
        return data
    return repr(sorted((name.removeprefix("./").rstrip("/"), digest) for name, digest in members)).encode()


def diff_states(initial: FileState, final: FileState) -> dict[str, str]:
    """Map each changed path to A (added), D (deleted) or M (modified)."""
    paths = {path for path in {*initial, *final} if initial.get(path) != final.get(path)}
    return {path: "A" if path not in initial else "D" if path not in final else "M" for path in paths}


def equal_output(text: str, gold: str, *, ordered: bool) -> bool:
    """Whether two outputs have the same lines. Whitespace, empty lines and a leading `./` are ignored."""
    lines, gold_lines = (
        [" ".join(line.split()).removeprefix("./") for line in output.splitlines() if line.strip()]
        for output in (text, gold)
    )
    return lines == gold_lines if ordered else sorted(lines) == sorted(gold_lines)


def text_similarity(text: str, gold: str) -> float:
    """Cosine similarity of the TF-IDF vectors of two texts, as in InterCode."""
    words, gold_words = (Counter(_WORD.findall(answer.lower())) for answer in (text, gold))
    if not words or not gold_words:
        return float(text.split() == gold.split())
    weight = {word: math.log(3 / (1 + (word in words) + (word in gold_words))) + 1 for word in words | gold_words}

    def dot(one: Counter[str], other: Counter[str]) -> float:
        return sum(one[word] * other[word] * weight[word] ** 2 for word in one.keys() & other.keys())

    return dot(words, gold_words) / math.sqrt(dot(words, words) * dot(gold_words, gold_words))


@dataclass(frozen=True, slots=True)
class GoldOutcome:
    """What the gold command does."""

    initial: FileState
    final: FileState
    output: str


_GOLD_OUTCOMES: OrderedDict[str, GoldOutcome] = OrderedDict()
"""By checksum of the task: the chains of a group have the same task."""
_MAX_GOLD_OUTCOMES = 512


class Shell(SandboxEnvironment):
    """A shell, and a file tree in which something is to be found or changed."""

    scored_by = "shell_match"
    limits: ClassVar[Limits] = Limits(seconds=10, inodes=2000, output=64 << 10)
    longest: ClassVar[int] = 4000
    """Number of characters of an output that are shown."""

    draw_tasks = staticmethod(tasks.draw_tasks)

    async def reset(self, task: Task) -> None:
        """Start a new session with the file tree of the task."""
        files, setup = task.columns.get("files") or {}, task.columns.get("setup") or ""
        gold = task.columns.get("gold")
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise DataError("the column 'files' must map paths to text")
        if not isinstance(setup, str) or not isinstance(gold, str | None) or not (files or setup):
            raise DataError(
                f"task {task.id!r} needs the column 'files' or 'setup' (a script), and 'gold' (a command); "
                "Shell.draw_tasks and nl2bash_tasks make such rows"
            )
        self._files: dict[str, str] = files
        self._setup, self._gold = setup, gold
        await self._reset_session()
        self.printed = ""
        """Output of the last command."""
        self.commands = 0
        """Number of commands."""

    async def _write_files(self, session: Session) -> None:
        """Write the task's files into a session and run its setup script. Raises DataError."""
        try:
            for path, text in self._files.items():
                await session.put(path, text.encode())
        except FileAccessError as error:
            raise DataError(f"a file of the task cannot be written: {error}") from error
        if self._setup:
            outcome = await session.shell(self._setup)
            if outcome.end not in _COMPLETED:
                raise DataError(f"the script of the column 'setup' fails: {outcome.text:.200}")

    @tool(name="shell", timeout=TOOL_TIMEOUT, max_length=100_000)
    async def run_shell(self, command: str) -> dict[str, Any]:
        """Run a shell command. It starts in the folder of the task. What the last command prints is the answer.

        Args:
            command: The command, as one would type it.
        """
        outcome = await self.session.shell(command)
        self.commands += 1
        self.printed = outcome.output
        text = cut_middle(outcome.text, self.longest)
        if not outcome.files_kept:
            await self._replace_session()
            text += "\n[A fresh session was started, with the files of the task as they were.]"
        return {"observation": text or "(no output)", "end": outcome.end.value}

    async def evaluate(self, answer: str = "") -> dict[str, Any]:
        """Compare files and output with those of the gold command.

        Returns `match` (both are equal), `similarity` (as in InterCode), `files_correct` (the files are equal),
        `output_correct` (the output of the last command, or the final answer, is equal) and `commands`.
        """
        expected = await self._run_gold()
        ordered = self._gold is not None and bool(_SORT.search(self._gold))
        output_correct = not expected.output.strip() or any(
            equal_output(text, expected.output, ordered=ordered) for text in (self.printed, answer)
        )
        try:
            state = await read_state(self.session)
        except UnreadableState:
            scores = {"match": False, "similarity": 0.0, "files_correct": False}
            return {**scores, "output_correct": output_correct, "commands": self.commands}
        files_correct = dict(state) == dict(expected.final)
        # A third each for the paths that changed, for their contents, and for the output.
        changes, gold_changes = (set(diff_states(expected.initial, final).items()) for final in (state, expected.final))
        common = [path for path, status in changes & gold_changes if status != "D"]
        contents = sum(state[path] == expected.final[path] for path in common) / len(common) if common else 1.0
        output = text_similarity(self.printed, expected.output) if expected.output.strip() else 1.0
        return {
            "match": files_correct and output_correct,
            "similarity": (1 - math.erf(len(changes ^ gold_changes)) + contents + output) / 3,
            "files_correct": files_correct,
            "output_correct": output_correct,
            "commands": self.commands,
        }

    async def _run_gold(self) -> GoldOutcome:
        """Run the gold command in a separate session, or take its outcome from the cache. Raises DataError."""
        content = json.dumps([self._files, self._setup, self._gold], sort_keys=True)
        key = hashlib.sha256(content.encode()).hexdigest()
        if key in _GOLD_OUTCOMES:
            return _GOLD_OUTCOMES[key]
        if self._gold is None:
            raise DataError("the row needs a command in the column 'gold'")
        session = await self._sandbox.open_session(self.limits)
        try:
            await self._write_files(session)
            initial = await read_state(session)
            outcome = await session.shell(self._gold)
            if outcome.end not in _COMPLETED:
                raise DataError(f"the command of the column 'gold' fails: {outcome.text:.200}: {self._gold:.200}")
            result = _GOLD_OUTCOMES[key] = GoldOutcome(initial, await read_state(session), outcome.output)
        except UnreadableState as error:
            raise DataError(f"the tree of the task cannot be compared: {error}") from error
        finally:
            await session.close()
        while len(_GOLD_OUTCOMES) > _MAX_GOLD_OUTCOMES:
            _GOLD_OUTCOMES.popitem(last=False)
        return result

    def expert(self) -> ToolCall | str:
        """Run the gold command."""
        if self._gold is None:
            raise ConfigError("this task has no expert: its row has no column 'gold'")
        return "Done." if self.commands else ToolCall("shell", {"command": self._gold})


@reward
async def shell_match(prediction: str, env: Shell) -> dict[str, Any]:
    """1 if the files and the output equal those of the gold command, otherwise 0."""
    scores = await env.evaluate(prediction)
    return {"reward": float(scores.pop("match")), **scores}


@reward
async def shell_similarity(prediction: str, env: Shell) -> dict[str, Any]:
    """Mean similarity of changed paths, contents and output, as in InterCode."""
    scores = await env.evaluate(prediction)
    return {"reward": scores["similarity"], **scores}
