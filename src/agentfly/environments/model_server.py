"""ModelServer: a model behind an OpenAI-compatible server as a shared resource, for example a judge for rewards.

All chains share one instance. It has started when the server lists the model, is checked again after it has been idle,
and limits the number of concurrent requests.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar, overload

import pydantic

from agentfly.backends import openai_api
from agentfly.backends.base import Request
from agentfly.backends.client import ClientBackend
from agentfly.environment import Environment, Pool
from agentfly.errors import BackendFault, ConfigError, EnvironmentFault
from agentfly.types import Message, Sampling, Task

T = TypeVar("T")
_JSON_START = re.compile(r"[{\[]")
_MAX_CHARACTERS = 20_000
"""Characters at the end of an answer that are searched for JSON."""
_MAX_STARTS = 2000
"""Positions in them that are tried as the beginning of JSON."""
_SCHEMA_REJECTED = re.compile(r"response_format|json_schema|structured|guided|grammar", re.IGNORECASE)
"""Error messages of servers that do not support a schema."""
Conversation = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]


class ModelServer(Environment):
    """A model to send requests to. Subclasses set the server, the model and the limits."""

    pool: ClassVar[Pool] = Pool(scope="global", concurrent=True)  # type: ignore[arg-type]
    base_url: ClassVar[str] = "http://localhost:8000/v1"
    model: ClassVar[str | None] = None
    """Name of the model on the server. None: the only model that it serves."""
    api_key_variable: ClassVar[str | None] = None
    """Environment variable with the API key. None: OPENAI_API_KEY if it is set, otherwise no key is sent."""
    max_concurrent: ClassVar[int] = 32
    """Largest number of concurrent requests; further ones wait."""
    timeout: ClassVar[float] = 120.0
    """Seconds without a byte of the response after which a request fails."""
    retries: ClassVar[int] = 4
    """Number of retries after a 429, a 5xx or a broken connection."""
    sampling: ClassVar[Sampling] = Sampling(temperature=0.0)
    """Default sampling of `chat`."""

    async def start(self) -> None:
        name = type(self).__name__
        if not isinstance(self.max_concurrent, int) or self.max_concurrent < 1:
            raise ConfigError(
                f"{name}.max_concurrent must be a whole number of at least 1, not {self.max_concurrent!r}"
            )
        api_key = None
        if self.api_key_variable is not None:
            api_key = os.environ.get(self.api_key_variable)
            if not api_key:
                raise ConfigError(f"{name} takes its key from {self.api_key_variable}, which is not set")
        self._accepts_schema = True
        """Whether the server supports a JSON schema; otherwise the schema is part of the prompt."""
        self._client = ClientBackend(
            self.model_name() or "",
            self.server_url(),
            api_key=api_key,
            exact=False,
            timeout=self.timeout,
            max_connections=self.max_concurrent,
            retries=self.retries,
        )
        self._semaphore = asyncio.Semaphore(self.max_concurrent)
        self._client.model = await self._find_model()

    async def check(self) -> None:
        """Raise if the server does not serve the model any more."""
        await self._find_model()

    async def close(self) -> None:
        if hasattr(self, "_client"):
            await self._client.close()

    def server_url(self) -> str:
        """Return the base URL of the server."""
        return self.base_url

    def model_name(self) -> str | None:
        """Return the name of the model. None: the only model that the server serves."""
        return self.model

    async def _find_model(self) -> str:
        """Return the name of the model, which the server must list."""
        with _raise_dead_server():
            models = [card.id for card in await self._client.list_models() if card.id]
        model, url = self._client.model, self._client.base_url
        listed = ", ".join(models[:20]) or "nothing"
        if model in models:
            return model
        if model:
            raise ConfigError(f"{url} does not serve {model!r}; it serves {listed}")
        if len(models) != 1:
            raise ConfigError(f"{url} serves {listed}; say which in {type(self).__name__}.model")
        return models[0]

    @overload
    async def chat(self, messages: Conversation, *, schema: type[T], **sampling: Any) -> T: ...
    @overload
    async def chat(self, messages: Conversation, *, schema: None = None, **sampling: Any) -> str: ...
    async def chat(self, messages: Conversation, *, schema: type[Any] | None = None, **sampling: Any) -> Any:
        """Return the model's answer.

        Args:
            messages: A question, or a conversation.
            schema: A type that pydantic supports (a model, a dataclass, a TypedDict, `list[int]`). The answer is
                requested as JSON with its schema and validated, requested once more if it is not valid, and returned
                as that type.
            sampling: Fields of `Sampling` that replace the class's own.

        Raises:
            EnvironmentFault: The server is gone, or all retries failed.
            BackendFault: It rejected the request, or twice gave an answer that does not fit the schema.
        """
        names = [field.name for field in fields(Sampling)]
        if unknown := [name for name in sampling if name not in names]:
            raise ConfigError(f"chat() takes {', '.join(names)} and schema, not {', '.join(unknown)}")
        conversation = [messages] if isinstance(messages, Message | Mapping) else messages
        request = Request((), replace(self.sampling, **sampling), messages=Task.of(conversation).messages)
        if schema is None:
            return await self._send(self._client, request)

        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(schema)
        json_schema = adapter.json_schema()
        instruction = f"Answer with JSON of this schema only: {json.dumps(json_schema)}"
        for attempt in range(2):
            answer = await self._send_with_schema(request, json_schema, instruction)
            try:
                return _parse_answer(adapter, answer)
            except pydantic.ValidationError as error:
                details = error.errors(include_url=False)[:5]
                reason = "; ".join(
                    f"{'.'.join(map(str, detail['loc'])) or 'it'}: {detail['msg']}" for detail in details
                )
                if attempt:
                    raise BackendFault(
                        f"{self._client.model} was asked twice and gave no fitting JSON: {reason}"
                    ) from error
            correction = Message("user", f"That does not fit: {reason}. {instruction}")
            request = replace(request, messages=(*request.messages, Message("assistant", answer), correction))
        raise AssertionError("the second attempt returns or raises")

    async def _send_with_schema(self, request: Request, json_schema: dict[str, Any], instruction: str) -> str:
        """Send a request for JSON: with the server's support for schemas, or without it by an instruction."""
        if self._accepts_schema:
            response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": json_schema}}
            client = copy.copy(self._client)  # with the same connections
            client.extra_body = {**client.extra_body, "response_format": response_format}
            try:
                return await self._send(client, request)
            except BackendFault as fault:
                if not _SCHEMA_REJECTED.search(str(fault)):
                    raise
                self._accepts_schema = False
        *history, last = request.messages
        extended = replace(last, content=f"{last.text}\n\n{instruction}")
        return await self._send(self._client, replace(request, messages=(*history, extended)))

    async def _send(self, client: ClientBackend, request: Request) -> str:
        with _raise_dead_server():
            async with self._semaphore:
                completion = await client.generate(request)
        return completion.message.text if completion.message is not None else ""


@contextmanager
def _raise_dead_server() -> Iterator[None]:
    """Raise EnvironmentFault if a request failed because the server is gone; a server that rejects it is not."""
    try:
        yield
    except openai_api.ServerUnavailable as fault:
        raise EnvironmentFault(str(fault)) from fault


def _parse_answer(adapter: pydantic.TypeAdapter[T], answer: str) -> T:
    """Parse an answer, or the last JSON object or list in it that is valid: some models add text around it."""
    try:
        return adapter.validate_json(answer)
    except pydantic.ValidationError:
        decoder = json.JSONDecoder()
        text = answer[-_MAX_CHARACTERS:]
        pieces = list[str]()  # none of them is inside another
        position = 0
        for _ in range(_MAX_STARTS):
            start = _JSON_START.search(text, position)
            if start is None:
                break
            try:
                _, position = decoder.raw_decode(text, start.start())
                pieces.append(text[start.start() : position])
            except (ValueError, RecursionError):
                position = start.start() + 1
        for piece in reversed(pieces):
            try:
                return adapter.validate_json(piece)
            except pydantic.ValidationError:
                continue
        raise
