"""Task folders in the format of Harbor and Terminal-Bench 2: a task as files.

TASK/instruction.md   the prompt
     task.toml        configuration, schema 1.4 (`TaskConfig`)
     environment/     a Dockerfile, or files for the working folder
     solution/solve.sh
     tests/test.sh    the verifier: it writes /logs/verifier/reward.json or reward.txt

What would change a task's meaning and is not supported is refused when the folder is read. Keys without effect here are
listed by `TaskFiles.ignored_keys`.
"""

from __future__ import annotations

import enum
import math
import os
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agentfly.errors import DataError
from agentfly.validation import describe_invalid

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml", "singularity-compose.yaml")
_IMAGE_FILES = ("Dockerfile", ".dockerignore")
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


class NetworkMode(enum.Enum):
    PUBLIC = "public"
    NO_NETWORK = "no-network"
    ALLOWLIST = "allowlist"


class VerifierMode(enum.Enum):
    SHARED = "shared"
    """The verifier runs where the agent worked."""
    SEPARATE = "separate"
    """It runs in an instance of its own, which gets the declared artifacts only."""


def _parse_size(value: Any) -> Any:
    """Convert a size of older schemas, such as "2G", to MiB."""
    if not isinstance(value, str):
        return value
    if value[-1:].upper() not in _SIZES:
        raise ValueError('a size has a unit, such as "2G" or "512M"')
    size = float(value[:-1]) * _SIZES[value[-1].upper()]
    if not math.isfinite(size):
        raise ValueError("a size is finite")
    return int(size)


