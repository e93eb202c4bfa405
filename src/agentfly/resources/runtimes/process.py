"""`Pool(runtime="process")`: every instance in its own worker process.

A crash, a memory leak or a held GIL in an environment affects no other chain, and ends with its process.
"""

from __future__ import annotations

import os
import sys

from agentfly.environment import Environment, InstanceHandle
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.rpc.connection import RpcConnection
from agentfly.resources.rpc.proxy import make_proxy
from agentfly.resources.supervisor import Worker, get_supervisor
from agentfly.sandbox.inside import process_tree


class ProcessRuntime:
    """Runs instances in worker processes on this machine, with the files and environment variables of this process."""

    name = "process"

    def __init__(self) -> None:
        self.max_instances: int | None = max(8, 4 * (os.cpu_count() or 1))

    async def create(self, env_class: type[Environment]) -> InstanceHandle:
        """Create an instance in a new worker."""
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
            connection = await RpcConnection.open(worker.line, worker.wait)
            return _WorkerHandle(await make_proxy(env_class, connection), worker, connection)
        except BaseException:
            worker.drop()
            (connection or worker.line).close()
            raise


class _WorkerHandle(InstanceHandle):
    """An instance in a worker process."""

    def __init__(self, environment: Environment, worker: Worker, connection: RpcConnection) -> None:
        super().__init__(environment)
        self._worker = worker
        self._connection = connection

    def death(self) -> str | None:
        """Why its process ended; None while it runs."""
        return self._connection.broken or self._worker.poll()

    def memory(self) -> int | None:
        """Proportional set size in bytes of its process and all descendants."""
        guardian = self._worker.guardian
        if guardian is None or sys.platform != "linux":
            return None
        return process_tree.memory([guardian, *process_tree.descendants(guardian)], 0)

    async def end(self) -> None:
        """Kill its process and all descendants. A cancellation stops only the waiting, not the kill."""
        self._worker.end()
        self._connection.close()
        try:
            await self._worker.wait()
        finally:
            self._worker.drop()
