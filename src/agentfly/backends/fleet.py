"""`backend="fleet"`: several backends of the same model as one.

A chain stays with the member that sampled its first turn, whose prefix cache has its tokens; a new chain goes to the
member with the fewest requests. A member that fails `MAX_FAILURES` requests in a row gets no requests until the next
weight update, which raises if the member cannot take it; chains that fail are retried by the rollout's failure policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from agentfly.backends.base import Backend, Request
from agentfly.backends.registry import open_backend
from agentfly.errors import BackendFault, ConfigError
from agentfly.templates.template import Template
from agentfly.threads import wait_for
from agentfly.types import Completion

MAX_FAILURES = 3
"""Failed requests in a row after which a member gets no more."""
MAX_CHAINS = 1 << 16
"""Chains whose member is remembered; the least recently used ones are forgotten."""
_LOG = logging.getLogger(__name__)


class FleetBackend(Backend):
    """Routes requests to members by chain."""

    def __init__(self, members: Sequence[Backend | Mapping[str, Any]], *, model: str | None = None) -> None:
        """
        Args:
            members: Backends, or their settings with `backend` as the name.
            model: A setting of all of them.
        """
        if not members:
            raise ConfigError("a fleet needs at least one member: members=[{'backend': 'client', 'base_url': …}, …]")
        shared = {} if model is None else {"model": model}
        ready: list[Backend] = []
        opened: list[Backend] = []
        try:
            for member in members:
                if isinstance(member, Backend):
                    ready.append(member)
                    continue
                settings = {**shared, **member}
                opened.append(open_backend(settings.pop("backend", "client"), **settings))
                ready.append(opened[-1])
        except BaseException:
            wait_for(_await_all(backend.close() for backend in opened))
            raise
        self.members = tuple(ready)
        self.prompt_format = self.members[0].prompt_format
        self.can_sleep = all(member.can_sleep for member in self.members)
        lengths = [member.context_length for member in self.members if member.context_length is not None]
        self.context_length = min(lengths, default=None)
        self._load = [0] * len(self.members)
        """Requests in flight, by member."""
        self._failures = [0] * len(self.members)
        """Requests that failed since the last success, by member."""
        self._member_of: OrderedDict[str, int] = OrderedDict()

    @property
    def weight_version(self) -> int:
        return min(member.weight_version for member in self.members)

    def attach(self, template: Template) -> None:
        for member in self.members:
            member.attach(template)
        self.supports_images = all(member.supports_images for member in self.members)  # known to an engine from here on

    async def generate(self, request: Request) -> Completion:
        index = self._route(request)
        self._load[index] += 1
        try:
            completion = await self.members[index].generate(request)
        except BackendFault as fault:
            self._failures[index] += 1
            if self._failures[index] == MAX_FAILURES:
                _LOG.warning("member %d of the fleet gets no requests until the next weight update: %s", index, fault)
            raise
        finally:
            self._load[index] -= 1
        self._failures[index] = 0
        return completion

    def _route(self, request: Request) -> int:
        """The member of a request's chain; for a new chain, or one whose member failed, the least busy one."""
        working = [index for index, failures in enumerate(self._failures) if failures < MAX_FAILURES]
        if not working:
            raise BackendFault(f"all {len(self.members)} members of the fleet have failed {MAX_FAILURES} requests each")
        index = self._member_of.get(request.chain) if request.turn else None
        if index not in working:
            index = min(working, key=lambda candidate: (self._load[candidate], candidate))
        if request.chain:
            self._member_of[request.chain] = index
            self._member_of.move_to_end(request.chain)
            if len(self._member_of) > MAX_CHAINS:
                self._member_of.popitem(last=False)
        return index

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Send the weights to all members. When all have ended, raises the first error."""
        await _await_all(member.update_weights(weights, version) for member in self.members)
        self._failures = [0] * len(self.members)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await _await_all(member.sleep(keep_weights=keep_weights) for member in self.members)

    async def close(self) -> None:
        await _await_all(member.close() for member in self.members)


async def _await_all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait until all calls have ended, then raise the error of the first that failed."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if result is not None:
            raise result
