"""Sample from any OpenAI-compatible server.

Two ways to speak. `tokens`: our template renders, `/completions` takes ids and must give back the ids it
sampled with their log-probabilities, or the request fails; nothing is decoded and encoded again.
`messages`: the server renders; the ids come along where it returns them, and where it does not the completion
is a message only and cannot train.

Log-probabilities are the server's. vLLM reports them before temperature and top-p unless it was started with
`--logprobs-mode processed_logprobs`: train at a temperature other than 1 only on a server started so.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from agentfly.backends import answers, openai_api
from agentfly.backends.base import Backend, PromptFormat, Request
from agentfly.backends.update_lock import UpdateLock
from agentfly.errors import BackendFault, ConfigError, describe
from agentfly.http_body import HEADERS, BodyError, read_error_text
from agentfly.retrying import RateLimiter, WaitAsAsked
from agentfly.templates.template import Template
from agentfly.threads import compute
from agentfly.types import Completion, FinishReason

if TYPE_CHECKING:  # it needs torch, which a client does without until it hands over weights
    from agentfly.backends.weight_files import WeightFolder

T = TypeVar("T")
Read = Callable[[httpx.Response, answers.Limits], Awaitable[T]]

_log = logging.getLogger(__name__)
_OURS = frozenset({"messages", "model", "n", "prompt", "stream"})
_LONGEST_WAIT = 120.0
"""Seconds. A server that asks for more (a used-up quota) is believed, and the request fails at once."""


class ClientBackend(Backend):
    """A model behind an OpenAI-compatible server."""

    def __init__(
        self,
        model: str,
        base_url: str = "http://localhost:8000/v1",
        *,
        api_key: str | None = None,
        prompt_format: PromptFormat | str = PromptFormat.MESSAGES,
        exact: bool = True,
        context_length: int | None = None,
        weight_version: int = 0,
        handover: str | None = None,
        timeout: float = 3600.0,
        max_connections: int = 256,
        retries: int = 4,
        backoff: float = 0.5,
        requests_per_minute: int | None = None,
        max_response_bytes: int = 64 << 20,
        vocab_size: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is sent before the first request.

        `api_key`: None takes OPENAI_API_KEY, and sends none where that is not set.
        `exact`: ask a server that speaks messages for ids and log-probabilities too.
        `context_length`: None asks the server, where we speak tokens.
        `weight_version`: what every token is stamped with until `update_weights` says otherwise.
        `handover`: a folder for weights on their way, which the server must see too; None takes this machine's memory.
        `timeout`: seconds without a byte of an answer.
        `backoff`: seconds before the first retry, doubled each time; a server's Retry-After goes before it.
        `requests_per_minute`: None does not limit.
        `max_response_bytes`: a larger response, before or after decompression, is an error of the server.
        `vocab_size`: token ids from the server must be below it; None takes the size of the agent's tokenizer.
        `extra_body`: fields sent with every request, over ours.
        """
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={base_url!r} must start with http:// or https://")
        if taken := sorted(_OURS & set(extra_body or ())):
            raise ConfigError(f"extra_body may not set {', '.join(taken)}: the backend does")
        if max_response_bytes < 1 or (vocab_size is not None and vocab_size < 1):
            raise ConfigError(f"{max_response_bytes=} and {vocab_size=} must be at least 1")
        if requests_per_minute is not None and requests_per_minute < 1:
            raise ConfigError(f"requests_per_minute={requests_per_minute} must be at least 1; None does not limit")
        self.model = model
        self.base_url = base_url.rstrip("/")
        self.prompt_format = _speaks(prompt_format)
        self.exact = exact
        self.context_length = context_length
        self.retries = retries
        self.backoff = backoff
        self.extra_body = dict(extra_body or {})
        self._answer_limits = answers.Limits(max_response_bytes, vocab_size)
        self._version = weight_version
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, 30.0), pool=None)
        self._limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._key = api_key or os.environ.get("OPENAI_API_KEY")
        self._limiter = None if requests_per_minute is None else RateLimiter(requests_per_minute, seconds=60)
        self._doors: dict[asyncio.AbstractEventLoop, _LoopClient] = {}
        self._dialect = openai_api.Dialect.EXTENDED
        self._asked_context = False
        self._place = None if handover is None else Path(handover).expanduser()
        self._handover: WeightFolder | None = None
        self._gate = UpdateLock()
        self._torn = ""
        """Why the server's weights are those of no version; empty while they are of one."""
        self._idless = False
        """The server was asked for ids and gave none: it is not asked again, and may stream."""
        self._reached = False
        """The server has answered, whatever it said."""

    @property
    def weight_version(self) -> int:
        """The version that every token is stamped with."""
        return self._version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self._version = version

    def attach(self, template: Template) -> None:
        """Learn the size of the vocabulary, unless `vocab_size` was given."""
        if self._answer_limits.vocab_size is None:
            self._answer_limits = self._answer_limits._replace(vocab_size=template.codec.vocab_size)

    async def generate(self, request: Request) -> Completion:
        """Sample one turn. One that is asked for during an update waits for it."""
        async with self._gate.turn():
            if self._torn:
                raise BackendFault(self._torn)
            return await (self._complete(request) if self.prompt_format is PromptFormat.TOKENS else self._chat(request))

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Have vLLM's server load weights, by their names in the checkpoint, when the turns under way have ended.

        The server must have been started by `agentfly serve --updatable`, and be asked by nobody else meanwhile.
        """
        from agentfly.backends.weight_files import WeightFolder, discard

        async with self._gate.update():
            if self._handover is None:
                self._handover = WeightFolder(self.model, None, None, self._place)
            handed = await compute(self._handover.write, weights)
            try:
                if handed.model is not None:
                    await self._reload(str(handed.model), version)
            except BaseException:
                discard(handed)
                raise
            self._handover.keep(handed)
            self._version, self._torn = version, ""

    async def _reload(self, folder: str, version: int) -> None:
        """The server's own way: nothing computed with other weights is used after it."""
        await self._order("/pause?mode=wait&clear_cache=true")
        try:
            await self._order("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        except BaseException as error:
            self._torn = f"the server did not take the weights of version {version}: {describe(error)}; update again"
            raise
        finally:
            await self._order("/resume")

    async def _order(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Tell the server what only one that may be updated knows."""
        url = f"{self.base_url.removesuffix('/v1')}{path}"
        try:
            async with (await self._door()).client.stream("POST", url, json=body or {}) as answer:
                text = await read_error_text(answer)
        except httpx.TransportError as error:
            raise BackendFault(f"{url} cannot be reached: {openai_api.reason(error)}") from error
        if answer.status_code in (404, 405):
            raise ConfigError(f"{url} is not served: start the server with `agentfly serve MODEL --updatable`")
        if not answer.is_success:
            raise BackendFault(f"{url} answered {answer.status_code}: {text[:500]}")

    async def close(self) -> None:
        """Close the connections of every event loop that still runs; one that ended has closed its own."""
        if self._handover is not None:
            self._handover.close()
        here = asyncio.get_running_loop()
        while self._doors:
            loop, door = self._doors.popitem()
            if loop is here:
                with suppress(RuntimeError):  # it is running: the ending loop is closing it at this moment
                    await door.life.aclose()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(door.life.aclose(), loop))

    async def _complete(self, request: Request) -> Completion:
        """Tokens in, tokens out."""
        if request.images:
            raise ConfigError("/completions takes no pictures; say prompt_format='messages' for a model that sees")
        version = self._version
        room = await self._room(len(request.prompt), request.sampling.max_tokens)
        body = {**openai_api.completions_body(self.model, request, room), **self.extra_body}
        turn = await self._send("/completions", body, partial(answers.read_turn, request=request), request.chain)
        if not turn.ids and turn.finish is not FinishReason.ABORTED:
            raise BackendFault(f"{self.base_url} ended the turn without one sampled token")
        return Completion(turn.ids, turn.logprobs, [version] * len(turn.ids), turn.finish or FinishReason.STOP)

    async def _room(self, prompt: int, wanted: int | None) -> int:
        """The most tokens that this turn may have."""
        if self.context_length is None and not self._asked_context:
            async with (await self._door()).lock:
                if not self._asked_context:
                    self.context_length = await self._served_context()
                    self._asked_context = True
        if self.context_length is None:
            if wanted is None:
                raise ConfigError(
                    f"{self.base_url} does not say how long its context is, and max_tokens is None: "
                    "give the backend context_length=, or the sampling max_tokens="
                )
            return wanted
        room = self.context_length - prompt
        if room < 1:
            raise BackendFault(
                f"the prompt has {prompt} tokens, the server's context {self.context_length}: no room left"
            )
        return room if wanted is None else min(wanted, room)

    async def _served_context(self) -> int | None:
        """The context length of our model as the server lists it (vLLM does); None: it does not."""
        try:
            cards = await self._send("/models", None, answers.read_models)
        except (openai_api.Rejected, ConfigError):
            return None
        return next((card.max_model_len for card in cards if card.id == self.model), None)

    async def _chat(self, request: Request) -> Completion:
        """Messages in, a message out, with its tokens where the server returns them."""
        version = self._version
        answer = await self._ask_chat(request)
        if not answer.ids:
            self._idless = True
            return Completion((), (), (), answer.finish, message=answer.message)
        if request.on_tokens:
            request.on_tokens(answer.ids)
        versions = [version] * len(answer.ids)
        return Completion(answer.ids, answer.logprobs, versions, answer.finish, answer.prompt_ids, answer.message)

    async def _ask_chat(self, request: Request) -> answers.Answer:
        """Ask in the richest dialect that the server has not refused."""
        asked: list[dict[str, Any]] = []
        refusals: list[str] = []
        for dialect in itertools.dropwhile(lambda known: known is not self._dialect, openai_api.Dialect):
            body = {
                **openai_api.chat_body(self.model, request, dialect, self.exact and not self._idless),
                **self.extra_body,
            }
            if body in asked:
                continue
            asked.append(body)
            try:
                read = partial(answers.read_answer, request=request)
                answer = await self._send("/chat/completions", body, read, request.chain)
            except openai_api.Rejected as refusal:
                if refusal.too_long:
                    raise
                refusals.append(str(refusal))
                continue
            self._keep(dialect, refusals)
            return answer
        raise BackendFault("; and asked in plainer words, ".join(dict.fromkeys(refusals)))

    def _keep(self, dialect: openai_api.Dialect, refusals: Sequence[str]) -> None:
        if not refusals:
            return
        if self.exact and self._dialect is openai_api.Dialect.EXTENDED:
            _log.warning("no token ids from this server, so what it samples cannot train: %s", refusals[0])
        self._dialect = dialect

    async def _send(self, path: str, body: dict[str, Any] | None, read: Read[T], chain: str = "") -> T:
        """Ask, and ask again while the trouble may pass. `read` makes something of a good answer."""
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(openai_api.Retryable),
            wait=WaitAsAsked(self.backoff, jitter=0.25),
            stop=lambda state: state.attempt_number > self.retries or state.upcoming_sleep > _LONGEST_WAIT,
            retry_error_callback=_raise_last,
        )
        return await attempts(self._attempt, path, body, read, chain)

    async def _attempt(self, path: str, body: dict[str, Any] | None, read: Read[T], chain: str) -> T:
        if self._limiter is not None:
            await self._limiter.acquire()
        client = (await self._door()).client
        headers = {"x-session-id": chain} if chain else {}
        method = "GET" if body is None else "POST"
        try:
            async with client.stream(method, path, json=body, headers=headers) as response:
                self._reached = True
                if not response.is_success:
                    raise openai_api.refusal(response, await read_error_text(response), self.model, self._key)
                return await read(response, self._answer_limits)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            trouble = openai_api.Retryable if self._reached else BackendFault  # who was never there will not be back
            raise trouble(
                f"cannot reach {self.base_url}: {openai_api.reason(error)}; check that the server is running "
                f"(`agentfly serve {self.model}` starts one) and that base_url= is its address, with /v1"
            ) from error
        except httpx.TimeoutException as error:
            raise BackendFault(
                f"no answer from {self.base_url} in {self._timeout.read:g} s; timeout= allows more"
            ) from error
        except httpx.TransportError as error:
            raise openai_api.Retryable(f"{self.base_url} broke off its answer: {openai_api.reason(error)}") from error
        except BodyError as error:
            raise openai_api.Malformed(f"{self.base_url} gave an answer that cannot be read: {error}") from error

    async def _door(self) -> _LoopClient:
        """This event loop's own client: connections cannot be shared between loops."""
        loop = asyncio.get_running_loop()
        if loop not in self._doors:
            for ended in [known for known in self._doors if known.is_closed()]:
                self._doors.pop(ended, None)
            life = self._open()
            self._doors[loop] = _LoopClient(life, await anext(life), asyncio.Lock())
        return self._doors[loop]

    async def _open(self) -> AsyncGenerator[httpx.AsyncClient, None]:
        """A generator, because an ending event loop closes its generators: no connection outlives it."""
        headers = {**HEADERS, "authorization": f"Bearer {self._key}"} if self._key else HEADERS
        client = httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=self._timeout, limits=self._limits)
        try:
            yield client
        finally:
            await client.aclose()


class _LoopClient(NamedTuple):
    life: AsyncGenerator[httpx.AsyncClient, None]
    client: httpx.AsyncClient
    lock: asyncio.Lock


def _raise_last(state: RetryCallState) -> None:
    """Raise the error of the last attempt."""
    error = state.outcome.exception() if state.outcome is not None else None
    raise BackendFault(f"{error} (asked {state.attempt_number} times)") from error


def _speaks(value: PromptFormat | str) -> PromptFormat:
    try:
        return PromptFormat(value)
    except ValueError:
        ways = " or ".join(repr(way.value) for way in PromptFormat)
        raise ConfigError(f"prompt_format={value!r}; it may be {ways}") from None
