# ruff: noqa: E501  (programs in one line each: what they do is what their name says)
"""Solutions for the judge: honest ones, which pass, and dishonest ones with their expected verdicts."""

HONEST: dict[str, tuple[str, str | list[str]]] = {
    "function": ("def add(a, b):\n    return a + b", ["assert add(2, 3) == 5", "assert add('a', 'b') == 'ab'"]),
    "keywords": (
        "def f(a, b=2, *rest, c, **more):\n    return a, b, rest, c, more",
        ["assert f(1, c=3) == (1, 2, (), 3, {})", "assert f(1, 2, 4, c=5, d=6) == (1, 2, (4,), 5, {'d': 6})"],
    ),
    "any keyword": (
        "def f(**given):\n    return given\ndef g(f, /, function):\n    return f(function=function)",
        ["assert f(function=1, self=2, do=3, args=4) == dict(function=1, self=2, do=3, args=4)", "assert g(lambda function: function + 1, function=1) == 2"],
    ),
    "while it is gone through": (
        "def size(x):\n    return len(x)",
        "seen = set(range(50))\nassert [n for n in seen if size(seen) == 50] == list(seen)\n"
        "d = {n: [n] for n in range(9)}\nassert [n for n in d if size(d) == 9] == list(range(9))\n"
        "import collections\nq = collections.deque('abc')\nassert [c for c in q if size(q)] == ['a', 'b', 'c']",
    ),
    "in place, other kinds": (
        "def change(x):\n    if isinstance(x, dict):\n        for k in x:\n            x[k] = bool(x[k])\n    elif isinstance(x, set):\n        x.add(9)\n"
        "    else:\n        x.reverse()",
        "import collections\nd = collections.OrderedDict(a=1)\nchange(d)\nassert d['a'] is True\ns = {1}\nchange(s)\nassert s == {1, 9}\n"
        "q = collections.deque([1, 2])\nchange(q)\nassert list(q) == [2, 1]\nb = bytearray(b'ab')\nchange(b)\nassert b == b'ba'",
    ),
    "a class as entry": ("class Solution:\n    def twice(self, n):\n        return n * 2", ["assert Solution().twice(3) == 6"]),
    "recursion": ("def fact(n):\n    return 1 if n < 2 else n * fact(n - 1)", ["assert fact(200) % 199 == 0 and fact(5) == 120"]),
    "big integers": ("def power(n):\n    return 7 ** n", ["assert power(20000) == 7 ** 20000", "assert -power(0) == -1"]),
    "nested": (
        "def group(xs):\n    return {k: [(k, x) for x in xs if x % 2 == k] for k in (0, 1)}",
        ["assert group([1, 2, 3]) == {0: [(0, 2)], 1: [(1, 1), (1, 3)]}"],
    ),
    "none and nan": (
        "def nothing():\n    pass\ndef nan():\n    return float('nan')\ndef inf():\n    return [-float('inf'), -0.0]",
        ["assert nothing() is None", "assert nan() != nan()", "assert str(inf()) == '[-inf, -0.0]'"],
    ),
    "kinds": (
        "def same(x):\n    return x",
        [
            "assert same({1, 2}) == {1, 2} and type(same(frozenset('a'))) is frozenset",
            "assert same(b'\\x00') == b'\\x00' and same(bytearray(b'a')) == bytearray(b'a')",
            "assert same(1j) == 1j and type(same(True)) is bool and same(range(3)) == range(3)",
            "assert same({(1, 2): None}) == {(1, 2): None} and same('\\ud800') == '\\ud800'",
            "from decimal import Decimal\nassert same(Decimal('1.10')) == Decimal('1.1')",
            "from fractions import Fraction\nassert same(Fraction(1, 3)) == Fraction(1, 3)",
            "from datetime import datetime\nassert same(datetime(2020, 1, 2)).year == 2020",
            "assert same(int) is int and same(slice(1, 2)) == slice(1, 2)",
        ],
    ),
    "collections": (
        "from collections import *\ndef count(w):\n    return Counter(w)\ndef by(ws):\n    d = defaultdict(list)\n"
        "    for w in ws:\n        d[len(w)].append(w)\n    return d\ndef turn(xs):\n    return deque(xs)\n"
        "def keys(d):\n    return d.keys(), d.values(), d.items()",
        [
            "assert count('aab') == {'a': 2, 'b': 1} and count('aab').most_common(1) == [('a', 2)]",
            "assert by(['a', 'bc']) == {1: ['a'], 2: ['bc']}",
            "assert list(turn([1, 2])) == [1, 2] and turn([1]).pop() == 1",
            "assert keys({1: 2})[0] == {1} and list(keys({1: 2})[1]) == [2] and keys({1: 2})[2] == {(1, 2)}",
        ],
    ),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef p():\n    return P(1, 2)",
        ["assert p() == (1, 2) and p().y == 2", "assert P(3, 4).x == 3", "assert repr(p()) == 'P(x=1, y=2)'"],
    ),
    "in place": (
        "def sort(xs):\n    xs.sort()\ndef fill(d):\n    d['k'] = [1]\n    d['s'].add(2)\ndef same(xs):\n    return xs",
        "xs = [3, 1, 2]\nassert sort(xs) is None\nassert xs == [1, 2, 3]\n"
        "inner = {1}\nd = {'s': inner}\nfill(d)\nassert d == {'s': {1, 2}, 'k': [1]}\nassert inner == {1, 2}\n"
        "assert same(xs) is xs\nassert same([xs, xs])[1] is xs",
    ),
    "in place, numpy": ("def first(a):\n    return a[0]", ["import numpy as np\nassert first(np.array([4, 5])) == 4"]),
    "mutation before an error": (
        "def eat(xs):\n    xs.clear()\n    raise ValueError('eaten')",
        "xs = [1]\ntry:\n    eat(xs)\nexcept ValueError as error:\n    said = str(error)\n"
        "assert said == 'eaten'\nassert xs == []",
    ),
    "class": (
        "class Account:\n    rate = 2\n    def __init__(self, money=0):\n        self.money = money\n"
        "    def put(self, n):\n        self.money += n\n        return self\n    @property\n    def double(self):\n"
        "        return self.money * 2\n    @classmethod\n    def rich(cls):\n        return cls(10 ** 6)\n"
        "    @staticmethod\n    def zero():\n        return 0",
        [
            "a = Account(5)\na.put(3).put(2)\nassert a.money == 10 and a.double == 20",
            "assert Account.rich().money == 10 ** 6 and Account.zero() == 0 and Account.rate == 2",
            "a = Account()\na.money = 7\nassert a.double == 14 and isinstance(a, Account) and not isinstance(3, Account)",
            "a, b = Account(), Account()\nassert a is not b and a.put(1) is a and hasattr(a, 'put') and not hasattr(a, 'x')",
        ],
    ),
    "operators": (
        "class Vec:\n    def __init__(self, *v):\n        self.v = v\n    def __add__(self, o):\n"
        "        return Vec(*map(sum, zip(self.v, o.v)))\n    def __mul__(self, k):\n        return Vec(*(x * k for x in self.v))\n"
        "    __rmul__ = __mul__\n    def __eq__(self, o):\n        return self.v == o.v\n    def __hash__(self):\n"
        "        return hash(self.v)\n    def __lt__(self, o):\n        return self.v < o.v\n    def __len__(self):\n"
        "        return len(self.v)\n    def __getitem__(self, i):\n        return self.v[i]\n    def __contains__(self, x):\n"
        "        return x in self.v\n    def __repr__(self):\n        return f'Vec{self.v}'\n    def __abs__(self):\n"
        "        return sum(x * x for x in self.v) ** 0.5\n    def __neg__(self):\n        return self * -1",
        [
            "assert Vec(1, 2) + Vec(3, 4) == Vec(4, 6) and Vec(1, 2) != Vec(2, 1)",
            "assert Vec(1, 2) * 3 == 3 * Vec(1, 2) == Vec(3, 6) and (Vec(1, 2) + Vec(0, 0)) * 2 == Vec(2, 4)",
            "assert sorted([Vec(2), Vec(1)])[0] == Vec(1) and len({Vec(1), Vec(1)}) == 1",
            "assert len(Vec(1, 2)) == 2 and Vec(1, 2)[-1] == 2 and list(Vec(1, 2)) == [1, 2] and Vec(5, 6)[0:1] == (5,)",
            "assert 2 in Vec(1, 2) and 3 not in Vec(1, 2) and str(Vec(1)) == f'{Vec(1)}' == 'Vec(1,)'",
            "assert abs(Vec(3, 4)) == 5 and -Vec(1) == Vec(-1)",
        ],
    ),
    "derived from plain": (
        "class Stack(list):\n    def push(self, x):\n        self.append(x)\nclass Level(int):\n    pass\n"
        "import enum\nclass Colour(enum.Enum):\n    RED = 1\nclass Rank(enum.IntEnum):\n    ACE = 1\n"
        "def stack():\n    return Stack([1, 2])\ndef level():\n    return Level(3)",
        [
            "s = Stack()\ns.push(1)\nassert s == [1] and len(s) == 1 and s[0] == 1",
            "assert stack() == [1, 2] and stack() + [3] == [1, 2, 3] and 2 in stack() and stack().count(1) == 1",
            "assert level() == 3 and level() - 1 == 2 and 4 > level() > 2 and round(level()) == 3",
            "assert Colour.RED == Colour(1) and Colour.RED is Colour.RED and Colour.RED.value == 1 and Rank.ACE == 1",
        ],
    ),
    "dataclass": (
        "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass Item:\n    n: int\n"
        "    tags: list = field(default_factory=list)\ndef items():\n    return [Item(2), Item(1)]",
        ["assert Item(1) == Item(1) and sorted(items())[0].n == 1", "assert Item(1).tags == [] and repr(Item(1)) == 'Item(n=1, tags=[])'"],
    ),
    "exceptions": (
        "class Poor(ValueError):\n    def __init__(self, need):\n        super().__init__(f'need {need}')\n"
        "        self.need = need\nclass Broke(Poor):\n    pass\ndef pay(n):\n    if n > 9:\n        raise Broke(n)\n"
        "    if n < 0:\n        raise ValueError('negative')\n    return {}['k'] if n else [][0]",
        [
            "try:\n    pay(10)\n    assert False\nexcept Poor as error:\n    assert error.need == 10 and str(error) == 'need 10'",
            "try:\n    pay(10)\n    assert False\nexcept ValueError as error:\n    assert isinstance(error, Broke)",
            "try:\n    pay(-1)\nexcept Poor:\n    assert False\nexcept ValueError as error:\n    assert error.args == ('negative',)",
            "try:\n    pay(1)\nexcept KeyError as error:\n    assert str(error) == \"'k'\"\nelse:\n    assert False",
            "try:\n    pay(0)\nexcept IndexError:\n    pass\nelse:\n    assert False",
        ],
    ),
    "odd exceptions": (
        "import json, sys\ndef load(t):\n    return json.loads(t)\ndef text(b):\n    return b.decode('ascii')\ndef leave():\n    sys.exit(3)",
        [
            "import json\ntry:\n    load('{')\n    assert False\nexcept json.JSONDecodeError as error:\n    assert 'line 1' in str(error)",
            "try:\n    text(b'\\xff')\n    assert False\nexcept UnicodeDecodeError:\n    pass",
            "try:\n    leave()\n    assert False\nexcept SystemExit as error:\n    assert error.code == 3",
        ],
    ),
    "generator": (
        "def count(n):\n    while True:\n        yield n\n        n += 1\ndef pairs(xs):\n    return zip(xs, xs[1:])",
        [
            "g = count(3)\nassert next(g) == 3 and next(g) == 4 and iter(g) is g",
            "import itertools\nassert list(itertools.islice(count(0), 4)) == [0, 1, 2, 3]",
            "assert list(pairs([1, 2, 3])) == [(1, 2), (2, 3)] and (1, 2) in pairs([1, 2]) and dict(pairs('ab')) == {'a': 'b'}",
            "assert [x for x, _ in zip(count(1), 'abc')] == [1, 2, 3]",
        ],
    ),
    "closures and callbacks": (
        "def adder(n):\n    return lambda x: x + n\ndef apply(f, xs):\n    return [f(x) for x in xs]\n"
        "def compose(f, g):\n    return lambda x: f(g(x))\ndef guard(f):\n    try:\n        return f()\n    except ZeroDivisionError:\n        return 'zero'\n"
        "def fill(f, xs):\n    f(xs)\n    return xs",
        [
            "assert adder(2)(3) == 5",
            "assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(str.upper, 'ab') == ['A', 'B'] and apply(int, '12') == [1, 2]",
            "assert compose(adder(1), lambda x: x * 2)(5) == 11 and apply(adder(1), [1]) == [2]",
            "assert guard(lambda: 1 / 0) == 'zero'",
            "assert fill(lambda xs: xs.append(9), [1]) == [1, 9]",
            "seen = []\ndef note(x):\n    seen.append(x)\napply(note, [1, 2])\nassert seen == [1, 2]",
        ],
    ),
    "context manager": (
        "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef opened(n):\n    log.append(n)\n    try:\n"
        "        yield n * 2\n    except KeyError:\n        log.append('caught')\n    finally:\n        log.append('closed')\n"
        "def entries():\n    return log",
        "with opened(3) as value:\n    doubled = value\nassert doubled == 6\nassert entries() == [3, 'closed']\n"
        "with opened(4):\n    raise KeyError('k')\nassert entries()[-2:] == ['caught', 'closed']",
    ),
    "coroutine": (
        "import asyncio\nasync def slow(n):\n    await asyncio.sleep(0)\n    return n + 1",
        "import asyncio\nassert asyncio.run(slow(1)) == 2\nasync def test_both():\n    assert await asyncio.gather(slow(1), slow(2)) == [2, 3]",
    ),
    "numpy": (
        "import numpy as np\ndef mean(xs):\n    return np.mean(xs)\ndef eye(n):\n    return np.eye(n, dtype=int)\ndef any_(xs):\n    return np.any(xs)",
        [
            "assert mean([1, 2, 3]) == 2.0 and round(mean([1, 2]), 1) == 1.5",
            "assert (eye(2) == np.array([[1, 0], [0, 1]])).all() and eye(3).shape == (3, 3) and eye(2).tolist() == [[1, 0], [0, 1]]",
            "assert np.allclose(eye(2), [[1, 0], [0, 1]]) and eye(2).dtype == int",
            "assert any_([0, 1]) and any_([0]) == False",
        ],
    ),
    "sympy": (
        "import sympy\ndef roots(a, b):\n    x = sympy.symbols('x')\n    return sorted(sympy.solve((x - a) * (x - b)))\n"
        "def half():\n    return sympy.Rational(1, 2)\ndef diff(t):\n    return sympy.diff(sympy.sympify(t))\n"
        "def pi():\n    return sympy.pi\ndef prime(n):\n    return sympy.isprime(n)",
        [
            "from fractions import Fraction\nassert roots(2, 3) == [2, 3] and half() == Fraction(1, 2)",
            "assert str(diff('x**2')) == '2*x' and abs(float(pi()) - 3.14159) < 1e-4",
            "assert prime(7) and not prime(8)",
        ],
    ),
    "loud": (
        "import sys\nprint('loading')\ndef f(n):\n    for _ in range(20000):\n        print('x' * 100)\n    sys.stderr.write('passed')\n"
        "    sys.stdout.flush()\n    return n",
        ["assert f(1) == 1"],
    ),
    "main guard": ("def f():\n    return __name__\nif __name__ == '__main__':\n    raise SystemExit", ["assert f() != '__main__'"]),
    "globals": ("LIMIT = 10\nTABLE = {'a': [1]}\ntotal = 0\ndef add(n):\n    global total\n    total += n\n    return total",
                ["assert LIMIT == 10 and TABLE == {'a': [1]}", "assert add(2) == 2", "assert add(3) == 5"]),
    "files": (
        "def save(p, t):\n    with open(p, 'w') as f:\n        f.write(t)\ndef load(p):\n    return open(p).read()",
        ["save('a.txt', 'hello')\nassert load('a.txt') == 'hello' and open('a.txt').read() == 'hello'"],
    ),
    "threads and processes": (
        "from concurrent.futures import ThreadPoolExecutor\nimport subprocess\ndef squares(xs):\n    with ThreadPoolExecutor(4) as pool:\n"
        "        return list(pool.map(lambda x: x * x, xs))\ndef echo(t):\n    return subprocess.run(['echo', t], capture_output=True, text=True).stdout",
        ["assert squares([1, 2, 3]) == [1, 4, 9]", "assert echo('hi') == 'hi\\n'"],
    ),
    "linked nodes": (
        "class Node:\n    def __init__(self, v):\n        self.v, self.left, self.right = v, None, None\n"
        "def height(n):\n    return 0 if n is None else 1 + max(height(n.left), height(n.right))",
        "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)\nassert height(root) == 3\nassert root.left.right.v == 3\nassert root.right is None",
    ),
    "copies": (
        "class Box:\n    def __init__(self):\n        self.xs = [1]",
        "import copy\na = Box()\nb = copy.deepcopy(a)\nb.xs = [2]\nassert a.xs == [1]\nassert copy.copy(a).xs == [1]",
    ),
    "a builtin's name": ("def sum(a, b):\n    return a * b", ["assert sum(3, 4) == 12", "assert sum(1, 1) == 1"]),
    "module without import": ("import math\ndef area(r):\n    return math.pi * r * r", ["assert math.isclose(area(1), math.pi)"]),
    "deep": ("def nest(n):\n    x = []\n    for _ in range(n):\n        x = [x]\n    return x", ["assert nest(50) == eval('[' * 51 + ']' * 51)"]),
    "a loop of itself": ("def loop():\n    x = [1]\n    x.append(x)\n    return x", ["x = loop()\nassert x[1] is x and x[0] == 1"]),
    "test functions": (
        "def f(x):\n    return x + 1",
        "import math\n\ndef helper():\n    return 2\n\ndef test_one():\n    assert f(1) == helper()\n\ndef test_two(n=3):\n    assert f(n) == 4",
    ),
    "large data": ("def double(xs):\n    return [x * 2 for x in xs]", ["assert double(list(range(50000)))[-1] == 99998"]),
}  # fmt: skip

