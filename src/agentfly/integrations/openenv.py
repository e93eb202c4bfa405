"""Serves an environment over the OpenEnv protocol, for the clients of openenv 0.10 and openenv-core 0.3.

A session is one WebSocket at `/ws`. Each of its episodes is a chain of our rollout in which the client takes the place
of the model: `reset` starts the chain, every `step` is one turn, and the last one has the reward. So instances are
leased, calls validated and scored as in training, and a closed socket releases everything. openenv is not required.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from agentfly.agents import HFAgent
from agentfly.backends.base import Backend, PromptFormat, Request
from agentfly.backends.http_body import BodyError, parse_json
from agentfly.environment import Environment
from agentfly.errors import AgentFlyError, DataError, EnvironmentFault, describe, require_extra
from agentfly.gateway.http_server import BrowserGuard, equals_key, format_url, open_listener, read_key, require_key
from agentfly.resources import ResourceManager
from agentfly.rollout import RunResult
from agentfly.scoring import RewardSpec
from agentfly.threads import call
from agentfly.tooling import Toolbox
from agentfly.types import Completion, FinishReason, Message, ToolCall
from agentfly.validation import describe_invalid

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.websockets import WebSocket

MAX_MESSAGE_BYTES = 16 << 20


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class _Reset(_Strict):
    """The arguments of `reset`: a row, or the seed and split of a task that the environment draws."""

    task: dict[str, Any] | None = None
    seed: int | None = None
    split: str = "train"
    episode_id: str | None = None


class _CallTool(_Strict):
    """One call of a tool, as OpenEnv's CallToolAction."""

    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: dict[str, Any] = {}
    metadata: dict[str, Any] = {}


class _Answer(_Strict):
    """The final answer, which ends the episode."""

    type: Literal["answer"]
    answer: str
    metadata: dict[str, Any] = {}


class _ListTools(_Strict):
    type: Literal["list_tools"]
    metadata: dict[str, Any] = {}


_ACTION: pydantic.TypeAdapter[_CallTool | _Answer | _ListTools] = pydantic.TypeAdapter(
    Annotated[
        Annotated[_CallTool, pydantic.Tag("call_tool")]
        | Annotated[_Answer, pydantic.Tag("answer")]
        | Annotated[_ListTools, pydantic.Tag("list_tools")],
        pydantic.Discriminator(lambda action: str(action.get("type", "call_tool")) if isinstance(action, dict) else ""),
    ]
)


class _RemotePlayer(Backend):
    """A client in place of a model: every turn is shown to it, and its reply is awaited."""

    prompt_format = PromptFormat.MESSAGES
    supports_images = True
    weight_version = 0

    def __init__(self) -> None:
        self.shown: asyncio.Queue[tuple[Message, ...]] = asyncio.Queue()
        self.replies: asyncio.Queue[Message] = asyncio.Queue()

    async def generate(self, request: Request) -> Completion:
        self.shown.put_nowait(request.messages)
        return Completion((), (), (), FinishReason.STOP, message=await self.replies.get())


