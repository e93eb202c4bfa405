"""`Pool(place=OnRay(num_cpus=0.1))`: every instance in a Ray actor, on whichever node has room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agentfly.environment import Environment, Housed
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.on_ray.cluster import MOST_AT_ONCE, Lost, answered, entered, kill, refuse_in_vain, sent
from agentfly.resources.on_ray.seat import Seat, Way
from agentfly.resources.remote.shipping import dumps, modules_by_value
from agentfly.resources.remote.stand_in import attached
from agentfly.threads import call

_CLEARING = 2.0
"""Seconds that a seat is given to end what its instance started, before it is killed."""


@dataclass(unsafe_hash=True)
class OnRay:
    """Instances in actors of a Ray cluster, one each. Where no node has room at the moment, one waits until it has."""

    num_cpus: float = 0.1
    """Of a node, for each instance. It bounds how many there are on a node, not what one may use."""
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Custom resources of the cluster that an instance takes."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What else Ray's actors may be told, such as `runtime_env`, `label_selector`, or a `scheduling_strategy` in place
    of SPREAD."""

    max_instances: int | None = field(default=None, init=False, repr=False)
    name = "ray"

    def __post_init__(self) -> None:
        for name, amount in {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}.items():
            if not isinstance(amount, int | float) or isinstance(amount, bool) or not amount >= 0:
                raise ConfigError(f"OnRay's {name} must be a number of at least 0, not {amount!r}")

    async def house(self, kind: type[Environment]) -> Housed:
        """Make an instance in a fresh actor."""
        return await self.seat(kind, dumps(kind, modules_by_value(kind, everything=True), kind.__name__))

    async def seat(self, kind: type[Environment], shipped: bytes) -> Seated:
        """Make an instance of the shipped class in a fresh actor; `kind` says what it looks like from here."""
        ray = await call(entered)
        await call(refuse_in_vain, self._needs)
        try:
            seat = ray.remote(Seat).options(**self._options).remote()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Ray does not take {self}: {error}") from error
        try:
            seated = Seated(kind, seat, f"{kind.__name__} on {await answered(sent(seat, 'node'))}")
            await seated.make(shipped)
        except BaseException as error:
            kill(seat)
            if isinstance(error, Lost):
                raise EnvironmentFault(f"no actor for {kind.__name__}: {error}") from error
            raise
        return seated

    @property
    def _needs(self) -> dict[str, float]:
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in needs.items() if amount}

    @property
    def _options(self) -> dict[str, Any]:
        ours = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": dict(self.resources) or None}
        fixed = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": MOST_AT_ONCE}
        if taken := sorted(self.options.keys() & {*ours, *fixed, "name", "lifetime", "namespace", "get_if_exists"}):
            raise ConfigError(f"OnRay's options may not say {', '.join(taken)}: instances are made, not found or kept")
        return {"scheduling_strategy": "SPREAD", **ours, **fixed, **self.options}


class _Fate:
    """What became of an actor. It knows nothing of those who ask, and so keeps nobody alive."""

    def __init__(self, seat: Any, what: str) -> None:
        self.death: str | None = None
        self._what = what
        sent(seat, "stay").future().add_done_callback(self._learn)

    def _learn(self, staying: Future[None]) -> None:
        self.death = f"{self._what} is lost: {Lost.of(staying.exception())}"


class Seated(Housed):
    """An instance in a Ray actor."""

    def __init__(self, kind: type[Environment], seat: Any, what: str) -> None:
        self.seat, self.what = seat, what
        self._fate = _Fate(seat, what)
        self._memory: int | None = None
        self._counting = False
        environment, self._remote = attached(kind, Way(seat, what), everything=True)
        super().__init__(environment)

    async def make(self, shipped: bytes) -> None:
        """Have the instance made."""
        await self._remote.ask("make", "", (None, shipped), {})
        self._memory = await answered(sent(self.seat, "memory"))

    def death(self) -> str | None:
        """What became of its actor, as soon as Ray tells; None while it lives."""
        return self._fate.death

    def memory(self) -> int | None:
        """Bytes that its process and all below it hold, as of the last time this was asked."""
        if not self._counting and self._fate.death is None:
            with contextlib.suppress(Lost):
                sent(self.seat, "memory").future().add_done_callback(self._counted)
                self._counting = True
        return self._memory

    def _counted(self, counting: Future[int | None]) -> None:
        self._counting = False
        if counting.exception() is None:
            self._memory = counting.result()

    async def end(self) -> None:
        """Kill its actor, and all processes below it where it still answers."""
        try:
            if self._fate.death is None:
                with contextlib.suppress(Lost, TimeoutError):
                    async with asyncio.timeout(_CLEARING):
                        await answered(sent(self.seat, "clear"))
        finally:
            kill(self.seat)
