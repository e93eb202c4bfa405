"""Work of `agentfly env play`: interactive calls in one instance.

A call is typed as `press(times=3)`, `press {"times": 3}`, `press 3`, or `run_shell ls -l`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import re
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from rich.console import Console

from agentfly.cli.console import print_text
from agentfly.cli.env_list import tool_lines
from agentfly.cli.signals import Terminated
from agentfly.environment import Environment, Scope
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.resources import ResourceManager
from agentfly.runs.thumbnails import describe_image
from agentfly.templates.parsers.pythonic import parse_python_calls
from agentfly.tooling import Context, Tool, Toolbox, ToolResult
from agentfly.trajectory import CallStatus
from agentfly.types import Content, Task, ToolCall

T = TypeVar("T")
NO_TASK = Task((), {}, "no task")
NO_TASK_HINT = "It was reset for an empty task; use --task FILE --row N, or --question, for a real one."
_NAME = re.compile(r"\s*([\w.:/-]*)")
GREETING = """\
Type a call: name(argument=1), name {"argument": 1}, or name and the arguments in their order.
A line that ends in << continues until a line >>; the lines between are one argument.
:tools  :state  :reset  :quit, or Ctrl-D. Ctrl-C cancels the running call."""


class _BackgroundLoop:
    """An event loop in its own thread, so that the environment keeps running while the user types."""

    def __enter__(self) -> _BackgroundLoop:
        ready = threading.Event()

        def run_loop() -> None:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                self._task: asyncio.Future[Any] = self._loop.create_future()
                self._task.set_result(None)
                self._loop.call_soon(ready.set)
                self._loop.run_forever()

        self._thread = threading.Thread(target=run_loop, name="agentfly-play")
        self._thread.start()
        ready.wait()
        return self

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. Ctrl-C cancels it at any moment."""
        try:
            return asyncio.run_coroutine_threadsafe(self._run(work), self._loop).result()
        except KeyboardInterrupt:
            asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
            raise

    async def _cancel(self) -> None:
        """Cancel the running call and wait for its end: a busy instance can be neither used nor released."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.ensure_future(work)
        await asyncio.wait([self._task])
        result: T = self._task.result()
        return result

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class PlaySession:
    """One instance, leased to a user."""

    def __init__(self, env_class: type[Environment], task: Task) -> None:
        self.env_class = env_class
        self.task = task
        self.toolbox = Toolbox([env_class])
        self._manager = ResourceManager()
        self._turn = 0

    async def start(self) -> None:
        """Lease an instance that is reset for the task."""
        self._group = self._manager.group()
        self._leases = self._manager.leases(self.task, self.toolbox.environments, group=self._group, chain="by hand")
        await self._leases.get(self.env_class)

    async def restart(self) -> None:
        """Release the instance and lease one again: the same one, unless it is broken."""
        await self._leases.release()
        self._group.close()
        await self.start()

    async def act(self, call: ToolCall) -> ToolResult:
        """Make a call, as in a chain."""
        tool = self.toolbox.find(call)
        if isinstance(tool, ToolResult):
            return tool
        context = Context(self.task, turn=self._turn)
        self._turn += 1
        return await self._leases.act(
            tool.environments, lambda envs: tool.run(call.arguments, context=context, environments=envs)
        )

    async def state(self) -> dict[str, Any]:
        """The public attributes of the instance."""
        attributes = vars(await self._leases.get(self.env_class))
        return {name: value for name, value in attributes.items() if not name.startswith("_")}

    async def close(self) -> None:
        """Close the instance."""
        await self._manager.close()


def play(env_class: type[Environment], task: Task | None) -> None:
    """Read and run calls until the user quits."""
    console = Console()
    session = PlaySession(env_class, task or NO_TASK)
    with _BackgroundLoop() as background:
        try:
            background.run(session.start())
            print_text(console, f"{env_class.__name__}: {_describe_reset(env_class, session.task)}", "bold")
            _print_content(console, tuple(image for message in session.task.messages for image in message.images))
            console.print(tool_lines(session.toolbox), end="")
            print_text(console, GREETING, "dim")
            for line, block in _entries(console):
                if line == ":quit":
                    break
                _handle(console, background, session, line, block)
        except EnvironmentFault as fault:
            if task is not None:
                raise
            raise ConfigError(f"{fault}. {NO_TASK_HINT}") from fault
        finally:
            background.run(session.close())


def _describe_reset(env_class: type[Environment], task: Task) -> str:
    if env_class.pool.scope is Scope.GLOBAL:
        return "shared by all chains, so it is never reset"
    return "reset for an empty task" if task is NO_TASK else f"reset for {task.question!r:.200}"


def _entries(console: Console) -> Iterator[tuple[str, str | None]]:
    """Yield the typed lines, each with the block that follows it, if any.

    A terminal has editing and history; lines from a file are echoed.
    """
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (`input` uses it once it is imported)

    def read_lines() -> Iterator[str]:
        while True:
            try:
                line = input("> " if interactive else "")
            except EOFError:
                return
            if not interactive:
                print_text(console, f"> {line}", "dim")
            yield line

    lines = read_lines()
    for line in lines:
        if not line.rstrip().endswith("<<"):
            yield line.strip(), None
        else:
            block = itertools.takewhile(lambda text: text.strip() != ">>", lines)
            yield line.rstrip().removesuffix("<<").strip(), "\n".join(block)


def parse_call(line: str, toolbox: Toolbox, block: str | None = None) -> ToolCall:
    """Parse a line as a call; a malformed call has its `problem` set. `block`: text of the next argument."""
    match = _NAME.match(line)
    assert match is not None
    name = match[1]
    arguments_text = line[match.end() :]
    tool = toolbox.find(ToolCall(name))
    if not isinstance(tool, Tool):
        return ToolCall(name)
    if block is None and arguments_text.startswith("("):
        calls = parse_python_calls(line)
        return calls[0] if len(calls) == 1 else ToolCall(name, problem="write one call per line")
    parameters: Mapping[str, Any] = tool.arguments.schema["properties"]
    arguments_text = arguments_text.strip()
    is_text = {
        parameter: any(option.get("type") == "string" for option in (spec, *spec.get("anyOf", ())))
        for parameter, spec in parameters.items()
    }
    if block is None and arguments_text.startswith("{"):
        call = ToolCall.of({"name": name, "arguments": arguments_text})
        is_single_text = list(is_text.values()) == [True]
        if not is_single_text or (call.arguments and set(call.arguments) <= set(parameters)):
            return call

    # Words are positional arguments; the last parameter takes the rest of the line, the block is one more argument.
    names = list(parameters) or ["arguments"]  # unknown: the tool answers that it takes none
    values = arguments_text.split(maxsplit=max(len(names) - 1 - (block is not None), 0))
    if block is not None:
        values = [f"{arguments_text}\n{block}" if arguments_text else block] if len(names) == 1 else [*values, block]
    arguments: dict[str, Any] = {}
    for parameter, text in zip(names, values, strict=False):
        arguments[parameter] = text
        if not is_text.get(parameter, False):
            with contextlib.suppress(ValueError):
                arguments[parameter] = json.loads(text)
    return ToolCall(name, arguments)


def _handle(console: Console, background: _BackgroundLoop, session: PlaySession, line: str, block: str | None) -> None:
    """Run a command or a call."""
    try:
        match line:
            case "":
                return
            case ":tools":
                console.print(tool_lines(session.toolbox), end="")
            case ":state":
                state = background.run(session.state())
                lines = [f"  {name} = {_format_value(value)}" for name, value in state.items()]
                print_text(console, "\n".join(lines) or "  (no public attributes)")
            case ":reset":
                background.run(session.restart())
                print_text(console, _describe_reset(session.env_class, session.task), "dim")
            case _ if line.startswith(":"):
                print_text(console, f"unknown command {line!r}; there are :tools, :state, :reset and :quit", "red")
            case _:
                result = background.run(session.act(parse_call(line, session.toolbox, block)))
                mark, style = ("← ", "") if result.status is CallStatus.OK else ("✗ ", "red")
                _print_content(console, result.observation, mark, style)
                if result.ends_chain:
                    print_text(console, "the chain would end here; :reset starts a new one", "dim")
    except Terminated:
        raise
    except (EnvironmentFault, KeyboardInterrupt) as error:
        print_text(console, f"{describe(error)}: this instance cannot be used any more; a fresh one was leased", "red")
        background.run(session.restart())


def _print_content(console: Console, content: Content, mark: str = "", style: str = "") -> None:
    """Print text as the model would see it; images are written to files."""
    for piece in (content,) if isinstance(content, str) else content:
        if isinstance(piece, str):
            print_text(console, mark + piece, style)
            mark = ""
            continue
        print_text(console, describe_image(piece), "dim")
        header, comma, data = piece.url.partition(";base64,")
        if comma:
            suffix = "".join(filter(str.isalnum, header.rpartition("/")[2]))[:8]
            with tempfile.NamedTemporaryFile(prefix="agentfly-", suffix=f".{suffix}", delete=False) as file:
                file.write(base64.b64decode(data))
            print_text(console, f"saved to {file.name}", "dim")


def _format_value(value: object) -> str:
    try:
        return f"{value!r:.500}"
    except Exception as error:
        return f"(cannot be printed: {describe(error)})"
