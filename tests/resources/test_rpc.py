"""A remote instance is used like a local one; its answers are data, and are validated."""

import abc
import asyncio
import contextlib
import functools
import importlib.util
import json
import random
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from agentfly import Environment, Task, tool
from agentfly.environment import Pool
from agentfly.errors import ConfigError, DataError, EnvironmentFault, describe
from agentfly.resources.rpc import codec
from agentfly.resources.rpc.connection import FrameProtocol, RpcConnection
from agentfly.resources.rpc.proxy import make_proxy
from agentfly.resources.rpc.server import RpcServer
from agentfly.sandbox.inside.frames import ANSWER, CANCEL, QUESTION
from agentfly.scoring import reward
from agentfly.threads import call
from agentfly.tooling import Context
from agentfly.trajectory import CallStatus
from agentfly.types import Image

TASK = Task.of({"question": "Make it show 7.", "target": 7})


class Loopback:
    """Carries requests to a server in this process."""

    def __init__(self) -> None:
        self.server = RpcServer()

    async def ask(self, request: bytes) -> bytes:
        return await self.server.answer(request)


class Odd:
    """What is not plain."""


class Strange(dict[str, int]):
    """What looks plain, and is not."""

    def items(self) -> Any:
        return 1 / 0


class Counter(Environment):
    shown = 0
    board: Any = None

    def __init__(self) -> None:
        self.log: list[str] = []
        self._secret = "hidden"

    async def reset(self, task: Task) -> None:
        self.shown, self.task = 0, task

    @tool
    async def press(self, times: int) -> str:
        """Press the given number of times."""
        self.shown += times
        return f"The counter shows {self.shown}."

    @tool(name="press_slowly")
    def plain_press(self, times: int, context: Context) -> dict[str, Any]:
        """Press, in a thread."""
        self.shown += times
        return {
            "observation": f"{self.shown} of {context.metadata['target']}",
            "thread": threading.current_thread().name,
        }

    @property
    def double(self) -> int:
        return self.shown * 2

    @property
    def broken_property(self) -> int:
        return self._nothing  # type: ignore[attr-defined, no-any-return]

    @functools.cached_property
    def costly(self) -> int:
        return 42

    def give(self, value: Any) -> Any:
        return value

    def make(self, expression: str) -> Any:
        return eval(expression)

    def let(self, name: str, expression: str) -> None:
        setattr(self, name, eval(expression))

    def drop(self, name: str) -> None:
        delattr(self, name)

    async def fail(self, expression: str) -> None:
        raise eval(expression)

    def fail_plainly(self, expression: str) -> None:
        raise eval(expression)

    def _hidden(self) -> None:
        raise AssertionError("run on the host")

    def __del__(self) -> None:
        self._secret.upper()

    def __eq__(self, other: object) -> bool:
        return self._secret == getattr(other, "_secret", None)

    __hash__ = None  # type: ignore[assignment]


class Failing(Environment):
    @tool
    def act(self) -> str:
        """Fail."""
        raise KeyError("x")


