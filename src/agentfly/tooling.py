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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Self, overload

from agentfly.environment import Environment, meant, refuse_unmakable
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.outcome import CallRecord, CallStatus
from agentfly.recording import plain
from agentfly.registry import Registry
from agentfly.schema import Arguments, names_in_sight, to_text, type_hints
from agentfly.threads import call
from agentfly.trajectory import chain_id
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
    retries: int = 0
    """Failed attempts before this result."""

    @property
    def record(self) -> CallRecord:
        return CallRecord(self.name, self.status, self.seconds, self.info, self.retries)


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
        retries: int = 0,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        """`names` are local names that string type hints may use; the other settings are those of `tool`."""
        _refuse_what_is_no_function(function)
        functools.update_wrapper(self, function)
        self.function = function
        self.name: str = name or function.__name__
        self.max_length, self.ends_chain, self.timeout, self.retries = max_length, ends_chain, timeout, retries
        self._description, self._names = description, names or {}
        self._home: type | None = None
        """The class whose method this is; None for a function, and for a method bound to its instance."""
        self._attribute = function.__name__
        """What the method is called in that class."""
        if max_length < 1 or (timeout is not None and timeout <= 0):
            raise ConfigError(f"tool {self.name!r}: max_length and timeout must be above 0 (timeout=None: no limit)")
        if not isinstance(retries, int) or retries < 0:
            raise ConfigError(f"tool {self.name!r}: retries must be a whole number from 0, not {retries!r}")
        TOOLS.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        if self.function.__qualname__ == f"{owner.__qualname__}.{self.function.__name__}":  # defined here, not lent
            self._home, self._attribute = owner, name

    def __get__(self, instance: object, owner: type) -> Any:
        if isinstance(instance, Environment | type):
            return MethodType(self.function, instance)
        if instance is not None:
            bound = MethodType(self.function, instance)
            return self._variant(function=bound, __wrapped__=bound, _home=None)
        if owner is self._home or not issubclass(owner, Environment):
            return self
        return self._variant(_home=owner)  # Sub.press acts in a Sub, not in the class that defines press

    def _variant(self, **changed: Any) -> Self:
        variant = copy.copy(self)
        for derived in ("injected", "environments", "arguments"):
            variant.__dict__.pop(derived, None)
        variant.__dict__.update(changed)
        return variant

    def __repr__(self) -> str:
        return f"<tool {self.name} of {self.reference}>"

    @property
    def owner(self) -> type[Environment] | None:
        """The environment whose method this is; None for a function."""
        return self._home if self._home is not None and issubclass(self._home, Environment) else None

    @property
    def reference(self) -> str:
        """`module:qualified.name`, which finds the tool unambiguously."""
        if self.owner is not None:
            return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.function.__name__}"
        return f"{self.function.__module__}:{self.function.__qualname__}"

    @functools.cached_property
    def injected(self) -> dict[str, type[Environment] | None]:
        """Parameters the model never sees: each with its environment type, or None for `context`."""
        if self._home is not None and self.owner is None:
            raise ConfigError(
                f"tool {self.name!r} is a method of {self._home.__name__}: pass it from an instance, or make "
                f"{self._home.__name__} an Environment, which gives every chain its own"
            )
        out: dict[str, type[Environment] | None] = {}
        for position, (name, hint) in enumerate(type_hints(self.function, self._names).items()):
            if self.owner is not None and position == 0:
                out[name] = self.owner
            elif inspect.isclass(hint) and issubclass(hint, Environment):
                out[name] = hint
            elif name == "context":
                out[name] = None
        return out

    def acting_in(self, used: Iterable[type[Environment]]) -> Self:
        """The same tool, acting in the subclasses that are used of the environments it asks for."""
        asker = f"tool {self.name!r}"
        injected = {name: kind and meant(kind, used, asker) for name, kind in self.injected.items()}
        return self if injected == self.injected else self._variant(injected=injected)

    @functools.cached_property
    def environments(self) -> tuple[type[Environment], ...]:
        """The environment types a call needs, in the order in which they are locked."""
        kinds = {kind for kind in self.injected.values() if kind is not None}
        return tuple(sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"))

    @functools.cached_property
    def arguments(self) -> Arguments:
        """What the model may send."""
        hints = type_hints(self.function, self._names)
        return Arguments.of(self.name, self.function, {n: h for n, h in hints.items() if n not in self.injected})

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI function format."""
        description = self._description if self._description is not None else self.arguments.description
        function = {"name": self.name, "description": description, "parameters": self.arguments.schema}
        return {"type": "function", "function": function}

    async def run(
        self, arguments: Mapping[str, Any], *, context: Context, environments: Mapping[type[Environment], Environment]
    ) -> ToolResult:
        """Check the arguments, run the function, and make an observation of what it returned.

        Raises only EnvironmentFault: anything else the function raises is told to the model and recorded, after
        `retries` further attempts.
        """
        started = time.perf_counter()
        result = await self._attempt(arguments, context, environments)
        for retry in range(1, self.retries + 1):
            if result.status is not CallStatus.ERROR:
                break
            result = await self._attempt(arguments, context, environments)
            result = replace(result, seconds=time.perf_counter() - started, retries=retry)
        return result

    async def _attempt(
        self, arguments: Mapping[str, Any], context: Context, environments: Mapping[type[Environment], Environment]
    ) -> ToolResult:
        started, limit = time.perf_counter(), asyncio.timeout(self.timeout)
        try:
            checked = self.arguments.check(arguments)
            if isinstance(checked, str):
                return ToolResult(self._cut(checked, MAX_LENGTH), CallStatus.INVALID, name=self.name)
            for name, kind in self.injected.items():
                checked[name] = context if kind is None else environments[kind]
            function = self.function
            if self.owner is not None:  # the instance's own method, which is carried out where the instance lives
                function = getattr(checked.pop(next(iter(self.injected))), self._attribute)
            async with limit:
                returned = await call(function, **checked)
            return self._result(returned, time.perf_counter() - started)
        except EnvironmentFault:
            raise
        except Exception as error:
            if not limit.expired():
                told = f"Error: tool {self.name!r} failed: {describe(error)}"
            elif self.environments:  # a world that is still busy with the last action cannot take the next
                raise EnvironmentFault(f"tool {self.name!r} took longer than {self.timeout:g} s") from error
            else:
                told = f"Error: tool {self.name!r} took longer than {self.timeout:g} s and was given up."
            seconds = time.perf_counter() - started
            return ToolResult(
                self._cut(told, max(self.max_length, 200)), CallStatus.ERROR, name=self.name, seconds=seconds
            )

    def _result(self, returned: Any, seconds: float) -> ToolResult:
        if isinstance(returned, Image):
            returned = {"observation": "", "image": returned}
        if not isinstance(returned, Mapping) or "observation" not in returned:
            return ToolResult(self._cut(_as_text(returned)), CallStatus.OK, {}, self.ends_chain, self.name, seconds)
        info = dict(returned)
        text, image = self._cut(_as_text(info.pop("observation"))), info.pop("image", None)
        ends = bool(info.pop("ends_chain", False)) or self.ends_chain
        observation: Content = text
        if image is not None:
            images = [Image.of(each) for each in (image if isinstance(image, list | tuple) else [image])]
            observation = (text, *images) if text else tuple(images)
        return ToolResult(observation, CallStatus.OK, plain(info), ends, self.name, seconds)

    def _cut(self, text: str, limit: int | None = None) -> str:
        """The text as the model may read it; what we say ourselves is not held to the tool's own `max_length`."""
        if not text.isascii():  # half a surrogate pair, as in odd file names, is nothing a tokenizer can read
            text = text.encode("utf-8", "replace").decode()
        limit = limit or self.max_length
        if len(text) <= limit:
            return text
        return f"{text[:limit]}\n… (cut: {len(text) - limit} of {len(text)} characters left out)"


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Iterator | AsyncIterator):
        raise TypeError(f"it returned a {type(value).__name__}, which may never end; return text or a list")
    return "" if value is None else to_text(value)


