"""Isolated sessions for code written by a model, on Linux, without Docker or root. Usable on its own.

    import asyncio
    from agentfly.sandbox import Limits, open_sandbox

    async def main():
        async with await open_sandbox() as sandbox:                      # the strongest mechanism that works here
            session = await sandbox.open_session(Limits(seconds=10))
            outcome = await session.run("x = 2 ** 100; x % 1000")        # variables persist between calls
            print(outcome.value, outcome.ok)                             # 376 True
            await session.put("data.txt", b"one two")
            outcome = await session.shell("wc -w < data.txt")
            print(outcome.output.strip(), outcome.status)                # 2 0
            print(await session.get("data.txt"))                         # b'one two'

    asyncio.run(main())

`open_sandbox` raises SandboxUnavailable where no safe mechanism works, and the message says what to install.
Errors of user code, timeouts and exceeded limits are in the `Outcome` and are never raised. A call that ends its
session has `files_kept=False`. `session.reset()` starts over. User code shares the host's kernel: against hostile
tenants, run everything in a virtual machine.

    host.py, local.py            SessionHost: the processes, files, cgroup and channel of one session
    session.py, results.py       Session: calls, deadlines, outcomes. Sandbox: opens and closes sessions
    channel.py                   framed messages to a session, all of them checked
    mechanisms.py, mounts.py     choice of the mechanism, and what a session sees of the host
    zygote.py, cgroups.py        the process that sessions are cloned from, and the limits of each process tree
    inside/                      trusted programs that run in the sandbox; never imported by the modules above
"""

from agentfly.sandbox.base import (
    Capabilities,
    EndReason,
    Entry,
    FileAccessError,
    Limits,
    Outcome,
    SandboxUnavailable,
    SessionClosed,
)
from agentfly.sandbox.local import LocalSandbox
from agentfly.sandbox.mechanisms import MECHANISMS, MechanismStatus, open_sandbox, probe_mechanisms
from agentfly.sandbox.session import Sandbox, Session

__all__ = [
    "MECHANISMS",
    "Capabilities",
    "EndReason",
    "Entry",
    "FileAccessError",
    "Limits",
    "LocalSandbox",
    "MechanismStatus",
    "Outcome",
    "Sandbox",
    "SandboxUnavailable",
    "Session",
    "SessionClosed",
    "open_sandbox",
    "probe_mechanisms",
]
