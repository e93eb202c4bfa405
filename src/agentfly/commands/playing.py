"""What `agentfly env play` does: a person acts in an environment, and sees what a model would see."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from agentfly.commands.console import harmless
from agentfly.commands.signals import Terminated
from agentfly.commands.typed import read_call
from agentfly.commands.worlds import NO_TASK, NO_TASK_HINT, tool_lines
from agentfly.environment import Environment, Scope
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.outcome import CallStatus
from agentfly.resources import ResourceManager
from agentfly.tooling import Context, Toolbox, ToolResult
from agentfly.types import Image, Task, ToolCall

T = TypeVar("T")
GREETING = """\
Type a call: name(argument=1), name {"argument": 1}, or name and the arguments in their order.
A line that ends in << goes on until a line >>, and what is between is one argument.
:tools  :state  :reset  :quit, or Ctrl-D. Ctrl-C gives up what is running."""


class _Background:
    """An event loop in a thread of its own, so that a world goes on living while a person thinks."""

    def __enter__(self) -> _Background:
        ready = threading.Event()

        def live() -> None:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                self._task: asyncio.Future[Any] = self._loop.create_future()
                self._task.set_result(None)
                self._loop.call_soon(ready.set)
                self._loop.run_forever()

        self._thread = threading.Thread(target=live, name="agentfly-play")
        self._thread.start()
        ready.wait()
        return self

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Have it done there. Ctrl-C gives it up, at whatever moment it comes."""
        try:
            return asyncio.run_coroutine_threadsafe(self._done(work), self._loop).result()
        except KeyboardInterrupt:
            asyncio.run_coroutine_threadsafe(self._given_up(), self._loop).result()
            raise

    async def _given_up(self) -> None:
        """Stop what is being done, and wait for that: a world that is still busy can be neither used nor given back."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _done(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.ensure_future(work)
        await asyncio.wait([self._task])
        result: T = self._task.result()
        return result

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Player:
    """One instance, lent to a person."""

    def __init__(self, kind: type[Environment], task: Task) -> None:
        self.kind, self.task, self.toolbox = kind, task, Toolbox([kind])
        self._manager = ResourceManager()
        self._turn = 0

    async def begin(self) -> None:
        """Get an instance, reset for the task."""
        self._group = self._manager.group()
        self._leases = self._manager.leases(self.task, self.toolbox.environments, group=self._group, chain="by hand")
        await self._leases.get(self.kind)

    async def again(self) -> None:
        """Give the instance back and get one anew: the same one, unless it is spoiled."""
        await self._leases.release()
        self._group.close()
        await self.begin()

    async def act(self, call: ToolCall) -> ToolResult:
        """What the call comes to, as in a chain."""
        tool = self.toolbox.find(call)
        if isinstance(tool, ToolResult):
            return tool
        context = Context(self.task, turn=self._turn)
        self._turn += 1
        return await self._leases.act(
            tool.environments, lambda lent: tool.run(call.arguments, context=context, environments=lent)
        )

    async def state(self) -> dict[str, Any]:
        """The public attributes of the instance."""
        there = vars(await self._leases.get(self.kind))
        return {name: value for name, value in there.items() if not name.startswith("_")}

    async def close(self) -> None:
        """Close the instance."""
        await self._manager.close()


def play(kind: type[Environment], task: Task | None) -> None:
    """Let a person act in an instance until he has had enough."""
    console = Console()
    player = Player(kind, task or NO_TASK)
    with _Background() as background:
        try:
            background.do(player.begin())
            _say(console, f"{kind.__name__}: {_set_up(kind, player.task)}", "bold")
            console.print(tool_lines(player.toolbox), end="")
            _say(console, GREETING, "dim")
            for line, block in _entries(console):
                if line == ":quit":
                    break
                _take(console, background, player, line, block)
        except EnvironmentFault as fault:
            if task is not None:
                raise
            raise ConfigError(f"{fault}. {NO_TASK_HINT}") from fault
        finally:
            background.do(player.close())


def _set_up(kind: type[Environment], task: Task) -> str:
    if kind.pool.scope is Scope.GLOBAL:
        return "everybody's, so it is never reset"
    return "reset for an empty task" if task is NO_TASK else f"reset for {task.question!r:.200}"


def _entries(console: Console) -> Iterator[tuple[str, str | None]]:
    """What is typed, a line at a time, with the block that follows it where one does."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    typed = _lines(console)
    for line in typed:
        if not line.rstrip().endswith("<<"):
            yield line.strip(), None
        else:
            block = itertools.takewhile(lambda each: each.strip() != ">>", typed)
            yield line.rstrip().removesuffix("<<").strip(), "\n".join(block)


def _lines(console: Console) -> Iterator[str]:
    """The lines of a person, with editing and history; or of a file, shown as if they were typed."""
    by_hand = sys.stdin.isatty()
    if by_hand:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (`input` uses it once it is there)
    while True:
        try:
            line = input("> " if by_hand else "")
        except EOFError:
            return
        if not by_hand:
            _say(console, f"> {line}", "dim")
        yield line


def _take(console: Console, background: _Background, player: Player, line: str, block: str | None) -> None:
    """Do what a line says."""
    try:
        match line:
            case "":
                return
            case ":tools":
                console.print(tool_lines(player.toolbox), end="")
            case ":state":
                state = [f"  {name} = {_shown(value)}" for name, value in background.do(player.state()).items()]
                _say(console, "\n".join(state) or "  (no public attributes)")
            case ":reset":
                background.do(player.again())
                _say(console, _set_up(player.kind, player.task), "dim")
            case _ if line.startswith(":"):
                _say(console, f"there is no {line!r}; there are :tools, :state, :reset and :quit", "red")
            case _:
                _show(console, background.do(player.act(read_call(line, player.toolbox, block))))
    except Terminated:
        raise
    except (EnvironmentFault, KeyboardInterrupt) as error:
        _say(console, f"{describe(error)}: this instance cannot be used any more; you have a fresh one", "red")
        background.do(player.again())


def _show(console: Console, result: ToolResult) -> None:
    """An observation as the model would have it; pictures go to files."""
    parts = (result.observation,) if isinstance(result.observation, str) else result.observation
    well = result.status is CallStatus.OK
    text = "\n".join(part if isinstance(part, str) else _saved(part) for part in parts)
    _say(console, f"{'←' if well else '✗'} {text}", "" if well else "red")
    if result.ends_chain:
        _say(console, "a chain would end here; :reset begins anew", "dim")


def _saved(image: Image) -> str:
    """Say where a picture is."""
    kind, comma, data = image.url.partition(";base64,")
    if not comma:
        return f"[a picture: {image.url}]"
    suffix = "".join(filter(str.isalnum, kind.rpartition("/")[2]))[:8]
    with tempfile.NamedTemporaryFile(prefix="agentfly-", suffix=f".{suffix}", delete=False) as file:
        file.write(base64.b64decode(data))
    return f"[a picture, saved to {file.name}]"


def _shown(value: object) -> str:
    try:
        return f"{value!r:.500}"
    except Exception as error:
        return f"(cannot be shown: {describe(error)})"


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(harmless(Text(text, style)), soft_wrap=True)
