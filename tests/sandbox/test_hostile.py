"""User code that breaks things, by accident or on purpose: only its own session is affected, as the outcome reports."""

import asyncio

import pytest

from agentfly.sandbox import EndReason, SessionClosed

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIND_CHANNEL = """
import os, stat, struct
places = [n for n in range(3, 64) if os.path.exists(f'/proc/self/fd/{n}') and stat.S_ISSOCK(os.fstat(n).st_mode)]
FORGED = b'''{"id": 1, "status": "ok", "value": "'forged'", "error": null, "traceback": null,
             "figures": [], "dropped": 0}'''
def frame(payload, kind=b'R'):
    return struct.pack('>Ic', len(payload), kind) + payload
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(3)", "status 3"),
        ("import os; os._exit(0)", "status 0"),
        ("import ctypes; ctypes.string_at(0)", "signal 11"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ("import os; os.abort()", "signal 6"),
        ("import signal; signal.alarm(1)\nimport time; time.sleep(5)", "signal 14"),
        (
            "import sys; sys.setrecursionlimit(10**8)\nd = eval('[' * 90 + ']' * 90)\nf = lambda: f()\n"
            "import os; os.execv('/bin/true', ['x'])",
            "status 0",
        ),
    ],
)
async def test_exit_of_the_interpreter_is_described(session, code: str, words: str) -> None:
    await session.run("open('kept', 'w').write('file')")
    outcome = await session.run(f"print('last words')\n{code}")
    assert outcome.end is EndReason.DIED, outcome.text
    assert words in outcome.message
    assert "variables are gone" in outcome.message
    assert outcome.output == "last words\n"
    assert not outcome.state_kept
    assert outcome.files_kept
    assert (await session.run("open('kept').read()")).value == "'file'"


async def test_infinite_recursion_is_an_error(session) -> None:
    outcome = await session.run("def f():\n    return f()\nf()")
    assert outcome.error == "RecursionError: maximum recursion depth exceeded"
    assert len(outcome.traceback) < 2000
    outcome = await session.run(
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(self, n):\n"
        "        return getattr(self, n + 'x')\nA().a"
    )
    assert not outcome.ok
    assert (await session.run("1")).value == "1"


@pytest.mark.parametrize(
    "attack",
    [
        "[os.write(n, b'garbage that is no frame ' * 9) for n in places]",
        "[os.write(n, struct.pack('>Ic', 1 << 31, b'R')) for n in places]",
        "[os.write(n, struct.pack('>Ic', 10, b'A') + b'0123456789') for n in places]",
        "[os.write(n, frame(b'{}')) for n in places]",
        "[os.write(n, frame(b'not json')) for n in places]",
        "[os.write(n, frame(b'[' * 100000)) for n in places]",
        "[os.write(n, frame(FORGED)) for n in places]",
        "[os.write(n, frame(bytes(1000))) for n in places for _ in range(3)]",
        "[os.close(n) for n in places]",
        "os.closerange(3, 1000)",
        "os.closerange(0, 1000)",
        "import socket; [socket.socket(fileno=n).shutdown(socket.SHUT_RDWR) for n in places]",
        "[os.dup2(os.open('/dev/null', 2), n) for n in places]",
        "import threading, time\ndef later():\n    time.sleep(0.05)\n"
        "    [os.write(n, frame(b'{}')) for n in places]\nthreading.Thread(target=later).start()",
        "[os.write(n, struct.pack('>Ic', 1000, b'R')) for n in places]",
    ],
)
async def test_tampering_with_the_channel_is_reported(session, attack: str) -> None:
    outcome = await session.run(FIND_CHANNEL + attack, timeout=1)
    assert outcome.value != "'forged'"
    for _ in range(600):  # a thread may write after the answer
        if not outcome.ok:
            break
        await asyncio.sleep(0.05)
        outcome = await session.run("1")
    assert outcome.end in (EndReason.DIED, EndReason.TIMEOUT, EndReason.FLOODED), outcome.text
    assert outcome.message
    if outcome.files_kept:
        assert (await session.run("1 + 1")).value == "2"
    else:
        with pytest.raises(SessionClosed):
            await session.run("1")
        await session.reset()
        assert (await session.run("1 + 1")).value == "2"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.close(1); os.close(2)",
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import sys; sys.stdout = sys.stderr = None",
        "import os; os.set_blocking(1, False)",
        "import fcntl; fcntl.fcntl(1, 1031, 4096)",
        "import resource; resource.prlimit(1, resource.RLIMIT_FSIZE, (0, 0))",
        "import sys; sys.stdin.close()",
        "import sys; sys.stdin.detach(); sys.stdout.detach()",
        "import builtins\n"
        "for name in ('len', 'isinstance', 'print', 'repr', 'str', 'open', 'type', 'compile', 'exec', 'max', 'id'):\n"
        "    setattr(builtins, name, None)",
        "import json, os, struct, io, traceback, linecache, socket\n"
        "for m in (json, struct, traceback, linecache):\n    for n in list(vars(m)):\n"
        "        if not n.startswith('__'):\n            setattr(m, n, None)",
        "import sys\nfor name in list(sys.modules):\n    if name not in ('sys', 'builtins'):\n"
        "        del sys.modules[name]",
        "import sys; sys.modules.clear()",
        "globals().clear()",
        "import os\nos.mkdir('d'); os.chdir('d'); os.rmdir('../d')",
        "import os; os.chdir('/')",
        "import shutil; shutil.rmtree('/session', ignore_errors=True)",
        "import sys; sys.settrace(lambda *a: 1 / 0)",
        "import sys; sys.setprofile(lambda *a: None)",
        "import gc; gc.disable(); gc.collect()",
        "import signal\nfor n in range(1, 32):\n    try:\n"
        "        signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass",
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.02)",
        "import sys; sys.path.clear()",
        "import threading, time\nfor _ in range(4):\n"
        "    threading.Thread(target=lambda: [time.sleep(0.01) for _ in range(100)]).start()",
        "import sys; sys.excepthook = None; sys.displayhook = None",
        "import os\nos.environ.clear()",
        "class E(Exception):\n    def __str__(self):\n        raise ValueError\ntry:\n    raise E\nexcept E:\n    pass",
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))",
        "import warnings; warnings.simplefilter('error')",
    ],
)
async def test_session_survives_code_that_breaks_the_interpreter(session, code: str) -> None:
    first = await session.run(code)
    await asyncio.sleep(0.03)
    second = await session.run("'still ' 'here'")
    if second.end is EndReason.ERROR:  # an alarm that went off between the calls strikes in the next one
        second = await session.run("'still ' 'here'")
    assert second.value == "'still here'", (first.text, second.text)
    broken = await session.run("undefined_name")
    assert broken.end is EndReason.ERROR
    assert "NameError" in broken.text


@pytest.mark.parametrize(
    "name", ["json", "struct", "traceback", "linecache", "tokenize", "base64", "io", "os", "re", "numpy", "token"]
)
async def test_file_that_shadows_a_module_does_no_harm(session, name: str) -> None:
    await session.put(f"{name}.py", b"raise RuntimeError('shadow')\n")
    assert (await session.run("print(1)\n2")).text == "1\n2"
    assert (await session.run("1 / 0")).error == "ZeroDivisionError: division by zero"
    assert (await session.shell("true")).status == 0


async def test_module_in_the_working_folder_can_be_imported(session) -> None:
    await session.put("mine.py", b"def broken():\n    return 1 / 0\n")
    outcome = await session.run("import mine\nmine.broken()")
    assert "mine.py" in outcome.traceback
    assert "return 1 / 0" in outcome.traceback


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("import os; os.write(1, b'\\xff\\xfe ok\\n')", "\ufffd\ufffd ok\n"),
        ("print('\\ud800')", "\\ud800\n"),
        ("print('\\x00\\x1b[31mred')", "\x00\x1b[31mred\n"),
        ("print('日本 ✓')", "日本 ✓\n"),
    ],
)
async def test_output_that_is_not_plain_text(session, code: str, output: str) -> None:
    assert (await session.run(code)).output == output


async def test_lone_surrogates_in_values_and_errors(session) -> None:
    assert (await session.run("raise ValueError('\\ud800')")).end is EndReason.ERROR
    (await session.run("class R:\n    def __repr__(self):\n        return '\\ud800'\nR()")).text.encode()
    outcome = await session.run("class R:\n    def __repr__(self):\n        raise TypeError('no')\nR()")
    assert outcome.error == "TypeError: no"
    outcome = await session.run("class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E")
    assert outcome.end is EndReason.ERROR
    outcome = await session.run("code = '\\ud800'\ncode")
    assert outcome.ok


async def test_output_of_a_background_thread_is_in_the_next_call(session) -> None:
    code = """
