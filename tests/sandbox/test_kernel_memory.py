"""Memory that the kernel holds for a session outside its processes: network and socket buffers, pipes, page tables."""

import asyncio
from pathlib import Path

import pytest
import pytest_asyncio

from agentfly.sandbox import EndReason, Limits

pytestmark = pytest.mark.asyncio(loop_scope="session")
MB = 1 << 20
BOTH = pytest.mark.parametrize("mechanism", ["zygote", "namespaces"])
SMALL = Limits(seconds=60, memory=256 * MB, processes=24, disk=16 * MB, inodes=500, output=4000)

# Each fills buffers on the session's own loopback and keeps them; it stops by itself at about 300 MB.
TCP = """
import socket
server, kept, sent = socket.create_server(("127.0.0.1", 0)), [], 0
while sent < 300 << 20 and len(kept) < 100:
    client = socket.create_connection(server.getsockname(), 2)
    kept += [client, server.accept()[0]]
    for end in kept[-2:]:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        end.setblocking(False)
    for end in kept[-2:]:
        try:
            while sent < 300 << 20:
                sent += end.send(bytes(1 << 18))
        except BlockingIOError:
            pass
"""
UDP = """
import socket
sender, kept = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), []
for _ in range(100):
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    kept.append(receiver)
    for _ in range(50):
        sender.sendto(bytes(60_000), receiver.getsockname())
"""


def network_buffers() -> int:
    """Bytes in TCP and UDP buffers of the whole machine."""
    pages = 0
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        words = line.split()
        if words[0] in ("TCP:", "UDP:"):
            pages += int(words[words.index("mem") + 1])
    return pages * 4096


async def grown_buffers(buffers_before: int, limit: int) -> int:
    """Growth of the network buffers, measured for up to ten seconds until it is below the limit.

    Buffers of other processes come and go; those of the session stay.
    """
    for _ in range(100):
        if (grown := network_buffers() - buffers_before) < limit:
            break
        await asyncio.sleep(0.1)
    return grown


@BOTH
@pytest.mark.parametrize("attack", [TCP, UDP], ids=["tcp", "udp"])
async def test_network_buffers_are_limited_by_the_control_group(open_session, sandboxes, mechanism, attack) -> None:
    if "cgroup" not in (await sandboxes.get(mechanism)).capabilities.memory:
        pytest.skip("no control group can be made here")
    session = await open_session(mechanism, SMALL)
    buffers_before = network_buffers()
    outcome = await session.run(attack)
    assert outcome.ok, outcome.text
    assert await grown_buffers(buffers_before, 100 * MB) < 100 * MB
    assert (await session.run("1 + 1")).value == "2"


@BOTH
async def test_loopback_works_where_a_control_group_limits_it(open_session, sandboxes, mechanism: str) -> None:
    if "cgroup" not in (await sandboxes.get(mechanism)).capabilities.memory:
        pytest.skip("no control group can be made here")
    session = await open_session(mechanism, SMALL)
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname(), 2)
accepted, _ = server.accept()
client.sendall(b"hello")
accepted.recv(5)
"""
    assert (await session.run(code)).value == "b'hello'"


@pytest_asyncio.fixture(params=["zygote", "namespaces"], loop_scope="session")
async def uncapped_session(request, open_session, sandboxes, monkeypatch):
    """A session that no control group limits, as an ordinary user has it."""
    sandbox = await sandboxes.get(request.param)
    monkeypatch.setattr(sandbox, "_cgroups", None)
    return await open_session(request.param, SMALL)


@pytest.mark.parametrize("attack", [TCP, UDP], ids=["tcp", "udp"])
async def test_no_network_buffers_without_a_control_group(uncapped_session, attack: str) -> None:
    buffers_before = network_buffers()
    outcome = await uncapped_session.run(attack)
    assert await grown_buffers(buffers_before, 10 * MB) < 10 * MB
    assert "Address family not supported" in outcome.error
    assert (await uncapped_session.run("import asyncio; asyncio.run(asyncio.sleep(0, 'works'))")).value == "'works'"


# Six processes, at most 50 MB each.
UNIX = """
import os, socket, time
def fill():
    kept, sent = [], 0
    while sent < 50 << 20 and len(kept) < 100:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        kept.append(pair)
        for end in pair:
            end.setblocking(False)
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            except PermissionError:
                pass
            try:
                while sent < 50 << 20:
                    sent += end.send(bytes(1 << 16))
            except BlockingIOError:
                pass
    time.sleep(50)
children = []
for _ in range(6):
    children.append(os.fork())
    if children[-1] == 0:
        fill()
        os._exit(0)
[os.waitpid(child, 0) for child in children]
"""


async def test_buffers_of_unix_sockets_count_without_a_control_group(uncapped_session) -> None:
    outcome = await uncapped_session.run(UNIX)
    assert outcome.end is EndReason.OUT_OF_MEMORY, outcome.text
    assert (await uncapped_session.run("1 + 1")).value == "2"


async def test_send_buffers_cannot_grow_without_a_control_group(uncapped_session) -> None:
    code = "import socket\na, b = socket.socketpair()\na.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)"
    assert "PermissionError" in (await uncapped_session.run(code)).error


async def test_page_tables_count_without_a_control_group(uncapped_session) -> None:
    """Reading one byte of every 2 MB costs a page of tables each, and no memory of the process's own."""
    code = """
import mmap, time
space = mmap.mmap(-1, 150 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
for place in range(0, len(space), 2 << 20):
    space[place]
time.sleep(50)
"""
    outcome = await uncapped_session.run(code)
    assert outcome.end is EndReason.OUT_OF_MEMORY, outcome.text
    assert (await uncapped_session.run("1 + 1")).value == "2"


async def test_memory_cannot_be_left_in_a_pipe(session) -> None:
    """A byte that vmsplice puts into a pipe keeps its whole huge page after the process has unmapped it."""
    code = """
import ctypes, os
class Piece(ctypes.Structure):
    _fields_ = [("place", ctypes.c_char_p), ("size", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
libc.vmsplice(os.pipe()[1], ctypes.byref(Piece(b"x", 1)), ctypes.c_ulong(1), 0), os.strerror(ctypes.get_errno())
"""
    assert (await session.run(code)).value == "(-1, 'Function not implemented')"
