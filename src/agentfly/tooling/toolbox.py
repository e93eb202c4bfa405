"""`@tool`: a function, or a method of an environment, that the model may call.

The decorated function stays callable. Its schema is derived from the type hints and the docstring; arguments from the
model are validated and coerced by pydantic before the call. A mistake of the model is answered with an observation that
states what is wrong and what exists; an exception in the tool's own code is a tool fault.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Self, get_args, overload

from agentfly import plugins
from agentfly.environment import Environment, resolve_env_class, validate_constructor
from agentfly.errors import ConfigError, DataError, EnvironmentFault, ToolTimeout, describe
from agentfly.segment import to_plain
from agentfly.threads import LoopTimer, call, run_within
from agentfly.tooling.schema import ToolArguments, caller_namespace, read_tool_schemas, to_text, type_hints
from agentfly.trajectory import CallRecord, CallStatus, chain_id
from agentfly.types import Content, Image, Task, ToolCall
from agentfly.validation import NonNegativeInt, PositiveFloat, PositiveInt, validate
from agentfly.vision.images import normalize_content

_LOG = logging.getLogger(__name__)
MAX_LENGTH = 8192
TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Context:
    """Position in the run of a tool or reward call. Injected into a tool's parameter of this type, and into a reward's
    parameter `context`."""

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


@dataclass(slots=True)  # not frozen, which would triple the time to create one in every turn
class ToolResult:
    """The result of a tool call."""

    observation: Content
    """Shown to the model."""
    status: CallStatus = CallStatus.OK
    info: Mapping[str, Any] = field(default_factory=dict)
    """Other values the tool returned; recorded, not shown to the model."""
    ends_chain: bool = False
    name: str = ""
    """The tool's name, or the unknown name the model used."""
    seconds: float = 0.0
    retries: int = 0
    """Failed attempts before this result."""
    blocked: float = 0.0
    """Seconds in which the tool blocked the event loop."""
    action: str = ""
    """A digest of name and arguments."""
    repeated: bool = False
    """Whether the same call got the same observation before in the chain."""

    @property
    def record(self) -> CallRecord:
        return CallRecord(
            self.name, self.status, self.seconds, self.info, self.retries, self.blocked, self.action, self.repeated
        )


