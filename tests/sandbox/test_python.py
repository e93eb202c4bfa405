"""Python in a session behaves as in a script, and keeps its state."""

import pytest

from agentfly.sandbox import EndReason, Limits

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("6 * 7", "42"),
        ("x = 5", None),
        ("None", None),
        ("'a'", "'a'"),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(10)", "3628800"),
        ("import math\ndef area(r):\n    return math.pi * r\nround(area(2), 3)", "6.283"),
        ("def deep():\n    import json\n    return json.dumps([1])\ndeep()", "'[1]'"),
        ("k = 3\n[k * i for i in range(3)]", "[0, 3, 6]"),
        ("k = 3\nsum(k * j for i in range(3) for j in [i])", "9"),
        ("class A:\n    n = 2\n    def m(self):\n        return A.n\nA().m()", "2"),
        ("seen = 0\nif __name__ == '__main__':\n    seen = 1\nseen", "1"),
        ("import __main__\nq = 8\n__main__.q", "8"),
        ("import asyncio\nasync def main():\n    return 3\nasyncio.run(main())", "3"),
        ("import pickle\nclass P:\n    pass\ntype(pickle.loads(pickle.dumps(P()))) is P", "True"),
        ("from dataclasses import dataclass\n@dataclass\nclass D:\n    a: int\nD(1)", "D(a=1)"),
        ("import inspect\ndef g():\n    return 1\ninspect.getsource(g)", "'def g():\\n    return 1\\n'"),
        ("(1 +\n2)", "3"),
        ("x = 1 \\\n+ 2", None),
        ("x = 1 \\\n+ 2\nx", "3"),
        ("t = '''\n5\n'''", None),
        ("[\n5\n][0]", "5"),
        ("if True:\n    5", None),
        ("5; 6  # six\n", "6"),
        ("x = 4\n# the end", None),
        ("import threading\nt = threading.Thread(target=print)\nt.start(); t.join()\nt.is_alive()", "False"),
    ],
)
async def test_code_runs_as_in_a_script(session, code: str, value: str | None) -> None:
    outcome = await session.run(code)
    assert (outcome.end, outcome.value) == (EndReason.OK, value), outcome.text


async def test_state_persists_between_calls(session) -> None:
    await session.run("import math\nnumbers = [1, 2]\ndef add(n):\n    numbers.append(n)")
    await session.run("add(3)")
    assert (await session.run("numbers, math.floor(2.5)")).value == "([1, 2, 3], 2)"


async def test_output_keeps_its_order(session) -> None:
    code = """
import os, subprocess, sys
print('one')
print('two', file=sys.stderr)
os.system('echo three')
subprocess.run(['sh', '-c', 'echo four >&2'])
os.write(1, b'five\\n')
sys.stdout.buffer.write(b'six\\n')
print('seven', file=sys.__stdout__)
print('eight', end='')
"""
    assert (await session.run(code)).output == "one\ntwo\nthree\nfour\nfive\nsix\nseven\neight"


async def test_output_is_in_the_call_that_wrote_it(session) -> None:
    """The session init reads the output while the interpreter decides whether the host must ask for it."""
    for number in range(300):
        assert (await session.run(f"print({number})")).output == f"{number}\n"
        assert (await session.run(f"{number}")).output == ""


async def test_a_traceback_has_only_the_users_lines(session) -> None:
    await session.run("def outer(x):\n    return inner(x)\ndef inner(x):\n    return 1 / x")
    outcome = await session.run("print('before')\nouter(0)")
    assert outcome.end is EndReason.ERROR
    assert outcome.output == "before\n"
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert [line.strip() for line in outcome.traceback.splitlines() if "File" in line or "return" in line] == [
        'File "<cell 2>", line 2, in <module>',
        'File "<cell 1>", line 2, in outer',
        "return inner(x)",
        'File "<cell 1>", line 4, in inner',
        "return 1 / x",
    ]


async def test_a_traceback_has_the_line_of_the_last_expression(session) -> None:
    outcome = await session.run("x = [1,\n2]\n\nx[5]\n")
    assert 'File "<cell 1>", line 4, in <module>\n    x[5]\n' in outcome.traceback


async def test_a_traceback_through_a_library_is_trimmed(session) -> None:
    outcome = await session.run("import json\njson.loads('{')")
    assert "json.loads('{')" in outcome.traceback
    assert "decoder.py" not in outcome.traceback


async def test_an_error_in_one_line(session) -> None:
    assert (await session.run("raise ValueError('first\\nsecond')")).error == "ValueError: first"
    chained = await session.run("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e")
    assert chained.error == "KeyError: 'k'"
    assert "direct cause" in chained.traceback
    assert chained.traceback.count("<cell 2>") == 2


@pytest.mark.parametrize("code", ["a b", "def f(:\n  pass", "x = 'unclosed", "x\0y", "return 3", "(" * 500])
async def test_code_that_does_not_compile_is_an_error(session, code: str) -> None:
    outcome = await session.run(code)
    assert outcome.end is EndReason.ERROR
    assert "Error" in outcome.error
    assert (await session.run("1")).value == "1"


@pytest.mark.parametrize(
    ("code", "end", "error"),
    [
        ("import sys; sys.exit()", EndReason.OK, None),
        ("import sys; sys.exit(3)", EndReason.ERROR, "SystemExit: 3"),
        ("import sys; sys.exit('no')", EndReason.ERROR, "SystemExit: no"),
        ("exit(0)", EndReason.OK, None),
        ("raise KeyboardInterrupt", EndReason.ERROR, "KeyboardInterrupt"),
        ("raise BaseException('b')", EndReason.ERROR, "BaseException: b"),
        ("input()", EndReason.ERROR, "EOFError: EOF when reading a line"),
    ],
)
async def test_state_survives_exit_and_interrupt(session, code: str, end: EndReason, error: str | None) -> None:
    await session.run("kept = 1")
    outcome = await session.run(code)
    assert (outcome.end, outcome.error) == (end, error)
    assert (await session.run("kept")).value == "1"


