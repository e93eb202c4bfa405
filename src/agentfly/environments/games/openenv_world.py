"""An environment behind an OpenEnv server, wherever that runs.

It speaks the sessions of openenv-core: one WebSocket at `/ws` for each instance, in which the server keeps one
environment; so chains share nothing, and closing the socket ends it. openenv-core itself is not needed here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic

from agentfly.environments.games.game import TextGame
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.extras import needed
from agentfly.http_body import parse_json
from agentfly.types import Task

_MOST = 64 << 20
"""Bytes of the longest message."""


class _Complaint(pydantic.BaseModel):
    loc: list[str | int] = []
    msg: str = ""


class _Data(pydantic.BaseModel):
    observation: Any = None
    reward: Annotated[float, pydantic.Field(allow_inf_nan=False)] | None = None
    done: bool | None = None
    message: str = "it does not say why"
    errors: list[_Complaint] = []


class _Answer(pydantic.BaseModel):
    """What a server sends: an observation, a state, or an error."""

    type: str = ""
    data: _Data = _Data()

    @pydantic.field_validator("data", mode="before")
    @classmethod
    def _ignore_state(cls, data: Any, info: pydantic.ValidationInfo) -> Any:
        """A state has fields of the environment's own; nothing is read from it."""
        return {} if data is None or info.data.get("type") == "state" else data

    @property
    def complaint(self) -> str:
        wrong = [f"{'.'.join(map(str, each.loc))}: {each.msg}" for each in self.data.errors]
        return "; ".join([self.data.message, *wrong])[:1000]


class OpenEnvWorld(TextGame):
    """An environment of an OpenEnv server (extra `openenv`). Its score is the sum of its rewards."""

    address: ClassVar[str] = "http://127.0.0.1:8000"
    """Where the server is, where the task's column `address` does not say."""
    field: ClassVar[str] = ""
    """The field of an action that the model's words go to; empty: the words are a JSON object of all fields."""
    shows: ClassVar[str] = ""
    """The field of an observation that is shown; empty: all of them, as JSON."""
    longest_action = 100_000
    answer_timeout: ClassVar[float] = 60.0
    """Seconds that the server may take for an answer."""
    _socket: Any = None
    _at: str = ""

    async def reset(self, task: Task) -> None:
        """Begin anew. What the server's reset takes is in the column `reset`, such as a seed."""
        self.begin()
        given = task.columns.get("reset", {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"the column 'reset' has what the server's reset takes, by name; not {given!r:.80}")
        address = _session_address(task.columns.get("address", self.address))
        if self._socket is None or self._at != address:
            await self.close()
            self._socket, self._at = await _connected(address), address
        answer = await self._asked({"type": "reset", "data": dict(given)})
        if answer.type == "error":
            raise EnvironmentFault(f"the OpenEnv server at {address} could not reset: {answer.complaint}")
        self.seen = self._read(answer)

    async def _act(self, action: str) -> str:
        fields = {self.field: action} if self.field else _object(action)
        if fields is None:
            return 'Error: an action is a JSON object, such as {"message": "Hello."}.'
        answer = await self._asked({"type": "step", "data": fields})
        if answer.type == "error":
            return f"Error: {answer.complaint}"
        self.seen = self._read(answer)
        return self.seen

    def _read(self, answer: _Answer) -> str:
        reward = answer.data.reward or 0.0
        self.score += reward
        self.over = bool(answer.data.done)
        self.won = self.over and reward > 0
        seen = answer.data.observation
        if self.shows and isinstance(seen, Mapping):
            seen = seen.get(self.shows)
        return seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)

    async def _asked(self, message: Mapping[str, Any]) -> _Answer:
        """What the server answers. Where it is gone, or answers in another format, the world is lost."""
        try:
            async with asyncio.timeout(self.answer_timeout):
                await self._socket.send(json.dumps(message))
                answer = await self._socket.recv()
        except BaseException as error:
            await self.close()  # an answer that comes too late must not be taken for the next one
            if not isinstance(error, Exception):
                raise
            raise EnvironmentFault(f"the OpenEnv server at {self._at} is gone: {describe(error)}") from error
        try:
            return _Answer.model_validate(parse_json(answer))
        except ValueError as error:  # pydantic's is one
            await self.close()
            raise EnvironmentFault(
                f"the OpenEnv server at {self._at} gave an answer that cannot be read: {describe(error):.500}"
            ) from error

    async def check(self) -> None:
        """See whether the session is still there."""
        await self._asked({"type": "state"})

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()


def _session_address(address: Any) -> str:
    """Where sessions are, for a server's address."""
    scheme, found, rest = str(address).partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if not found or scheme not in schemes:
        raise ConfigError(f"an OpenEnv server is at an address such as http://127.0.0.1:8000, not {address!r:.80}")
    return f"{schemes[scheme]}://{rest.rstrip('/')}/ws"


async def _connected(address: str) -> Any:
    with needed("OpenEnvWorld", "openenv"):
        from websockets.asyncio.client import connect

    try:
        return await connect(address, max_size=_MOST, proxy=None)
    except Exception as error:
        raise EnvironmentFault(f"no OpenEnv server answers at {address}: {describe(error)}") from error


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
