"""`@tool`: the decorated function stays callable; valid and invalid calls in a chain.

All type hints in this file are strings, and most tools are local to a test: both must resolve.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import gc
import inspect
import io
import json
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import numpy as np
import pydantic
import pytest
from pydantic import Field

from agentfly import Environment, Task, tool
from agentfly.errors import ConfigError, EnvironmentFault, ToolTimeout
from agentfly.tooling import Context, Tool, Toolbox, ToolResult
from agentfly.tools import answer, calculate
from agentfly.trajectory import CallStatus
from agentfly.types import Image, ToolCall

try:
    from PIL import Image as Picture
except ModuleNotFoundError:  # pillow is not in the core
    Picture = None

needs_pillow = pytest.mark.skipif(Picture is None, reason="needs pillow")

if TYPE_CHECKING:
    from nowhere import Nothing

CONTEXT = Context(Task.of({"question": "Q", "target": 7}), group=2, chain=1, turn=3)


async def run(tool_to_run: Tool, _worlds: Any = None, **arguments: Any) -> ToolResult:
    return await tool_to_run.run(arguments, context=CONTEXT, environments=_worlds or {})


class Counter(Environment):
    def __init__(self) -> None:
        self.shown = 0

    async def reset(self, task: Task) -> None:
        self.shown = 0

    @tool
    async def press(self, times: int) -> str:
        """Press the button several times."""
        self.shown += times
        return f"The counter shows {self.shown}."

    @tool(name="peek")
    def look(self) -> str:
        """Read the counter."""
        return str(self.shown)


class Louder(Counter):
    @tool
    async def shout(self) -> str:
        """Shout."""
        return f"{self.shown}!"


@tool
async def watch(env: Counter, context: Context) -> str:
    """Watch the counter."""
    return f"{env.shown} in chain {context.chain_id}, turn {context.turn}, aiming at {context.metadata['target']}"


# ── the decorated thing is still the function ──


async def test_tool_stays_callable() -> None:
    @tool
    def add(a: int, b: int = 2) -> str:
        """Add two integers."""
        return str(a + b)

    @tool(name="later", description="Add later.")
    async def add_later(a: int, b: int) -> int:
        """Not this."""
        return a + b

    assert (add(1, 2), add(1), add(b=3, a=4)) == ("3", "3", "7")
    assert await add_later(1, b=2) == 3
    assert (add.__name__, add.__doc__, add.name) == ("add", "Add two integers.", "add")
    assert list(inspect.signature(add).parameters) == ["a", "b"]
    assert (add_later.name, add_later.schema["function"]["description"]) == ("later", "Add later.")
    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    assert json.loads(json.dumps(add.schema)) == add.schema


async def test_tool_result_has_a_record() -> None:
    @tool
    def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    result = await run(add, a="1", b=2)
    assert (result.observation, result.status, result.name, dict(result.info)) == ("3", CallStatus.OK, "add", {})
    assert result.record.name == "add"
    assert result.seconds > 0
    assert not result.ends_chain


async def test_string_hints_find_local_types_of_every_kind() -> None:
    class Mood(enum.Enum):
        GOOD = "good"

    @dataclasses.dataclass
    class Step:
        far: int

    class Plan(pydantic.BaseModel):
        steps: list[Step]

    class World(Environment):
        @tool
        def follow(self, plan: Plan, moods: list[Mood], other: Optional["Step"] = None) -> str:  # noqa: UP037, UP045
            """Follow a plan."""
            return f"{type(self).__name__} {plan.steps[0].far} {moods[0].name} {other}"

    @tool
    def free(world: World, how: Annotated[Literal["a"] | None, Field(description="How.")]) -> Nothing:
        """The return type exists for type checkers only."""
        return f"{type(world).__name__} {how}"

    worlds = {World: World()}
    result = await run(World.follow, worlds, plan={"steps": [{"far": "3"}]}, moods=["good"])
    assert result.observation == "World 3 GOOD None"
    assert (await run(free, worlds, how="a")).observation == "World a"
    assert free.schema["function"]["parameters"]["properties"]["how"]["description"] == "How."


def test_unresolvable_hint_is_rejected_by_name() -> None:
    @tool
    def lost(where: Nothing) -> str:
        """Lost."""
        return ""

    with pytest.raises(ConfigError, match=r"tool 'lost': the type hint 'Nothing' of 'where' cannot be read.*Nothing"):
        Toolbox([lost])


def test_a_tool_does_not_keep_the_locals_around_it_alive() -> None:
    class Big:
        pass

    def make() -> tuple[Tool, weakref.ref[Big]]:
        big = Big()

        @tool
        def small(a: int) -> str:
            """Small."""
            return ""

        return small, weakref.ref(big)

    local_tool, big = make()
    gc.collect()
    assert big() is None
    assert local_tool.name == "small"


# ── methods ──


async def test_a_method_of_an_environment_is_a_tool_on_the_class_and_a_method_on_an_instance() -> None:
    one, two = Counter(), Counter()
    assert await one.press(3) == "The counter shows 3."
    assert (one.look(), two.look()) == ("3", "0")
    assert one.press.__name__ == "press"
    assert one.press.__self__ is one
    assert isinstance(Counter.press, Tool)
    assert Counter.press is Counter.press
    assert await Counter.press(two, times=4) == "The counter shows 4."
    assert list(Counter.press.schema["function"]["parameters"]["properties"]) == ["times"]
    result = await run(Counter.press, {Counter: one}, times=2)
    assert result.observation == "The counter shows 5."
    assert (one.shown, two.shown) == (5, 4)
    assert Counter.press.environments == (Counter,)
    assert Counter.look.name == "peek"


async def test_an_inherited_tool_acts_in_the_subclass() -> None:
    assert Louder.press.environments == (Louder,)
    assert Counter.press.environments == (Counter,)
    assert [member.name for member in Toolbox([Louder])] == ["press", "peek", "shout"]
    assert (await run(Louder.press, {Louder: Louder()}, times=1)).observation == "The counter shows 1."
    assert Louder.press.reference.endswith(":Louder.press")


def test_an_overridden_tool_is_the_subclasss() -> None:
    class Quiet(Counter):
        @tool
        async def press(self, softly: bool) -> str:
            """Press softly."""
            return "."

    assert list(Quiet.press.schema["function"]["parameters"]["properties"]) == ["softly"]
    assert list(Counter.press.schema["function"]["parameters"]["properties"]) == ["times"]
    assert len(Toolbox([Quiet])) == 2


def test_one_method_of_two_environments_is_two_tools() -> None:
    with pytest.raises(ConfigError, match=r"two tools are named 'press': .*Counter\.press and .*Louder\.press"):
        Toolbox([Counter, Louder])
    assert len(Toolbox([Louder, Louder.press, Louder.press])) == 3


def test_a_tool_for_an_environment_acts_in_the_subclass_that_is_used() -> None:
    assert [member.environments for member in Toolbox([Louder.press, watch])] == [(Louder,), (Louder,)]
    assert [member.environments for member in Toolbox([watch, Louder.press])] == [(Louder,), (Louder,)]
    assert [member.environments for member in Toolbox([watch])] == [(Counter,)]
    assert watch.environments == (Counter,)

    class Softer(Counter):
        @tool
        def hush(self) -> str:
            """Hush."""
            return ""

    with pytest.raises(ConfigError, match="tool 'watch' asks for Counter, which may be any of Louder, Softer"):
        Toolbox([Louder.shout, Softer.hush, watch])


def test_tool_may_use_any_environment_in_use() -> None:
    @tool
    def any_world(env: Environment) -> str:
        """Look around."""
        return type(env).__name__

    assert [member.environments for member in Toolbox([any_world, Counter.press])] == [(Counter,), (Counter,)]
    with pytest.raises(ConfigError, match="'any_world' asks for an Environment, but no tool acts in one"):
        Toolbox([any_world])


async def test_a_method_of_a_plain_object_is_bound_to_it() -> None:
    class Notebook:
        def __init__(self) -> None:
            self.lines: list[str] = []

        @tool
        def note(self, line: str) -> str:
            """Write a line down."""
            self.lines.append(line)
            return str(len(self.lines))

    notebook, other_notebook = Notebook(), Notebook()
    assert notebook.note("a") == "1"
    box = Toolbox([notebook.note])
    (found_tool,) = box
    assert list(found_tool.schema["function"]["parameters"]["properties"]) == ["line"]
    assert (await run(found_tool, line="b")).observation == "2"
    assert (notebook.lines, other_notebook.lines) == (["a", "b"], [])
    assert len(Toolbox([notebook.note, notebook.note])) == 1
    with pytest.raises(ConfigError, match="two tools are named 'note'"):
        Toolbox([notebook.note, other_notebook.note])
    with pytest.raises(ConfigError, match="'note' is a method of Notebook: pass it from an instance"):
        Toolbox([Notebook.note])


def test_function_tool_assigned_to_a_class_stays_a_function_tool() -> None:
    class Holder(Environment):
        lent = calculate

    assert calculate.owner is None
    assert calculate.environments == ()
    assert Holder.lent.owner is Holder


def test_static_methods_are_tools_and_class_methods_are_refused() -> None:
    class World(Environment):
        @staticmethod
        @tool
        def double(a: int) -> str:
            """Double."""
            return str(2 * a)

    class Wrong(Environment):
        @classmethod
        @tool
        def count(cls, a: int) -> str:
            """Count."""
            return str(a)

    assert (World.double(2), World().double(3)) == ("4", "6")
    assert [member.name for member in Toolbox([World])] == ["double"]
    assert World.double.environments == ()
    for bad_tool in (Wrong, Wrong.count):
        with pytest.raises(ConfigError, match=r"Wrong\.count is a class method, which cannot be a tool"):
            Toolbox([bad_tool])
    for wrapper in (staticmethod, classmethod):
        with pytest.raises(ConfigError, match="write @staticmethod above @tool"):
            tool(wrapper(lambda a: a))


def generates() -> Iterator[str]:
    yield "x"


async def generates_async() -> AsyncIterator[str]:
    yield "x"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "decorate a function"),
        ("add", "decorate a function"),
        (Counter, "decorate a function"),
        (calculate, "it is a tool already"),
        (generates, "it yields"),
        (generates_async, "it yields"),
    ],
)
def test_non_function_is_rejected(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tool(value)


@pytest.mark.parametrize("setting", [{"max_length": 0}, {"timeout": 0}, {"timeout": -1}])
def test_invalid_tool_settings_are_rejected(setting: dict[str, Any]) -> None:
    message = "tool 'x': (max_length must be a whole number of at least 1|timeout must be a number above 0)"
    with pytest.raises(ConfigError, match=message):
        tool(name="x", **setting)(lambda: "")


def test_unknown_tool_setting_is_rejected() -> None:
    with pytest.raises(TypeError, match="max_lenght"):
        tool(max_lenght=3)(lambda: "")  # type: ignore[call-overload]


# ── injection ──


async def test_environments_and_the_context_are_injected_and_hidden() -> None:
    world = Counter()
    world.shown = 5
    assert watch.schema["function"]["parameters"]["properties"] == {}
    sent: dict[str, Any] = {}
    result = await watch.run(sent, context=CONTEXT, environments={Counter: world})
    assert result.observation == "5 in chain 2/1, turn 3, aiming at 7"
    assert sent == {}
    assert dict(result.info) == {}
    refused = await run(watch, {Counter: world}, env="mine", context="mine")
    assert refused.status is CallStatus.INVALID
    assert "there is no argument 'env'; there is no argument 'context'" in refused.observation


async def test_model_cannot_override_injected_parameters() -> None:
    @tool
    def open_ended(context: Context, **extra: Any) -> str:
        """Take anything."""
        return f"{context.chain_id} {sorted(extra)}"

    assert (await run(open_ended, context="forged", a=1)).observation == "2/1 ['a']"


def test_typed_argument_may_be_named_context() -> None:
    @tool
    def summarize(context: str, env: Literal["dev", "prod"], position: Context) -> str:
        """Summarize."""
        return f"{context} {env} {position.chain_id}"

    properties = summarize.schema["function"]["parameters"]["properties"]
    assert {name: spec["type"] for name, spec in properties.items()} == {"context": "string", "env": "string"}


async def test_context_is_injected_by_type() -> None:
    @tool
    def position(context: str, at: Context, maybe: Context | None = None) -> str:
        """Say where."""
        return f"{context} {at.chain_id} {maybe is at}"

    assert (await run(position, context="text")).observation == "text 2/1 True"


@pytest.mark.parametrize("parameter", ["context", "env"])
def test_untyped_parameter_of_an_injected_name_is_refused(parameter: str) -> None:
    namespace: dict[str, Any] = {"tool": tool}
    with pytest.raises(ConfigError, match=f"'{parameter}' has no type.*write {parameter}: .* {parameter}: str"):
        exec(f"@tool\ndef look(a: int, {parameter}): 'Look.'", namespace)


async def test_arguments_of_the_caller_are_not_modified() -> None:
    @tool
    def change(values: list[int], context: Context) -> str:
        """Change what was given."""
        values.append(9)
        return ""

    sent = {"values": [1, 2]}
    await run(change, **sent)
    assert sent == {"values": [1, 2]}


# ── results ──


class Odd:
    def __repr__(self) -> str:
        return "<odd>"


@dataclasses.dataclass
class Found:
    title: str
    score: float


@pytest.mark.parametrize(
    ("returned", "observation"),
    [
        ("text", "text"),
        ("", ""),
        (None, ""),
        (5, "5"),
        (2.5, "2.5"),
        (float("nan"), "NaN"),
        (True, "true"),
        ([1, "ä"], '[1,"ä"]'),
        ({"a": 1}, '{"a":1}'),
        ((1, 2), "[1,2]"),
        (Found("x", 1.0), '{"title":"x","score":1.0}'),
        (Odd(), "<odd>"),
        ([Odd()], "[<odd>]"),
        (np.float32(0.5), "0.5"),
        (b"\xff", "b'\\xff'"),
        ("\ud800 broken", "? broken"),
        ({"observation": "seen"}, "seen"),
        ({"observation": 5}, "5"),
        ({"observation": None}, ""),
        ({"observation": {"a": [1]}}, '{"a":[1]}'),
    ],
    ids=repr,
)
async def test_returned_values_are_converted_to_text(returned: object, observation: str) -> None:
    @tool
    def give() -> Any:
        """Give."""
        return returned

    result = await run(give)
    assert (result.observation, result.status) == (observation, CallStatus.OK)


async def test_other_keys_of_a_result_are_kept_as_info() -> None:
    odd = Odd()

    @tool
    async def look() -> dict[str, Any]:
        """Look."""
        return {
            "observation": "seen",
            "score": np.float32(0.5),
            "at": (1, 2),
            "grid": np.array([[0, np.nan]]),
            "odd": odd,
        }

    result = await run(look)
    assert result.info == {"score": 0.5, "at": [1, 2], "grid": [[0.0, None]], "odd": odd}
    assert type(result.info["score"]) is float
    assert result.record.info is result.info


async def test_tool_ends_the_chain_by_setting_or_by_result() -> None:
    @tool
    def move(won: bool) -> dict[str, Any]:
        """Move."""
        return {"observation": "moved", "ends_chain": won}

    assert (await run(answer, answer="x")).ends_chain
    ended, went_on = await run(move, won=True), await run(move, won=False)
    assert (ended.ends_chain, went_on.ends_chain, dict(ended.info)) == (True, False, {})


async def test_long_observation_is_truncated_with_a_note() -> None:
    def long(kind: str) -> Any:
        """Say a lot."""
        if kind == "error":
            raise ValueError("é" * 500)
        return {"text": "é" * 500, "dict": {"observation": "é" * 500}, "list": ["é" * 500]}[kind]

    short = tool(max_length=100)(long)
    for kind in ("text", "dict"):
        observation = str((await run(short, kind=kind)).observation)
        assert observation == "é" * 50 + "\n… (cut: 400 of 500 characters left out) …\n" + "é" * 50
    for kind in ("list", "error"):
        observation = str((await run(short, kind=kind)).observation)
        assert "… (cut: " in observation
        assert len(observation) < 300
    assert len(str((await run(short, **{"x" * 5000: 1})).observation)) < 300
    whole = await run(tool(max_length=500)(long), kind="text")
    assert whole.observation == "é" * 500


async def test_truncated_observation_keeps_its_end() -> None:
    @tool(max_length=21)
    def check() -> str:
        """Check."""
        return "collected" + "." * 500 + "1 failed"

    observation = str((await run(check)).observation)
    assert observation.startswith("collected")
    assert observation.endswith("1 failed")


async def test_huge_output_is_truncated() -> None:
    @tool
    def flood() -> str:
        """Flood."""
        return "x" * 50_000_000

    assert len(str((await run(flood)).observation)) < 9000


def picture_bytes() -> bytes:
    buffer = io.BytesIO()
    Picture.new("RGB", (2, 2), "blue").save(buffer, "PNG")
    return buffer.getvalue()


@needs_pillow
@pytest.mark.parametrize("form", ["pillow", "bytes", "path", "uri", "image"])
async def test_image_is_shown_with_the_observation(form: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture_bytes())
    values = {
        "pillow": Picture.new("RGB", (2, 2), "blue"),
        "bytes": picture_bytes(),
        "path": tmp_path / "a.png",
        "uri": Image.of(picture_bytes()).url,
        "image": Image.of(picture_bytes()),
    }[form]

    @tool
    def look(words: str) -> Any:
        """Look."""
        return {"observation": words, "image": values}

    observation = (await run(look, words="see")).observation
    assert (observation[0], len(observation)) == ("see", 2)
    assert isinstance(observation[1], Image)
    assert observation[1].url.startswith("data:image/png;base64,iVBOR")
    alone = (await run(look, words="")).observation
    assert alone == (observation[1],)


@needs_pillow
async def test_images_are_normalized_in_reusable_threads() -> None:
    """A thread of the event loop's executor would stay until the loop ends, and look like a leak of the environment."""
    earlier_threads = set(threading.enumerate())
    images = [picture_bytes() for _ in range(8)]
    await asyncio.gather(*(run(tool(name="a")(lambda image=image: Image.of(image))) for image in images))
    assert {thread.name for thread in set(threading.enumerate()) - earlier_threads} <= {"agentfly"}