class _OpenEnvSession:
    """The episodes of one client."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._player = _RemotePlayer()
        self._running: asyncio.Task[RunResult] | None = None
        self._episode = ""
        self._steps = 0

    async def handle(self, text: str) -> str | None:
        """The response to a message as JSON; None if the client closes the session."""
        kind = None
        try:
            message = parse_json(text.encode())
            kind, data = (message.get("type"), message.get("data", {})) if isinstance(message, dict) else (None, {})
            if kind == "close":
                return None
            if kind == "state":
                return _to_json("state", {"episode_id": self._episode, "step_count": self._steps})
            if kind not in ("reset", "step"):
                problem = f"Unknown message type: {kind!r:.80}; there are reset, step, state and close"
                return _format_error(problem, "UNKNOWN_TYPE")
            observed = await (self._reset(_Reset.model_validate(data)) if kind == "reset" else self._step(data))
            return _to_json("observation", {"reward": None, "done": False, **observed})
        except BodyError as error:
            return _format_error(f"Invalid JSON: {error}", "INVALID_JSON")
        except pydantic.ValidationError as error:
            return _format_error(f"Invalid {kind}: {describe_invalid(error)}", "VALIDATION_ERROR")
        except AgentFlyError as error:
            return _format_error(str(error), "EXECUTION_ERROR")
        except Exception as error:
            return _format_error(describe(error), "EXECUTION_ERROR")

    async def _reset(self, arguments: _Reset) -> dict[str, Any]:
        server = self._server
        await self.close()
        row: Any = arguments.task
        if row is None:
            (row,) = await call(server.env_class.draw_tasks, arguments.split, 1, seed=arguments.seed or 0)
        self._episode, self._steps = arguments.episode_id or uuid.uuid4().hex, 0
        self._player = _RemotePlayer()
        agent = HFAgent(tools=[server.env_class], reward=server.reward, backend=self._player, manager=server.manager)
        run = agent.run(row, max_turns=server.max_turns, failures={"retries": 0})
        self._running = asyncio.create_task(run)
        messages = await self._next_turn()
        if messages is None:
            return self._finish({})
        last = messages[-1]
        return {"observation": {"prompt": last.text, "messages": [message.to_dict() for message in messages]}}

    async def _step(self, data: Any) -> dict[str, Any]:
        action = _ACTION.validate_python(data)
        if isinstance(action, _ListTools):
            tools = []
            for function in (schema["function"] for schema in self._server.toolbox.schemas):
                parameters = function["parameters"]
                tools.append(
                    {"name": function["name"], "description": function["description"], "input_schema": parameters}
                )
            return {"observation": {"tools": tools}}
        if self._running is None:
            raise DataError("there is no episode: call reset first")
        self._steps += 1
        if isinstance(action, _Answer):
            observation: dict[str, Any] = {"answer": action.answer}
            reply = Message("assistant", action.answer)
        else:
            observation = {"tool_name": action.tool_name}
            reply = Message(
                "assistant", tool_calls=(ToolCall(action.tool_name, action.arguments, f"call{self._steps}"),)
            )
        self._player.replies.put_nowait(reply)
        messages = await self._next_turn()
        if messages is None:
            return self._finish(observation)
        return {"observation": {**observation, **_describe_result(messages[-1])}}

    async def _next_turn(self) -> tuple[Message, ...] | None:
        """What the client is shown next; None if the chain has ended."""
        assert self._running is not None
        next_prompt = asyncio.create_task(self._player.shown.get())
        try:
            await asyncio.wait([next_prompt, self._running], return_when=asyncio.FIRST_COMPLETED)
            return next_prompt.result() if next_prompt.done() else None
        finally:
            next_prompt.cancel()

    def _finish(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The last observation of an episode. Raises EnvironmentFault if the chain failed."""
        assert self._running is not None
        running, self._running = self._running, None
        (chain,) = running.result().trajectories
        if chain.score is None and (chain.failures or self._server.reward is not None):
            failures = "; ".join(f"{failure.kind.value}: {failure.message}" for failure in chain.failures)
            raise EnvironmentFault(f"the episode ended as {chain.stop.value}: {failures}")
        last = chain.messages[-1]
        if "tool_name" in observation and last.role == "tool":
            observation |= _describe_result(last)
        metrics = {} if chain.score is None else dict(chain.score.metrics)
        metadata = {"stop_reason": chain.stop.value, "metrics": metrics}
        return {"observation": observation, "reward": chain.reward, "done": True, "metadata": metadata}

    async def close(self) -> None:
        """Cancel the episode that runs; its instances are released."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class OpenEnvServer:
    """Serves an environment class: `async with OpenEnvServer(Counter) as server: server.url`."""

    def __init__(
        self,
        env_class: type[Environment],
        *,
        reward: RewardSpec | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_sessions: int = 64,
        max_turns: int = 1000,
        api_key: str | None = None,
    ) -> None:
        """
        Args:
            env_class: The environment; its tools are the actions.
            reward: Scores a finished episode; None: the environment's own (`scored_by`).
            host: Address to listen on.
            port: 0: any free port.
            max_sessions: Maximum number of clients at once; a further one is refused.
            max_turns: Number of steps after which an episode ends.
            api_key: Clients must send it as a bearer token; None needs a loopback address.
        """
        require_key(host, api_key)
        self.env_class = env_class
        self.toolbox = Toolbox([env_class])
        self.reward = reward if reward is not None else env_class.scored_by or None
        self.host = host
        self.port = port
        self.max_sessions = max_sessions
        self.max_turns = max_turns
        self._api_key = api_key or None
        self.sessions: set[_OpenEnvSession] = set()
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return format_url(self.host, self.port)

    async def start(self) -> OpenEnvServer:
        """Listen. Raises ConfigError if the address is not available."""
        with require_extra("serving an environment", "openenv"):
            import uvicorn
            import websockets  # noqa: F401  (uvicorn needs it for the protocol)

            from agentfly.gateway.server import BackgroundServer
        listener = open_listener(self.host, self.port)
        self.port = listener.getsockname()[1]
        self.manager = ResourceManager()
        app = self._build_app()
        config = uvicorn.Config(
            BrowserGuard(app) if self._api_key is None else app,
            ws="websockets-sansio", ws_max_size=MAX_MESSAGE_BYTES, lifespan="off", log_config=None,
            log_level=logging.CRITICAL, access_log=False, timeout_graceful_shutdown=2,
        )  # fmt: skip
        ready = asyncio.Event()
        self._server = BackgroundServer(config, ready.set)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await ready.wait()
        return self

    async def close(self) -> None:
        """Stop listening, cancel running episodes, and close all instances."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        for session in list(self.sessions):
            await session.close()
        self._server.should_exit = True
        await serving
        await self.manager.close()

    async def __aenter__(self) -> OpenEnvServer:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _build_app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route, WebSocketRoute

        name, about = self.env_class.__name__, self.env_class.__doc__ or ""
        state = {"type": "object", "properties": {"episode_id": {"type": "string"}, "step_count": {"type": "integer"}}}
        documents: dict[str, Any] = {
            "/health": {"status": "healthy"},
            "/metadata": {"name": name, "description": about.partition("\n")[0]},
            "/schema": {"action": _ACTION.json_schema(), "observation": {"type": "object"}, "state": state},
        }

        async def read(request: HttpRequest) -> Response:
            return JSONResponse(documents[request.url.path])

        routes = [Route(path, read) for path in documents]
        return Starlette(routes=[*routes, WebSocketRoute("/ws", self._run_session)])

    async def _run_session(self, client: WebSocket) -> None:
        from starlette.websockets import WebSocketDisconnect

        if self._api_key is not None and not equals_key(read_key(client.headers.raw), self._api_key):
            await client.close(code=1008, reason="the API key is not valid here")  # answers 403
            return
        await client.accept()
        if len(self.sessions) >= self.max_sessions:
            message = f"all {self.max_sessions} sessions are in use; try again later"
            await client.send_text(_format_error(message, "CAPACITY_REACHED"))
            await client.close()
            return
        session = _OpenEnvSession(self)
        self.sessions.add(session)
        try:
            while (answer := await session.handle(await client.receive_text())) is not None:
                await client.send_text(answer)
        except WebSocketDisconnect:
            pass
        finally:
            self.sessions.discard(session)
            await session.close()
            with contextlib.suppress(RuntimeError):  # it is closed already
                await client.close()


def _to_json(kind: str, data: dict[str, Any]) -> str:
    return json.dumps({"type": kind, "data": data}, ensure_ascii=False)


def _format_error(message: str, code: str) -> str:
    """An error with OpenEnv's code for it."""
    return _to_json("error", {"message": message, "code": code})


def _describe_result(message: Message) -> dict[str, Any]:
    """The observation of a tool call; OpenEnv reports errors of a call as its result."""
    images = [image.url for image in message.images]
    return {"result": message.text, **({"images": images} if images else {})}
