"""Programs of others as child processes, each below a guardian that ends it with all its descendants.

A program's background children and those that leave its process group or session (`setsid`) end with it, when it is
ended, and when this process ends in any way: see `sandbox.inside.guardian`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, SubprocessStreamProtocol
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentfly import sandbox
from agentfly.resources.rpc.server import OWNER
from agentfly.sandbox.inside import process_tree
from agentfly.sandbox.owner import process_name

_GUARDIAN = str(Path(sandbox.__file__).parent / "inside" / "__main__.py")
_LIMIT = 1 << 16
"""Bytes that are buffered of each output stream before the program has to wait."""
_END_SECONDS = 3.0
"""Time for a guardian to end its program, which has a second of it to end by itself, and everything below it."""


class GuardedProcess:
    """A program below a guardian, with pipes to its standard streams."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _ExitProtocol) -> None:
        pid = transport.get_pid()
        assert pid is not None
        assert protocol.stdin is not None
        assert protocol.stdout is not None
        assert protocol.stderr is not None
        self.pid = pid
        """Process id of the guardian, whose only child at first is the program."""
        self.stdin = protocol.stdin
        self.stdout = protocol.stdout
        self.stderr = protocol.stderr
        self._transport = transport
        self._exited = protocol.exited

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], cwd: str | os.PathLike[str] | None = None
    ) -> GuardedProcess:
        """Start a program with exactly these environment variables, and its mark for cleaning up."""
        config = json.dumps({"command": list(command), "owner": os.getpid()})
        # Not the mark of workers, of which a supervisor kills those that it finds at its start.
        mark = {OWNER: f"{process_name(os.getpid())}-guarded"}
        loop = asyncio.get_running_loop()
        # As create_subprocess_exec does, which does not return the transport; nothing else closes the pipes.
        transport, protocol = await loop.subprocess_exec(
            lambda: _ExitProtocol(loop),
            *(sys.executable, "-I", "-S", "-B", _GUARDIAN, "guardian", config),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**env, **mark},
            cwd=cwd,
            start_new_session=True,  # Ctrl-C goes to this process only
        )
        return cls(transport, protocol)

    @property
    def returncode(self) -> int | None:
        """The exit code of the program, 128 and the number of the signal that killed it; None while it runs."""
        code = self._transport.get_returncode()
        return 128 - code if code is not None and code < 0 else code

    async def wait(self) -> int:
        """Wait until the program and everything below it has ended; returns `returncode`.

        asyncio's own `wait` also waits for the end of the pipes, which a process of someone else may hold.
        """
        await asyncio.shield(self._exited)
        code = self.returncode
        assert code is not None
        return code

    async def end(self) -> None:
        """End the program with all its descendants, and close the pipes. A cancellation ends only the waiting."""
        try:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._transport.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wait(), _END_SECONDS)
        finally:
            if self.returncode is None:  # the guardian does not react: the program may have stopped it
                if sys.platform == "linux":
                    process_tree.kill_below(self.pid)
                with contextlib.suppress(ProcessLookupError):
                    self._transport.kill()
            self._transport.close()


class _ExitProtocol(SubprocessStreamProtocol):
    """Streams of a process, and a future that is done when it has exited, also while its pipes are open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_LIMIT, loop=loop)
        self.exited: asyncio.Future[None] = loop.create_future()

    def process_exited(self) -> None:
        super().process_exited()
        if not self.exited.done():
            self.exited.set_result(None)