import os, threading, time
def print_late():
    while not os.path.exists('go'):
        time.sleep(0.01)
    print('late')
    open('printed', 'w').close()
threading.Thread(target=print_late).start()
"""
    assert (await session.run(code)).output == ""
    await session.put("go", b"")
    async with asyncio.timeout(60):
        while "printed" not in {entry.path for entry in await session.list_files()}:
            await asyncio.sleep(0.01)
    assert (await session.run("print('now')")).output == "late\nnow\n"


async def test_background_children_die_with_the_session(open_session) -> None:
    session = await open_session()
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
"""
    await session.run(code)
    marker = (await session.run("[n for n in os.listdir('/proc') if n.isdigit()]")).value
    assert len(eval(marker)) >= 3
    await session.close()
    with pytest.raises(SessionClosed):
        await session.run("1")


async def test_sessions_do_not_see_each_other(open_session) -> None:
    one, other = await open_session(), await open_session()
    await one.run("secret = 'mine'; open('/session/f', 'w').write('x'); open('/tmp/f', 'w').write('x')")
    await one.run("import os\nfor p in ('/dev/shm/f',):\n    open(p, 'w').write('x')")
    assert (await one.run("import pty; ends = pty.openpty(); os.ttyname(ends[1])")).value == "'/dev/pts/0'"
    await one.run("import subprocess; child = subprocess.Popen(['sleep', '30']); child.pid")
    seen = await other.run("import os\n[os.listdir(p) for p in ('/session', '/tmp', '/dev/shm', '/dev/pts')]")
    assert seen.value == "[[], [], [], ['ptmx']]"
    names = eval(
        (await other.run("[open(f'/proc/{n}/cmdline').read() for n in os.listdir('/proc') if n.isdigit()]")).value
    )
    assert not any("sleep" in name for name in names)
    assert (await other.run("secret")).error == "NameError: name 'secret' is not defined"
    spoken = await other.run("import socket\ns = socket.socket(socket.AF_UNIX); s.bind('\\0meet'); s.listen()")
    assert spoken.ok
    assert not (await one.run("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0meet')")).ok


