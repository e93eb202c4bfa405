"""Session init as the first process of a container, connected to the host by stdin and stdout.

The kernel protects the first process of a pid namespace from every signal of the others, SIGKILL included: user code
of the same user id cannot kill it, and cannot read its memory, because it is not dumpable.
"""

from __future__ import annotations

import gc
import os
from typing import Any, NoReturn

from . import frames, interpreter, session_init


def main(config: dict[str, Any]) -> NoReturn:
    """Import everything that is imported late, then become the session init."""
    if os.getpid() != 1:
        raise SystemExit("the session init must be the first process of its container; run it without an init process")
    os.umask(0o022)
    interpreter.warm_up()
    gc.collect()
    gc.freeze()
    pipes = frames.PipeChannel(os.dup(0), os.dup(1))
    session_init.main(pipes, pipes.fds, config["limits"], config)