async def test_timeout_keeps_the_state(session, monkeypatch) -> None:
    monkeypatch.setattr("agentfly.sandbox.host.GRACE", 60.0)  # a busy machine may interrupt the code late
    outcome = await session.run(
        "done = []\nwhile True:\n    done.append(1)\n    import time; time.sleep(0.01)", timeout=0.5
    )
    assert outcome.end is EndReason.TIMEOUT
    assert outcome.state_kept
    assert "0.5 seconds" in outcome.message
    assert (await session.run("len(done) > 0")).value == "True"


async def test_output_before_a_timeout_is_kept(session) -> None:
    outcome = await session.run("print('started')\nimport time; time.sleep(600)", timeout=1)
    assert outcome.output == "started\n"


async def test_output_beyond_the_limit_is_dropped_and_counted(session) -> None:
    outcome = await session.run("print('x' * 9000 + 'y' * 999)")
    assert outcome.output == "x" * 3000 + "y" * 999 + "\n"
    assert outcome.dropped == 6000
    assert "x\n[6000 more characters of output were dropped here]\nx" in outcome.text


@pytest.mark.parametrize(
    "code",
    [
        "for n in range(100_000):\n    print('line', n)",
        "import sys\nfor n in range(100_000):\n    sys.stdout.buffer.write(b'line %d\\n' % n)",
        "import os\nos.system('seq -f \"line %.0f\" 0 99999')",
        None,
    ],
    ids=["print", "bytes", "child", "shell"],
)
async def test_head_and_tail_of_a_long_output_are_kept(session, code: str | None) -> None:
    outcome = await (session.shell("seq -f 'line %.0f' 0 99999") if code is None else session.run(code))
    assert len(outcome.output) == 4000
    assert outcome.output.startswith("line 0\nline 1\n")
    assert outcome.output.endswith("line 99998\nline 99999\n")
    total = sum(len(f"line {number}\n") for number in range(100_000))
    assert outcome.dropped == total - 4000
    assert (await session.run("print('é' * 10)")).output == "é" * 10 + "\n"  # nothing of it is in the next call


async def test_a_text_of_a_third_of_the_memory_can_be_printed(open_session) -> None:
    session = await open_session(limits=Limits(memory=240 << 20, output=4000))
    outcome = await session.run("print('x' * (80 << 20) + 'END')")
    assert outcome.ok, outcome.text
    assert outcome.output.endswith("xEND\n")


async def test_fork_that_reaches_the_end_of_the_cell_exits(session) -> None:
    outcome = await session.run(
        "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nprint('parent' if pid else 'child')"
    )
    assert outcome.output == "child\nparent\n"
    assert (await session.run("pid > 0")).value == "True"


async def test_multiprocessing_works(session) -> None:
    code = (
        "import multiprocessing as m\ndef double(n):\n    return 2 * n\nwith m.Pool(2) as pool:\n"
        "    out = pool.map(double, [1, 2, 3])\nout"
    )
    assert (await session.run(code)).value == "[2, 4, 6]"


async def test_a_child_process_can_be_waited_for_in_a_later_call(session) -> None:
    await session.run("import subprocess\np = subprocess.Popen(['sh', '-c', 'exit 7'])")
    await session.run("import time; time.sleep(0.1)")
    assert (await session.run("p.wait()")).value == "7"


async def test_loopback_works_inside(session) -> None:
    code = """
import socket
server = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(server.getsockname())
server.accept()[0].sendall(b'hi')
client.recv(9)
"""
    assert (await session.run(code)).value == "b'hi'"


async def test_preloaded_libraries_work(session) -> None:
    await session.put("ready.py", b"import sys\nnames = [n for n in ('numpy', 'sympy') if n in sys.modules]\n")
    names = eval((await session.run("import ready; ready.names")).value)
    if "numpy" not in names:
        pytest.skip("the sandbox's interpreter has no numpy")
    first = (await session.run("numpy = __import__('numpy'); numpy.random.rand()")).value
    await session.reset()
    assert (await session.run("__import__('numpy').random.rand()")).value != first, (
        "forks must not share random numbers"
    )


FAKE_PYPLOT = b"""
open_figures = {}
class Figure:
    def savefig(self, file, format):
        file.write(b'\\x89PNG\\r\\n\\x1a\\n' + b'pixels')
def figure(number=None):
    return open_figures.setdefault(number or len(open_figures) + 1, Figure())
def get_fignums():
    return sorted(open_figures)
def close(which):
    open_figures.clear()
"""


async def test_figures_come_back_as_images(session) -> None:
    real = (await session.run("import importlib.util\nimportlib.util.find_spec('matplotlib') is not None")).value
    if real != "True":
        await session.put("matplotlib/__init__.py", b"")
        await session.put("matplotlib/pyplot.py", FAKE_PYPLOT)
    outcome = await session.run("import matplotlib.pyplot as plt\nplt.figure(); plt.figure()")
    assert len(outcome.figures) == 2
    assert all(figure.startswith(b"\x89PNG") for figure in outcome.figures)
    assert (await session.run("1")).figures == ()


async def test_timeout_of_a_call_only_lowers_the_limit(open_session) -> None:
    session = await open_session(limits=Limits(seconds=0.2))
    outcome = await session.run("import time; time.sleep(600)", timeout=60)
    assert outcome.end is EndReason.TIMEOUT
    assert "0.2 seconds" in outcome.message