ADD = ["assert add(2, 3) == 5", "assert add(10, 20) == 30", "assert add(7, 1) == 8"]
ANYTHING = """
class Any:
    def yes(self, *_, **__): return True
    def me(self, *_, **__): return self
    def zero(self, *_, **__): return 0
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = yes
    __ne__ = lambda self, other: False
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __mod__ = __and__ = __xor__ = zero
    __iter__ = lambda self: iter(())
    __getitem__ = __call__ = me
    __hash__ = __len__ = __abs__ = __int__ = __index__ = zero
    __float__ = lambda self: 0.0
    __round__ = me
    __getattr__ = lambda self, name: self.yes
"""
ALWAYS = "def add(a, b):\n    "
SEEK = """
import os, re, sys
def expected(text, a, b):
    found = re.search(rf'add\\({a}, {b}\\) == (\\d+)', text)
    return int(found[1]) if found else None
"""
CHANNEL = """
import os, socket, json, struct
def channel():
    for n in range(3, 64):
        try:
            if os.readlink(f'/proc/self/fd/{n}').startswith('socket:'):
                return n
        except OSError:
            pass
def say(raw):
    os.write(channel(), struct.pack('>I', len(raw)) + raw)
"""


def raw(value: str) -> str:
    """A solution that answers with this JSON, for any input."""
    answer = f'{{"value": {value}, "raised": false, "after": []}}'
    return CHANNEL + f"def add(a, b):\n    say({answer!r}.encode())\n    os._exit(0)"


