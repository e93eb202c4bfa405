"""MCPServer: an MCP server as an environment whose actions are the server's tools.

A stateful server is started once per instance, so that chains never share state; one that keeps no state
(`stateful = False`) is one connection that all chains share.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import mcp_types

from agentfly.environment import Environment, Scope
from agentfly.errors import ConfigError, EnvironmentFault, ToolTimeout
from agentfly.integrations.mcp.connection import Connection, Endpoint, require_command_or_url
from agentfly.integrations.mcp.tools import (
    MCPTool,
    SchemaArguments,
    check_total_size,
    choose_names,
    to_observation,
)
from agentfly.sandbox.owner import process_name, remove_folder
from agentfly.threads import wait_for
from agentfly.tooling import MAX_LENGTH, Tool
from agentfly.types import Task

_LOG = logging.getLogger(__name__)
FOLDER = "{folder}"
"""Stands for the instance's own folder in `command`, `env` and `cwd`."""


class MCPServer(Environment):
    """A server of the Model Context Protocol. Subclasses set `command` or `url`; an instance is one connection.

    The tools are listed once, when the class is first used as a tool: the server is started for it and ended again.
    """

    command: ClassVar[Sequence[str]] = ()
    """Program with arguments that speaks over stdin and stdout, such as `["uvx", "mcp-server-time"]`."""
    url: ClassVar[str] = ""
    """Address of a server that speaks streamable HTTP."""
    env: ClassVar[Mapping[str, str]] = {}
    """Environment variables of the command, besides HOME, PATH, USER and the like."""
    cwd: ClassVar[str] = FOLDER
    """Working directory of the command."""
    headers: ClassVar[Mapping[str, str]] = {}
    """HTTP headers."""
    api_key_variable: ClassVar[str] = ""
    """Environment variable with the key that is sent as `Authorization: Bearer`; empty: none is sent."""
    stateful: ClassVar[bool] = True
    """Whether chains must not share the server. False: all chains share one connection, which is never reset."""
    reset_tool: ClassVar[str] = ""
    """Tool of the server that resets its state, hidden from the model. Empty: the server is restarted for each
    chain. The task's column `reset` has the arguments."""
    include: ClassVar[Sequence[str] | None] = None
    """The server's tools that the model may use; None: all."""
    exclude: ClassVar[Sequence[str]] = ()
    """Tools of the server that the model may not use."""
    rename: ClassVar[Mapping[str, str]] = {}
    """Names for the model, by the server's names."""
    prefix: ClassVar[str] = ""
    """Precedes the names of all tools: `git_` where two servers have a tool `status`."""
    timeout: ClassVar[float] = 120.0
    """Seconds without an answer or progress after which a call has failed."""
    max_seconds: ClassVar[float] = 600.0
    """Seconds for a call, with any amount of progress."""
    start_timeout: ClassVar[float] = 60.0
    """Seconds for the server to start and to list its tools."""
    max_length: ClassVar[int] = MAX_LENGTH
    """Maximum characters of an observation."""
    max_bytes: ClassVar[int] = 16 << 20
    """Maximum bytes of a message of the server."""
    deterministic = False
    _listed: ClassVar[dict[str, Any] | None] = None
    """Input schemas by the server's tool names; None until they are listed."""
    _connection: Connection | None = None
    _folder: str = ""
    _used = False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls._listed = None
        if not cls.stateful and cls.pool.scope is Scope.CHAIN:
            cls.pool = replace(cls.pool, scope=Scope.GLOBAL, concurrent=True)

    @classmethod
    def load_tools(cls) -> None:
        """Start the server, list its tools and make them methods of this class. Later calls do nothing."""
        if cls._listed is None:
            try:
                cls._define_tools(wait_for(_list_tools(cls)))
            except EnvironmentFault as fault:
                raise ConfigError(str(fault)) from fault

    @classmethod
    def tools(cls) -> list[Tool]:
        """The tools that the model may use."""
        cls.load_tools()
        return [attribute for attribute in vars(cls).values() if isinstance(attribute, MCPTool)]

    @classmethod
    def _define_tools(cls, listed: Sequence[mcp_types.Tool]) -> None:
        # Some tools of the protocol version 2025-11-25 run only as tasks, which a plain call does not start.
        by_name = {
            tool.name: tool for tool in listed if tool.execution is None or tool.execution.task_support != "required"
        }
        if cls.reset_tool and cls.reset_tool not in by_name:
            raise ConfigError(f"{cls.__name__}.reset_tool is {cls.reset_tool!r}; there are {', '.join(by_name)}")
        names = choose_names(
            [name for name in by_name if name != cls.reset_tool],
            include=cls.include,
            exclude=cls.exclude,
            rename=cls.rename,
            prefix=cls.prefix,
            server=cls.__name__,
        )
        if not names:
            raise ConfigError(f"{cls.__name__} offers no tools; the server has {', '.join(by_name) or 'none'}")
        check_total_size([by_name[name] for name in names], cls.__name__)
        inherited = [name for base in cls.__mro__ for name, value in vars(base).items() if isinstance(value, MCPTool)]
        for attribute in inherited:
            setattr(cls, attribute, None)  # a class that has other settings may not offer it
        for tool_name, name in names.items():
            _add_tool(cls, by_name[tool_name], name)
        cls._listed = {name: by_name[name].input_schema for name in [*names, *filter(None, [cls.reset_tool])]}

    @property
    def folder(self) -> Path:
        """The instance's own folder, by default the server's working directory. Emptied before each chain."""
        return Path(self._folder)

    async def prepare(self, task: Task) -> None:
        """Fill `folder` for a task, before the server starts for it. Override it; the default does nothing."""

    async def start(self) -> None:
        name = process_name(os.getpid()) or "agentfly"  # a later process removes the folder if this one is killed
        self._folder = tempfile.mkdtemp(prefix=f"{name}-mcp-")
        if type(self).prepare is MCPServer.prepare:
            await self._connect()

    async def reset(self, task: Task) -> None:
        """Give the chain a server without the state of earlier ones."""
        if self._connection is not None and ((self._used and not self.reset_tool) or self._connection.failure):
            await self._disconnect()
        if self._used:
            await asyncio.to_thread(remove_folder, self.folder)
            self.folder.mkdir(mode=0o700)
        await self.prepare(task)
        if self._connection is None:
            await self._connect()
        self._used = True
        if self.reset_tool:
            arguments = task.columns.get("reset", {})
            if not isinstance(arguments, Mapping):
                raise ConfigError(f"the column 'reset' has the arguments of {self.reset_tool!r}, not {arguments!r:.80}")
            returned = await self.call_tool(self.reset_tool, arguments)
            if returned.get("is_error"):
                raise EnvironmentFault(
                    f"{self.reset_tool!r} could not reset the server: {returned['observation']:.500}"
                )

    async def check(self) -> None:
        """Raise if the server does not answer."""
        if self._connection is None:
            return
        if self._connection.failure:
            raise EnvironmentFault(self._connection.failure)
        if self.url:
            async with asyncio.timeout(self.start_timeout):
                await self._connection.list_tools()

    async def close(self) -> None:
        try:
            await self._disconnect()
        finally:
            if self._folder:
                await asyncio.to_thread(remove_folder, self.folder)
                self._folder = ""

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool by the server's own name, as rewards may do; returns `observation`, `image`, `structured`, …

        Raises EnvironmentFault if the server is lost, and ToolTimeout if a stateful one does not answer in time.
        """
        if self._connection is None:
            raise EnvironmentFault(f"the MCP server {type(self).__name__} is not running")
        try:
            result, progress = await self._connection.call_tool(name, arguments, self.timeout)
        except TimeoutError:
            message = f"{name!r} gave neither an answer nor progress for {self.timeout:g} s"
            if self.stateful:  # it may still be busy, and change its state at any time
                raise ToolTimeout(message) from None
            raise RuntimeError(message) from None
        return await asyncio.to_thread(to_observation, result, progress)

    @property
    def pid(self) -> int | None:
        """Id of the process that the server's processes are below; None over HTTP and while it does not run."""
        return self._connection.pid if self._connection else None

    @classmethod
    def _endpoint(cls, folder: str) -> Endpoint:
        """Where the server of an instance with this folder is."""
        require_command_or_url(cls.command, cls.url, cls.__name__)
        headers = dict(cls.headers)
        if cls.api_key_variable:
            if not (key := os.environ.get(cls.api_key_variable)):
                raise ConfigError(f"{cls.__name__} takes its key from {cls.api_key_variable}, which is not set")
            headers["authorization"] = f"Bearer {key}"
        command = tuple(argument.replace(FOLDER, folder) for argument in cls.command)
        if command:
            program = shutil.which(command[0], path=cls.env.get("PATH"))
            if program is None:
                raise ConfigError(f"{cls.__name__} starts {command[0]!r}, which is not installed or not in PATH")
            command = (os.path.abspath(program), *command[1:])
        return Endpoint(
            cls.__name__,
            command=command,
            url=cls.url,
            env={key: value.replace(FOLDER, folder) for key, value in cls.env.items()},
            headers=headers,
            cwd=cls.cwd.replace(FOLDER, folder),
            sessions=cls.stateful,
            max_bytes=cls.max_bytes,
            start_timeout=cls.start_timeout,
        )

    async def _connect(self) -> None:
        def warn() -> None:
            _LOG.warning(
                "the tool list of the MCP server %s changed; the agent keeps the tools it was made with",
                type(self).__name__,
            )

        self._connection = await Connection.open(self._endpoint(self._folder), on_change=warn)
        listed = await self._connection.list_tools()
        if self._listed is None:  # in a worker process, whose class has only just been imported
            type(self)._define_tools(listed)
        now = {tool.name: tool.input_schema for tool in listed}
        changed = [name for name, schema in (self._listed or {}).items() if now.get(name) != schema]
        if changed:
            raise EnvironmentFault(
                f"the MCP server {type(self).__name__} no longer has the tools that the agent was made with: "
                f"{', '.join(changed)} {'is' if len(changed) == 1 else 'are'} gone or take other arguments"
            )

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def mcp_server(command: Sequence[str] = (), *, url: str = "", name: str = "", **settings: Any) -> type[MCPServer]:
    """An MCPServer class with these settings, for `tools=[mcp_server(["uvx", "mcp-server-time"])]`.

    Args:
        command: Program with arguments that speaks over stdin and stdout.
        url: Instead of a command, the address of a server that speaks streamable HTTP.
        name: Name of the class; by default made of the command or the URL.
        settings: Class attributes of MCPServer, such as `stateful=False` or `prefix="git_"`, and `pool`.
    """
    require_command_or_url(command, url, "mcp_server(…)")
    allowed = [setting for setting in MCPServer.__annotations__ if not setting.startswith("_")] + ["pool"]
    if unknown := [setting for setting in settings if setting not in allowed]:
        raise ConfigError(f"mcp_server has no setting {unknown[0]!r}; it has {', '.join(allowed)}")
    if not name:
        words = re.findall(r"[a-zA-Z0-9]+", url.partition("://")[2] or Path(command[-1]).name)
        name = "".join(word.capitalize() for word in words) or "Server"
        name = name if name[0].isalpha() else f"Server{name}"
    return type(name, (MCPServer,), {**settings, "command": tuple(command), "url": url, "__module__": __name__})


