"""Files and shell commands of a session."""

import pytest

from agentfly.sandbox import EndReason, Entry, FileAccessError, SessionClosed

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_put_get_and_list_files(session) -> None:
    data = bytes(range(256)) * 5000
    await session.put("deep/folder/data.bin", data)
    assert await session.get("deep/folder/data.bin") == data
    assert (await session.run("len(open('deep/folder/data.bin', 'rb').read())")).value == str(len(data))
    await session.put("empty", b"")
    assert await session.get("empty") == b""
    assert await session.list_files() == [Entry("deep", "folder", 60), Entry("empty", "file", 0)]
    assert [entry.path for entry in await session.list_files(recursive=True)] == [
        "deep",
        "deep/folder",
        "deep/folder/data.bin",
        "empty",
    ]


@pytest.mark.parametrize("path", ["../etc/x", "/etc/x", "/tmp/x", "a/../../x", "/session/../usr/x", "bad\0name"])
async def test_paths_outside_are_refused(session, path: str) -> None:
    with pytest.raises(FileAccessError):
        await session.put(path, b"x")
    with pytest.raises(FileAccessError):
        await session.get(path)
    assert (await session.run("1")).value == "1"


async def test_links_do_not_lead_out(session) -> None:
    await session.run("import os\nos.symlink('/usr/lib/os-release', 'link'); os.symlink('/etc', 'folder')")
    for path in ("link", "folder/alternatives"):
        with pytest.raises(FileAccessError, match="outside"):
            await session.get(path)
    with pytest.raises(FileAccessError):
        await session.put("folder/x", b"x")


async def test_special_files_are_refused_at_once(session) -> None:
    await session.run("import os; os.mkfifo('pipe'); os.mkdir('folder')")
    for path in ("pipe", "folder", "missing"):
        with pytest.raises(FileAccessError):
            await session.get(path)
    for path in ("pipe", "folder"):
        with pytest.raises(FileAccessError):
            await session.put(path, b"x")


async def test_large_files_are_refused(session) -> None:
    await session.run("open('big', 'wb').write(bytes(3_000_000))")
    with pytest.raises(FileAccessError, match="3000000 bytes, more than 1000"):
        await session.get("big", max_bytes=1000)
    with pytest.raises(FileAccessError, match="do not fit"):
        await session.put("huge", bytes(17 << 20))
    with pytest.raises(FileAccessError, match="No space left"):
        await session.put("huge", bytes(15 << 20))
    assert (await session.run("1")).ok


async def test_file_names_that_are_not_text(session) -> None:
    await session.run("open(b'\\xff\\xfe', 'w').close()")
    (entry,) = await session.list_files()
    entry.path.encode()


async def test_shell(session) -> None:
    outcome = await session.shell("echo out; echo err >&2; pwd; false || exit 3")
    assert (outcome.output, outcome.status, outcome.end) == ("out\nerr\n/session\n", 3, EndReason.ERROR)
    assert (await session.shell("python3 -c 'print(1 + 1)'")).output == "2\n"
    assert (await session.shell("echo $HOME $USER; cat")).output == "/session agent\n"


async def test_a_shell_has_the_usual_signals(session) -> None:
    outcome = await session.shell("yes | head -1; echo ${PIPESTATUS[0]}; trap 'echo caught' INT; kill -INT $$")
    assert outcome.output == "y\n141\ncaught\n"


async def test_long_listing_is_truncated(session) -> None:
    code = """
import os
folder = '/'.join([os.fsdecode(b'\\xff' * 250)] * 14)
for number in range(300):
    os.makedirs(f'{folder}/{number}')
"""
    await session.run(code)
    assert 0 < len(await session.list_files(recursive=True)) < 400


async def test_shell_and_python_share_files_but_not_processes(session) -> None:
    await session.run("kept = 1; open('note', 'w').write('hello')")
    assert (await session.shell("cat note; kill -9 $$")).output == "hello"
    assert (await session.run("kept")).value == "1"


async def test_a_shell_command_is_stopped(session) -> None:
    outcome = await session.shell("echo begun; trap '' TERM INT; while :; do sleep 1; done", timeout=1)
    assert (outcome.end, outcome.output) == (EndReason.TIMEOUT, "begun\n")
    assert (await session.run("1")).ok


async def test_a_background_process_does_not_hold_a_call(session) -> None:
    outcome = await session.shell("(until [ -e go ]; do sleep 0.05; done; echo late; touch printed) & echo now")
    assert outcome.output == "now\n"
    later = await session.shell("touch go; until [ -e printed ]; do sleep 0.05; done; echo then")
    assert later.output == "late\nthen\n"


async def test_reset_removes_state_and_files(session) -> None:
    await session.run("x = 1; open('f', 'w').close()\nimport subprocess; subprocess.Popen(['sleep', '60'])")
    await session.reset()
    assert await session.list_files() == []
    assert (await session.run("x")).error == "NameError: name 'x' is not defined"
    assert (await session.shell("ls -d /proc/[0-9]* | wc -l")).output.strip() in ("3", "4", "5")


async def test_closed_session_raises(open_session) -> None:
    session = await open_session()
    await session.close()
    await session.close()
    for use in (session.run("1"), session.shell("true"), session.get("x"), session.reset()):
        with pytest.raises(SessionClosed):
            await use
