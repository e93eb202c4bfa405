"""`@tool`: a function, or a method of an environment, that the model may call.

The decorated thing stays a callable function. What the model sees is a schema made from the type hints and the
docstring; what the model sends is checked and coerced by pydantic before the function sees it. The model's mistakes are
answered with an observation that says what is wrong and what exists; a bug in the tool's own code is a tool fault.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints, overload

from agentfly.environment import Environment
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.registry import Registry
from agentfly.schema import Arguments
from agentfly.threads import call
from agentfly.trajectory import CallRecord, CallStatus, chain_id
from agentfly.types import Content, Image, Task, ToolCall

MAX_LENGTH = 8192
TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Context:
    """Where in a run a tool or reward is called. Asked for by naming a parameter `context`."""

    task: Task
    group: int = 0
    chain: int = 0
    turn: int = 0

    @property
    def chain_id(self) -> str:
        return chain_id(self.group, self.chain)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The columns of the task."""
        return self.task.columns


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call came to."""

    observation: Content
    """What the model is shown."""
    status: CallStatus = CallStatus.OK
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else the tool returned; recorded, not shown."""
    ends_chain: bool = False
    name: str = ""
    """The tool, or the name the model made up."""
    seconds: float = 0.0

    @property
    def record(self) -> CallRecord:
        return CallRecord(self.name, self.status, self.seconds, self.info)


