# ruff: noqa: E501  (programs in one line each: what they do is what their name says)
"""Solutions that keep a check of the tests from counting, and honest ones that catch what the tests raise."""

SWALLOWS = """
class CM:
    def __init__(self, *a): pass
    def __enter__(self): return self
    def __exit__(self, *a): return True
cm = CM
def f(x=None): return 0
def boom(x=None): raise ValueError('no')
def run(cb, *a):
    try: return cb(*a)
    except BaseException: return None
def deco(g): return lambda *a: None
"""

SWALLOWING: dict[str, tuple[str, str | list[str]]] = {
    "with assert": (SWALLOWS, ["with CM():\n    assert f(3) == 9"]),
    "with assert2": (SWALLOWS, ["with cm() as c:\n    x = 1\n    assert f(3) == 9\nassert True"]),
    "with text": (SWALLOWS, "with CM():\n    assert f(3) == 9"),
    "with in fn": (SWALLOWS, "def test_a():\n    with CM() as c:\n        assert f(3) == 9"),
    "with raising before": (SWALLOWS, ["with CM():\n    x = boom(3)\n    assert x == 9"]),
    "with raising in assert": (SWALLOWS, ["with CM():\n    assert boom(3) == 9"]),
    "loop": (SWALLOWS, ["with CM():\n    for i in range(3):\n        assert i < 5\n        boom(i)"]),
    "helper": (SWALLOWS, "def helper():\n    x = boom(1)\n    assert x == 1\n\ndef test_a():\n    with CM():\n        helper()"),
    "helper later": (SWALLOWS, "def helper():\n    assert f(1) == 1\n\ndef test_a():\n    with CM():\n        boom()\n        helper()"),
    "exitstack": (SWALLOWS, ["import contextlib\nwith contextlib.ExitStack() as s:\n    s.enter_context(CM())\n    assert f(3) == 9"]),
    "exitstack raise": (SWALLOWS, ["import contextlib\nwith contextlib.ExitStack() as s:\n    s.enter_context(CM())\n    x = boom(3)\n    assert x == 9"]),
    "wrapped cm": (SWALLOWS, "import contextlib\n@contextlib.contextmanager\ndef w():\n    with CM():\n        yield\ndef test_a():\n    with w():\n        assert f(1) == 1"),
    "wrapped cm raise": (SWALLOWS, "import contextlib\n@contextlib.contextmanager\ndef w():\n    with CM():\n        yield\ndef test_a():\n    with w():\n        x = boom()\n        assert x == 1"),
    "callback": (SWALLOWS, ["def cb(x):\n    assert x == 5\nrun(cb, 3)"]),
    "callback seen": (SWALLOWS, ["seen = []\ndef cb(x):\n    seen.append(x)\n    assert f(x) == 9\nrun(cb, 3)\nassert seen == [3]"]),
    "callback boom": (SWALLOWS, ["seen = []\ndef cb(x):\n    seen.append(x)\n    assert boom(x) == 9\nrun(cb, 3)\nassert seen == [3]"]),
    "callback in with": (SWALLOWS, ["def cb(x):\n    assert boom(x) == 9\nwith CM():\n    cb(3)"]),
    "replace": ("class CM:\n    def __enter__(self): return self\n    def __exit__(self, *a): raise ValueError\ndef f(x): return 0", ["try:\n    with CM():\n        assert f(3) == 9\nexcept ValueError:\n    pass"]),
    "replace cb": ("def run(g):\n    try: g()\n    except BaseException: raise ValueError\ndef f(x): return 0", ["def cb():\n    assert f(1) == 1\ntry:\n    run(cb)\nexcept ValueError:\n    pass"]),
    "passed on by one, swallowed by another": (SWALLOWS + "def run(cb): return cb()\n", ["def cb():\n    assert f(1) == 1\nwith CM():\n    run(cb)"]),
    "replace assertion then swallow": (SWALLOWS + "class D(CM):\n    def __exit__(self, *a): raise AssertionError('mine')\n", ["with CM():\n    with D():\n        assert f(1) == 1"]),
    "stopiter all map": ("def f(x): raise StopIteration", ["assert all(map(lambda c: f(c[0]) == c[1], [(1, 2), (3, 4)]))"]),
    "stopiter zip": ("def f(x): raise StopIteration", ["for got, want in zip(map(f, [1, 2]), [3, 4]):\n    assert got == want"]),
    "stopiter bool": ("class B:\n    def __bool__(self): raise StopIteration\ndef f(x): return B()", ["assert all(filter(f, [1, 0]))"]),
    "skiptest": ("import unittest\ndef f(x): raise unittest.SkipTest('x')", ["import unittest, io\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(1), 2)\nr = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.TestLoader().loadTestsFromTestCase(T))\nassert r.wasSuccessful() and r.testsRun == 1"]),
    "decorated": (SWALLOWS, "@deco\ndef test_a():\n    assert f(1) == 1"),
    "unittest assert in with": (SWALLOWS, ["import unittest\nt = unittest.TestCase()\nwith CM():\n    t.assertEqual(f(1), 1)"]),
    "unittest assert unreached": (SWALLOWS, ["import unittest\nt = unittest.TestCase()\nwith CM():\n    x = boom(1)\n    t.assertEqual(x, 1)"]),
    "assertRaises": (SWALLOWS, ["import unittest\nt = unittest.TestCase()\nwith CM():\n    with t.assertRaises(ValueError):\n        f(1)"]),
    "hostile bool": ("class B:\n    def __bool__(self): return True\n    def __eq__(self, o): return True\n    def __exit__(self, *a): return self\n    def __enter__(self): return self\ndef f(x): return B()", ["with f(1) as b:\n    assert f(2) == 3"]),
    "exit gen": ("import contextlib\n@contextlib.contextmanager\ndef CM():\n    try: yield\n    except BaseException: pass\ndef f(x): return 0", ["with CM():\n    assert f(1) == 1"]),
    "settrace": ("import sys, gc\ndef tr(fr, ev, arg):\n    return tr\nsys.settrace(tr)\nimport builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\ngc.callbacks.append(lambda *a: None)\n" + SWALLOWS, ["with CM():\n    assert f(1) == 1"]),
    "hostile message": (SWALLOWS + "class M:\n    def __str__(self): raise ValueError\n    __repr__ = __str__\ndef m(): return M()\n", ["try:\n    with CM():\n        assert f(1) == 1, m()\nexcept ValueError:\n    pass"]),
    "raise AssertionError": (SWALLOWS, ["with CM():\n    if f(1) != 1:\n        raise AssertionError('bad')"]),
    "two managers": (SWALLOWS, ["with CM() as a, CM() as b:\n    assert f(1) == 1"]),
    "with test's own inside": (SWALLOWS, ["import threading\nlock = threading.Lock()\nwith CM():\n    with lock:\n        boom()\n    assert f(1) == 1"]),
    "method cb": (SWALLOWS, ["class T:\n    def cb(self, x):\n        assert x == 9\nrun(T().cb, 1)"]),
    "partial cb": (SWALLOWS, ["import functools\ndef cb(a, x):\n    assert x == 9\nrun(functools.partial(cb, 1), 1)"]),
    "cancelled": ("import asyncio\nasync def f(x): raise asyncio.CancelledError", ["import asyncio\nasync def one():\n    assert await f(1) == 2\nasync def both():\n    async with asyncio.TaskGroup() as g:\n        g.create_task(one())\nasyncio.run(both())"]),
    "coroutine cb": ("async def run(cb):\n    try: await cb(3)\n    except BaseException: pass", ["import asyncio\nasync def cb(x):\n    assert x == 9\nasyncio.run(run(cb))"]),
    "generator cb": ("def run(cb):\n    try: list(cb(3))\n    except BaseException: pass", ["def cb(x):\n    yield x\n    assert x == 9\nrun(cb)"]),
    "skiptest under another module": ("class SkipTest(Exception): pass\nSkipTest.__module__ = 'json'\ndef f(x): raise SkipTest('x')", ["import unittest, io, json\njson.SkipTest = unittest.SkipTest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(1), 2)\nr = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.TestLoader().loadTestsFromTestCase(T))\nassert r.wasSuccessful() and r.testsRun == 1"]),
    "late cb": ("kept=[]\ndef keep(cb): kept.append(cb)\ndef go():\n    try: kept[0](1)\n    except BaseException: pass", ["def cb(x):\n    assert x == 9\nkeep(cb)\ngo()"]),
}  # fmt: skip

