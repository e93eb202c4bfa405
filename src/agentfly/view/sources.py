"""What `agentfly view` shows: run directories, outputs of `agentfly eval`, and files of saved trajectories."""

from __future__ import annotations

import gzip
import json
import re
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import psutil  # type: ignore[import-untyped]

from agentfly.errors import DataError, describe
from agentfly.runs.directory import RunDirectory
from agentfly.runs.files import open_regular
from agentfly.runs.record import Alarm

_CHAINS_FILE = re.compile(r"(step|eval)-(\d+)\.jsonl\.gz")
DAMAGE = (
    OSError,
    EOFError,
    zlib.error,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading a damaged file can raise: it is no JSON, nested too deeply, or has values of other types."""
_EVAL_CHAINS = "chains.jsonl"
"""The file with the chains in an output folder of `agentfly eval`."""
Curve = list[tuple[int, float]]
Kind = Literal["run", "eval", "trajectories"]


@dataclass(frozen=True, slots=True)
class ChainFile:
    """A file of chains, one JSON object per line."""

    path: Path
    step: int | None = None
    """None outside of a training run."""
    held_out: bool = False
    grows: bool = False
    """Whether lines are appended; other files are written once, and replaced as a whole."""

    @property
    def state(self) -> tuple[int, int, int]:
        """Size, time of the last change, and inode: another one if the file was written or replaced since."""
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns, status.st_ino

    def lines(self, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """The complete lines from an offset in the uncompressed file, each with its own offset."""
        with self._open() as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                yield offset, line
                offset += len(line)

    def read(self, places: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """The objects of lines, given by offset and length in the order of the file."""
        try:
            with self._open() as file:
                values = []
                for offset, length in places:
                    file.seek(offset)
                    values.append(dict(json.loads(file.read(length))))
                return values
        except (OSError, EOFError, ValueError) as error:
            raise DataError(f"{self.path} cannot be read: {error}; reload the list of chains") from error

    @contextmanager
    def _open(self) -> Iterator[BinaryIO | gzip.GzipFile]:
        with open_regular(self.path) as file:
            yield gzip.GzipFile(fileobj=file) if self.path.suffix == ".gz" else file


class Source:
    """One PATH of the command line, or one run of a folder of runs."""

    def __init__(self, number: int, path: Path, kind: Kind) -> None:
        self.number = number
        self.path = path
        self.kind = kind
        self.run = RunDirectory(path) if kind == "run" else None
        self.problems: dict[str, str] = {}
        """Files without chains that cannot be read, or not completely, by path."""
        self._sampled: int | None = None
        """Sampled chains per task of its evaluations; None until it was read."""
        self._lock = threading.Lock()
        self._curves: dict[Path, _CurveFile] = {}
        if self.run is not None:
            # Greedy and sampled evaluations get the same prefix, so that the page shows them in one list.
            self._curves[self.run.metrics_file] = _CurveFile(self.run.metrics_file, "")
            self._curves[self.run.evals_file] = _CurveFile(self.run.evals_file, "eval/")

    @property
    def name(self) -> str:
        """The name of its folder or file."""
        return self.path.parent.name if self.path.name == _EVAL_CHAINS else self.path.name

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run or of the evaluation; empty for saved trajectories, and if they cannot be read."""
        try:
            if self.run is not None:
                return self.run.config
            if self.kind == "eval":
                first = next(ChainFile(self.path).lines(), (0, b"{}"))[1]
                return dict(json.loads(first).get("settings") or {})
        except (DataError, *DAMAGE) as error:
            self.problems[f"the settings of {self.path}"] = describe(error)
        return {}

    def is_greedy(self, chain: int, *, held_out: bool) -> bool:
        """Whether a chain, given by its index in its group, is the one that an evaluation adds at temperature 0."""
        if self._sampled is None:
            settings = self.settings.get("evaluation") if self.kind == "run" else self.settings
            sampled = settings.get("chains") if isinstance(settings, dict) and settings.get("greedy", True) else None
            self._sampled = sampled if isinstance(sampled, int) else sys.maxsize
        return (held_out or self.kind == "eval") and chain >= self._sampled

    def alarms(self) -> list[Alarm]:
        """The alarms of a run; none if they cannot be read."""
        try:
            return [] if self.run is None else self.run.alarms()
        except (DataError, *DAMAGE) as error:
            self.problems[f"the alarms of {self.path}"] = describe(error)
            return []

    @property
    def live(self) -> bool:
        """Whether its writer is alive, by the process id in the run's lock file.

        The lock itself is not tried: a writer that starts at that moment would be refused.
        """
        if self.kind != "run":
            return False
        try:
            with open_regular(self.path / ".lock") as file:
                return bool(psutil.pid_exists(int(file.read())))
        except (OSError, ValueError, OverflowError):
            return False

    def chain_files(self) -> list[ChainFile]:
        """The files with its chains; a running run adds files."""
        if self.kind != "run":
            return [ChainFile(self.path, grows=self.kind == "eval")]
        paths = sorted((self.path / "trajectories").glob("*.jsonl.gz"))
        matches = [(path, _CHAINS_FILE.fullmatch(path.name)) for path in paths]
        return [ChainFile(path, int(match[2]), match[1] == "eval") for path, match in matches if match]

    def curves(self) -> dict[str, Curve]:
        """Every metric by name, as (step, value) in the order of steps. Reads only what was written since."""
        out: dict[str, Curve] = {}
        with self._lock:  # requests are answered by several threads
            for path, file in self._curves.items():
                file.update()
                out |= {name: list(points) for name, points in file.curves.items()}
                if file.problem:
                    self.problems[str(path)] = file.problem
        return out


class _CurveFile:
    """The metrics in a JSONL file with one line per step."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.curves: dict[str, Curve] = {}
        self.problem = ""
        """Why a line was skipped; empty if none was."""
        self._file = ChainFile(path)
        self._prefix = prefix
        self._offset = 0
        self._last = -1
        """The newest step."""

    def update(self) -> None:
        """Read the lines that were appended; all of them if the file was rewritten, as on resuming a run."""
        if not self._file.path.is_file():
            return
        if self._file.state[0] < self._offset:
            self._forget()
        for offset, line in self._file.lines(self._offset):
            try:
                value = json.loads(line)
                step = int(value.pop("step"))
                numbers = list(_flatten(value, self._prefix))
            except DAMAGE as error:
                self.problem = f"the line at byte {offset} is skipped, {describe(error)}"
                self._offset = offset + len(line)
                continue
            if step <= self._last:  # cut off, and grown again beyond its old length: read from the start next time
                self._forget()
                return
            self._offset = offset + len(line)
            self._last = step
            for name, number in numbers:
                self.curves.setdefault(name, []).append((step, number))

    def _forget(self) -> None:
        self._offset = 0
        self._last = -1
        self.curves = {}


def _flatten(line: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, prefix)
        elif isinstance(value, int | float) and name != "steps":
            yield f"{prefix}{name}", float(value)


def find_sources(paths: list[Path]) -> list[Source]:
    """The sources that the paths name; a folder of runs stands for all of them.

    Raises DataError for a path that is none of these.
    """
    kinds: dict[Path, Kind] = {}
    for path in paths:
        absolute = path.expanduser().absolute()
        if _is_run(absolute):
            kinds.setdefault(absolute, "run")
        elif (absolute / _EVAL_CHAINS).is_file():
            kinds.setdefault(absolute / _EVAL_CHAINS, "eval")
        elif absolute.is_file():
            kinds.setdefault(absolute, _file_kind(absolute))
        elif absolute.is_dir():
            inside: dict[Path, Kind] = dict.fromkeys(sorted(filter(_is_run, absolute.iterdir())), "run")
            inside |= dict.fromkeys(sorted(absolute.glob(f"*/{_EVAL_CHAINS}")), "eval")
            if not inside:
                raise DataError(
                    f"{path} is no run directory, no output folder of `agentfly eval`, and has none in it; "
                    "a run directory has config.json and trajectories/, an evaluation chains.jsonl"
                )
            kinds = {**kinds, **inside}
        else:
            raise DataError(f"there is no {path}; give run directories, outputs of `agentfly eval`, or saved chains")
    return [Source(number, path, kind) for number, (path, kind) in enumerate(kinds.items(), 1)]


def _is_run(path: Path) -> bool:
    """Whether a folder is a run directory; the folder of a model has a config.json too."""
    return (path / "config.json").is_file() and (path / "trajectories").is_dir()


def _file_kind(path: Path) -> Kind:
    """Whether a file is the log of an evaluation or saved trajectories. Raises DataError if it is neither."""
    file = ChainFile(path)
    try:
        _, line = next(file.lines(), (0, b""))
        first = json.loads(line) if line else {}
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} holds no chains: its first line is not JSON ({error})") from error
    if not isinstance(first, dict) or not first.keys() & {"settings", "trajectory", "segments"}:
        raise DataError(
            f"{path} holds no chains: give a file of `agentfly run --save`, or of `agentfly eval --out FILE.jsonl`"
        )
    return "eval" if "settings" in first else "trajectories"
