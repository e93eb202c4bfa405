"""Escape attempts from a session, each really executed: none may succeed."""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")
STRONG = ("zygote", "namespaces")
SECRET = "a-secret-of-the-host"

# Each is a function body: what it returns is what it got, an exception or a false value means it got nothing.
ESCAPES = {
    "host loopback": "return socket.create_connection(('127.0.0.1', HOST['port']), 1)",
    "host abstract socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + HOST['abstract']); return s",
    "host unix socket": "s = socket.socket(socket.AF_UNIX); s.connect(HOST['folder'] + '/socket'); return s",
    "host datagram socket": "with DATAGRAMS() as s: return s.sendto(b'x', HOST['folder'] + '/datagrams')",
    "connect a pair": "with DATAGRAMS() as s: s.connect(HOST['folder'] + '/datagrams'); return s.send(b'x')",
    "the internet": "return socket.create_connection(('1.1.1.1', 53), 1)",
    "udp out": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); return s.sendto(b'x', ('8.8.8.8', 53))",
    "netlink": "return socket.socket(16, socket.SOCK_RAW, 0)",
    "vsock": "return socket.socket(40, socket.SOCK_STREAM)",
    "packet socket": "return socket.socket(17, socket.SOCK_RAW, 3)",
    "raw socket": "return socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "kernel crypto socket": "return socket.socket(38, 5)",
    "users of the host": "return open('/etc/passwd').read()",
    "shadow": "return open('/etc/shadow').read()",
    "root's home": "return [n for n in os.listdir('/root') if n not in HOST['shown']]",
    "home folders": "return os.listdir('/home')",
    "secret file": "return Path(HOST['folder'] + '/secret').read_text()",
    "write /usr": "return open('/usr/escaped', 'w')",
    "write /": "return open('/escaped', 'w')",
    "write /etc": "return open('/etc/escaped', 'w')",
    "write /dev": "return open('/dev/escaped', 'w')",
    "write the interpreter": "return open(os.path.join(os.path.dirname(os.__file__), 'escaped.py'), 'w')",
    "write the libraries": "return [open(p + '/escaped.py', 'w') for p in sys.path if p.startswith('/opt/site')]",
    "write the trusted files": "return open('/opt/agentfly/inside/session_init.py', 'a')",
    "symlink out": "os.symlink(HOST['folder'], 'out'); return Path('out/secret').read_text()",
    "root of the session init": "return open('/proc/1/root' + HOST['folder'] + '/secret').read()",
    "memory of the session init": "return open('/proc/1/mem', 'rb')",
    "files of the session init": "return os.listdir('/proc/1/fd')",
    "open files": "return [n for n in os.listdir('/proc/self/fd') if not DULL(n)]",
    "processes of others": "return [n for n in os.listdir('/proc') if n.isdigit() and int(n) > 40]",
    "ptrace": "return libc.ptrace(16, 1, 0, 0) == 0",
    "ptrace itself": "return libc.ptrace(0, 0, 0, 0) == 0",
    "read another's memory": "return libc.syscall(310, 1, None, 0, None, 0, 0) >= 0",
    "signal the host": "os.kill(HOST['pid'], 0); return True",
    "mount": "return libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0",
    "umount": "return libc.umount2(b'/session', 2) == 0",
    "new user namespace": "return libc.unshare(0x10000000) == 0",
    "clone with a namespace": "return clone(0x10000000)",
    "join a namespace": "return libc.setns(os.open('/proc/1/ns/mnt', 0), 0) == 0",
    "device node": "os.mknod('/session/disk', 0o60600, os.makedev(254, 0)); return True",
    "devices": "return [open(d, 'rb') for d in ('/dev/kvm', '/dev/vda', '/dev/sda', '/dev/mem') if os.path.exists(d)]",
    "core pattern": "return open('/proc/sys/kernel/core_pattern', 'w')",
    "overcommit": "return open('/proc/sys/vm/overcommit_memory', 'w')",
    "sysrq": "return open('/proc/sysrq-trigger', 'w')",
    "chroot": "os.chroot('/tmp'); return True",
    "become root": "os.setuid(0); return True",
    "sudo and su": "return subprocess.run(['su', '-c', 'true'], capture_output=True, timeout=5).returncode == 0",
    "capabilities": "return int(open('/proc/self/status').read().split('CapEff:')[1].split()[0], 16)",
    "io_uring": "return libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0",
    "bpf": "return libc.syscall(321, 0, ctypes.create_string_buffer(120), 120) >= 0",
    "keyring": "return libc.syscall(250, 0, -3, 1) >= 0",
    "perf events": "return libc.syscall(298, ctypes.create_string_buffer(120), 0, -1, -1, 0) >= 0",
    "userfaultfd": "return libc.syscall(323, 1) >= 0",
    "system v memory": "return libc.shmget(0, 1 << 20, 0o1600) >= 0",
    "anonymous memory file": "return os.memfd_create('x')",
    "push into a terminal": "import fcntl; fcntl.ioctl(os.open('/dev/ptmx', 2), 0x5412, b'x'); return True",
    "environment": "return [k for k, v in os.environ.items() if HOST['secret'] in v or 'TOKEN' in k]",
    "environment of the session init": "return HOST['secret'] in open('/proc/1/environ').read()",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)); return True",
    "drop the filter": "return libc.prctl(22, 0, 0, 0, 0) == 0",
    "host name": "return socket.gethostname() == HOST['name']",
    "other's terminals": "return [n for n in os.listdir('/dev/pts') if n != 'ptmx']",
    "trusted modules": "import inside; return inside",
    "handle of the host": "return [s.getsockopt(1, 77) for s in SOCKETS()]",
    "handle of the sender": "return [s.setsockopt(1, 76, 1) or s for s in SOCKETS()]",
    "pid of the host": "return any(int.from_bytes(s.getsockopt(1, 17, 4), 'little') > 1 for s in SOCKETS())",
}
if os.uname().machine != "x86_64":
    for by_number in ("read another's memory", "io_uring", "bpf", "keyring", "perf events", "userfaultfd"):
        del ESCAPES[by_number]