_MebiBytes = Annotated[int | None, BeforeValidator(_parse_size), Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _ConfigTable(BaseModel):
    """A table of task.toml. Unknown keys are kept: published tasks have some."""

    model_config = ConfigDict(frozen=True, extra="allow")


class AgentTable(_ConfigTable):
    timeout_sec: _Seconds | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None


class EnvironmentTable(_ConfigTable):
    docker_image: str | None = None
    build_timeout_sec: _Seconds = 600.0
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_mb: _MebiBytes = Field(default=None, validation_alias=AliasChoices("memory_mb", "memory"))
    storage_mb: _MebiBytes = Field(default=None, validation_alias=AliasChoices("storage_mb", "storage"))
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    healthcheck: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = []
    network_mode: NetworkMode | None = None
    allow_internet: bool | None = None

    @property
    def network(self) -> NetworkMode:
        if self.network_mode is None and self.allow_internet is False:
            return NetworkMode.NO_NETWORK
        return self.network_mode or NetworkMode.PUBLIC


class CollectTable(_ConfigTable):
    command: str
    service: str = "main"
    timeout_sec: _Seconds = 60.0


class ArtifactTable(_ConfigTable):
    source: str


class VerifierTable(_ConfigTable):
    timeout_sec: _Seconds = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    environment_mode: VerifierMode | None = None
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = []

    @property
    def mode(self) -> VerifierMode:
        default = VerifierMode.SHARED if self.environment is None else VerifierMode.SEPARATE
        return self.environment_mode or default


class SolutionTable(_ConfigTable):
    env: dict[str, str] = {}


class TaskTable(_ConfigTable):
    name: str | None = None


class TaskConfig(_ConfigTable):
    """The content of task.toml."""

    schema_version: str = Field(default="1.4", validation_alias=AliasChoices("schema_version", "version"))
    source: str | None = None
    task: TaskTable = TaskTable()
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    artifacts: list[str | ArtifactTable] = []
    steps: list[dict[str, Any]] | None = None
    multi_step_reward_strategy: str | None = None


@dataclass(frozen=True)
class TaskFiles:
    """A task folder that was read and can be run."""

    folder: Path
    config: TaskConfig
    instruction: str

    @classmethod
    def read(cls, folder: Path) -> TaskFiles:
        """Read a task folder. Raises DataError for what is missing, malformed or not supported."""
        path = folder / "task.toml"
        if link := next(_find_links_outside(folder), None):
            raise DataError(
                f"the task folder {folder} has the link {link.relative_to(folder)} to a file outside of it, which the "
                "agent could read; copy the folder with the files behind its links (cp -rL) if they belong to the task"
            )
        try:
            config = TaskConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
            instruction = (folder / "instruction.md").read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise DataError(f"the task folder {folder} has no {Path(error.filename).name}") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        except ValidationError as error:
            raise DataError(f"{path}: {describe_invalid(error, with_input=True)}") from error
        files = cls(folder, config, instruction)
        if not instruction.strip():
            raise DataError(f"{folder / 'instruction.md'} is empty")
        if not (folder / "tests" / "test.sh").is_file():
            raise DataError(f"the task folder {folder} has no tests/test.sh, which decides the reward")
        if reason := next(files._find_unsupported(), None):
            raise DataError(f"the task folder {folder} {reason}")
        return files

    @property
    def name(self) -> str:
        return self.config.task.name or self.folder.name

    @cached_property
    def dockerfile(self) -> Path | None:
        path = self.folder / "environment" / "Dockerfile"
        return path if path.is_file() else None

    @cached_property
    def workdir(self) -> str:
        """Where the agent's commands start: declared, else that of the Dockerfile, else /app."""
        if self.config.environment.workdir:
            return self.config.environment.workdir
        text = self.dockerfile.read_text(encoding="utf-8") if self.dockerfile else ""
        declared = re.findall(r"^\s*WORKDIR\s+(\S+)", text, re.IGNORECASE | re.MULTILINE)
        return str(PurePosixPath("/", *declared)) if declared else "/app"

    @property
    def artifacts(self) -> list[str]:
        """Absolute paths that a separate verifier gets."""
        sources = [entry if isinstance(entry, str) else entry.source for entry in self.config.artifacts]
        return [posixpath.normpath(posixpath.join(self.workdir, source)) for source in sources] + ["/logs/artifacts"]

    def files_in(self, name: str) -> dict[str, bytes]:
        """The files of a folder of the task by path, without those that make an image."""
        root = self.folder / name
        paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths if path.name not in _IMAGE_FILES}

    def to_row(self) -> dict[str, str]:
        """The task as a row of a dataset."""
        return {"id": self.name, "question": self.instruction, "task_folder": str(self.folder)}

    def ignored_keys(self) -> list[str]:
        """Keys of task.toml that have no effect here, as `table.key`."""
        tables: dict[str, _ConfigTable] = {
            "": self.config, "agent.": self.config.agent, "environment.": self.config.environment,
            "verifier.": self.config.verifier, "solution.": self.config.solution,
        }  # fmt: skip
        if self.config.verifier.environment is not None:
            tables["verifier.environment."] = self.config.verifier.environment
        return sorted(f"{prefix}{key}" for prefix, table in tables.items() for key in table.model_extra or ())

    def _find_unsupported(self) -> Iterator[str]:
        """What the task needs that is not supported."""
        environment, verifier = self.config.environment, self.config.verifier
        for table, where in ((environment, "environment"), (verifier.environment, "verifier.environment")):
            if table is None:
                continue
            if table.os.lower() != "linux":
                yield f"is for {table.os} ({where}.os); only linux is supported"
            if table.gpus or table.tpu:
                yield f"needs an accelerator ({where}), which environments here do not get"
            if table.network is NetworkMode.ALLOWLIST:
                yield f"allows a list of hosts ({where}.network_mode); only public and no-network are supported"
            if table.mcp_servers or table.healthcheck:
                key = "mcp_servers" if table.mcp_servers else "healthcheck"
                yield f"declares {where}.{key}, which is not supported"
        if environment.workdir and not environment.workdir.startswith("/"):
            yield f"works in {environment.workdir!r} (environment.workdir), which is no absolute path"
        if self.config.steps:
            yield "has several steps, which are not supported"
        modes = [table.network_mode or environment.network for table in (self.config.agent, verifier)]
        if NetworkMode.ALLOWLIST in modes:
            yield "allows a list of hosts (network_mode); only public and no-network are supported"
        if verifier.mode is VerifierMode.SHARED and modes[0] is not modes[1]:
            yield 'gives its agent and its verifier another network_mode, which needs environment_mode = "separate"'
        if verifier.mode is VerifierMode.SEPARATE and (self.folder / "tests" / "Dockerfile").exists():
            yield "has tests/Dockerfile, an image for the verifier alone, which is not supported"
        if verifier.mode is VerifierMode.SHARED and verifier.environment is not None:
            yield 'has [verifier.environment] with environment_mode = "shared"; the two exclude each other'
        if any(hook.service != "main" for hook in verifier.collect):
            yield "collects from another service than main, which is not supported"
        if compose := next((name for name in _COMPOSE if (self.folder / "environment" / name).exists()), None):
            yield f"has environment/{compose}; only tasks of one container are supported"
        if verifier.user not in (None, self.config.agent.user) and verifier.mode is VerifierMode.SHARED:
            yield f"runs its verifier as user {verifier.user!r} and its agent as another, which is not supported"


def _find_links_outside(folder: Path) -> Iterator[Path]:
    """The links that leave a task folder: with them, its author could read any file of the host into a session."""
    root = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            yield path


def find_task_folders(root: Path) -> list[Path]:
    """The task folders directly in `root`, or `root` itself if it is one; none if it has none."""
    if (root / "task.toml").is_file():
        return [root]
    return sorted(path.parent for path in root.glob("*/task.toml"))


def read_rows(root: Path) -> Iterator[tuple[str, Any]]:
    """Yield a row for each task folder in `root`: the instruction is the question, `task_folder` the path."""
    for folder in find_task_folders(root):
        try:
            files = TaskFiles.read(folder.resolve())
        except DataError as error:
            yield f"task {folder.name}", error
        else:
            yield f"task {folder.name}", files.to_row()


def resolve_variables(values: Mapping[str, str], allowed: frozenset[str], where: str) -> dict[str, str]:
    """Replace values `${VAR}` and `${VAR:-default}` by variables of this process, as far as `allowed` names them.

    A task often comes from an unknown author: without the list, it could read every key of the host. Raises DataError.
    """
    resolved = dict(values)
    for key, text in values.items():
        if match := _VARIABLE.fullmatch(text):
            name, default = match.groups()
            value = os.environ.get(name, default) if name in allowed else default
            if value is None:
                hint = "is not set" if name in allowed else "is not in TaskFolder.host_variables"
                raise DataError(f"{where} needs the variable {name} of the host, which {hint}")
            resolved[key] = value
    return resolved