CATCHING: dict[str, tuple[str, str | list[str]]] = {
    "a manager that ignores an exception": (
        "class Ignore:\n    def __init__(s,*k): s.k=k\n    def __enter__(s): return s\n    def __exit__(s,t,e,b): return t is not None and t.__name__ in s.k\ndef bad(): raise ValueError",
        [
            "with Ignore('ValueError'):\n    assert 1 + 1 == 2\n    raise ValueError('x')\nassert True",
            "with Ignore('ValueError'):\n    bad()\nassert True",
            "with Ignore('ValueError'):\n    bad()\n    assert False, 'not reached'\nassert True",
            "with Ignore('ZeroDivisionError'):\n    1 / 0\nassert True",
            "with Ignore('ValueError'):\n    assert True\nx = 1",
            "try:\n    with Ignore('KeyError'):\n        bad()\nexcept ValueError:\n    pass\nelse:\n    assert False",
            "def g():\n    with Ignore('ValueError'):\n        return 5\nassert g() == 5",
            "seen = []\nfor n in [1, 2]:\n    with Ignore('ValueError'):\n        seen.append(n)\n        if n == 1:\n            raise ValueError\n        assert n == 2\nassert seen == [1, 2]",
        ],
    ),
    "functions that call back": (
        "def guard(f,d=None):\n    try: return f()\n    except Exception: return d\ndef retry(f, n=5):\n    for _ in range(n):\n        try: return f()\n        except ValueError: pass\ndef through(f): return f()\ndef it(xs): return iter(xs)",
        [
            "assert guard(lambda: 1 / 0, 3) == 3",
            "calls = []\ndef flaky():\n    calls.append(1)\n    if len(calls) < 3:\n        raise ValueError\n    assert len(calls) == 3\n    return 'ok'\nassert retry(flaky) == 'ok'",
            "def cb():\n    assert False\ntry:\n    through(cb)\nexcept AssertionError:\n    pass\nelse:\n    raise ValueError",
            "def cb():\n    x = {}['k']\n    assert x\ntry:\n    through(cb)\nexcept KeyError:\n    pass",
            "def cb():\n    assert 1 == 1\n    return 4\nassert guard(cb) == 4",
            "i = it([])\ntry:\n    next(i)\n    assert False\nexcept StopIteration:\n    pass",
            "assert list(it([1, 2])) == [1, 2] and next(it([]), 7) == 7",
            "try:\n    assert guard(lambda: 1) == 2\nexcept AssertionError:\n    assert guard(lambda: 1) == 1",
        ],
    ),
    "decorated tests": (
        "import functools\ndef deco(f):\n    @functools.wraps(f)\n    def g(*a): return f(*a)\n    return g\ndef f(): return 1",
        "@deco\ndef test_a():\n    assert f() == 1\n@deco\ndef test_b():\n    return 2\nassert test_b() == 2",
    ),
}  # fmt: skip
