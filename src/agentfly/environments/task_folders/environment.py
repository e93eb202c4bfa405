"""TaskFolder: a task as files. The agent works in the task's image or in a sandbox, then the task's verifier runs.

The verifier's files are written after the agent's last call, when all of the agent's processes are killed and whatever
it left at their paths is deleted. A verifier without a valid reward file is a fault of the task if it writes none in an
untouched instance either. If it does there, the agent has broken the verifier and earns 0: a masked chain would teach
that breaking it costs nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import posixpath
import shlex
import sys
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from agentfly.data.task_folders import (
    AgentTable,
    EnvironmentTable,
    NetworkMode,
    TaskFiles,
    VerifierMode,
    VerifierTable,
    read_rows,
    resolve_variables,
)
from agentfly.environment import Pool, Recycle
from agentfly.environments.code_interpreter import TOOL_TIMEOUT, SandboxFiles
from agentfly.environments.data import validate_split
from agentfly.errors import ConfigError, DataError
from agentfly.sandbox import EndReason, FileAccessError, Limits, Sandbox, Session, SessionClosed
from agentfly.sandbox.mechanisms import STRONG, shared_sandbox
from agentfly.sandbox.mounts import TASK_FOLDERS
from agentfly.scoring import reward
from agentfly.threads import call
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

SHIPPED = Path(__file__).parent / "repair" / "packages"
"""Shipped task folders by split: small Python packages with one wrong line."""
_MIB = 1 << 20
_MAX_REWARD_BYTES = 1 << 16
_MAX_ARTIFACT_BYTES = 64 * _MIB
_ARCHIVE = "artifacts.tar"
_STATE = "/tmp/.shell_state"
_FOLDERS = ("/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests", "/solution")
_SHELL = """
cd {workdir} || exit
[ -f {state} ] && . {state} 2>/dev/null
save() {{
    status=$?
    {{ if [ -n "$BASH_VERSION" ]; then declare -p; declare -f; else set; export -p; fi
       printf 'cd %s\\n' "'$(pwd | sed "s/'/'\\\\\\\\''/g")'"; }} > {state} 2>/dev/null
    exit $status
}}
trap save EXIT
eval {command}
"""
"""Runs a command where the last one ended: with its variables, its functions and in its folder."""


class VerifierError(DataError):
    """The verifier wrote no valid reward file."""


class TaskFolder(SandboxFiles):
    """A task folder of Harbor or Terminal-Bench 2: `agentfly.data.read_tasks(FOLDER)` has a row for each."""

    scored_by = "verified"
    pool = Pool(recycle=Recycle.REPLACE, max_instances=64, reset_timeout=900)
    limits: ClassVar[Limits] = Limits(seconds=600, memory=2048 * _MIB, disk=512 * _MIB, inodes=100_000, processes=256)
    """Limits of a task that declares none. `seconds` also bounds a single command."""
    allow_no_image: ClassVar[bool] = False
    """Run a task that has an image in the sandbox instead: with this machine's programs, and without network."""
    host_variables: ClassVar[frozenset[str]] = frozenset()
    """Names of variables of this process that tasks may read with `${NAME}` in their `env`."""

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 48, *, seed: int = 0) -> list[dict[str, Any]]:
        """Draw shipped tasks without replacement: Python packages with one wrong line each."""
        rows = [row for _, row in read_rows(SHIPPED / validate_split(split))]
        if not 0 <= count <= len(rows):
            raise DataError(f"{split} has {len(rows)} shipped task folders, not {count}")
        return Random(f"{split}/{seed}").sample(rows, len(rows))[:count]

    async def start(self) -> None:
        """Nothing: the task decides what its session runs in."""

    async def check(self) -> None:
        if self._session is not None:
            await super().check()

    async def reset(self, task: Task) -> None:
        """Open a session for the task folder of the column `task_folder`."""
        folder = task.columns.get("task_folder")
        if not isinstance(folder, str):
            raise DataError(
                f"task {task.id!r} needs the column `task_folder`, a path; read_tasks(FOLDER) makes such rows"
            )
        await self.close()
        self.task_files = TaskFiles.read(Path(folder))
        self.last_output = None
        self._files = {}
        self._scores: dict[str, float] | None = None
        self._agent_seconds = 0.0
        self._workdir = self.task_files.workdir
        config = self.task_files.config
        self._sandbox = await self._open_sandbox(config.environment, config.agent)
        self._session = await self._sandbox.open_session(self._session_limits)
        await self._write_files(self.session)

    async def _open_sandbox(self, table: EnvironmentTable, program: AgentTable | VerifierTable) -> Sandbox:
        """The sandbox of a declared image, of the task's Dockerfile, or the local one if there is neither."""
        files, config = self.task_files, self.task_files.config
        image = table.docker_image
        if self.allow_no_image or (image is None and files.dockerfile is None):
            sandbox = await shared_sandbox(self.mechanism)
            if sandbox.mechanism not in STRONG:
                raise ConfigError(f"task folders need a sandbox with mounts of its own, not {sandbox.mechanism}")
            return sandbox
        from agentfly.resources.runtimes.container import Container  # late: it needs the extra `container`

        image, workdir = await call(prepare_image, image, files.folder, config.environment.build_timeout_sec)
        self._workdir = config.environment.workdir or workdir or self._workdir
        container = Container(
            image=image,
            user=str(program.user or ""),
            folder="/",
            read_only=False,
            network=(program.network_mode or table.network) is NetworkMode.PUBLIC,
            capabilities=True,
            environment={"HOME": "/root", **self._resolve(table.env, "environment.env")},
        )
        return await shared_sandbox(container)

    @property
    def _session_limits(self) -> Limits:
        config = self.task_files.config
        return Limits(
            seconds=max(self.limits.seconds, config.verifier.timeout_sec, config.agent.timeout_sec or 0),
            memory=(config.environment.memory_mb or self.limits.memory // _MIB) * _MIB,
            disk=(config.environment.storage_mb or self.limits.disk // _MIB) * _MIB,
            inodes=self.limits.inodes,
            processes=self.limits.processes,
            output=self.limits.output,
            cpus=config.environment.cpus,
        )

    def _resolve(self, values: Mapping[str, str], where: str) -> dict[str, str]:
        return resolve_variables(values, self.host_variables, f"{self.task_files.folder}: {where}")

    def _locate(self, path: str) -> str:
        return locate(self.session, posixpath.normpath(posixpath.join(self._workdir, path)))

    async def _write_files(self, session: Session) -> None:
        """Make the folders of the format. Without an image, write the environment's files into the working folder."""
        await super()._write_files(session)
        is_local = is_without_image(session)
        if is_local and posixpath.commonpath([self._workdir, "/app"]) != "/app":
            raise DataError(
                f"{self.task_files.folder} works in {self._workdir}; without an image it must be /app or below"
            )
        folders = shlex.join(locate(session, path) for path in (self._workdir, *_FOLDERS))
        outcome = await session.shell(f"mkdir -p {folders} && cd {shlex.quote(self._workdir)}")
        if not outcome.ok:
            raise DataError(f"{self.task_files.folder} cannot work in {self._workdir}: {outcome.text[-500:]}")
        for path, data in self.task_files.files_in("environment").items() if is_local else ():
            await session.put(locate(session, f"{self._workdir}/{path}"), data)

    @tool(timeout=TOOL_TIMEOUT, max_length=20_000)
    async def bash(self, command: str) -> dict[str, Any]:
        """Run a command in a shell. Variables, functions and the working folder stay for the next command.

        Args:
            command: The command, as one would type it.
        """
        limit = self.task_files.config.agent.timeout_sec or math.inf
        remaining = limit - self._agent_seconds
        if remaining <= 0:
            return {"observation": f"The {limit:g} seconds of this task are used up: no further command is run."}
        started = time.monotonic()
        try:
            outcome = await self.session.shell(self._script(command), min(remaining, self.limits.seconds))
        finally:
            self._agent_seconds += time.monotonic() - started
        return await self._observe(outcome)

    def _script(self, command: str) -> str:
        """A script that runs a command in the agent's shell."""
        workdir = shlex.quote(self._workdir)
        return self._exports(self.session, {}) + _SHELL.format(
            workdir=workdir, state=_STATE, command=shlex.quote(command)
        )

    def _exports(self, session: Session, variables: Mapping[str, str]) -> str:
        """Shell commands that set variables. A container has those of the environment already."""
        table = self.task_files.config.environment.env if is_without_image(session) else {}
        values = {**self._resolve(table, "environment.env"), **variables}
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())

    async def verify(self) -> dict[str, float]:
        """Run the task's verifier, once: later calls return the same. The key `reward` is the score."""
        if self._scores is None:
            try:
                self._scores = await self._verify()
            except (VerifierError, FileAccessError, SessionClosed):
                # Raises again if it is the task's fault, or if no session can be opened any more.
                async with self._verifier_session() as session:
                    await self._run_verifier(session)
                self._scores = {"reward": 0.0, "verifier_broken": 1.0}
        return self._scores

    async def _verify(self) -> dict[str, float]:
        config = self.task_files.config
        if config.verifier.mode is VerifierMode.SHARED:
            await self._kill_processes()
            return await self._run_verifier(self.session)
        for hook in config.verifier.collect:
            await self.session.shell(self._script(hook.command), hook.timeout_sec)
        await self._kill_processes()
        artifacts = await self._pack_artifacts()
        async with self._verifier_session() as session:
            if artifacts:
                await session.put(locate(session, f"/logs/{_ARCHIVE}"), artifacts)
                await session.shell(f"tar -xf /logs/{_ARCHIVE} -C / --no-same-owner; rm -f /logs/{_ARCHIVE}")
            return await self._run_verifier(session)

    async def _kill_processes(self) -> None:
        """End the agent's processes, which could change files while the verifier runs or artifacts are packed."""
        outcome = await self.session.shell("kill -9 -1")
        # Where the agent uses up all processes, the command itself is not started.
        if outcome.status != 0:
            raise VerifierError(f"the agent's processes cannot be killed: {outcome.text[-500:]}")

    async def _pack_artifacts(self) -> bytes:
        """The declared artifacts as a tar archive. Empty if none can be packed."""
        names = self.task_files.artifacts
        paths = shlex.join(path.lstrip("/") for path in names)
        # Missing artifacts are left out: the verifier sees that they are not there.
        listing = f'cd / && for path in {paths}; do [ -e "$path" ] && printf \'%s\\n\' "$path"; done'
        archive = locate(self.session, f"/logs/{_ARCHIVE}")
        # tar fails for a dangling link or an unreadable file, and packs all others nevertheless.
        outcome = await self.session.shell(
            f"rm -rf /tmp/{_ARCHIVE} {archive}; {listing} | tar -chf /tmp/{_ARCHIVE} -T -; mv /tmp/{_ARCHIVE} {archive}"
        )
        if not outcome.ok:
            return b""
        data = await self.session.get(archive, _MAX_ARTIFACT_BYTES)
        try:
            artifacts: bytes = await call(filter_archive, data, names)
        # tarfile raises errors of other kinds, too, for numbers that are none.
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
            raise VerifierError(f"the artifacts cannot be unpacked: {error}") from error
        return artifacts

    @asynccontextmanager
    async def _verifier_session(self) -> AsyncIterator[Session]:
        """An instance that the agent has not touched."""
        config = self.task_files.config
        sandbox = await self._open_sandbox(config.verifier.environment or config.environment, config.verifier)
        session = await sandbox.open_session(self._session_limits)
        try:
            await self._write_files(session)
            yield session
        finally:
            await session.close()

    async def _run_verifier(self, session: Session) -> dict[str, float]:
        """Raises VerifierError if the verifier writes no valid reward."""
        config, folder = self.task_files.config, self.task_files.folder
        # The agent may have put files of its own there, or links to somewhere else.
        folders = shlex.join(locate(session, path) for path in ("/tests", "/solution", "/logs/verifier"))
        await session.shell(f"chmod -R u+rwX {folders}; rm -rf {folders} {_STATE}; mkdir -p {folders}")
        try:
            for path, data in self.task_files.files_in("tests").items():
                await session.put(locate(session, f"/tests/{path}"), data)
        except FileAccessError as error:  # the agent has used up the disk, for example
            raise VerifierError(f"the verifier of {folder} cannot be written: {error}") from error
        exports = self._exports(session, self._resolve(config.verifier.env, "verifier.env"))
        command = f"cd {shlex.quote(self._workdir)}\n{exports}chmod +x /tests/test.sh\n/tests/test.sh"
        outcome = await session.shell(command, config.verifier.timeout_sec)
        if outcome.end is EndReason.TIMEOUT:
            raise VerifierError(f"the verifier of {folder} took more than {config.verifier.timeout_sec:g} seconds")
        for name, parse in (("reward.json", json.loads), ("reward.txt", float)):
            try:
                text = (await session.get(locate(session, f"/logs/verifier/{name}"), _MAX_REWARD_BYTES)).decode()
                return to_rewards(parse(text))
            except FileAccessError:
                continue
            except (ValueError, RecursionError) as error:
                raise VerifierError(f"the verifier of {folder} wrote no valid {name}: {error}") from error
        raise VerifierError(
            f"the verifier of {folder} wrote neither /logs/verifier/reward.json nor reward.txt; it printed: "
            f"{outcome.text[-500:]}"
        )

    async def expert(self) -> ToolCall | str:
        """Run solution/solve.sh, the task's oracle."""
        if self.last_output is not None:
            return "Done."
        files = self.task_files.files_in("solution")
        if "solve.sh" not in files:
            raise ConfigError(f"{self.task_files.folder} has no solution/solve.sh")
        variables = self._resolve(self.task_files.config.solution.env, "solution.env")
        assignments = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
        if len(files) == 1:  # a command that shows what it does, and that another instance can repeat
            return ToolCall("bash", {"command": f"{assignments}bash -c {shlex.quote(files['solve.sh'].decode())}"})
        for path, data in files.items():
            await self.session.put(locate(self.session, f"/solution/{path}"), data)
        return ToolCall("bash", {"command": f"chmod +x /solution/solve.sh; {assignments}/solution/solve.sh"})


def is_without_image(session: Session) -> bool:
    """Whether a session is in the local sandbox. Its files are below a folder, those of a container are the image's."""
    return session.folder != "/"


def locate(session: Session, path: str) -> str:
    """Where a session has an absolute path of a task: in the local sandbox, `/app` is a link into its folder."""
    is_link = any(path == folder or path.startswith(f"{folder}/") for folder in TASK_FOLDERS)
    return session.folder + path if is_link and is_without_image(session) else path


_BUILDS = threading.Lock()


@cache
def prepare_image(image: str | None, folder: Path, seconds: float) -> tuple[str, str]:
    """Return the name and the working folder of a task's image. Without a name, its Dockerfile is built first.

    An image that the engine has of the same Dockerfile and files is not built again. Raises SandboxUnavailable.
    """
    from agentfly.resources.runtimes.container.engine import ContainerEngine  # late: it needs the extra `container`

    engine = ContainerEngine.connect()
    try:
        if image is None:
            context = folder / "environment"
            digest = hashlib.sha256()
            for path in sorted(path for path in context.rglob("*") if path.is_file()):
                digest.update(f"{path.relative_to(context)}\0".encode() + path.read_bytes())
            image = f"localhost/agentfly-task:{digest.hexdigest()[:16]}"
            with _BUILDS:  # chains of one task ask for its image at the same time
                engine.build(context, image, seconds)
        return image, engine.working_folder(image)
    finally:
        engine.close()


def filter_archive(archive: bytes, paths: Sequence[str]) -> bytes:
    """Return a tar archive of the files and folders of `archive` that are at or below `paths`.

    In a container the agent may have replaced `tar`: its archive could overwrite any program of the verifier.
    """

    def is_declared(name: str) -> bool:
        path = f"/{name}"
        is_below = any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in paths)
        return is_below and posixpath.normpath(path) == path

    kept = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as source,
        tarfile.open(fileobj=kept, mode="w:", format=tarfile.GNU_FORMAT) as target,
    ):
        for member in source:
            is_link = member.islnk() and is_declared(member.linkname)
            # A sparse file of a few bytes could be larger than every disk.
            is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
            if not is_declared(member.name) or not (is_file or is_link or member.isdir()):
                continue
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.linkname, entry.mtime = member.type, member.linkname, member.mtime
            entry.mode = member.mode & 0o777  # without set-user-ID
            entry.size = member.size if is_file else 0
            target.addfile(entry, source.extractfile(member) if is_file else None)
    return kept.getvalue()


def to_rewards(value: Any) -> dict[str, float]:
    """Check the content of a reward file: a finite number, or an object of finite numbers. Raises ValueError.

    Without the key `reward`, the score is the mean of all numbers.
    """
    values = value if isinstance(value, dict) else {"reward": value}
    for name, number in values.items():
        # Python compares integers that no float can hold, where math.isfinite fails.
        if not isinstance(number, int | float) or not abs(number) <= sys.float_info.max:
            raise ValueError(f"{name!r} is {number!r:.80}, not a finite number")
    if not values:
        raise ValueError("the object is empty")
    rewards = {name: float(number) for name, number in values.items()}
    return {"reward": sum(rewards.values()) / len(rewards), **rewards}


@reward(timeout=None)
async def verified(env: TaskFolder) -> dict[str, Any]:
    """The reward that the task's verifier wrote; its other numbers are metrics."""
    return await env.verify()
