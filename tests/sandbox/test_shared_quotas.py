"""Quotas that the kernel keeps per user of the host: one session must not use up what others and the host need."""

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOTH = pytest.mark.parametrize("mechanism", ["zygote", "namespaces"])
ALL = pytest.mark.parametrize("mechanism", ["zygote", "namespaces", "landlock"])

# Runs an attack in one session, which goes on holding what it got; then opens another and uses quotas on the host.
HOST = """
import ctypes, select, socket

def use_host():
    "What the host's own programs do with the same quotas."
    done = {}
    for name, use in {"descriptors": pass_descriptor, "inotify": make_inotify, "pipe": fill_pipe,
                      "epoll": watch}.items():
        try:
            use()
            done[name] = True
        except OSError as error:
            done[name] = str(error)
    return done

def pass_descriptor():
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(one, [b"x"], [0])
        for file in socket.recv_fds(other, 1, 1)[1]:
            os.close(file)

def make_inotify():
    file = ctypes.CDLL(None, use_errno=True).inotify_init()
    if file < 0:
        raise OSError(ctypes.get_errno(), "inotify")
    os.close(file)

def fill_pipe():
    reading, writing = os.pipe()
    os.write(writing, b"x" * 4096)
    os.close(reading)
    os.close(writing)

def watch():
    with select.epoll() as poll:
        with socket.socket(socket.AF_UNIX) as some_socket:
            poll.register(some_socket)

async def main(mechanism, attack):
    async with await open_sandbox(mechanism, reduced=True, preload=()) as sandbox:
        attacker = await sandbox.open_session(Limits(seconds=30))
        attacked = await attacker.run(attack)
        host = use_host()
        try:
            victim = await sandbox.open_session(Limits(seconds=30))
            session = (await victim.run("import os; os.popen('echo works').read()")).text
        except Exception as error:
            session = repr(error)
        return {"attack": attacked.text, "host": host, "session": session}
"""
IN_FLIGHT = """
import os, socket
kept, sent, refused = [], 0, 0
while sent < 5000 and refused < 20:
    try:
        kept.append(socket.socketpair())
        for end in kept[-1]:
            end.setblocking(False)
            while sent < 5000:
                socket.send_fds(end, [b"x"], [0] * 100)
                sent += 100
    except BlockingIOError:
        pass
    except OSError as error:
        refused += 1
        last = error.strerror
print(last)
sent
"""
FROM_MANY_PROCESSES = """
import os, socket, time
start, done = os.pipe(), os.pipe()
def send():
    os.close(start[1])
    one, other = socket.socketpair()
    one.setblocking(False)
    os.read(start[0], 1)
    for _ in range(20):
        try:
            socket.send_fds(one, [b"x"], [0] * 253)
        except OSError:
            pass
    os.close(done[1])
    time.sleep(60)
for _ in range(16):
    if os.fork() == 0:
        send()
        os._exit(0)
os.close(start[1])  # all begin together
os.close(done[1])
os.read(done[0], 1)  # returns when every child has sent its descriptors
"""
INOTIFY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
files = [libc.inotify_init1(0) for _ in range(200)]
print(os.strerror(ctypes.get_errno()))
sum(file >= 0 for file in files)
"""
PIPES = """
import fcntl, os, time
done = os.pipe()
for _ in range(40):
    if os.fork() == 0:
        pipes = []
        try:
            while True:
                pipes.append(os.pipe())
                fcntl.fcntl(pipes[-1][1], fcntl.F_SETPIPE_SZ, 1 << 20)
        except OSError:
            pass
        try:
            while True:
                pipes.append(os.pipe())
        except OSError:
            pass
        os.close(done[1])
        time.sleep(60)
        os._exit(0)
os.close(done[1])
os.read(done[0], 1)  # returns when every child has its pipes
"""
USED = {"descriptors": True, "inotify": True, "pipe": True, "epoll": True}


@ALL
@pytest.mark.parametrize("attack", [IN_FLIGHT, FROM_MANY_PROCESSES], ids=["one process", "many processes"])
async def test_descriptors_in_flight_do_not_stop_others(as_ordinary_user, mechanism: str, attack: str) -> None:
    result = as_ordinary_user(HOST, mechanism, attack)
    assert result["session"] == r"'works\n'", result
    if attack is IN_FLIGHT:
        assert "Too many references" in result["attack"], "the attack reaches the kernel's limit"
        assert result["host"] == USED, result


@ALL
async def test_inotify_is_unavailable(as_ordinary_user, mechanism: str) -> None:
    result = as_ordinary_user(HOST, mechanism, INOTIFY)
    assert result["attack"] == "Function not implemented\n0"
    assert (result["session"], result["host"]) == (r"'works\n'", USED)


@ALL
async def test_pipes_do_not_stop_others(as_ordinary_user, mechanism: str) -> None:
    result = as_ordinary_user(HOST, mechanism, PIPES)
    assert (result["session"], result["host"]) == (r"'works\n'", USED)


@ALL
async def test_kernel_limits_shared_by_all_sessions(open_session, mechanism: str) -> None:
    session = await open_session(mechanism)
    code = """
import resource
[resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_SIGPENDING)]
"""
    assert (await session.run(code)).value == "[256, 256]"
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
said = []
libc.syscall(206 if os.uname().machine == "x86_64" else 0, 1, ctypes.byref(ctypes.c_ulong()))
said.append(os.strerror(ctypes.get_errno()))
libc.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None)
said.append(os.strerror(ctypes.get_errno()))
set(said)
"""
    assert (await session.run(code)).value == "{'Function not implemented'}"


@BOTH
async def test_terminals_of_one_session_are_limited(open_session, mechanism: str) -> None:
    """The number of terminals on the machine is limited."""
    session = await open_session(mechanism)
    code = """
import os
opened = []
try:
    while True:
        opened.append(os.open("/dev/ptmx", os.O_RDWR))
except OSError as error:
    print(error.strerror)
len(opened)
"""
    assert (await session.run(code)).text == "No space left on device\n32"
