"""Session init as the first process of a container, connected to the host by stdin and stdout.

The kernel protects the first process of a pid namespace from every signal of the others, SIGKILL included: user code
of the same user id cannot kill it, and cannot read its memory, because it is not dumpable.
"""

from __future__ import annotations

import gc
import os
from typing import Any, NoReturn

from . import interpreter, session_init


class PipeChannel:
    """Two pipes with the interface of one socket."""

    def __init__(self) -> None:
        self._input = os.dup(0)
        self._output = os.dup(1)

    @property
    def fds(self) -> set[int]:
        """File descriptors in use."""
        return {self._input, self._output}

    def fileno(self) -> int:
        """Return the file descriptor to poll for input."""
        return self._input

    def recv(self, size: int, /) -> bytes:
        """Read up to `size` bytes; empty at the end of the stream."""
        return os.read(self._input, size)

    def sendall(self, data: bytes, /) -> None:
        """Write all bytes."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._output, view) :]

    def close(self) -> None:
        """Close both pipes."""
        for fd in self.fds:
            os.close(fd)


def main(config: dict[str, Any]) -> NoReturn:
    """Import everything that is imported late, then become the session init."""
    if os.getpid() != 1:
        raise SystemExit("the session init must be the first process of its container; run it without an init process")
    os.umask(0o022)
    interpreter.warm_up()
    gc.collect()
    gc.freeze()
    pipes = PipeChannel()
    session_init.main(pipes, pipes.fds, config["limits"], config)