class Tool:
    """A function the model may call. Call it as the function it is; `run` is how a chain calls it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        max_length: int = MAX_LENGTH,
        ends_chain: bool = False,
        timeout: float | None = TIMEOUT,
        namespace: Mapping[str, Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name: str = name or function.__name__
        self.max_length, self.ends_chain, self.timeout = max_length, ends_chain, timeout
        self.owner: type[Environment] | None = None
        """The environment whose method this is; None for a function."""
        self._description, self._namespace = description, namespace
        if max_length < 1 or (timeout is not None and timeout <= 0):
            raise ConfigError(f"tool {self.name!r}: max_length and timeout must be above 0 (timeout=None: no limit)")
        TOOLS.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        if issubclass(owner, Environment):
            self.owner = owner

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is not None:
            return functools.partial(self.function, instance)
        if not issubclass(owner, Environment) or owner is self.owner:
            return self
        inherited = copy.copy(self)  # Sub.press acts in a Sub, not in the class that defines press
        inherited.owner = owner
        inherited.__dict__.pop("arguments", None)
        inherited.__dict__.pop("injected", None)
        return inherited

    def __repr__(self) -> str:
        return f"<tool {self.name} of {self.function.__module__}.{self.function.__qualname__}>"

    @property
    def reference(self) -> str:
        """`module:qualified.name`, which finds the tool unambiguously."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    @functools.cached_property
    def injected(self) -> dict[str, type[Environment] | None]:
        """Parameters the model never sees: each with its environment type, or None for `context`."""
        out: dict[str, type[Environment] | None] = {}
        for position, (name, hint) in enumerate(self._hints().items()):
            if self.owner is not None and position == 0:
                out[name] = self.owner
            elif inspect.isclass(hint) and issubclass(hint, Environment):
                out[name] = hint
            elif name == "context":
                out[name] = None
        return out

    @functools.cached_property
    def environments(self) -> tuple[type[Environment], ...]:
        """The environment types a call needs, in the order in which they are locked."""
        kinds = {kind for kind in self.injected.values() if kind is not None}
        return tuple(sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"))

    @functools.cached_property
    def arguments(self) -> Arguments:
        """What the model may send."""
        return Arguments.of(self.name, self.function, self._hints(), hidden=set(self.injected))

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI function format."""
        description = self._description if self._description is not None else self.arguments.description
        function = {"name": self.name, "description": description, "parameters": self.arguments.schema}
        return {"type": "function", "function": function}

    def _hints(self) -> dict[str, Any]:
        """Every parameter in order, with its type; Any where none is written."""
        try:
            hints = get_type_hints(self.function, localns=dict(self._namespace or {}), include_extras=True)
        except NameError as error:
            raise ConfigError(
                f"tool {self.name!r}: the type hint {error.name!r} is not known in {self.function.__module__}; "
                "import it there, or write the type without quotes"
            ) from error
        return {name: hints.get(name, Any) for name in inspect.signature(self.function).parameters}

    async def run(
        self, arguments: Mapping[str, Any], *, context: Context, environments: Mapping[type[Environment], Environment]
    ) -> ToolResult:
        """Check the arguments, run the function, and make an observation of what it returned.

        Raises only EnvironmentFault: anything else the function raises is told to the model and recorded.
        """
        checked = self.arguments.check(arguments)
        if isinstance(checked, str):
            return ToolResult(checked, CallStatus.INVALID, name=self.name)
        for name, kind in self.injected.items():
            checked[name] = context if kind is None else environments[kind]
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                returned = await call(self.function, **checked)
        except EnvironmentFault:
            raise
        except Exception as error:
            if limit.expired():
                if self.environments:  # a world that is still busy with the last action cannot take the next
                    raise EnvironmentFault(f"tool {self.name!r} took longer than {self.timeout:g} s") from error
                told = f"Error: tool {self.name!r} took longer than {self.timeout:g} s and was given up."
            else:
                told = f"Error: tool {self.name!r} failed: {type(error).__name__}: {error}"
            seconds = time.perf_counter() - started
            return ToolResult(self._cut(told), CallStatus.ERROR, name=self.name, seconds=seconds)
        return self._result(returned, time.perf_counter() - started)

    def _result(self, returned: Any, seconds: float) -> ToolResult:
        info: dict[str, Any] = {}
        observation: Content
        ends = self.ends_chain
        if isinstance(returned, str):
            observation = self._cut(returned)
        elif isinstance(returned, Mapping) and "observation" in returned:
            info = dict(returned)
            observation = self._cut(_as_text(info.pop("observation")))
            ends = bool(info.pop("ends_chain", False)) or ends
            if (image := info.pop("image", None)) is not None:
                observation = (observation, Image.of(image)) if observation else (Image.of(image),)
        else:
            observation = self._cut(_as_text(returned))
        return ToolResult(observation, CallStatus.OK, info, ends, self.name, seconds)

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_length:
            return text
        return f"{text[: self.max_length]}\n… (cut: {len(text) - self.max_length} of {len(text)} characters left out)"


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else Arguments.to_text(value)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    max_length: int = MAX_LENGTH,
    ends_chain: bool = False,
    timeout: float | None = TIMEOUT,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **settings: Any) -> Any:
    """Make a tool of a function, an async function, or a method of an Environment.

    Args:
        function: The function, when the decorator is used bare.
        name: What the model calls it; None takes the function's name.
        description: What it does; None takes the docstring.
        max_length: Most characters of an observation; what is over is cut with a visible mark.
        ends_chain: Whether a call ends the chain, as an answer tool does.
        timeout: Seconds a call may take; None means no limit.
    """
    namespace = sys._getframe(1).f_locals  # so that string type hints find the names of the enclosing function

    def decorate(function: Callable[..., Any]) -> Tool:
        written = getattr(function, "__annotations__", {}).values()
        local = namespace if any(isinstance(hint, str) for hint in written) else None
        return Tool(function, namespace=local, **settings)

    return decorate if function is None else decorate(function)


class Toolbox:
    """The tools of one agent, by the names the model uses."""

    def __init__(self, tools: Iterable[Tool | type[Environment] | str]) -> None:
        self._tools: dict[str, Tool] = {}
        for given in tools:
            for each in _expand(given):
                other = self._tools.setdefault(each.name, each)
                if other is not each and other.reference != each.reference:
                    both = f"{other.reference} and {each.reference}"
                    raise ConfigError(f"two tools are named {each.name!r}: {both}; give one another name=")
        self.schemas: tuple[dict[str, Any], ...] = tuple(each.schema for each in self._tools.values())

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def find(self, call: ToolCall) -> Tool | ToolResult:
        """The tool that a call names; or, where it cannot be run, what to tell the model."""
        found = self._tools.get(call.name)
        there = f"Tools there are: {', '.join(self._tools) or 'none'}."
        if found is None and call.name:
            return ToolResult(f"Error: there is no tool {call.name!r}. {there}", CallStatus.UNKNOWN, name=call.name)
        if found is None:
            told = f"Error: this call could not be read: {call.problem or 'it has no name'}. {there}"
            return ToolResult(told, CallStatus.INVALID)
        if call.problem:
            told = f"Error: the call of {call.name!r} could not be read: {call.problem}. {found.arguments.usage}"
            return ToolResult(told, CallStatus.INVALID, name=call.name)
        return found


def _expand(given: Tool | type[Environment] | str) -> Sequence[Tool]:
    if isinstance(given, Tool):
        return [given]
    if isinstance(given, str):
        return [TOOLS.find(given)]
    if inspect.isclass(given) and issubclass(given, Environment):
        own = [getattr(given, name) for name in dir(given) if isinstance(inspect.getattr_static(given, name), Tool)]
        if not own:
            raise ConfigError(f"environment {given.__name__} has no @tool methods")
        return own
    raise ConfigError(f"{given!r} is no tool; decorate the function with @tool, or pass an Environment or a tool's name")


TOOLS: Registry[Tool] = Registry("tool")
