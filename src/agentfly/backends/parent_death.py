"""No orphans: vLLM's processes end with the one they work for, also where that is killed.

vLLM calls `die_with_parent` in each of its processes: it is one of vLLM's plugins, by the package's entry points.
Whoever starts vLLM through AgentFly marks the environment; vLLM that is started otherwise is left as it is.
"""

from __future__ import annotations

import os
import signal
import sys

from agentfly.sandbox.inside import kernel

MARK = "AGENTFLY_STARTS_VLLM"
"""The environment variable that names the process for which vLLM works."""


def die_with_parent() -> None:
    """Have this process killed when its parent ends; nothing in the process that the mark names."""
    owner = os.environ.get(MARK)
    if owner is None or owner == str(os.getpid()) or sys.platform != "linux":
        return
    kernel.die_with_parent()
    if os.getppid() == 1 and owner != "1":  # the parent ended before it was asked for
        os.kill(os.getpid(), signal.SIGKILL)
