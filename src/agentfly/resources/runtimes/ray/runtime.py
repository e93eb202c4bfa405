"""`Pool(runtime=RayRuntime(num_cpus=0.1))`: every instance in a Ray actor, on any node with free resources.

Also: connecting to a Ray cluster, calling its actors, and translating Ray's errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agentfly.environment import Environment, InstanceHandle
from agentfly.errors import ConfigError, EnvironmentFault, describe, require_extra
from agentfly.resources.rpc.proxy import attach_proxy
from agentfly.resources.rpc.serialization import dumps, modules_by_value
from agentfly.resources.rpc.server import RpcServer
from agentfly.resources.runtimes.process import tree_memory
from agentfly.sandbox.inside import kernel, process_tree
from agentfly.threads import call
from agentfly.validation import NonNegativeFloat, validate

NAMESPACE = "agentfly"
"""Ray namespace of the shared managers, the same for every job."""
PICKLED_CLASS = "_agentfly_pickled"
"""Attribute of a placeholder for a class that this process has only pickled: what its instances are created from."""
MAX_CONCURRENCY = 100_000
"""Concurrent calls per actor. With Ray's default of 1000, waiting chains would keep others from releasing."""
_LOG = logging.getLogger(__name__)
_CONNECT_LOCK = threading.Lock()
_CLEANUP_SECONDS = 2.0
"""Time for an actor to kill the processes of its instance before the actor itself is killed."""


class ActorUnreachable(Exception):
    """An actor does not answer. The message is Ray's, without the table of ids."""

    def __init__(self, message: str, dead: bool = True) -> None:
        super().__init__(message)
        self.dead = dead
        """Whether it will never answer again."""

    @classmethod
    def from_ray(cls, error: BaseException | None) -> ActorUnreachable:
        """Translate an error of Ray."""
        exceptions = import_ray().exceptions
        lines = [line.strip() for line in str(error).splitlines() if line and not line[0].isspace()]
        temporary = isinstance(error, exceptions.ActorUnavailableError | exceptions.GetTimeoutError)
        return cls("".join(lines[-1:])[:400] or describe(error or Exception()), dead=not temporary)


def import_ray() -> Any:
    """The ray package."""
    with require_extra("a cluster", "ray"):
        import ray
        import ray.exceptions  # not guaranteed to be imported by the package
    return ray


def connect() -> Any:
    """Ray, connected to this process's cluster, else to the one at RAY_ADDRESS, else to a new local one."""
    ray = import_ray()
    address = os.environ.get("RAY_ADDRESS")
    with _CONNECT_LOCK:
        if ray.is_initialized():
            return ray
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if address:
                ray.init(address="auto", log_to_driver=False, logging_level="error")
            else:
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
        except Exception as error:  # Ray raises many types
            where = f"RAY_ADDRESS={address} cannot be reached" if address else "no local cluster could be started"
            raise ConfigError(f"Ray is not initialized, and {where}: {describe(error)}") from error
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it by one that ends the process
    _LOG.info("Ray was not initialized: %s", f"connected to {address}" if address else "started a local cluster")
    return ray


def raise_if_infeasible(needs: Mapping[str, float]) -> None:
    """Raise ConfigError if no node could ever satisfy the resources; Ray would wait forever."""
    nodes = [node["Resources"] for node in connect().nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        return
    needed = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
    available = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in needs) for node in nodes)
    raise ConfigError(
        f"an instance asks for {needed}; no node of the cluster has that: they have {available or 'nothing'}"
    )


def call_actor(actor: Any, method: str, *args: Any) -> Any:
    """Call a method of an actor; a reference for `await_answer` or `get_answer`, which may also be ignored."""
    if not import_ray().is_initialized():  # otherwise Ray would start a cluster to look for the actor
        raise ActorUnreachable("this process has left its Ray cluster")
    try:
        return getattr(actor, method).remote(*args)
    except Exception as error:  # for an actor of another cluster Ray raises a bare Exception
        raise ActorUnreachable.from_ray(error) from error


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise what an actor's method raised, and ActorUnreachable if there will be no answer."""
    exceptions = import_ray().exceptions
    try:
        yield
    except exceptions.RayError as error:
        cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
        if isinstance(cause, exceptions.RayError):
            raise ActorUnreachable.from_ray(cause) from error
        raise cause from None


async def await_answer(reference: Any) -> Any:
    """The result of an actor call, or the exception it raised; ActorUnreachable if there will be neither."""
    with _translate_errors():
        return await reference


def get_answer(reference: Any, timeout: float) -> Any:
    """Like `await_answer`, but blocks the thread, for at most `timeout` seconds."""
    with _translate_errors():
        return import_ray().get(reference, timeout=timeout)


def kill(actor: Any) -> None:
    """Kill an actor. Does nothing if it is gone, or if this process has left its cluster."""
    ray = import_ray()
    if ray.is_initialized():
        with contextlib.suppress(ray.exceptions.ActorHandleNotFoundError):
            ray.kill(actor)


class Heartbeat:
    """An actor that dies with the process that created it."""

    async def stay(self) -> None:
        """Never return: the pending call fails when the actor dies."""
        await asyncio.Event().wait()