class Lazy:
    """A descriptor of the user's own."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance._hidden + 1


class Registered(Environment, abc.ABC):
    heard: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, key: str) -> None:
        Registered.heard.append(key)

    @abc.abstractmethod
    def let(self, value: int) -> None: ...


class Slotted(Registered, key="Slotted"):
    __slots__ = ("slot",)
    slot: int
    default = 1
    lazy = Lazy()

    def let(self, value: int) -> None:
        self.slot = self._hidden = value

    @staticmethod
    def constant() -> str:
        return "static"

    lazy_fixed = "static"


@pytest.fixture
async def env() -> Counter:
    return await make_proxy(Counter, Loopback())


class TestStandIn:
    async def test_proxy_is_an_instance_and_never_ran_the_constructor(self, env: Counter) -> None:
        assert isinstance(env, Counter)
        assert type(env).__name__ == "Counter"
        assert env == env
        assert env != await make_proxy(Counter, Loopback())
        assert len({env}) == 1
        assert repr(env) == "<Counter in a worker>"

    async def test_tools_run_remotely(self, env: Counter) -> None:
        await env.reset(TASK)
        context = Context(TASK)
        result = await Counter.press.run({"times": 3}, context=context, environments={Counter: env})
        assert (result.observation, env.shown) == ("The counter shows 3.", 3)
        result = await Counter.plain_press.run({"times": 4}, context=context, environments={Counter: env})
        assert (result.observation, env.shown) == ("7 of 7", 7)
        assert result.info["thread"] == "agentfly"

    async def test_tools_of_a_subclass_run_remotely(self) -> None:
        class Louder(Counter):
            async def press(self, times: int) -> str:
                return "LOUD"

        env = await make_proxy(Louder, Loopback())
        result = await Counter.press.run({"times": 3}, context=Context(TASK), environments={Counter: env})
        assert result.observation == "LOUD"

    async def test_free_tools_and_rewards_read_mirrored_attributes(self, env: Counter) -> None:
        @tool
        async def peek(env: Counter) -> str:
            """Look."""
            return str(env.shown)

        @tool
        def peek_in_a_thread(env: Counter) -> str:
            """Look, and call."""
            return f"{env.shown} {env.double} {env.give('x')}"

        @reward
        def reached(env: Counter, target: int) -> float:
            return float(env.shown == target and env.double == 2 * target and env.task.columns["target"] == target)

        await env.reset(TASK)
        await env.press(7)
        run = functools.partial(run_tool, env)
        assert (await run(peek)).observation == "7"
        assert (await run(peek_in_a_thread)).observation == "7 14 x"
        assert await call(reached.function, env, 7) == 1.0

    async def test_plain_method_in_event_loop_is_rejected(self, env: Counter) -> None:
        with pytest.raises(RuntimeError, match=r"Counter\.give .* make the caller a plain function"):
            env.give(1)
        with pytest.raises(RuntimeError, match=r"Counter\.double"):
            _ = env.double
        assert await call(env.give, 1) == 1

    async def test_properties(self, env: Counter) -> None:
        await env.press(2)
        assert await call(lambda: (env.double, env.costly, env.costly)) == (4, 42, 42)
        for _ in range(2):
            with pytest.raises(AttributeError, match=r"broken_property.*reading it raised AttributeError.*_nothing"):
                await call(lambda: env.broken_property)

    async def test_private_attributes_are_unavailable(self, env: Counter) -> None:
        for name in ("_secret", "_hidden"):
            with pytest.raises(AttributeError, match=f"Counter.{name} is private.*give Counter a method"):
                getattr(env, name)

    async def test_setting_an_attribute_is_rejected(self, env: Counter) -> None:
        with pytest.raises(AttributeError, match=r"Counter\.shown .* cannot be set from here; give Counter a method"):
            env.shown = 3
        with pytest.raises(AttributeError, match="cannot be set"):
            del env.log

    async def test_mirror_follows_changes_and_deletions(self, env: Counter) -> None:
        assert env.log == []
        await call(env.let, "log", "['a', ('b',)]")
        assert env.log == ["a", ("b",)]
        await call(env.let, "extra", "1")
        assert env.extra == 1  # type: ignore[attr-defined]
        await call(env.drop, "extra")
        with pytest.raises(AttributeError, match="no attribute 'extra'"):
            _ = env.extra  # type: ignore[attr-defined]

    async def test_unmirrored_attribute_raises_despite_class_default(self, env: Counter) -> None:
        assert env.board is None
        await call(env.let, "board", "Odd()")
        with pytest.raises(AttributeError, match=r"Counter\.board cannot leave its worker: it is a Odd; give Counter"):
            _ = env.board
        await call(env.let, "board", "'x' * (2 << 20)")
        with pytest.raises(AttributeError, match=r"Counter\.board .* too big to be mirrored.*give Counter a method"):
            _ = env.board
        assert len(await call(lambda: env.board)) == 2 << 20
        await call(env.let, "board", "[1]")
        assert env.board == [1]

    async def test_unusual_attributes_break_no_answer(self, env: Counter) -> None:
        await call(env.let, "strange", "Strange(a=1)")
        with pytest.raises(AttributeError, match="looking at it raised ZeroDivisionError"):
            _ = env.strange  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="isidentifier"):
            await call(env.let, "__dict__", "{'_secret': 'x', 3: 4}")

    async def test_mirrored_attribute_never_hides_a_method(self, env: Counter) -> None:
        await call(env.let, "press", "3")
        assert asyncio.iscoroutinefunction(env.press)

    async def test_late_and_lost_answers_lose_no_attribute(self) -> None:
        class Wild(Loopback):
            held: asyncio.Event | None = None
            answered = 0

            async def ask(self, request: bytes) -> bytes:
                answer = await super().ask(request)
                self.answered += 1
                if self.held is not None:
                    await self.held.wait()
                return answer

        wild = Wild()
        env = await make_proxy(Counter, wild)
        wild.held, wild.answered = asyncio.Event(), 0
        late, lost = asyncio.create_task(env.press(1)), asyncio.create_task(env.press(1))
        while wild.answered < 2:
            await asyncio.sleep(0)
        lost.cancel()
        held, wild.held = wild.held, None
        assert env.shown == 0
        await env.press(1)
        assert env.shown == 3
        held.set()
        assert await late == "The counter shows 1."
        assert env.shown == 3

    async def test_proxy_cannot_be_copied_or_pickled(self, env: Counter) -> None:
        with pytest.raises(
            ConfigError, match=r"what Counter\.give is given cannot be sent to a worker.*lives in a worker"
        ):
            await call(env.give, env)

    async def test_unusual_classes(self) -> None:
        env = await make_proxy(Slotted, Loopback())
        await call(env.let, 5)
        assert (env.slot, env.default, env.lazy_fixed) == (5, 1, "static")
        assert await call(lambda: env.lazy) == 6
        assert Registered.heard == ["Slotted"]


async def run_tool(env: Counter, value: Any) -> Any:
    return await value.run({}, context=Context(TASK), environments={Counter: env})


class TestErrors:
    @pytest.mark.parametrize(
        ("expression", "kind", "message"),
        [
            ("ValueError('bad')", ValueError, "ValueError: bad"),
            ("KeyError('x')", KeyError, "KeyError: 'x'"),
            ("OSError(5, 'gone')", OSError, "OSError: [Errno 5] gone"),
            ("FileNotFoundError(2, 'gone', 'f')", FileNotFoundError, "FileNotFoundError: [Errno 2] gone: 'f'"),
            ("json.JSONDecodeError('m', 'd', 0)", ValueError, "JSONDecodeError: m: line 1 column 1 (char 0)"),
            ("b'\\xff'.decode()", ValueError, "UnicodeDecodeError: 'utf-8' codec can't decode"),
            ("TimeoutError()", TimeoutError, "TimeoutError"),
            ("EnvironmentFault('died')", EnvironmentFault, "EnvironmentFault: died"),
            ("DataError('row 3')", DataError, "DataError: row 3"),
            ("SystemExit(3)", RuntimeError, "RuntimeError: SystemExit: 3"),
            ("KeyboardInterrupt()", Exception, "KeyboardInterrupt"),
            ("asyncio.CancelledError()", RuntimeError, "RuntimeError: CancelledError"),
            ("ExceptionGroup('g', [ValueError(1)])", Exception, "ExceptionGroup: g (1 sub-exception)"),
        ],
    )
    async def test_errors_keep_type_and_text(self, env: Counter, expression: str, kind: Any, message: str) -> None:
        with pytest.raises(kind) as caught:
            await env.fail(expression)
        assert describe(caught.value).startswith(message)
        assert "Where the instance lives" in caught.value.__notes__[0]
        if "Interrupt" not in expression and "Group" not in expression:
            with pytest.raises(kind):
                await call(env.fail_plainly, expression)

    async def test_tool_error_is_sent_to_the_model(self) -> None:
        env = await make_proxy(Failing, Loopback())
        result = await Failing.act.run({}, context=Context(TASK), environments={Failing: env})
        assert result.status is CallStatus.ERROR
        assert result.observation == "Error: tool 'act' failed: KeyError: 'x'"

    async def test_constructor_error(self) -> None:
        class Bad(Environment):
            def __init__(self) -> None:
                raise ValueError("no world")

        with pytest.raises(ValueError, match="no world"):
            await make_proxy(Bad, Loopback())

    async def test_unpicklable_argument_is_rejected(self, env: Counter) -> None:
        with pytest.raises(
            ConfigError, match=r"what Counter\.give is given cannot be sent to a worker: TypeError.*lock"
        ):
            await call(env.give, threading.Lock())

    @pytest.mark.parametrize(
        ("expression", "named"),
        [
            ("Odd()", "a Odd"),
            ("{'a': [Odd()]}", "a dict with a Odd in it"),
            ("(x for x in ())", "a generator"),
            ("namedtuple('Point', 'x')(1)", "a Point"),
            ("'x' * (33 << 20)", "more than 32768 KB"),
            ("'\\0' * (8 << 20)", "more than 32768 KB"),
            ("'\u4e00' * (12 << 20)", "more than 32768 KB"),
            ("set(range(20_000))", "more than 10000 set members"),
            ("np.array([Odd()])", "a ndarray"),
            ("(lambda a: a.append(a) or a)([])", "a list that contains itself, or is nested too deep"),
        ],
    )
    async def test_unserializable_return_value_is_an_error(self, env: Counter, expression: str, named: str) -> None:
        with pytest.raises(TypeError) as caught:
            await call(env.make, expression)
        assert f"Counter.make returned {named}" in str(caught.value)
        assert "cannot leave its worker; return text, numbers, lists, dicts, bytes or images" in str(caught.value)

    async def test_images_and_arrays(self, env: Counter) -> None:
        image = await call(env.make, "Pillow.new('RGB', (2, 2))")
        assert image == Image.of(Pillow.new("RGB", (2, 2)))
        array = await call(env.make, "np.arange(6, dtype='f4').reshape(2, 3)")
        assert (array.dtype, array.tolist()) == (np.float32, [[0, 1, 2], [3, 4, 5]])
        array[0] = 9
        number = await call(env.make, "np.int64(3)")
        assert isinstance(number, np.int64)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.just(TASK),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.sampled_from(["!bytes", "!"]), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.binary())
    ),
    max_leaves=20,
)


class TestPlain:
    @given(PLAIN)
    def test_reads_back_to_an_equal_value(self, value: Any) -> None:
        back = codec.read(codec.write(value).encode("utf-8", "surrogatepass"))
        assert back == value
        assert type(back) is type(value)

    def test_huge_numbers_and_half_surrogates(self) -> None:
        for value in (10**5000, -(10**5000), "\ud800", float("inf")):
            assert codec.read(codec.write(value).encode("utf-8", "surrogatepass")) == value

    @pytest.mark.parametrize(
        "data",
        [
            '{"!bytes": "@"}',
            '{"!bytes": 3}',
            '{"!nothing": []}',
            '{"!tuple": 3}',
            '{"!tuple": [], "a": 1}',
            '{"!dict": [[[], 1]]}',
            '{"!dict": [1]}',
            '{"!set": [[]]}',
            '{"!Image": [3]}',
            '{"!Task": []}',
            '{"!array": ["O8", [1], "AAAAAAAAAAA="]}',
            '{"!array": ["<f8", [1000000000], ""]}',
            '{"!array": ["<f8", [0, "x"], ""]}',
            '{"!array": [3]}',
            '{"!int": "zz"}',
            json.dumps({"!set": list(range(10_001))}),
            json.dumps([{"!set": list(range(6000))}, {"!set": list(range(6000))}]),
            "[" * 100_000,
            "9" * 10_000,
            "",
            "\xff\xfe",
        ],
    )
    def test_malformed_data_is_rejected(self, data: str) -> None:
        with pytest.raises(codec.Malformed):
            codec.read(data.encode("latin-1"))

    async def test_a_hostile_answer_is_a_fault_never_a_crash(self) -> None:
        dice = random.Random(0)

        class Hostile(Loopback):
            hostile = False

            async def ask(self, request: bytes) -> bytes:
                answer = bytearray(await super().ask(request))
                for _ in range(dice.randrange(1, 6) if self.hostile else 0):
                    position = dice.randrange(len(answer))
                    if dice.random() < 0.5:
                        answer[position] = dice.choice(b'{}[]",:!0a\xff\\')
                    else:
                        del answer[position : position + dice.randrange(20)]
                return bytes(answer)

        hostile = Hostile()
        env = await make_proxy(Counter, hostile)
        hostile.hostile, refused, strangers = True, 0, list[Exception]()
        for _ in range(1500):
            try:
                await env.fail("ValueError('x')") if dice.random() < 0.3 else await env.press(1)
            except EnvironmentFault:
                refused += 1
            except Exception as error:
                strangers += [] if hasattr(error, "__notes__") else [error]
        assert not strangers
        assert refused > 300
        assert type(vars(env)["_remote"]).__name__ == "Remote"

    @pytest.mark.parametrize(
        "answer",
        [
            {},
            [],
            3,
            {"value": 1},
            {"value": 1, "version": "x", "attributes": {}},
            {"value": 1, "version": 1, "attributes": []},
            {"value": 1, "version": 1, "attributes": {"a": 3}},
            {"error": 3, "version": 1, "attributes": {}},
            {"error": {"classes": [], "text": "", "trace": ""}, "version": 1, "attributes": {}},
            {"error": {"classes": ["a"], "text": 3, "trace": ""}, "version": 1, "attributes": {}},
            {"error": {"classes": ["\0"], "text": "", "trace": ""}, "version": 1, "attributes": {}},
        ],
    )
    async def test_malformed_answer_is_a_fault(self, answer: Any) -> None:
        class Liar:
            async def ask(self, _: bytes) -> bytes:
                return json.dumps(answer).encode()

        with pytest.raises(EnvironmentFault, match=r"the answer of Counter\(\) cannot be read"):
            await make_proxy(Counter, Liar())

    async def test_answer_cannot_modify_proxy_internals(self) -> None:
        class Liar:
            async def ask(self, _: bytes) -> bytes:
                names = {name: {"value": 1} for name in ("_remote", "__class__", "press", "double", "pool")}
                return json.dumps({"value": 1, "version": 1, "attributes": names}).encode()

        env = await make_proxy(Counter, Liar())
        assert isinstance(env, Counter)
        assert await env.press(1) == 1  # type: ignore[comparison-overlap]

    async def test_a_hostile_mirror_does_not_fill_the_memory(self) -> None:
        class Flood:
            questions = 0

            async def ask(self, _: bytes) -> bytes:
                self.questions += 1
                flood = {f"a{self.questions}": {"value": "x" * 100_000}}
                return json.dumps({"value": 1, "version": self.questions, "attributes": flood}).encode()

        flood = Flood()
        env = await make_proxy(Counter, flood)
        results = await asyncio.gather(*(env.press(1) for _ in range(50)), return_exceptions=True)
        assert "more attributes than an instance may have mirrored" in str(results[-1])
        assert len(vars(env)) < 15


class TestLine:
    async def test_oversized_frame_closes_the_connection(self) -> None:
        import socket

        host_end, worker_end = socket.socketpair()

        async def why() -> str:
            return "it is gone"

        line = await RpcConnection.open(host_end, why)
        question = asyncio.create_task(line.ask(b"x"))
        await asyncio.sleep(0)
        with worker_end:
            worker_end.sendall(b"\xff\xff\xff\xffA")
            with pytest.raises(EnvironmentFault, match="it sent a frame of 4294967295 bytes"):
                await question
            with pytest.raises(EnvironmentFault, match="it sent a frame"):
                await line.ask(b"x")
        assert line.broken

    async def test_unexpected_answers_are_ignored(self) -> None:
        class Deaf(FrameProtocol):
            limits: ClassVar = {QUESTION: 100, CANCEL: 100}

            def __init__(self) -> None:
                super().__init__()
                self.kinds: list[bytes] = []

            def on_frame(self, kind: bytes, number: int, payload: bytes) -> None:
                self.kinds.append(kind)
                self.send(ANSWER, number + 99, b"stray")
                self.send(ANSWER, number, payload.upper())

            def on_close(self) -> None:
                pass

        import socket

        host_end, worker_end = socket.socketpair()

        async def why() -> str:
            return "it is gone"

        line = await RpcConnection.open(host_end, why)
        _, deaf = await asyncio.get_running_loop().create_unix_connection(Deaf, sock=worker_end)
        assert await asyncio.gather(line.ask(b"a"), line.ask(b"b")) == [b"A", b"B"]
        given_up = asyncio.create_task(line.ask(b"c"))
        await asyncio.sleep(0)
        given_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await given_up
        assert await line.ask(b"d") == b"D"
        assert deaf.kinds == [QUESTION, QUESTION, QUESTION, CANCEL, QUESTION]
        deaf.close()
        with pytest.raises(EnvironmentFault, match="it is gone"):
            await line.ask(b"e")


FAR = """
import asyncio, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pydantic", "numpy", "httpx", "tests", "far_world", "far_help", "recipe_world"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Refuse())
from agentfly.resources.rpc.server import RpcServer
async def main():
    server = RpcServer()
    while size := sys.stdin.buffer.read(4):
        answer = await server.answer(sys.stdin.buffer.read(int.from_bytes(size, "big")))
        sys.stdout.buffer.write(len(answer).to_bytes(4, "big") + answer)
        sys.stdout.buffer.flush()
