"""`Pool(runtime="process")`: every instance in its own worker process.

A crash, a memory leak or a held GIL in an environment affects no other chain, and ends with its process.
"""

from __future__ import annotations

import contextlib
import os
import sys

import psutil  # type: ignore[import-untyped]

from agentfly.environment import Environment, InstanceHandle
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.rpc.connection import RpcConnection
from agentfly.resources.rpc.proxy import make_proxy
from agentfly.resources.supervisor import Worker, get_supervisor


class ProcessRuntime:
    """Runs instances in worker processes on this machine, with the files and environment variables of this process."""

    name = "process"

    def __init__(self) -> None:
        self.max_instances: int | None = max(8, 4 * (os.cpu_count() or 1))

    async def create(self, env_class: type[Environment]) -> InstanceHandle:
        if not hasattr(os, "fork"):
            raise ConfigError(
                f"runtime='process' needs a system that can fork, which {sys.platform} cannot; use 'in_process'"
            )
        try:
            module = "agentfly.tooling" if env_class.__module__ != "__main__" else "agentfly"
            worker = get_supervisor().open(load=module)
        except OSError as error:
            raise EnvironmentFault(f"no worker process for {env_class.__name__}: {error}") from error
        connection = None
        try:
            connection = await RpcConnection.open(worker.socket, worker.wait)
            return _WorkerHandle(await make_proxy(env_class, connection), worker, connection)
        except BaseException:
            worker.drop()
            (connection or worker.socket).close()
            raise


def tree_memory(pid: int) -> int | None:
    """Proportional set size in bytes of a process and all its descendants. None on systems other than Linux."""
    if sys.platform != "linux":
        return None
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                try:
                    total += process.memory_full_info().pss
                except psutil.AccessDenied:  # count all its pages
                    total += process.memory_info().rss
    return total


class _WorkerHandle(InstanceHandle):
    """An instance in a worker process."""

    def __init__(self, environment: Environment, worker: Worker, connection: RpcConnection) -> None:
        super().__init__(environment)
        self._worker = worker
        self._connection = connection

    def exit_reason(self) -> str | None:
        return self._connection.broken or self._worker.poll()

    def memory(self) -> int | None:
        """Proportional set size in bytes of its process and all descendants."""
        guardian = self._worker.guardian
        return None if guardian is None else tree_memory(guardian)

    async def terminate(self) -> None:
        """Kill its process and all descendants. A cancellation stops only the waiting, not the kill."""
        self._worker.end()
        self._connection.close()
        try:
            await self._worker.wait()
        finally:
            self._worker.drop()
