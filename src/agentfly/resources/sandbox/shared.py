"""One sandbox for all who live in an event loop: opened when it is first asked for, closed with the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from agentfly.resources.sandbox.cells import CellSandbox
from agentfly.resources.sandbox.mechanisms import Opener, open_sandbox

Mechanism = str | Opener[Any] | None
"""A sandbox mechanism by name, or what opens one, such as a Container; None is the strongest that works here."""


class _Life:
    """A sandbox from its opening to its end, which the event loop brings about when it shuts down."""

    def __init__(self, mechanism: Mechanism) -> None:
        self._generator = self._live(mechanism)
        self.opening = asyncio.ensure_future(anext(self._generator))

    async def _live(self, mechanism: Mechanism) -> AsyncGenerator[CellSandbox, None]:
        opened: Any = open_sandbox(mechanism)
        async with await opened as sandbox:
            yield sandbox


_SANDBOXES: dict[asyncio.AbstractEventLoop, dict[Mechanism, _Life]] = {}


async def shared_sandbox(mechanism: Mechanism) -> CellSandbox:
    """The running loop's sandbox of this mechanism."""
    loop = asyncio.get_running_loop()
    if loop not in _SANDBOXES:
        # A sandbox refers to its loop, so a weak mapping would never let either go.
        for closed in [known for known in list(_SANDBOXES) if known.is_closed()]:
            _SANDBOXES.pop(closed, None)
    lives = _SANDBOXES.setdefault(loop, {})
    life = lives.get(mechanism) or lives.setdefault(mechanism, _Life(mechanism))
    try:
        return await asyncio.shield(life.opening)
    except BaseException:
        if life.opening.done():  # it failed: the next one tries again
            lives.pop(mechanism, None)
        raise
