"""Isolated sessions that run what a model wrote, on Linux, without Docker or root.

    async with await open_sandbox() as sandbox:
        session = await sandbox.open_session(Limits(seconds=10))
        outcome = await session.run("2 ** 100")
        print(outcome.text)

User code shares the host's kernel: for hostile tenants put a virtual machine around it.
"""

from agentfly.resources.sandbox.contract import (
    Capabilities,
    Entry,
    FileRefused,
    Sandbox,
    SandboxUnavailable,
    Session,
    SessionOver,
)
from agentfly.resources.sandbox.limits import Limits
from agentfly.resources.sandbox.local import LocalSandbox
from agentfly.resources.sandbox.mechanisms import MECHANISMS, Verdict, open_sandbox, verdicts
from agentfly.resources.sandbox.outcome import End, Outcome
from agentfly.resources.sandbox.session import CellSession

__all__ = [
    "MECHANISMS",
    "Capabilities",
    "CellSession",
    "End",
    "Entry",
    "FileRefused",
    "Limits",
    "LocalSandbox",
    "Outcome",
    "Sandbox",
    "SandboxUnavailable",
    "Session",
    "SessionOver",
    "Verdict",
    "open_sandbox",
    "verdicts",
]