class Tool(plugins.NamedFunction):
    """A function the model may call. Calling the tool calls the function; a chain uses `run`."""

    kind = "tool"
    collision_hint = "give one another name="
    """What to do about two tools of the same name."""

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
        """`names`: local names that string type hints may use. The other settings are those of `tool`."""
        problem = ""
        if isinstance(function, staticmethod | classmethod):
            problem = "write @staticmethod above @tool; a class method cannot be a tool"
        elif isinstance(function, Tool):
            problem = "it is a tool already; for another tool of the same function, write tool(name=…)(it.function)"
        elif not callable(function) or inspect.isclass(function) or not hasattr(function, "__qualname__"):
            problem = "decorate a function, an async function or a method"
        elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            problem = "it yields; a tool must return its observation"
        if problem:
            raise ConfigError(f"{function!r} cannot be made a tool: {problem}")
        super().__init__(function, name, names)
        self._refuse_ambiguous_parameters()
        self.max_length = max_length
        self.ends_chain = ends_chain
        self.timeout = timeout
        self.retries = retries
        self._description = description
        self._class: type | None = None
        """The class that defines this method; None for a function, and for a method bound to its instance."""
        self._attribute = function.__name__
        """The method's attribute name in that class."""
        validate(f"tool {self.name!r}: max_length", max_length, PositiveInt)
        validate(f"tool {self.name!r}: timeout", timeout, PositiveFloat | None, " (None: no limit)")
        validate(f"tool {self.name!r}: retries", retries, NonNegativeInt)
        TOOLS.add(self)

    def _refuse_ambiguous_parameters(self) -> None:
        """Raise ConfigError for `context` and `env` without a type: injected, or an argument of the model."""
        parameters = inspect.signature(self.function).parameters
        for name, injected in (("context", "Context (of agentfly)"), ("env", "the Environment's class")):
            if name in parameters and type_hints(self.function, self._names)[name] is Any:
                raise ConfigError(
                    f"tool {self.name!r}: {name!r} has no type, so it may be injected or an argument of the model; "
                    f"write {name}: {injected} for the first, or a type such as {name}: str for the second"
                )

    def __set_name__(self, owner: type, name: str) -> None:
        if self.function.__qualname__ == f"{owner.__qualname__}.{self.function.__name__}":  # defined in this class
            self._class = owner
            self._attribute = name

    def __get__(self, instance: object, owner: type) -> Any:
        if isinstance(instance, Environment | type):
            return MethodType(self.function, instance)
        if instance is not None:
            bound = MethodType(self.function, instance)
            return self._copy_with(function=bound, __wrapped__=bound, _class=None)
        if owner is self._class or not issubclass(owner, Environment):
            return self
        return self._copy_with(_class=owner)  # Sub.press acts in a Sub, not in the class that defines press

    def _copy_with(self, **changes: Any) -> Self:
        """A copy with changed attributes and without cached properties."""
        new = copy.copy(self)
        for cached in ("injected_parameters", "environments", "arguments"):
            new.__dict__.pop(cached, None)
        new.__dict__.update(changes)
        return new

    @property
    def owner(self) -> type[Environment] | None:
        """The environment class that defines this method; None for a function."""
        return self._class if self._class is not None and issubclass(self._class, Environment) else None

    @property
    def reference(self) -> str:
        """`module:qualified.name`, unique for every tool."""
        if self.owner is not None:
            return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.function.__name__}"
        return super().reference

    @functools.cached_property
    def injected_parameters(self) -> dict[str, type[Environment] | None]:
        """Parameters that are not in the schema: each with its environment class, or None for a `Context`."""
        if self._class is not None and self.owner is None:
            raise ConfigError(
                f"tool {self.name!r} is a method of {self._class.__name__}: pass it from an instance, or make "
                f"{self._class.__name__} an Environment, which gives every chain its own instance"
            )
        out: dict[str, type[Environment] | None] = {}
        for position, (name, hint) in enumerate(type_hints(self.function, self._names).items()):
            if self.owner is not None and position == 0:
                out[name] = self.owner
            elif inspect.isclass(hint) and issubclass(hint, Environment):
                out[name] = hint
            elif Context in (hint, *get_args(hint)):
                out[name] = None
        return out

    def bind_environments(self, used: Iterable[type[Environment]]) -> Self:
        """The same tool, with each environment class replaced by its subclass in `used`, if there is one."""
        user = f"tool {self.name!r}"
        injected = {name: cls and resolve_env_class(cls, used, user) for name, cls in self.injected_parameters.items()}
        return self if injected == self.injected_parameters else self._copy_with(injected_parameters=injected)

    @functools.cached_property
    def environments(self) -> tuple[type[Environment], ...]:
        """The environment classes a call needs, in locking order."""
        env_classes = {env_class for env_class in self.injected_parameters.values() if env_class is not None}
        return tuple(sorted(env_classes, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}"))

    @functools.cached_property
    def arguments(self) -> ToolArguments:
        """Schema and validation of the arguments the model sends."""
        hints = type_hints(self.function, self._names)
        return ToolArguments.of(
            self.name, self.function, {n: h for n, h in hints.items() if n not in self.injected_parameters}
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI function format."""
        description = self._description if self._description is not None else self.arguments.description
        function = {"name": self.name, "description": description, "parameters": self.arguments.schema}
        return {"type": "function", "function": function}

    async def run(
        self, arguments: Mapping[str, Any], *, context: Context, environments: Mapping[type[Environment], Environment]
    ) -> ToolResult:
        """Validate the arguments, call the function, and convert what it returns to an observation.

        Raises only EnvironmentFault: other exceptions become a recorded observation, after `retries` further attempts.
        """
        started = time.perf_counter()
        result = await self._attempt(arguments, context, environments)
        for retry in range(1, self.retries + 1):
            if result.status not in (CallStatus.ERROR, CallStatus.TIMEOUT):
                break
            result = await self._attempt(arguments, context, environments)
            result = replace(result, seconds=time.perf_counter() - started, retries=retry)
        return result

    async def _attempt(
        self, arguments: Mapping[str, Any], context: Context, environments: Mapping[type[Environment], Environment]
    ) -> ToolResult:
        started = time.perf_counter()
        limit = asyncio.timeout(self.timeout)
        timer: LoopTimer[Any] | None = None
        try:
            checked = self.arguments.check(arguments)
            if isinstance(checked, str):
                return ToolResult(self._truncate(checked, MAX_LENGTH), CallStatus.INVALID, name=self.name)
            for name, env_class in self.injected_parameters.items():
                checked[name] = context if env_class is None else environments[env_class]
            function = self.function
            if self.owner is not None:  # the instance may be a proxy, whose method runs in another process
                function = getattr(checked.pop(next(iter(self.injected_parameters))), self._attribute)
            timer = LoopTimer(call(function, **checked), f"tool {self.name!r}")
            returned = await run_within(limit, timer)
            result = self._to_result(returned, time.perf_counter() - started)
            result.blocked = timer.blocked
            if isinstance(result.observation, tuple):
                result.observation = await call(normalize_content, result.observation)
            return result
        except EnvironmentFault:
            raise
        except Exception as error:
            status = CallStatus.TIMEOUT if limit.expired() else CallStatus.ERROR
            if status is CallStatus.ERROR:
                message = f"Error: tool {self.name!r} failed: {describe(error)}"
            elif self.environments:  # an environment that is still busy with this action cannot take the next one
                raise ToolTimeout(f"tool {self.name!r} took longer than {self.timeout:g} s") from error
            else:
                message = f"Error: tool {self.name!r} took longer than {self.timeout:g} s and was given up."
            message = self._truncate(message, max(self.max_length, 200))
            blocked = 0.0 if timer is None else timer.blocked
            seconds = time.perf_counter() - started
            return ToolResult(message, status, name=self.name, seconds=seconds, blocked=blocked)

    def _to_result(self, returned: Any, seconds: float) -> ToolResult:
        if isinstance(returned, Image):
            returned = {"observation": "", "image": returned}
        if isinstance(returned, str) or not isinstance(returned, Mapping) or "observation" not in returned:
            text = self._truncate(_to_observation(returned))
            return ToolResult(text, ends_chain=self.ends_chain, name=self.name, seconds=seconds)
        info = dict(returned)
        text = self._truncate(_to_observation(info.pop("observation")))
        image = info.pop("image", None)
        ends_chain = bool(info.pop("ends_chain", False)) or self.ends_chain
        observation: Content = text
        if image is not None:
            images = [Image.of(picture) for picture in (image if isinstance(image, list | tuple) else [image])]
            observation = (text, *images) if text else tuple(images)
        return ToolResult(observation, info=to_plain(info), ends_chain=ends_chain, name=self.name, seconds=seconds)

    def _truncate(self, text: str, limit: int | None = None) -> str:
        """Keep head and tail of an observation: `limit` characters in all, by default the tool's `max_length`."""
        if not text.isascii():  # a lone surrogate, as in some file names, cannot be tokenized
            text = text.encode("utf-8", "replace").decode()
        return cut_middle(text, limit or self.max_length)


def cut_middle(text: str, limit: int) -> str:
    """Keep head and tail of a text, `limit` characters in all, with a note between them that says how much was cut."""
    if len(text) <= limit:
        return text
    note = f"… (cut: {len(text) - limit} of {len(text)} characters left out) …"
    tail = limit // 2
    return f"{text[: limit - tail]}\n{note}\n{text[len(text) - tail :]}"


def _to_observation(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Iterator | AsyncIterator):
        raise TypeError(f"it returned a {type(value).__name__}, which may never end; return text or a list")
    return "" if value is None else to_text(value)


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
        name: Name in the schema; None: the function's name.
        description: Description in the schema; None: the docstring.
        max_length: Maximum characters of an observation; a longer one is truncated with a note.
        ends_chain: Whether a call ends the chain, as an answer tool does.
        timeout: Maximum seconds per call; None: no limit.
        retries: Further attempts after a call that raised or timed out; only for a tool that may safely run twice. A
            call whose environment died or is busy is not retried.
    """
    frame = sys._getframe(1)

    def decorate(function: Callable[..., Any]) -> Tool:
        return Tool(function, names=caller_namespace(frame, function), **settings)

    return decorate if function is None else decorate(function)


ToolLike = Tool | Callable[..., Any] | type[Environment] | str


class Toolbox:
    """The tools of one agent, by the names the model uses."""

    def __init__(self, tools: Iterable[ToolLike]) -> None:
        if isinstance(tools, str | type) or callable(tools):
            raise ConfigError(f"tools= takes a list of tools, not {tools!r}; put it in brackets")
        expanded = [expanded_tool for tool_like in tools for expanded_tool in _expand(tool_like)]
        used = {cls for tool in expanded for cls in tool.environments if cls is not Environment}
        self._tools: dict[str, Tool] = {}
        for tool in expanded:
            other = self._tools.setdefault(tool.name, tool.bind_environments(used))
            if (other.function, other.owner) != (tool.function, tool.owner):
                both = f"{other.reference} and {tool.reference}"
                hint = " or ".join(dict.fromkeys([tool.collision_hint, other.collision_hint]))
                raise ConfigError(f"two tools are named {tool.name!r}: {both}; {hint}")
        for env_class in {cls for tool in self._tools.values() for cls in tool.environments}:
            validate_constructor(env_class)
        self.schemas: tuple[dict[str, Any], ...] = tuple(tool.schema for tool in self._tools.values())
        self._reported_column = False

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    @functools.cached_property
    def environments(self) -> tuple[type[Environment], ...]:
        """The environment classes that the tools act in."""
        return tuple(dict.fromkeys(env_class for tool in self for env_class in tool.environments))

    def check_column(self, task: Task) -> None:
        """Log once that tool schemas in the column `tools` of a task have no effect: the model is shown these tools.

        Raises ConfigError if the column lists a tool that is not here.
        """
        try:
            schemas = read_tool_schemas(task.columns.get("tools"))
        except DataError:  # another column of this name is data
            return
        listed = [schema["function"]["name"] for schema in schemas or ()]
        if missing := [name for name in listed if name not in self._tools]:
            raise ConfigError(
                f"the column 'tools' lists {', '.join(missing):.200}, and the agent has "
                f"{', '.join(self._tools) or 'no tools'}. The model is shown the agent's tools: pass these to the "
                "agent, or rename the column"
            )
        if listed and not self._reported_column:
            self._reported_column = True
            _LOG.warning("the column 'tools' of the tasks has no effect: the model is shown the tools of the agent")

    def find(self, call: ToolCall) -> Tool | ToolResult:
        """The tool of a call; or, if the call cannot be run, its result: an error that the model is shown."""
        tool = self._tools.get(call.name)
        if tool is None:
            available = f"Tools there are: {', '.join(self._tools) or 'none'}."
            if call.name:
                message = f"Error: there is no tool {call.name!r:.80}. {available}"
                return ToolResult(message, CallStatus.UNKNOWN, name=call.name)
            message = f"Error: this call could not be read: {call.problem or 'it has no name'}. {available}"
            return ToolResult(message, CallStatus.INVALID)
        if call.problem:
            message = f"Error: the call of {call.name!r} could not be read: {call.problem}. {tool.arguments.usage}"
            return ToolResult(message, CallStatus.INVALID, name=call.name)
        return tool


def _expand(source: ToolLike) -> Sequence[Tool]:
    if isinstance(source, Tool):
        return [source]
    if isinstance(source, str):
        return [TOOLS.find(source)]
    if inspect.isclass(source) and issubclass(source, Environment):
        source.load_tools()
        methods: list[Tool] = []
        names = dict.fromkeys(name for base in reversed(source.__mro__) for name in vars(base))
        for name in names:  # in definition order
            attribute = inspect.getattr_static(source, name)
            if isinstance(getattr(attribute, "__func__", attribute), Tool):
                methods += _expand(getattr(source, name))
        if not methods:
            raise ConfigError(f"environment {source.__name__} has no @tool methods")
        return methods
    if isinstance(source, MethodType):
        method = source.__func__.__qualname__
        if inspect.isclass(source.__self__):
            raise ConfigError(f"{method} is a class method, which cannot be a tool; make it a method or a static one")
        if isinstance(source.__self__, Environment):
            raise ConfigError(
                f"{method} is bound to one instance; pass it from the class, and every chain gets its own instance"
            )
        return [Tool(source)]
    if inspect.isfunction(source):
        if not source.__name__.isidentifier():
            raise ConfigError(f"{source!r} has no name that the model could call; write tool(name=…)(function)")
        return [Tool(source)]
    raise ConfigError(
        f"{source!r} is not a tool; pass a function, one decorated with @tool, an Environment or a tool's name"
    )


TOOLS: plugins.Registry[Tool] = plugins.Registry("tool", plugins.TOOLS)
"""All tools by name."""
