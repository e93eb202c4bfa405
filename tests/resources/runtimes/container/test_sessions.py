"""Features and restrictions of sessions in containers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentfly.environments import CodeInterpreter
from agentfly.resources.runtimes.container import Container, ContainerSandbox
from agentfly.sandbox import EndReason, Entry, FileAccessError, Limits, Session, SessionClosed, open_sandbox
from agentfly.types import Task
from tests.resources.engine import IMAGE, Podman
from tests.resources.runtimes.container.conftest import SMALL
from tests.sandbox.test_attacks import FORK_BOMB, GREEDY_CHILDREN
from tests.sandbox.test_escapes import ESCAPES, TRIAL, host  # noqa: F401 (a fixture)
from tests.sandbox.test_hostile import FIND_CHANNEL

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("docker_host")]
MB = 1 << 20


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def probe_session(sandbox: ContainerSandbox) -> AsyncIterator[Session]:
    """One session for all the probes that must leave it as it is."""
    opened = await sandbox.open_session(SMALL)
    yield opened
    await opened.close()


async def test_state_shell_and_files(session: Session) -> None:
    assert (await session.run("x = 20\nprint('said')\nx + 1")).text == "said\n21"
    assert (await session.run("x")).value == "20"
    assert (await session.run("1 / 0")).error == "ZeroDivisionError: division by zero"
    outcome = await session.shell("echo out; echo err >&2; pwd; exit 3")
    assert (outcome.output, outcome.status) == ("out\nerr\n/session\n", 3)
    assert (await session.shell("echo $HOME $USER; python3 -c 'print(1 + 1)'")).output == "/session agent\n2\n"
    data = bytes(range(256)) * 5000
    await session.put("deep/data", data)
    assert await session.get("deep/data") == data
    assert await session.list_files(recursive=True) == [
        Entry("deep", "folder", 60),
        Entry("deep/data", "file", len(data)),
    ]
    with pytest.raises(FileAccessError, match="outside"):
        await session.get("/etc/hostname")


async def test_code_interpreter_in_a_container() -> None:
    class Contained(CodeInterpreter):
        mechanism = Container(image=IMAGE)

    interpreter = Contained()
    await interpreter.start()
    try:
        await interpreter.reset(Task.of({"question": "?", "files": {"note": "hello"}}))
        assert (await interpreter.run_python("open('note').read()"))["observation"] == "'hello'"
        assert (await interpreter.search_files("hel+o")) == "./note:1:hello\n"
    finally:
        await interpreter.close()


async def test_sandbox_capabilities(sandbox: ContainerSandbox) -> None:
    assert sandbox.mechanism == "container"
    assert sandbox.capabilities.network == "none"
    assert "runc" in sandbox.capabilities.boundary
    assert "cgroup" in sandbox.capabilities.memory


async def test_reset_removes_state_and_files(session: Session, engine: Podman) -> None:
    await session.run("x = 1; open('f', 'w').close()")
    containers_before = engine.containers()
    await session.reset()
    assert await session.list_files() == []
    assert (await session.run("x")).error == "NameError: name 'x' is not defined"
    assert len(engine.containers()) == len(containers_before)


async def test_eight_at_once(sandbox: ContainerSandbox) -> None:
    sessions = await asyncio.gather(*(sandbox.open_session(SMALL) for _ in range(8)))
    try:
        await asyncio.gather(*(session.run(f"mine = {n}; open('/tmp/f', 'x')") for n, session in enumerate(sessions)))
        outcomes = await asyncio.gather(*(session.run("mine") for session in sessions))
        assert [outcome.value for outcome in outcomes] == [str(number) for number in range(8)]
    finally:
        await asyncio.gather(*(session.close() for session in sessions))


TICKING = """
import threading, time
ticks = 0
def tick():
    global ticks
    while True:
        time.sleep(0.01)
        ticks += 1
threading.Thread(target=tick, daemon=True).start()
"""


async def test_pause_and_resume(session: Session, engine: Podman) -> None:
    await session.run(TICKING)
    assert 1 * MB < (await session.memory() or 0) <= 256 * MB
    await session.pause()
    with engine.client() as client:
        assert client.inspect_container(session._host.name)["State"]["Paused"]
    await session.resume()
    await session.resume()
    first = int((await session.run("ticks")).value or 0)
    await session.pause()
    assert int((await session.run("ticks")).value or 0) >= first, "a call wakes it"
    await session.pause()
    await session.close()
    with pytest.raises(SessionClosed):
        await session.pause()


async def test_cancelled_pause_is_awaited(session: Session) -> None:
    for delay in (0, 0.001, 0.01, 0.03):
        resting = asyncio.create_task(session.pause())
        await asyncio.sleep(delay)
        resting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await resting
        assert (await session.run("1 + 1")).value == "2"


async def test_memory(session: Session) -> None:
    outcome = await session.run("kept = 1\nbytearray(2 << 30)")
    assert (outcome.end, outcome.state_kept) == (EndReason.OUT_OF_MEMORY, True)
    assert "256 MB" in outcome.message
    tree = await session.run(GREEDY_CHILDREN)
    assert tree.end is EndReason.OUT_OF_MEMORY or (tree.value or "").count("9") >= 3, tree.text
    await session.put("kept", b"file")
    code = "import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096):\n    m[i] = 1"
    outcome = await session.run(code)
    assert (outcome.end, outcome.state_kept, outcome.files_kept) == (EndReason.OUT_OF_MEMORY, False, True), outcome.text
    assert "256 MB" in outcome.message
    assert await session.get("kept") == b"file"
    command = await session.shell(f"python3 -c '{code}'")
    assert command.end is EndReason.OUT_OF_MEMORY, command.text


async def test_processes(session: Session) -> None:
    outcome = await session.run(FORK_BOMB)
    assert 5 < int(outcome.value or 0) <= 24
    assert (await session.run("1")).ok
    assert "cannot start a process" in (await session.shell("true")).output


async def test_disk(session: Session) -> None:
    code = """