asyncio.run(main())
"""


class Far:
    """A Python that has AgentFly and cloudpickle, and nothing else."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", FAR], stdin=-1, stdout=-1, cwd="/")

    async def ask(self, request: bytes) -> bytes:
        return await asyncio.to_thread(self._ask, request)

    def _ask(self, request: bytes) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(len(request).to_bytes(4, "big") + request)
        self.process.stdin.flush()
        return self.process.stdout.read(int.from_bytes(self.process.stdout.read(4), "big"))


@pytest.fixture
def far() -> Any:
    transport = Far()
    with transport.process:
        yield transport
        assert transport.process.stdin is not None
        transport.process.stdin.close()


WORLD = """
from agentfly import Context, Environment, tool
from agentfly.environment import Pool

import WORLD_HELP

FACTOR = 3

@tool
def double(x: int) -> int:
    "Double."
    return 2 * x

def helper(x):
    return double(x) * FACTOR * WORLD_HELP.one()

class World(Environment):
    pool = Pool(max_instances=3)
    @tool
    async def act(self, x: int, context: "Context") -> str:
        "Act."
        self.last = helper(x)
        return f"{self.last} {type(self).__module__} {context.chain_id} {self.pool.max_instances}"
"""


class TestShipping:
    async def test_class_of_unreachable_file_is_sent_by_value(self, far: Far, tmp_path: Path, monkeypatch: Any) -> None:
        (tmp_path / "far_world.py").write_text(WORLD.replace("WORLD_HELP", "far_help"))
        (tmp_path / "far_help.py").write_text("def one():\n    return 1")
        monkeypatch.syspath_prepend(tmp_path)
        import far_world  # type: ignore[import-not-found]

        env = await make_proxy(far_world.World, far, everything=True)
        result = await far_world.World.act.run({"x": 2}, context=Context(TASK), environments={far_world.World: env})
        assert (result.observation, env.last) == ("12 far_world 0/0 None", 12)

    async def test_recipe_class_is_sent_by_value(self, far: Far, tmp_path: Path, monkeypatch: Any) -> None:
        (tmp_path / "world.py").write_text(WORLD.replace("WORLD_HELP", "recipe_help"))
        (tmp_path / "recipe_help.py").write_text("def one():\n    return 1")
        monkeypatch.syspath_prepend(tmp_path)
        spec = importlib.util.spec_from_file_location("recipe_world", tmp_path / "world.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "recipe_world", module)
        spec.loader.exec_module(module)
        env = await make_proxy(module.World, far)
        assert (await env.act(2, Context(TASK))).startswith("12 recipe_world")

    async def test_class_defined_in_a_function(self, far: Far) -> None:
        class Local(Environment):
            pool = Pool(max_instances=2)

            @tool
            async def act(self) -> str:
                """Act."""
                return type(self).__qualname__

        env = await make_proxy(Local, far, everything=True)
        assert (await env.act()).endswith("Local")

    async def test_unpicklable_class_is_rejected(self) -> None:
        lock = threading.Lock()

        class Locked(Environment):
            async def act(self) -> None:
                lock.acquire()

        with pytest.raises(ConfigError, match=r"Locked cannot be sent to a worker: TypeError.*lock"):
            await make_proxy(Locked, Loopback())


def test_serving_needs_nothing_but_the_standard_library() -> None:
    program = "import sys, agentfly.resources.rpc.connection; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    allowed = {*sys.stdlib_module_names, "agentfly", "sitecustomize"}  # Debian's Python has a sitecustomize
    assert {name for name in loaded if not name.startswith("_")} <= allowed


async def test_blocking_calls_end_with_their_loop() -> None:
    class Silent(Loopback):
        async def ask(self, request: bytes) -> bytes:
            if b"give" in request:
                await asyncio.sleep(3600)
            return await super().ask(request)

    faults: list[Exception] = []
    threads: list[threading.Thread] = []

    def use(env: Counter) -> None:
        try:
            env.give(1)
        except EnvironmentFault as fault:
            faults.append(fault)

    async def main() -> Counter:
        env = await make_proxy(Counter, Silent())
        threads.append(threading.Thread(target=use, args=(env,)))
        threads[0].start()
        await asyncio.sleep(0.05)
        return env

    env = await asyncio.to_thread(asyncio.run, main())
    await asyncio.to_thread(threads[0].join, 60)
    assert len(faults) == 1
    with pytest.raises(EnvironmentFault, match="does not run any more"):
        await asyncio.to_thread(env.give, 1)


_USED_BY_EXPRESSIONS = (Odd, Strange, namedtuple, np, Pillow, json)