def _add_tool(cls: type[MCPServer], tool: mcp_types.Tool, name: str) -> None:
    """Make a tool of the server a method of the class, under its name unless that is taken."""
    attribute = name.replace("-", "_")
    if not attribute.isidentifier() or not isinstance(getattr(cls, attribute, None), MCPTool | None):
        attribute = f"tool_{attribute}"  # the name is taken, such as `reset` and `close`

    async def method(_environment: Any, /, **arguments: Any) -> dict[str, Any]:
        returned: dict[str, Any] = await _environment.call_tool(tool.name, arguments)
        return returned

    method.__name__ = attribute
    method.__qualname__ = f"{cls.__qualname__}.{attribute}"
    method.__module__ = cls.__module__
    description = tool.description or tool.title or ""
    arguments = SchemaArguments.read(name, description, tool.input_schema, cls.__name__)
    mcp_tool = MCPTool(
        method, arguments, name=name, description=description, max_length=cls.max_length, timeout=cls.max_seconds
    )
    setattr(cls, attribute, mcp_tool)
    mcp_tool.__set_name__(cls, attribute)


async def _list_tools(cls: type[MCPServer]) -> list[mcp_types.Tool]:
    with tempfile.TemporaryDirectory(prefix=f"{process_name(os.getpid()) or 'agentfly'}-mcp-") as folder:
        connection = await Connection.open(cls._endpoint(folder))
        try:
            async with asyncio.timeout(cls.start_timeout):
                return await connection.list_tools()
        except TimeoutError:
            raise EnvironmentFault(f"{cls.__name__} did not list its tools within {cls.start_timeout:g} s") from None
        finally:
            await connection.close()