import errno
stopped = {}
for folder in FOLDERS:
    try:
        with open(folder + '/big', 'wb', buffering=0) as file:
            while file.tell() < 64 << 20:
                file.write(bytes(1 << 20))
    except OSError as error:
        stopped[folder] = errno.errorcode[error.errno], file.tell() if not file.closed else 0
    import os
    if os.path.exists(folder + '/big'):
        os.remove(folder + '/big')
{folder: code for folder, (code, _) in stopped.items()}
"""
    folders = ["/session", "/tmp", "/var/tmp", "/dev/shm", "/run", "/data", "/", "/usr", "/etc", "/dev"]
    outcome = await session.run(f"FOLDERS = {folders}\n{code}")
    stopped = eval(outcome.value or outcome.text)
    assert set(stopped) == set(folders)
    assert set(stopped.values()) <= {"ENOSPC", "EFBIG", "EROFS", "EACCES"}
    assert stopped["/"] == "EROFS"
    await session.run("open('/session/half', 'wb').write(bytes(9 << 20))")
    with pytest.raises(FileAccessError, match="No space left"):
        await session.put("huge", bytes(15 * MB))


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("while True:\n    pass", True),
        ("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass", False),
    ],
)
async def test_hanging_call_is_ended(session: Session, monkeypatch: pytest.MonkeyPatch, code: str, kept: bool) -> None:
    if kept:
        monkeypatch.setattr("agentfly.sandbox.host.GRACE", 60.0)  # a busy machine may interrupt the code late
    await session.run("x = 1")
    outcome = await session.run(code, timeout=0.3)
    assert (outcome.end, outcome.state_kept) == (EndReason.TIMEOUT, kept), outcome.text
    assert (await session.run("'x' in globals()")).value == str(kept)
    assert (await session.shell("sleep 60", timeout=0.3)).end is EndReason.TIMEOUT


# An image has users of its own; the engine counts processes; and one probe opens a terminal in the session all share.
NOT_HERE = ("users of the host", "raise a limit", "other's terminals")


@pytest.mark.parametrize("name", [name for name in ESCAPES if name not in NOT_HERE])
async def test_escapes_are_blocked(probe_session: Session, host: dict[str, object], name: str) -> None:  # noqa: F811
    outcome = await probe_session.run(TRIAL.format(host=host, body=ESCAPES[name]))
    assert outcome.value == "'blocked'", outcome.text
    assert (await probe_session.run("1 + 1")).value == "2"


@pytest.mark.parametrize(
    "attack",
    [
        "[os.write(n, frame(FORGED)) for n in places]",
        "[os.write(n, struct.pack('>Ic', 10, b'A') + b'0123456789') for n in places]",
        "[os.write(n, b'garbage that is no frame ' * 9) for n in places]",
        "os.closerange(0, 1000)",
    ],
)
async def test_replies_cannot_be_forged(probe_session: Session, attack: str) -> None:
    outcome = await probe_session.run(FIND_CHANNEL + attack, timeout=1)
    assert outcome.value != "'forged'"
    assert outcome.end in (EndReason.DIED, EndReason.TIMEOUT), outcome.text
    if not outcome.files_kept:  # the host found it out itself, and gave the session up
        await probe_session.reset()
    assert (await probe_session.run("1 + 1")).value == "2"


async def test_session_init_is_out_of_reach(probe_session: Session) -> None:
    code = """
import os, signal
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT, signal.SIGSEGV):
    os.kill(1, number)
got = []
for name in ('fd/0', 'fd/3', 'fd/4', 'mem', 'environ', 'maps'):
    try:
        got.append(open('/proc/1/' + name, 'wb' if 'fd' in name else 'rb').read())
    except OSError:
        pass
got
"""
    assert (await probe_session.run(code)).value == "[]"
    flooded = await probe_session.run("import os\nos.system('yes')")
    assert flooded.end is EndReason.FLOODED
    assert (await probe_session.run("1")).ok


async def test_requested_settings_are_applied(engine: Podman) -> None:
    container = Container(image=IMAGE, read_only=False, user="0:0", environment={"COLOUR": "blue"})
    async with await open_sandbox(container) as sandbox:
        session = await sandbox.open_session(Limits(cpus=0.5))
        code = "open('/usr/own', 'w').close()\nos.getuid(), os.environ['COLOUR'], os.listdir('/sys/class/net')"
        assert (await session.run(f"import os\n{code}")).value == "(0, 'blue', ['lo'])"
        assert (await session.shell("grep -c '^Cap[A-Z][a-z]*:.0*$' /proc/self/status")).output == "5\n"
        with engine.client() as client:
            settings = client.inspect_container(session._host.name)["HostConfig"]
        assert settings["NanoCpus"] == 500_000_000
        assert sandbox.capabilities.disk == "none"
    assert container.settings(Limits(), podman=True)[1]["network_mode"] == "none"
    assert Container(image=IMAGE, network=True).settings(Limits(), podman=True)[1]["network_mode"] is None
    assert "nr_inodes=10000" in container.settings(Limits(), podman=False)[1]["tmpfs"]["/session"]
