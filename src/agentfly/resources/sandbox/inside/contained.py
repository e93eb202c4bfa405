"""A keeper that is the first process of a container, and reaches the host by stdin and stdout.

The kernel keeps the first process of a pid namespace from every signal that the others send, SIGKILL too: user code of
the same uid cannot end its keeper, and cannot look into it, because the keeper is not dumpable.
"""

from __future__ import annotations

import gc
import os
from typing import Any, NoReturn

from . import interpreter, keeper


class Pipes:
    """Two pipes that are used as one socket."""

    def __init__(self) -> None:
        self._reading, self._writing = os.dup(0), os.dup(1)

    @property
    def files(self) -> set[int]:
        """What it uses."""
        return {self._reading, self._writing}

    def fileno(self) -> int:
        """What can be waited for."""
        return self._reading

    def recv(self, size: int, /) -> bytes:
        """Some bytes; none at the end."""
        return os.read(self._reading, size)

    def sendall(self, data: bytes, /) -> None:
        """Write all."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._writing, view) :]

    def close(self) -> None:
        """Let go of both."""
        for file in self.files:
            os.close(file)


def main(config: dict[str, Any]) -> NoReturn:
    """Load what is loaded late, then be a session."""
    if os.getpid() != 1:
        raise SystemExit("a keeper must be the first process of its container; run it without an init process")
    os.umask(0o022)
    interpreter.warm_up()
    gc.collect()
    gc.freeze()
    pipes = Pipes()
    keeper.main(pipes, pipes.files, config["limits"], config)
