"""Client for environments on an OpenEnv server.

Each instance opens one WebSocket at `/ws`, openenv-core's session protocol: the server keeps one environment per
socket, so chains share no state, and closing the socket ends the session. openenv-core is not required.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar

import pydantic

from agentfly.backends.http_body import parse_json
from agentfly.environments.games.game import TextGame
from agentfly.errors import ConfigError, EnvironmentFault, describe, require_extra
from agentfly.types import Task

_MAX_MESSAGE_BYTES = 64 << 20


class _FieldError(pydantic.BaseModel):
    loc: list[str | int] = []
    msg: str = ""


class _ResponseData(pydantic.BaseModel):
    observation: Any = None
    reward: Annotated[float, pydantic.Field(allow_inf_nan=False)] | None = None
    done: bool | None = None
    message: str = "no message"
    errors: list[_FieldError] = []


class _ServerResponse(pydantic.BaseModel):
    """A message of the server: an observation, a state, or an error."""

    type: str = ""
    data: _ResponseData = _ResponseData()

    @pydantic.field_validator("data", mode="before")
    @classmethod
    def _ignore_state(cls, data: Any, info: pydantic.ValidationInfo) -> Any:
        """A state has environment-specific fields, none of which is used."""
        return {} if data is None or info.data.get("type") == "state" else data

    @property
    def error(self) -> str:
        details = [f"{'.'.join(map(str, detail.loc))}: {detail.msg}" for detail in self.data.errors]
        return "; ".join([self.data.message, *details])[:1000]


class OpenEnvEnvironment(TextGame):
    """An environment on an OpenEnv server (extra `openenv`). Its score is the sum of the rewards."""

    address: ClassVar[str] = "http://127.0.0.1:8000"
    """URL of the server; default for the task's column `address`."""
    field: ClassVar[str] = ""
    """The action field that receives the model's text. Empty if the text is a JSON object with all fields."""
    shows: ClassVar[str] = ""
    """The observation field to show. Empty for all fields as JSON."""
    max_action_length = 100_000
    answer_timeout: ClassVar[float] = 60.0
    """Seconds to wait for a response."""
    _socket: Any = None
    _at: str = ""

    async def reset(self, task: Task) -> None:
        """Reset the environment with the arguments in the column `reset`, such as a seed."""
        self.begin()
        arguments = task.columns.get("reset", {})
        if not isinstance(arguments, Mapping):
            raise ConfigError(
                f"the column 'reset' must be an object with the arguments of the server's reset, not {arguments!r:.80}"
            )
        given_address = task.columns.get("address", self.address)
        scheme, separator, host = str(given_address).partition("://")
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if not separator or scheme not in schemes:
            raise ConfigError(
                f"an OpenEnv server has an address such as http://127.0.0.1:8000, not {given_address!r:.80}"
            )
        address = f"{schemes[scheme]}://{host.rstrip('/')}/ws"
        if self._socket is None or self._at != address:
            await self._disconnect()
            with require_extra("OpenEnvEnvironment", "openenv"):
                from websockets.asyncio.client import connect
            try:
                self._socket = await connect(address, max_size=_MAX_MESSAGE_BYTES, proxy=None)
            except Exception as error:
                raise EnvironmentFault(f"no OpenEnv server answers at {address}: {describe(error)}") from error
            self._at = address
        response = await self._request({"type": "reset", "data": dict(arguments)})
        if response.type == "error":
            raise EnvironmentFault(f"the OpenEnv server at {address} could not reset: {response.error}")
        self.view = self._apply(response)

    async def _act(self, action: str) -> str:
        fields: Any = None
        if self.field:
            fields = {self.field: action}
        else:
            with suppress(ValueError, RecursionError):
                fields = json.loads(action)
        if not isinstance(fields, dict):
            return 'Error: an action is a JSON object, such as {"message": "Hello."}.'
        response = await self._request({"type": "step", "data": fields})
        if response.type == "error":
            return f"Error: {response.error}"
        self.view = self._apply(response)
        return self.view

    def _apply(self, response: _ServerResponse) -> str:
        reward = response.data.reward or 0.0
        self.score += reward
        self.over = bool(response.data.done)
        self.won = self.over and reward > 0
        observation = response.data.observation
        if isinstance(observation, Mapping) and observation.get("metadata") == {}:  # openenv sends it always
            observation = {name: value for name, value in observation.items() if name != "metadata"}
        if self.shows and isinstance(observation, Mapping):
            observation = observation.get(self.shows)
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    async def _request(self, message: Mapping[str, Any]) -> _ServerResponse:
        """Send a message and return the response. Raises EnvironmentFault without a well-formed one."""
        try:
            async with asyncio.timeout(self.answer_timeout):
                await self._socket.send(json.dumps(message))
                received = await self._socket.recv()
        except BaseException as error:
            await self._disconnect()  # a late response must not be taken for the next one
            if not isinstance(error, Exception):
                raise
            raise EnvironmentFault(f"the OpenEnv server at {self._at} is gone: {describe(error)}") from error
        try:
            return _ServerResponse.model_validate(parse_json(received))
        except ValueError as error:  # includes pydantic's ValidationError
            await self._disconnect()
            raise EnvironmentFault(
                f"the OpenEnv server at {self._at} sent a malformed response: {describe(error):.500}"
            ) from error

    async def check(self) -> None:
        """Check that the session is alive."""
        await self._request({"type": "state"})

    async def close(self) -> None:
        await self._disconnect()

    async def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()
