"""Parsers of model text take time linear in its length.

`re` and `json` hold the GIL: while a quadratic pattern works through one repetitive reply, no other chain runs and no
timeout fires. The parsers are discovered (every tool-call parser, every agent that overrides `parse`, every reward that
reads model text), and so are the markers they are tested with: the string constants of their modules.
"""

import ast
import asyncio
import contextlib
import functools
import importlib
import inspect
import math
import pkgutil
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

import agentfly.agents
import agentfly.rewards
import agentfly.templates.parsers
from agentfly import plugins
from agentfly.agent import BaseAgent
from agentfly.agents.gui_formats import GUI_FORMATS
from agentfly.agents.vision import GUIAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.environments import shell, sql
from agentfly.environments.judge import Judge, Marks, Ruling
from agentfly.environments.search import engines
from agentfly.environments.shell import Shell
from agentfly.environments.shell.environment import equal_output, text_similarity
from agentfly.environments.sql import SQL, database
from agentfly.environments.sql.environment import extract_query
from agentfly.errors import ConfigError
from agentfly.scoring import OFFERED, Reward
from agentfly.segment import Author, Segment
from agentfly.templates.parsers.registry import PARSERS as TURN_PARSERS
from agentfly.tooling import tool
from agentfly.trajectory import StopReason, Trajectory, TurnRecord
from agentfly.types import Completion, FinishReason, Message, Task

SIZE = 25_000
RATIO = 3.0
FLOOR = 0.05
"""Seconds of CPU at 2 * SIZE characters below which a ratio is noise. A quadratic parser needs seconds there."""
PAIRS = 24
"""Combinations of two fragments per parser, drawn with a fixed seed."""
FILLERS = (" ", "\n", "a", '"')
"""Repeated after every fragment."""
COMMON = (
    *('"', "'", "`", "\\", "{", "}", "[", "]", "(", ")", "<", ">", ",", ";", "#", "$", ".", "-"),
    *(" ", "\n", "\t", " \n", "\r\n", "7", "1.", "1e", "a", "a ", "the ", "é", "\u2028", "\\u", "\\\n"),
    *('{"a":', '["', "{'", "''", "f(", "f(a=", '{"name": "f", "arguments": {}}', '{"name": "f"'),
    *("```", "```\n", "\n```\n", "```python\n", "```json\n", "<code>", "</code>", "<action>", "</action>"),
    *("<answer>", "</answer>", "<think>", "</think>", "<answer>4</answer>", "\\boxed{", "/*", "--", "select ", "as ("),
    *("\nAction:", "Action: f\n", "Input: ", "Input: {", "\nFinal Answer:", "Thought: ", "Observation:"),
)
COLUMNS: dict[str, Any] = {
    "answer": "42",
    "tests": ["assert True"],
    "cases": [{"stdin": "", "expected": "1"}],
}
"""Values of the dataset columns that rewards require."""


def submodules(package: ModuleType) -> Iterator[ModuleType]:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(module.name)


def subclasses(of: type) -> Iterator[type]:
    for subclass in of.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


@functools.cache
def markers(file: str) -> tuple[str, ...]:
    """The string constants of a module that are neither prose nor names, with the escapes of patterns removed."""
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    marks = (text for text in constants if not text.isidentifier() and not re.search(r"[a-z] \w+ [a-z]", text))
    plain = (re.sub(r"\\([^\w\s])", r"\1", text) for text in marks)
    pieces = (piece for text in plain for piece in (text, *text.split("…")))
    return tuple(dict.fromkeys(piece for piece in pieces if piece.strip() and len(piece) < 100))


# ── what is tested ──


@tool
def act(text: str) -> str:
    """Do something."""
    return text


def click_at(x: int, y: int) -> str:
    """Click.

    x, y: thousandths of the screen.
    """
    return ""


def agent_parsers() -> dict[str, tuple[Callable[[str], object], str]]:
    list(submodules(agentfly.agents))
    parsing_agents = [
        kind for kind in subclasses(BaseAgent) if "parse" in vars(kind) and kind.__module__.startswith("agentfly.")
    ]
    parsers = {
        kind.__name__: (kind(tools=[act], template="chatml", backend=ScriptedBackend("x")).parse, inspect.getfile(kind))
        for kind in parsing_agents
        if kind is not GUIAgent  # its formats are tested by themselves
    }
    for name, (kind, coordinates) in GUI_FORMATS.items():
        parsers[name] = (kind([tool(click_at)], coordinates).parse, inspect.getfile(kind))
    return parsers


def turn_parsers() -> dict[str, tuple[Callable[[str], object], str]]:
    modules = list(submodules(agentfly.templates.parsers))
    home = {id(parser): module.__file__ for module in modules for parser in vars(module).values() if callable(parser)}
    home |= {id(module.read): module.__file__ for module in modules if hasattr(module, "read")}
    return {name: (read, str(home[id(read)])) for name, read in TURN_PARSERS.items()}


def environment_for(kind: type) -> Any:
    """An environment for a reward. What answers in another process or on a server is replaced by a stand-in."""
    if issubclass(kind, SQL):
        env = kind()
        asyncio.run(env.reset(Task.of(kind.draw_tasks(count=1)[0], "0")))
        return env
    stand_in = MagicMock(spec=kind)
    if issubclass(kind, Judge):
        stand_in.max_characters = kind.max_characters
        stand_in.evaluate.side_effect = lambda messages, schema: (
            Marks(reason="", points=1) if schema is Marks else Ruling(reason="", correct=True)
        )
    if issubclass(kind, Shell):
        stand_in.evaluate.side_effect = lambda _: {"match": True, "similarity": 1.0}
    return stand_in