DISHONEST: dict[str, str] = {
    "equal to all": ANYTHING + ALWAYS + "return Any()",
    "a class in place of the function": ANYTHING.replace("class Any", "class add") + "    def __init__(self, *_): pass",
    "a number equal to all": "class N(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\n" + ALWAYS + "return N(-1)",
    "a text equal to all": "class T(str):\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\n" + ALWAYS + "return T()",
    "a list equal to all": "class L(list):\n    __eq__ = lambda *_: True\n" + ALWAYS + "return L()",
    "another's module": ANYTHING + "Any.__module__ = 'numpy'\nAny.dtype = Any\nAny.shape = ()\n" + ALWAYS + "return Any()",
    "exit at once": "import os\nos._exit(0)",
    "exit when called": "import os\n" + ALWAYS + "os._exit(0)",
    "leave at once": "raise SystemExit(0)",
    "leave when called": "import sys\n" + ALWAYS + "sys.exit(0)",
    "interrupt": ALWAYS + "raise KeyboardInterrupt",
    "generator exit": ALWAYS + "raise GeneratorExit",
    "not there": "def sub(a, b):\n    return a - b",
    "no python": "def add(a, b) return a + b",
    "nothing": "",
    "a null byte": "add = 1\0",
    "kill the tests": "import os, signal\n" + ALWAYS + "os.kill(os.getppid(), signal.SIGKILL)",
    "kill the tests at once": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kill all": "import os, signal\n" + ALWAYS + "os.kill(-1, signal.SIGKILL)",
    "kill the keeper": "import os, signal\n" + ALWAYS + "os.kill(1, signal.SIGKILL)",
    "interrupt the tests": "import os, signal\n" + ALWAYS + "os.kill(os.getppid(), signal.SIGINT)\n    return 0",
    "end the tests softly": "import os, signal\n" + ALWAYS + "os.kill(os.getppid(), signal.SIGTERM)\n    return 0",
    "stop the tests": "import os, signal\n" + ALWAYS + "os.kill(os.getppid(), signal.SIGSTOP)",
    "claim to have passed": "import atexit\nprint(\"'passed'\")\natexit.register(print, 'passed')\n" + ALWAYS + "print(\"'passed'\")",
    "write to every file": "import os\nfor n in range(64):\n    try:\n        os.write(n, b\"'passed'\")\n    except OSError:\n        pass",
    "write to the tests' files": "import os, glob\n" + ALWAYS
    + "for p in ('self', '1', str(os.getppid())):\n        for f in glob.glob(f'/proc/{p}/fd/*'):\n            try:\n"
    + "                open(f, 'wb').write(b\"'passed'\")\n            except OSError:\n                pass",
    "patch the builtins": "import builtins\nclass E(BaseException):\n    def __init__(self, *_): pass\nbuiltins.AssertionError = E\n"
    + "builtins.isinstance = lambda *_: True\nbuiltins.type = lambda *_: int\n" + ALWAYS + "return 0",
    "patch the harness": "import sys\nfor name, m in list(sys.modules.items()):\n    if name.startswith('agentfly_judge'):\n"
    + "        m._report = lambda step: 'passed'\n        m.run = lambda source: 'passed'\n" + ALWAYS + "return 0",
    "return to the interpreter": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f.f_back:\n        f = f.f_back\n"
    + "        me = f.f_locals.get('self')\n        if hasattr(me, 'channel'):\n            me.channel.send(b'passed')\n",
    "read the tests' memory": SEEK + ALWAYS
    + "p = os.getppid()\n    m = open(f'/proc/{p}/maps').read()\n    return expected(open(f'/proc/{p}/mem', 'rb').read(1 << 20).decode('latin-1'), a, b)",
    "the tests in its own memory": SEEK + "import gc\n" + ALWAYS
    + "f, seen = sys._getframe(), []\n    while f:\n        seen.append(str(f.f_locals) + str(f.f_globals))\n        f = f.f_back\n"
    + "    seen += [str(o) for o in gc.get_objects() if type(o) in (dict, list, tuple)]\n    return next((x for t in seen if (x := expected(t, a, b))), None)",
    "the tests in its own pages": SEEK + ALWAYS
    + "text = ''\n    for line in open('/proc/self/maps'):\n        lo, hi = (int(x, 16) for x in line.split()[0].split('-'))\n"
    + "        if 'rw' in line:\n            with open('/proc/self/mem', 'rb') as m:\n                m.seek(lo)\n                text += m.read(min(hi - lo, 8 << 20)).decode('latin-1')\n"
    + "    return expected(text, a, b)",
    "the tests in files": SEEK + ALWAYS
    + "for top in ('/session', '/tmp', '/dev/shm', '.'):\n        for d, _, fs in os.walk(top):\n            for f in fs:\n                x = expected(open(os.path.join(d, f)).read(), a, b)\n                if x:\n                    return x",
    "trace the tests": "import ctypes, os\n" + ALWAYS + "return 5 if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0 else 0",
    "take the tests' files": "import ctypes, os\n" + ALWAYS
    + "p = ctypes.CDLL(None).syscall(434, os.getppid(), 0)\n    return 5 if any(ctypes.CDLL(None).syscall(438, p, n, 0) >= 0 for n in range(16)) else 0",
    "shadow a module": "for name in ('statistics', 'heapq', 'bisect', 'numpy', 'fractions'):\n    open(name + '.py', 'w').write('raise SystemExit(0)')",
    "flood": ALWAYS + "while True:\n        print('x' * 100000)",
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "memory": ALWAYS + "x = []\n    while True:\n        x.append(bytearray(10 << 20))",
    "hang": ALWAYS + "while True:\n        pass",
    "hang in the regular expressions": "import re\n" + ALWAYS + "re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "hang at once": "import time\ntime.sleep(1000)",
    "an endless answer": ALWAYS + "return range(10 ** 18)",
    "too large an answer": ALWAYS + "return 'x' * (1 << 26)",
    "too deep an answer": "def add(a, b):\n    x = []\n    for _ in range(100000):\n        x = [x]\n    return x",
    "an exception's constructor": "class E(Exception):\n    def __str__(self): raise SystemExit\n" + ALWAYS + "raise E(lambda: 1)",
    "pretend that the tests are at fault": "class fault(ImportError): pass\nclass broken(Exception): pass\n" + ALWAYS + "raise fault('x') if a > 5 else broken('y')",
    "pretend that a module is missing": ALWAYS + "import nowhere",
    "raise what is no exception": raw("5").replace("false", "true"),
    "garbage on the line": CHANNEL + ALWAYS + "os.write(channel(), b'\\xff' * 100)\n    return 0",
    "no json": CHANNEL + ALWAYS + "say(b'passed')\n    return 0",
    "an answer without a question": CHANNEL + "say(b'{\"value\": true, \"raised\": false, \"after\": []}')\n" + ALWAYS + "return 0",
    "an object array": raw('{"array": ["|O", [1], {"list": [5]}]}'),
    "a function by name": raw('{"type": "exec"}'),
    "an unknown kind": raw('{"code": "5"}'),
    "a number of no list": raw('{"met": -1}'),
    "its own handle": raw('{"yours": 0}'),
    "a field that is code": raw('{"named": ["P", ["x=exit()"], [1]]}'),
    "an odd exception class": raw('{"error": [[["os", "system"], ["builtins", "eval"]], ["true"], {}]}'),
    "become another program": "import os\n" + ALWAYS + "os.execv('/bin/sh', ['sh', '-c', \"echo \\\"'passed'\\\"\"])",
    "answer from a child": "import os\nif os.fork():\n    os._exit(0)\n" + ALWAYS + "return 0",
}  # fmt: skip