async def test_concurrent_sessions(open_session) -> None:
    sessions = await asyncio.gather(*(open_session() for _ in range(60)))
    await asyncio.gather(*(session.run(f"mine = {number}") for number, session in enumerate(sessions)))
    outcomes = await asyncio.gather(*(session.run("mine") for session in sessions))
    assert [outcome.value for outcome in outcomes] == [str(number) for number in range(60)]


async def test_a_cancelled_call_ends_its_session(open_session) -> None:
    session = await open_session()
    running = asyncio.create_task(session.run("import time; time.sleep(30)"))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(SessionClosed, match="cancelled"):
        await session.run("1")
    await session.reset()
    assert (await session.run("1")).value == "1"


async def test_closing_ends_a_running_call(open_session) -> None:
    session = await open_session()
    running = asyncio.create_task(session.run("import time; time.sleep(30)"))
    await asyncio.sleep(0.1)
    await session.close()
    assert (await running).end is EndReason.DIED


async def test_calls_on_one_session_wait_for_each_other(session) -> None:
    await session.run("seen = []")
    await asyncio.gather(*(session.run(f"seen.append({n})") for n in range(20)))
    assert (await session.run("seen")).value == str(list(range(20)))


async def test_dead_zygote_is_restarted(open_session, sandboxes) -> None:
    sandbox = await sandboxes.get("namespaces")
    session = await open_session("namespaces")
    sandbox._zygote._process.kill()
    assert (await session.run("import time; time.sleep(5)")).end is EndReason.DIED
    again = await open_session("namespaces")
    assert (await again.run("1")).value == "1"
