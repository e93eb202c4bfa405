"""A model behind an OpenAI-compatible server, as a resource: a judge for rewards, a helper for tools.

One instance is everybody's. It counts as started when the server answers and serves the model, is asked whether it is
well after it has been idle, and lets so many requests through at once and no more.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar, overload

import httpx
import pydantic

from agentfly.backends import openai_api
from agentfly.backends.base import Request
from agentfly.backends.client import ClientBackend
from agentfly.environment import Environment, Pool
from agentfly.errors import BackendFault, ConfigError, EnvironmentFault
from agentfly.types import Message, Sampling, Task

T = TypeVar("T")
_OPENING = re.compile(r"[{\[]")
_READ, _TRIES = 20_000, 2000
"""Characters at the end of an answer that JSON is looked for in, and places where it may begin."""
_FORM_REFUSED = re.compile(r"response_format|json_schema|structured|guided|grammar", re.IGNORECASE)
"""What a server says that does not take a schema."""
Asked = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]


class _Client(ClientBackend):
    """The client that backends use, which can also say what is served."""

    async def served(self) -> list[str]:
        """The models that the server lists."""
        return [card.id for card in await self.list_models() if card.id]

    def asking_for(self, extra: Mapping[str, Any]) -> _Client:
        """The same client, over the same connections, with these fields in every request."""
        variant = copy.copy(self)
        variant.extra_body = {**self.extra_body, **extra}
        return variant


class ModelServer(Environment):
    """A model to ask, such as a judge. Name the server, the model and the limits on a subclass."""

    pool: ClassVar[Pool] = Pool(scope="global", concurrent=True)  # type: ignore[arg-type]
    base_url: ClassVar[str] = "http://localhost:8000/v1"
    model: ClassVar[str | None] = None
    """The name that the server knows; None takes the one model it serves."""
    api_key_variable: ClassVar[str | None] = None
    """The environment variable that holds the key; None: OPENAI_API_KEY where it is set, else no key is sent."""
    at_once: ClassVar[int] = 32
    """Requests under way at a time; further ones wait."""
    timeout: ClassVar[float] = 120.0
    """Seconds without a byte of an answer."""
    retries: ClassVar[int] = 4
    """How often a request is sent again after a 429, a 5xx or a broken connection."""
    sampling: ClassVar[Sampling] = Sampling(temperature=0.0)
    """What `chat` samples with where it is not told otherwise."""

    async def start(self) -> None:
        if not isinstance(self.at_once, int) or self.at_once < 1:
            raise ConfigError(
                f"{type(self).__name__}.at_once must be a whole number of at least 1, not {self.at_once!r}"
            )
        self._structured = True
        """Whether the server takes a schema; some refuse it, and are asked in words."""
        self._client = _Client(
            self.wanted() or "",
            self.address(),
            api_key=self._key(),
            exact=False,
            timeout=self.timeout,
            max_connections=self.at_once,
            retries=self.retries,
        )
        self._room = asyncio.Semaphore(self.at_once)
        self._client.model = await self._served()

    async def check(self) -> None:
        """Ask the server whether it still serves the model."""
        await self._served()

    async def close(self) -> None:
        if hasattr(self, "_client"):
            await self._client.close()

    def address(self) -> str:
        """Where the server is."""
        return self.base_url

    def wanted(self) -> str | None:
        """The model to ask; None: the one that the server has."""
        return self.model

    def _key(self) -> str | None:
        if self.api_key_variable is None:
            return None
        if not os.environ.get(self.api_key_variable):
            raise ConfigError(f"{type(self).__name__} takes its key from {self.api_key_variable}, which is not set")
        return os.environ[self.api_key_variable]

    async def _served(self) -> str:
        """The model that is asked, which the server must list."""
        try:
            served = await self._client.served()
        except BackendFault as fault:
            if _gone(fault):
                raise EnvironmentFault(str(fault)) from fault
            raise
        wanted, there, at = self._client.model, ", ".join(served[:20]) or "nothing", self._client.base_url
        if wanted in served:
            return wanted
        if wanted:
            raise ConfigError(f"{at} does not serve {wanted!r}; it serves {there}")
        if len(served) != 1:
            raise ConfigError(f"{at} serves {there}; say which in {type(self).__name__}.model")
        return served[0]

    @overload
    async def chat(self, messages: Asked, *, schema: type[T], **sampling: Any) -> T: ...
    @overload
    async def chat(self, messages: Asked, *, schema: None = None, **sampling: Any) -> str: ...
    async def chat(self, messages: Asked, *, schema: type[Any] | None = None, **sampling: Any) -> Any:
        """What the model answers.

        Args:
            messages: A question, or a conversation.
            schema: A type that pydantic knows (a model, a dataclass, a TypedDict, `list[int]`): the answer is asked for
                as JSON of its schema, checked, asked for once more where it does not fit, and returned as that type.
            sampling: Fields of `Sampling`, over the class's own.

        Raises:
            EnvironmentFault: The server is gone, or failed again and again.
            BackendFault: It refused the request, or twice gave an answer that does not fit the schema.
        """
        request = Request((), self._sampling(sampling), messages=_conversation(messages))
        if schema is None:
            return await self._ask(self._client, request)
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(schema)
        answer = await self._asked_for(adapter, request)
        try:
            return _read(adapter, answer)
        except pydantic.ValidationError as error:
            wrong = f"That does not fit: {_told(error)}. {_asking_for(adapter)}"
        again = (*request.messages, Message("assistant", answer), Message("user", wrong))
        answer = await self._asked_for(adapter, replace(request, messages=again))
        try:
            return _read(adapter, answer)
        except pydantic.ValidationError as error:
            raise BackendFault(
                f"{self._client.model} was asked twice and gave no fitting JSON: {_told(error)}"
            ) from error

    async def _asked_for(self, adapter: pydantic.TypeAdapter[Any], request: Request) -> str:
        """An answer by a schema: as the server's own feature, or, where it refuses that, in words."""
        if self._structured:
            form = {"name": "answer", "schema": adapter.json_schema()}
            client = self._client.asking_for({"response_format": {"type": "json_schema", "json_schema": form}})
            try:
                return await self._ask(client, request)
            except BackendFault as fault:
                if not _FORM_REFUSED.search(str(fault)):
                    raise
                self._structured = False
        *before, last = request.messages
        told = replace(last, content=f"{last.text}\n\n{_asking_for(adapter)}")
        return await self._ask(self._client, replace(request, messages=(*before, told)))

    async def _ask(self, client: _Client, request: Request) -> str:
        try:
            async with self._room:
                completion = await client.generate(request)
        except BackendFault as fault:
            if _gone(fault):
                raise EnvironmentFault(str(fault)) from fault
            raise
        return completion.message.text if completion.message is not None else ""

    def _sampling(self, given: Mapping[str, Any]) -> Sampling:
        known = [field.name for field in fields(Sampling)]
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"chat() takes {', '.join(known)} and schema, not {', '.join(unknown)}")
        return replace(self.sampling, **given)