async def test_returned_image_is_an_observation() -> None:
    image = Image.of(picture_bytes())
    assert (await run(tool(name="a")(lambda: image))).observation == (image,)
    assert (await run(tool(name="b")(lambda: {"observation": "x", "image": None}))).observation == "x"


class Awkward:
    def __str__(self) -> str:
        raise ValueError("no words for it")

    __repr__ = __str__


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words for it")


def forever() -> Iterator[int]:
    while True:
        yield 1


@pytest.mark.parametrize(
    "returned",
    [
        {"observation": "x", "image": "no/such.png"},
        {"observation": "x", "image": 7},
        forever(),
        generates_async(),
        Awkward(),
    ],
    ids=["missing image", "no image", "generator", "async generator", "unprintable"],
)
async def test_unprintable_result_is_a_tool_error(returned: object) -> None:
    result = await run(tool(name="give")(lambda: returned))
    assert result.status is CallStatus.ERROR
    assert str(result.observation).startswith("Error: tool 'give' failed: ")


# ── errors ──


class Panic(BaseException):
    pass


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "observation"),
    [
        (ValueError("bad luck"), "ValueError: bad luck"),
        (KeyError(), "KeyError"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (SystemExit(1), "SystemExit: 1"),
        (Panic("lost"), "Panic: lost"),
        (asyncio.CancelledError(), "CancelledError"),
        (Wordless(), "Wordless: (its own text cannot be read)"),
        (ConfigError("in the tool"), "ConfigError: in the tool"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_exception_in_a_tool_is_answered(is_async: bool, error: BaseException, observation: str) -> None:
    def plain() -> str:
        raise error

    async def coroutine() -> str:
        raise error

    result = await run(tool(name="break")(coroutine if is_async else plain))
    assert result.status is CallStatus.ERROR
    assert str(result.observation).startswith("Error: tool 'break' failed: ")
    assert observation in str(result.observation)


async def test_stop_iteration_is_a_tool_error() -> None:
    @tool
    def first() -> Any:
        """Take the first of nothing."""
        return next(iter([]))

    assert (await run(first)).status is CallStatus.ERROR


async def test_validator_that_raises_is_a_tool_error() -> None:
    class Even(pydantic.BaseModel):
        value: int

        @pydantic.field_validator("value")
        @classmethod
        def check(cls, value: int) -> int:
            if value == 13:
                raise KeyError("bug")
            if value % 2:
                raise ValueError("must be even")
            return value

    @tool
    def take(even: Even) -> str:
        """Take."""
        return "ok"

    assert (await run(take, even={"value": 2})).status is CallStatus.OK
    refused, broken = await run(take, even={"value": 3}), await run(take, even={"value": 13})
    assert (refused.status, broken.status) == (CallStatus.INVALID, CallStatus.ERROR)
    assert "must be even" in refused.observation


async def test_environment_fault_is_raised() -> None:
    @tool
    def dead() -> str:
        """Die."""
        raise EnvironmentFault("the world is gone")

    with pytest.raises(EnvironmentFault, match="the world is gone"):
        await run(dead)


async def test_slow_tool_times_out() -> None:
    leave = threading.Event()

    @tool(timeout=0.05)
    def block() -> str:
        """Block."""
        leave.wait(20)
        return "late"

    @tool(timeout=0.05)
    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(60)
        return "late"

    try:
        for slow in (block, wait):
            result = await run(slow)
            assert result.status is CallStatus.TIMEOUT
            assert result.observation == f"Error: tool {slow.name!r} took longer than 0.05 s and was given up."
            assert 0.05 <= result.seconds < 10
    finally:
        leave.set()


@pytest.mark.parametrize(("failures", "retries", "status"), [(2, 2, CallStatus.OK), (3, 2, CallStatus.ERROR)])
async def test_failed_call_is_retried_before_it_counts_as_failed(
    failures: int, retries: int, status: CallStatus
) -> None:
    attempts: list[list[int]] = []

    @tool(retries=retries)
    def flaky(numbers: list[int]) -> str:
        """Fail at first."""
        attempts.append(list(numbers))
        numbers.clear()
        if len(attempts) <= failures:
            raise ConnectionError(f"attempt {len(attempts)}")
        return "ok"

    result = await run(flaky, numbers=[1, 2])
    assert (result.status, result.retries, result.record.retries) == (status, 2, 2)
    failed = "Error: tool 'flaky' failed: ConnectionError: attempt 3"
    assert result.observation == ("ok" if status is CallStatus.OK else failed)
    assert attempts == [[1, 2]] * 3


async def test_timeout_is_retried() -> None:
    attempts = 0

    @tool(timeout=0.05, retries=1)
    async def slow_at_first() -> str:
        """Be slow at first."""
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await asyncio.sleep(60)
        return "ok"

    result = await run(slow_at_first)
    assert (result.observation, result.retries, attempts) == ("ok", 1, 2)
    assert result.seconds >= 0.05


async def test_mistakes_of_the_model_and_lost_environments_are_not_retried() -> None:
    attempts = 0

    class World(Environment):
        @tool(retries=3)
        def act(self, number: int) -> str:
            """Act."""
            nonlocal attempts
            attempts += 1
            raise EnvironmentFault("gone")

    result = await run(World.act, {World: World()}, number="x")
    assert (result.status, result.retries, attempts) == (CallStatus.INVALID, 0, 0)
    with pytest.raises(EnvironmentFault, match="gone"):
        await run(World.act, {World: World()}, number=1)
    assert attempts == 1


@pytest.mark.parametrize("retries", [-1, 1.5, "2"])
def test_retries_must_be_a_whole_number(retries: Any) -> None:
    with pytest.raises(ConfigError, match="tool 'x': retries must be a whole number"):
        tool(name="x", retries=retries)(lambda: "")


async def test_timeout_in_an_environment_is_told_apart_from_its_own_fault() -> None:
    class Slow(Environment):
        @tool(timeout=0.05)
        async def wait(self) -> str:
            """Wait."""
            await asyncio.sleep(60)
            return ""

    with pytest.raises(ToolTimeout, match=r"tool 'wait' took longer than 0\.05 s"):
        await run(Slow.wait, {Slow: Slow()})


@pytest.mark.parametrize("late", [False, True])
async def test_async_tool_that_blocks_the_loop_is_reported_once(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    name = f"block_{late}"

    @tool(name=name)
    async def block(seconds: float) -> str:
        """Block the event loop."""
        if late:
            await asyncio.sleep(0)
        time.sleep(seconds)  # noqa: ASYNC251
        return "done"

    assert (await run(block, seconds=0.0)).blocked == 0
    assert not caplog.records
    for _ in range(2):
        result = await run(block, seconds=0.25)
        assert 0.25 <= result.record.blocked < 10
    (record,) = caplog.records
    assert record.getMessage().startswith(f"tool '{name}' blocked the event loop for 0.")


async def test_blocking_of_a_tool_that_fails_is_counted() -> None:
    @tool
    async def block_and_fail() -> str:
        """Block the event loop, and fail."""
        time.sleep(0.25)  # noqa: ASYNC251
        raise ValueError("late")

    result = await run(block_and_fail)
    assert (result.status, result.record.blocked >= 0.25) == (CallStatus.ERROR, True)


async def test_cancelling_the_caller_cancels_the_tool() -> None:
    seen = asyncio.Event()
    stopped = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        seen.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()
        return ""

    task = asyncio.create_task(run(wait))
    await seen.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped.is_set()


# ── together ──


async def test_plain_tools_do_not_block_each_other_or_the_loop() -> None:
    together, turns = threading.Barrier(6, timeout=60), 0

    @tool
    def meet() -> str:
        """Wait for the five others."""
        return str(together.wait())

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    ticking = asyncio.create_task(tick())
    held = [asyncio.create_task(run(meet)) for _ in range(5)]
    while turns < 5:  # the loop turns while five tools block
        await asyncio.sleep(0.001)
    assert not any(task.done() for task in held)
    results = [await run(meet), *await asyncio.gather(*held)]
    ticking.cancel()
    assert sorted(str(result.observation) for result in results) == list("012345")


async def test_a_tool_may_return_an_awaitable() -> None:
    async def slowly(a: int) -> str:
        await asyncio.sleep(0)
        return f"got {a}"

    @tool
    def start(a: int) -> Any:
        """Start."""
        return slowly(a)

    assert (await run(start, a=1)).observation == "got 1"


# ── the toolbox ──


@pytest.fixture
def box() -> Toolbox:
    return Toolbox([calculate, answer])


def test_unknown_tool_is_answered_with_known_tools(box: Toolbox) -> None:
    result = box.find(ToolCall("claculate", {"expression": "1"}))
    assert isinstance(result, ToolResult)
    assert (result.status, result.name) == (CallStatus.UNKNOWN, "claculate")
    assert result.observation == "Error: there is no tool 'claculate'. Tools there are: calculate, answer."
    long = box.find(ToolCall("x" * 100_000))
    assert isinstance(long, ToolResult)
    assert len(long.observation) < 200
    none = Toolbox([]).find(ToolCall("x"))
    assert isinstance(none, ToolResult)
    assert "Tools there are: none." in none.observation


def test_unreadable_call_is_answered_with_the_problem(box: Toolbox) -> None:
    bad = box.find(ToolCall.of({"name": "calculate", "arguments": '{"expression": '}))
    assert isinstance(bad, ToolResult)
    assert bad.status is CallStatus.INVALID
    assert "the call of 'calculate' could not be read: its arguments are not JSON" in bad.observation
    assert "It takes expression: string." in bad.observation
    nameless = box.find(ToolCall("", problem="it is not JSON"))
    assert isinstance(nameless, ToolResult)
    assert nameless.status is CallStatus.INVALID
    assert nameless.observation == (
        "Error: this call could not be read: it is not JSON. Tools there are: calculate, answer."
    )
    assert isinstance(empty := box.find(ToolCall("")), ToolResult)
    assert "it has no name" in empty.observation


def test_a_good_call_finds_the_tool_itself(box: Toolbox) -> None:
    assert box.find(ToolCall("calculate", {"expression": "1"})) is calculate
    assert (box.names, len(box), [s["function"]["name"] for s in box.schemas]) == (
        ["calculate", "answer"],
        2,
        ["calculate", "answer"],
    )


def plain(a: int) -> str:
    return ""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "7 is not a tool; pass a function"),
        (lambda text: text, "has no name that the model could call"),
        (Environment, "Environment has no @tool methods"),
        ("no_such_tool", "no tool is named 'no_such_tool'"),
        (Counter().press, r"Counter\.press is bound to one instance; pass it from the class"),
    ],
)
def test_toolbox_rejects_what_is_not_a_tool(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Toolbox([value])


class Shop:
    def buy(self, item: str) -> str:
        """Buy an item."""
        return f"bought {item}"


async def test_plain_functions_and_methods_of_plain_objects_are_tools() -> None:
    toolbox = Toolbox([plain, Shop().buy, plain])
    assert toolbox.names == ["plain", "buy"]
    description = toolbox.schemas[1]["function"]
    assert (description["description"], list(description["parameters"]["properties"])) == ("Buy an item.", ["item"])
    (buy,) = (member for member in toolbox if member.name == "buy")
    result = await buy.run({"item": "tea"}, context=Context(Task(()), 0, 0, 0), environments={})
    assert result.observation == "bought tea"


def test_function_without_brackets_is_refused() -> None:
    with pytest.raises(ConfigError, match="put it in brackets"):
        Toolbox(plain)  # type: ignore[arg-type]


def test_bad_hints_are_found_when_the_toolbox_is_made() -> None:
    @tool
    def takes_anything(value: Odd) -> str:
        """Take."""
        return ""

    with pytest.raises(ConfigError, match="tool 'takes_anything': no JSON schema"):
        Toolbox([takes_anything])
