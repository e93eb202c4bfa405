"""One sandbox per event loop and mechanism: opened on first use, closed when the loop shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from agentfly.sandbox.mechanisms import Opener, open_sandbox
from agentfly.sandbox.session import Sandbox

Mechanism = str | Opener[Any] | None
"""Name of a sandbox mechanism, or an opener such as a Container; None is the strongest that works here."""


class _SharedSandbox:
    """Keeps a sandbox open in an asynchronous generator, which the event loop closes when it shuts down."""

    def __init__(self, mechanism: Mechanism) -> None:
        self._generator = self._hold_open(mechanism)
        self.opening = asyncio.ensure_future(anext(self._generator))

    async def _hold_open(self, mechanism: Mechanism) -> AsyncGenerator[Sandbox, None]:
        opening: Any = open_sandbox(mechanism)
        async with await opening as sandbox:
            yield sandbox


_SANDBOXES: dict[asyncio.AbstractEventLoop, dict[Mechanism, _SharedSandbox]] = {}


async def shared_sandbox(mechanism: Mechanism) -> Sandbox:
    """Return the running loop's sandbox of this mechanism, opened if necessary."""
    loop = asyncio.get_running_loop()
    if loop not in _SANDBOXES:
        # A sandbox refers to its loop, so a weak mapping would never release either.
        for closed in [known for known in list(_SANDBOXES) if known.is_closed()]:
            _SANDBOXES.pop(closed, None)
    sandboxes = _SANDBOXES.setdefault(loop, {})
    shared = sandboxes.get(mechanism) or sandboxes.setdefault(mechanism, _SharedSandbox(mechanism))
    try:
        return await asyncio.shield(shared.opening)
    except BaseException:
        if shared.opening.done():  # opening failed: the next caller tries again
            sandboxes.pop(mechanism, None)
        raise