def trajectory_of(text: str) -> Trajectory:
    task = Task.of({"question": "?", "dataset": "basic_arithmetic"}, "0")  # for reasoning_gym_score
    segment = Segment()
    segment.append(Author.TASK, [1], task.messages, turn=0)
    segment.append_completion(Completion((2,), (0.0,), (0,), FinishReason.STOP), Message("assistant", text), turn=0)
    return Trajectory(task, (segment.seal(),), (TurnRecord(FinishReason.STOP),), StopReason.ANSWER, text)


def reward_parsers() -> dict[str, tuple[Callable[[str], object], str]]:
    """The general rewards and those of environments, as far as they read what the model wrote."""
    general = [value for module in submodules(agentfly.rewards) for value in vars(module).values()]
    of_environments = [plugin.load() for plugin in plugins.list_plugins(plugins.REWARDS)]
    rewards = {reward.name: reward for reward in (*general, *of_environments) if isinstance(reward, Reward)}
    model_text = {"prediction", "final_response", "trajectory", "messages"}
    return {
        name: (as_parser(reward), inspect.getfile(reward.function))
        for name, reward in rewards.items()
        if model_text & set(reward.parameters)
    }


def as_parser(reward: Reward) -> Callable[[str], object]:
    @functools.cache
    def environments() -> dict[str, Any]:
        return {name: environment_for(kind) for name, kind in reward.environments.items()}

    def score(text: str) -> object:
        trajectory = trajectory_of(text)
        offered = {"prediction": text, "final_response": text, "trajectory": trajectory, "task": trajectory.task}
        offered |= {"messages": trajectory.messages, **COLUMNS, **environments()}
        required = [p.name for p in reward.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        missing = [name for name in required if name not in offered]
        assert not missing, f"add a sample of {', '.join(missing)} to COLUMNS for the reward {reward.name}"
        arguments = {name: offered[name] for name in reward.parameters if name in (*required, *OFFERED, "answer")}
        returned = reward.function(**arguments)
        return asyncio.run(returned) if inspect.iscoroutine(returned) else returned

    return score


PARSERS = {**turn_parsers(), **agent_parsers(), **reward_parsers()}


# ── the measurement ──


def texts(name: str, file: str) -> Iterator[tuple[str, Callable[[int], str]]]:
    """Descriptions of repetitive texts, each with a function that makes one of a given size."""
    fragments = list(dict.fromkeys((*COMMON, *markers(file))))
    for one in fragments:
        yield repr(one), lambda size, one=one: (one * (size // len(one) + 1))[:size]
        for filler in FILLERS:
            yield f"{one!r} before {filler!r}", lambda size, one=one, filler=filler: one + filler * (size - len(one))
    draw = random.Random(name)
    module_markers = markers(file) or COMMON
    for number in range(PAIRS):
        one, other = draw.choice(module_markers), draw.choice(fragments)
        one, other = (one, other) if number % 2 else (other, one)
        both = one + other
        yield repr(both), lambda size, both=both: (both * (size // len(both) + 1))[:size]
        yield f"{one!r} before {other!r}", lambda size, one=one, other=other: one + other * (size // len(other))
        yield (
            f"{one!r}, then {other!r}",
            lambda size, one=one, other=other: one * (size // 2 // len(one)) + other * (size // 2 // len(other)),
        )


def cpu_seconds(parse: Callable[[str], object], text: str) -> float:
    started = time.process_time()
    parse(text)
    return time.process_time() - started


def check_linear(parse: Callable[[str], object], name: str, file: str, size: int = SIZE, floor: float = FLOOR) -> None:
    for what, text in texts(name, file):
        double = cpu_seconds(parse, text(2 * size))
        if double <= floor:
            continue
        single = math.inf
        for number in range(10):  # a busy machine only adds to a time: the least of three rounds, or of ten
            single = min(single, cpu_seconds(parse, text(size)))
            double = min(double, cpu_seconds(parse, text(2 * size)))
            if number >= 2 and double <= max(floor, RATIO * single):
                break
        measured = f"{single:.3f} s for {size} characters, {double:.3f} s for {2 * size}"
        assert double <= max(floor, RATIO * single), f"{name}, {what}: {measured}"


@pytest.mark.parametrize("name", PARSERS)
def test_parser_takes_linear_time(name: str) -> None:
    parse, file = PARSERS[name]
    try:
        parse("42")
    except ConfigError as error:
        pytest.skip(str(error))  # an extra is not installed
    check_linear(parse, name, file)


# ── other text from models and tools ──


@pytest.mark.parametrize(
    ("parse", "module"),
    [
        (extract_query, sql.environment),
        (lambda text: equal_output(text, "42", ordered=False), shell.environment),
        (lambda text: text_similarity(text, "42"), shell.environment),
        (engines.strip_markup, engines),
    ],
)
def test_text_of_environments_takes_linear_time(parse: Callable[[str], object], module: ModuleType) -> None:
    assert module.__file__
    check_linear(parse, module.__name__, module.__file__)


def test_sql_query_takes_linear_time() -> None:
    copy = database.Database(database.build_image(lambda empty: empty.execute("create table t (a)")), seconds=2)

    def run(query: str) -> None:
        with contextlib.suppress(database.QueryFailed):
            copy.run(query, 10)

    assert database.__file__
    check_linear(run, "sql", database.__file__, size=database.MAX_QUERY_LENGTH // 2, floor=0.02)
    copy.close()
