"""vLLM plugin that ends vLLM's processes with their parent, even if the parent is killed.

vLLM calls `die_with_parent` in each of its processes (entry point `vllm.general_plugins`). It only has an effect where
AgentFly started vLLM and set `PARENT_VARIABLE`.
"""

from __future__ import annotations

import os
import signal
import sys

PARENT_VARIABLE = "AGENTFLY_STARTS_VLLM"
"""Environment variable with the id of the process that started vLLM."""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; no effect in the process that started vLLM."""
    owner = os.environ.get(PARENT_VARIABLE)
    if owner is None or owner == str(os.getpid()) or sys.platform != "linux":
        return
    from agentfly.sandbox.inside import kernel

    kernel.die_with_parent()
    if os.getppid() == 1 and owner != "1":  # the parent ended before the request reached the kernel
        os.kill(os.getpid(), signal.SIGKILL)