def _refuse_what_is_no_function(given: Any) -> None:
    if isinstance(given, staticmethod | classmethod):
        wrong = "write @staticmethod above @tool; a class method cannot be a tool"
    elif isinstance(given, Tool):
        wrong = "it is a tool already; another of the same function is tool(name=…)(it.function)"
    elif not callable(given) or inspect.isclass(given) or not hasattr(given, "__qualname__"):
        wrong = "decorate a function, an async function or a method"
    elif inspect.isgeneratorfunction(given) or inspect.isasyncgenfunction(given):
        wrong = "it yields; a tool returns what it has to say"
    else:
        return
    raise ConfigError(f"{given!r} cannot be made a tool: {wrong}")


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
    retries: int = 0,
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
        retries: How often a call that raises or runs over its timeout is tried again before it counts as failed; only
            for a tool that may safely run twice. An environment that is gone or busy is not retried.
    """
    frame = sys._getframe(1)

    def decorate(function: Callable[..., Any]) -> Tool:
        return Tool(function, names=names_in_sight(frame, function), **settings)

    return decorate if function is None else decorate(function)


class Toolbox:
    """The tools of one agent, by the names the model uses."""

    def __init__(self, tools: Iterable[Tool | type[Environment] | str]) -> None:
        if isinstance(tools, str | Tool | type):
            raise ConfigError(f"tools= takes a list of tools, not {tools!r}; put it in brackets")
        expanded = [each for given in tools for each in _expand(given)]
        used = {kind for each in expanded for kind in each.environments if kind is not Environment}
        self._tools: dict[str, Tool] = {}
        for each in expanded:
            other = self._tools.setdefault(each.name, each.acting_in(used))
            if (other.function, other.owner) != (each.function, each.owner):
                both = f"{other.reference} and {each.reference}"
                raise ConfigError(f"two tools are named {each.name!r}: {both}; give one another name=")
        for kind in {kind for each in self._tools.values() for kind in each.environments}:
            refuse_unmakable(kind)
        self.schemas: tuple[dict[str, Any], ...] = tuple(each.schema for each in self._tools.values())

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    @functools.cached_property
    def environments(self) -> tuple[type[Environment], ...]:
        """The environment types that the tools act in."""
        return tuple(dict.fromkeys(kind for each in self for kind in each.environments))

    def find(self, call: ToolCall) -> Tool | ToolResult:
        """The tool that a call names; or, where it cannot be run, what to tell the model."""
        found = self._tools.get(call.name)
        there = f"Tools there are: {', '.join(self._tools) or 'none'}."
        if found is None and call.name:
            return ToolResult(f"Error: there is no tool {call.name!r:.80}. {there}", CallStatus.UNKNOWN, name=call.name)
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
        own: list[Tool] = []
        names = dict.fromkeys(name for base in reversed(given.__mro__) for name in vars(base))
        for name in names:  # in the order in which they are written
            written = inspect.getattr_static(given, name)
            if isinstance(getattr(written, "__func__", written), Tool):
                own += _expand(getattr(given, name))
        if not own:
            raise ConfigError(f"environment {given.__name__} has no @tool methods")
        return own
    if isinstance(given, MethodType):
        method = given.__func__.__qualname__
        if inspect.isclass(given.__self__):
            raise ConfigError(f"{method} is a class method, which cannot be a tool; make it a method or a static one")
        raise ConfigError(f"{method} is bound to one instance; pass it from the class, and every chain gets its own")
    raise ConfigError(f"{given!r} is no tool; decorate it with @tool, or pass an Environment or a tool's name")


TOOLS: Registry[Tool] = Registry("tool")