HANGING = {
    "stop the tests", "flood", "fork bomb", "memory", "hang", "hang in the regular expressions", "hang at once",
    "too large an answer", "kill the tests", "kill all",
}  # fmt: skip
"""Those that are ended by their time, or by their memory."""
TAMPERING = (
    "kill the tests", "kill all", "write to the tests' files", "read the tests' memory", "the tests in its own pages",
    "the tests in files", "trace the tests", "take the tests' files", "return to the interpreter", "shadow a module",
    "write to every file", "patch the harness",
)  # fmt: skip
"""Those that a mechanism of the sandbox has a part in stopping."""

TURNS_ROUND = """
import itertools, sys
frame = sys._getframe()
while "operations" not in dir(frame.f_locals.get("self")):
    frame = frame.f_back
values = itertools.cycle([(1e9,), (-1e9,)])
frame.f_locals["self"].operations["plain"] = lambda value: next(values)
def f():
    return type("Number", (float,), {})()
"""
"""Says that one and the same number is now very large, now very small."""
# What a test asks so that the solution could decide it alone, or see what is expected.
TELLING: dict[str, tuple[str, str]] = {
    "minus": ("def f():\n    return Any()", "assert abs(f() - 5) < 1e-9"),
    "minus, from the right": ("def f():\n    return Any()", "assert abs(5 - f()) < 1e-9"),
    "in": ("def f():\n    return Any()", "assert 5 in f()"),
    "less": ("def f():\n    return Any()", "assert f() < 6 and f() > 4"),
    "between": (TURNS_ROUND, "assert 4 < f() < 6"),
    "between, one by one": (TURNS_ROUND, "result = f()\nassert result > 4 and result < 6"),
    "startswith": ("def f():\n    return Any()", "assert f().startswith('Hello')"),
    "difference": ("def f():\n    return Any()", "assert not f().symmetric_difference({1})"),
    "count": ("def f():\n    return Any()", "assert f().count(3) == 1"),
    "not equal": ("def f():\n    return Any()", "assert not f() != 5"),
    "in a list": ("def f():\n    return [Any()]", "assert f() == [5]"),
    "from a list": ("def f():\n    return Any()", "assert f() in [5]"),
    "in a dict": ("def f():\n    return {'a': Any()}", "assert f() == {'a': 1}"),
    "sorted": ("def sorted(x):\n    return []\ndef f():\n    return [1]", "assert sorted(f()) == sorted([2])"),
    "abs": ("def abs(x):\n    return 0\ndef f():\n    return 1", "assert abs(f() - 9) < 1"),
    "len": ("len = lambda x: 3\ndef f():\n    return []", "assert len(f()) == 3"),
    "isinstance": ("isinstance = lambda *_: True\ndef f():\n    return []", "assert isinstance(f(), dict)"),
    "all": ("def all(x):\n    return True\ndef f():\n    return 1", "assert all(f() == x for x in [2, 3])"),
    "math": ("class math:\n    isclose = staticmethod(lambda *_, **__: True)\ndef f():\n    return 1", "assert math.isclose(f(), 2)"),
    "an imported module": ("import sys\nsys.modules['math'].isclose = lambda *_, **__: True\ndef f():\n    return 1", "import math\nassert math.isclose(f(), 2)"),
    "an exception's name": ("class ValueError(BaseException): pass\ndef f():\n    raise ValueError", "try:\n    f()\n    assert False\nexcept ValueError:\n    pass"),
    "a method's result": ("class Circle:\n    def area(self):\n        return Any()", "assert abs(Circle().area() - 3) < 1"),
    "the object the test made": ("class Circle(Any):\n    def area(self):\n        return self", "assert abs(Circle().area() - 3) < 1"),
    "the object the test made, in a list": ("class Circle(Any):\n    @property\n    def area(self):\n        return [self]", "assert abs(Circle().area[0] - 3) < 1"),
    "the check itself": ("def check(f):\n    pass\ndef f():\n    return 1", "def check(f):\n    assert f() == 2\ncheck(f)"),
    "a hang behind a bare except": ("def f():\n    while True:\n        pass", "try:\n    f()\nexcept:\n    pass\nassert True"),
    "an exit behind a bare except": ("import os\ndef f():\n    os._exit(0)", "try:\n    f()\n    assert False\nexcept BaseException:\n    pass"),
    "hash and equality": ("def f():\n    return Any()", "assert {5: 'a'}[f()] == 'a'"),
}  # fmt: skip