def _gone(fault: BackendFault) -> bool:
    """Whether the server is a world that died. One that answers, and refuses, is not."""
    return isinstance(fault.__cause__, openai_api.Retryable | httpx.TransportError)


def _conversation(asked: Asked) -> tuple[Message, ...]:
    if isinstance(asked, Message | Mapping):
        asked = [asked]
    return Task.of(asked).messages


def _asking_for(adapter: pydantic.TypeAdapter[Any]) -> str:
    return f"Answer with JSON of this schema only: {json.dumps(adapter.json_schema())}"


def _read(adapter: pydantic.TypeAdapter[T], answer: str) -> T:
    """The answer, or the last piece of JSON in it that fits: some models say something around it."""
    try:
        return adapter.validate_json(answer)
    except pydantic.ValidationError:
        for piece in reversed(list(_pieces(answer[-_READ:]))):
            try:
                return adapter.validate_json(piece)
            except pydantic.ValidationError:
                continue
        raise


def _pieces(text: str) -> Iterator[str]:
    """The JSON objects and lists in a text, of which none is inside another."""
    decoder, at, tries = json.JSONDecoder(), 0, 0
    while tries < _TRIES and (found := _OPENING.search(text, at)):
        tries += 1
        try:
            _, end = decoder.raw_decode(text, found.start())
            yield text[found.start() : end]
        except (ValueError, RecursionError):
            end = found.start() + 1
        at = end


def _told(error: pydantic.ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in error.errors(include_url=False)[:5])