class InstanceActor(Heartbeat):
    """The actor of one instance, in its own worker process on some node."""

    def __init__(self) -> None:
        self._server = RpcServer()
        if sys.platform == "linux":
            kernel.adopt_orphans()

    async def answer(self, request: bytes) -> bytes:
        return await self._server.answer(request)

    async def node(self) -> str:
        """Its node, for messages."""
        ray = import_ray()
        return f"node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"

    async def memory(self) -> int | None:
        """Proportional set size in bytes of this process and all descendants."""
        return tree_memory(os.getpid())

    async def clear(self) -> None:
        """Kill all descendants: Ray kills only the direct children of a worker."""
        if sys.platform == "linux":
            process_tree.kill_below(os.getpid())


class ActorTransport:
    """Carries requests to an InstanceActor."""

    def __init__(self, actor: Any, description: str) -> None:
        self._actor = actor
        self._description = description

    async def ask(self, request: bytes) -> bytes:
        try:
            reference = call_actor(self._actor, "answer", request)
            try:
                answer: bytes = await await_answer(reference)
            except asyncio.CancelledError:
                import_ray().cancel(reference)
                raise
        except ActorUnreachable as error:
            raise EnvironmentFault(f"{self._description} is lost: {error}") from error
        return answer


@dataclass(unsafe_hash=True)
class RayRuntime:
    """Runs every instance in its own actor of a Ray cluster. Waits while no node has free resources."""

    num_cpus: float = 0.1
    """CPUs that Ray reserves per instance. Limits the number of instances per node, not their usage."""
    num_gpus: float = 0.0
    """GPUs that Ray reserves per instance; a fraction shares one."""
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Custom Ray resources reserved per instance."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further options of the actors, such as `runtime_env`, `label_selector`, or a `scheduling_strategy` in place of
    SPREAD."""

    max_instances: int | None = field(default=None, init=False, repr=False)
    """Not a setting: the cluster's resources limit the number of instances."""
    name = "ray"

    def __post_init__(self) -> None:
        for name, amount in {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}.items():
            validate(f"RayRuntime's {name}", amount, NonNegativeFloat)

    async def create(self, env_class: type[Environment]) -> InstanceHandle:
        pickled_class = vars(env_class).get(PICKLED_CLASS)
        if pickled_class is None:
            pickled_class = dumps(env_class, modules_by_value(env_class, everything=True), env_class.__name__)
        reserved = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": dict(self.resources) or None}
        fixed = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": MAX_CONCURRENCY}
        refused = self.options.keys() & {*reserved, *fixed, "name", "lifetime", "namespace", "get_if_exists"}
        if refused:
            raise ConfigError(
                f"RayRuntime's options may not set {', '.join(sorted(refused))}: every instance is a new, unnamed "
                "actor, and num_cpus, num_gpus and resources are fields of RayRuntime"
            )
        options = {"scheduling_strategy": "SPREAD", **reserved, **fixed, **self.options}
        ray = await call(connect)
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        await call(raise_if_infeasible, {name: amount for name, amount in needs.items() if amount})
        try:
            actor = ray.remote(InstanceActor).options(**options).remote()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Ray does not accept {self}: {error}") from error
        try:
            node = await await_answer(call_actor(actor, "node"))
            handle = ActorHandle(env_class, actor, f"{env_class.__name__} on {node}")
            await handle.make(pickled_class)
        except BaseException as error:
            kill(actor)
            if isinstance(error, ActorUnreachable):
                raise EnvironmentFault(f"no actor for {env_class.__name__}: {error}") from error
            raise
        return handle


class _ExitWatcher:
    """Records why an actor died. Ray's callback refers to this object only, so it keeps no handle alive."""

    def __init__(self, actor: Any, description: str) -> None:
        self.exit_reason: str | None = None
        self._description = description
        call_actor(actor, "stay").future().add_done_callback(self._on_exit)

    def _on_exit(self, done: Future[None]) -> None:
        self.exit_reason = f"{self._description} is lost: {ActorUnreachable.from_ray(done.exception())}"


class ActorHandle(InstanceHandle):
    """An instance in a Ray actor."""

    def __init__(self, env_class: type[Environment], actor: Any, description: str) -> None:
        self.actor = actor
        self.description = description
        self._watcher = _ExitWatcher(actor, description)
        self._memory: int | None = None
        self._measuring = False
        environment, self._remote = attach_proxy(env_class, ActorTransport(actor, description), everything=True)
        super().__init__(environment)

    async def make(self, pickled_class: bytes) -> None:
        """Create the instance in the actor."""
        await self._remote.ask("make", "", (None, pickled_class), {})
        self._memory = await await_answer(call_actor(self.actor, "memory"))

    def exit_reason(self) -> str | None:
        """Why its actor died, as soon as Ray reports it. None while it lives."""
        return self._watcher.exit_reason

    def memory(self) -> int | None:
        """Bytes used by its process and all descendants at the previous call; starts a new measurement."""
        if not self._measuring and self._watcher.exit_reason is None:
            with contextlib.suppress(ActorUnreachable):
                call_actor(self.actor, "memory").future().add_done_callback(self._on_memory)
                self._measuring = True
        return self._memory

    def _on_memory(self, done: Future[int | None]) -> None:
        self._measuring = False
        if done.exception() is None:
            self._memory = done.result()

    async def terminate(self) -> None:
        """Kill its actor, and first its descendants if the actor still answers."""
        try:
            if self._watcher.exit_reason is None:
                with contextlib.suppress(ActorUnreachable, TimeoutError):
                    async with asyncio.timeout(_CLEANUP_SECONDS):
                        await await_answer(call_actor(self.actor, "clear"))
        finally:
            kill(self.actor)