TRIAL = """
import ctypes, os, signal, socket, subprocess, sys
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
HOST = {host!r}
def DULL(number):
    try:
        place = os.readlink('/proc/self/fd/' + number)
    except OSError:
        return True
    return place == '/dev/null' or place.startswith(('pipe:', 'socket:', '/proc/'))
def SOCKETS():
    names = [n for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n)]
    found = [socket.socket(fileno=os.dup(int(n))) for n in names if 'socket:' in os.readlink('/proc/self/fd/' + n)]
    assert found, 'the channel of the interpreter'
    return found
def DATAGRAMS():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    other.close()
    return one
def clone(flags):
    pid = libc.syscall(56 if os.uname().machine == 'x86_64' else 220, flags | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return pid > 0
def attempt():
    {body}
try:
    got = attempt()
except BaseException as error:
    got = None
'ALLOWED ' + repr(got) if got else 'blocked'
"""


@pytest.fixture(scope="module")
def host() -> Iterator[dict[str, object]]:
    """Something on the host worth reaching."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
        os.chmod(folder, 0o755)
        (Path(folder) / "secret").write_text(SECRET)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        name = f"agentfly-test-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
            named.bind(folder + "/socket")
            named.listen()
            datagrams.bind(folder + "/datagrams")
            for name_of_socket in ("socket", "datagrams"):
                os.chmod(f"{folder}/{name_of_socket}", 0o777)
            components = [component for component in Path(sys.base_prefix).parts if component != "/"]
            yield {
                "port": tcp.getsockname()[1],
                "abstract": name,
                "folder": folder,
                "pid": os.getpid(),
                "secret": SECRET,
                "name": socket.gethostname(),
                "shown": components,
            }


@pytest.fixture(scope="module", autouse=True)
def secret_in_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTFLY_TEST_TOKEN", SECRET)
        yield


@pytest.mark.parametrize("mechanism", STRONG)
@pytest.mark.parametrize("name", ESCAPES)
async def test_escape_attempt_fails(open_session, host, mechanism: str, name: str) -> None:
    session = await open_session(mechanism)
    outcome = await session.run(TRIAL.format(host=host, body=ESCAPES[name]))
    assert outcome.value == "'blocked'", outcome.text


async def test_escape_attempts_succeed_without_a_sandbox(host) -> None:
    """Outside a sandbox most of them do: a trial that cannot succeed proves nothing."""
    free = [
        "host loopback",
        "host abstract socket",
        "secret file",
        "host unix socket",
        "host datagram socket",
        "connect a pair",
        "signal the host",
        "symlink out",
    ]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in free:
            space: dict[str, object] = {}
            exec(TRIAL.format(host=host, body=ESCAPES[name]), space)
            got = space["got"]
            assert got, name
            if isinstance(got, socket.socket):
                got.close()


# What Landlock and the filter hold without namespaces; `reduced` means the rest is not promised.
HELD_BY_LANDLOCK = (
    "host loopback", "host abstract socket", "host unix socket", "host datagram socket",
    "connect a pair", "the internet", "udp out", "netlink", "vsock", "packet socket",
    "raw socket", "users of the host", "shadow", "home folders", "secret file", "write /usr", "write /",
    "write /etc", "write the interpreter", "symlink out", "root of the session init", "memory of the session init",
    "ptrace",
    "ptrace itself", "signal the host", "mount", "umount", "new user namespace", "clone with a namespace",
    "devices", "core pattern", "overcommit", "sysrq", "chroot", "become root", "capabilities", "io_uring", "bpf",
    "keyring", "environment", "drop the filter",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in HELD_BY_LANDLOCK if name in ESCAPES])
async def test_escape_attempt_fails_with_landlock(open_session, host, name: str) -> None:
    session = await open_session("landlock")
    outcome = await session.run(TRIAL.format(host=host, body=ESCAPES[name]))
    assert outcome.value == "'blocked'", outcome.text


async def test_landlock_separates_sessions(open_session) -> None:
    one, other = await open_session("landlock"), await open_session("landlock")
    await one.put("secret", b"mine")
    for code in (
        f"open('{one.folder}/secret')",
        f"open('{one.folder}/new', 'w')",
        f"import os; os.listdir('{one.folder}')",
    ):
        assert "PermissionError" in (await other.run(code)).error
    assert not (await other.shell("kill -9 -1; sleep 0.2")).ok
    assert (await one.run("open('secret').read()")).value == "'mine'"


async def test_landlock_allows_socket_pairs(open_session) -> None:
    session = await open_session("landlock")
    assert (await session.run("import asyncio; asyncio.run(asyncio.sleep(0, 'works'))")).value == "'works'"


@pytest.mark.parametrize("mechanism", STRONG)
async def test_root_is_not_root_inside(open_session, mechanism: str) -> None:
    """As the host's root, even without capabilities, a session could write root's files in /proc/sys."""
    session = await open_session(mechanism)
    assert (await session.run("import os; os.getuid()")).value == "1000"
    mapped = (await session.run("open('/proc/self/uid_map').read().split()")).value
    assert mapped == "['1000', '1000', '1']"
    owner = (await session.run("os.stat('/usr').st_uid")).value
    assert owner == "65534", "the host's root must be nobody in there"


@pytest.mark.parametrize("mechanism", STRONG)
async def test_seccomp_filter_is_installed(open_session, mechanism: str) -> None:
    session = await open_session(mechanism)
    outcome = await session.run("open('/proc/self/status').read().split('Seccomp:')[1].split()[0]")
    assert outcome.value == "'2'"
    assert (await session.shell("grep -c '^Seccomp:.*2' /proc/self/status")).status == 0


@pytest.mark.parametrize("mechanism", STRONG)
async def test_pipes_keep_their_size(open_session, mechanism: str) -> None:
    """The pages of all pipes of a user are counted together: large ones of a session would shrink those of the host."""
    session = await open_session(mechanism)
    code = "import fcntl, os; fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20)"
    assert "PermissionError" in (await session.run(code)).error
    assert (await session.run("fcntl.fcntl(os.pipe()[1], fcntl.F_GETPIPE_SZ)")).value == "65536"


FILES = b"""
import os
def kinds():
    found = []
    for number in os.listdir('/proc/self/fd'):
        try:
            found.append(os.readlink('/proc/self/fd/' + number).split(':')[0])
        except FileNotFoundError:  # the listing itself
            pass
    return found
"""


@pytest.mark.parametrize("mechanism", STRONG)
async def test_no_open_file_of_the_host(open_session, mechanism: str) -> None:
    """User code has /dev/null, its output pipe twice, and its socket to the session init: nothing else."""
    session = await open_session(mechanism)
    await session.put("files.py", FILES)
    kinds = eval((await session.run("import files; files.kinds()")).value)
    assert set(kinds) <= {"/dev/null", "pipe", "socket"}
    assert len(kinds) <= 5
    listed = await session.shell("ls -l /proc/self/fd | grep -v -e /dev/null -e pipe: -e total -e /proc/")
    assert listed.output == ""
