"""Samples from an OpenAI-compatible server.

`prompt_format="tokens"`: our template renders the prompt; `/completions` takes token ids, and must return the sampled
ids with their log-probabilities, or the request fails. Nothing is decoded and encoded again.
`prompt_format="messages"`: the server renders the prompt. If it returns no ids, the completion is a message only and
cannot be trained on.

Log-probabilities are the server's. vLLM reports them before temperature and top-p unless it was started with
`--logprobs-mode processed_logprobs`: training at a temperature other than 1 needs a server started so.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from agentfly.backends import openai_api, openai_responses
from agentfly.backends.base import Backend, PromptFormat, Request
from agentfly.backends.event_loops import LoopClients, UpdateLock
from agentfly.backends.http_body import HEADERS, BodyError, read_error_text
from agentfly.backends.retrying import RateLimiter, WaitAsAsked
from agentfly.errors import BackendFault, ConfigError, describe
from agentfly.templates.template import Template
from agentfly.threads import compute
from agentfly.types import Completion
from agentfly.validation import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, validate_arguments

if TYPE_CHECKING:  # it imports torch, which a client needs only for weight updates
    from agentfly.backends.weight_files import WeightFolder

T = TypeVar("T")
Reader = Callable[[httpx.Response, openai_responses.ResponseLimits], Awaitable[T]]

_LOG = logging.getLogger(__name__)
_RESERVED_FIELDS = frozenset({"messages", "model", "n", "prompt", "stream"})
_MAX_WAIT = 120.0
"""Seconds. If a server asks for a longer wait (a used-up quota), the request fails at once."""


class ClientBackend(Backend):
    """A model behind an OpenAI-compatible server."""

    weight_version = 0

    @validate_arguments
    def __init__(
        self,
        model: str,
        base_url: str = "http://localhost:8000/v1",
        *,
        api_key: str | None = None,
        prompt_format: PromptFormat | str = PromptFormat.MESSAGES,
        exact: bool = True,
        context_length: PositiveInt | None = None,
        weight_version: NonNegativeInt = 0,
        weights_dir: str | None = None,
        timeout: PositiveFloat = 3600.0,
        max_connections: PositiveInt = 256,
        retries: NonNegativeInt = 4,
        backoff: NonNegativeFloat = 0.5,
        requests_per_minute: PositiveInt | None = None,
        max_response_bytes: PositiveInt = 64 << 20,
        vocab_size: PositiveInt | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is sent before the first request.

        Args:
            model: The name by which the server knows the model.
            base_url: Address of the server, with /v1.
            api_key: None: OPENAI_API_KEY, or no key if that is not set.
            prompt_format: "tokens" or "messages".
            exact: With messages, ask for token ids and log-probabilities.
            context_length: With tokens, the maximum length of prompt and completion; None: ask the server.
            weight_version: The version of every token until `update_weights` is called.
            weights_dir: Folder for weight updates, which the server must be able to read; None: shared memory.
            timeout: Seconds without receiving a byte.
            max_connections: Maximum number of concurrent connections.
            retries: Maximum number of retries of a request.
            backoff: Seconds before the first retry, doubled for each further one; Retry-After takes precedence.
            requests_per_minute: Rate limit; None: no limit.
            max_response_bytes: Maximum size of a response, before and after decompression.
            vocab_size: Token ids from the server must be below it; None: the size of the agent's tokenizer.
            extra_body: Fields sent with every request; they override ours.
        """
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={base_url!r} must start with http:// or https://")
        if reserved := sorted(_RESERVED_FIELDS & set(extra_body or ())):
            raise ConfigError(f"extra_body may not set {', '.join(reserved)}: the backend does")
        try:
            self.prompt_format = PromptFormat(prompt_format)
        except ValueError:
            values = " or ".join(repr(choice.value) for choice in PromptFormat)
            raise ConfigError(f"prompt_format={prompt_format!r}; it may be {values}") from None
        self.model = model
        self.base_url = base_url.rstrip("/")
        self.exact = exact
        self.context_length = context_length
        self.retries = retries
        self.backoff = backoff
        self.extra_body = dict(extra_body or {})
        self._response_limits = openai_responses.ResponseLimits(max_response_bytes, vocab_size)
        self._api_key = api_key or os.environ.get("OPENAI_API_KEY")
        self._timeout = timeout
        self._clients = LoopClients(
            base_url=self.base_url,
            headers={**HEADERS, "authorization": f"Bearer {self._api_key}"} if self._api_key else HEADERS,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 30.0), pool=None),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        )
        self._rate_limiter = None if requests_per_minute is None else RateLimiter(requests_per_minute, seconds=60)
        self._dialect = openai_api.Dialect.EXTENDED
        self._returns_ids = True
        """False once a chat server was asked for ids and returned none: then replies may be streamed."""
        self._connected = False
        """Whether the server has ever answered."""
        self._context_requested = False
        self.weight_version = weight_version
        self._weights_parent = None if weights_dir is None else Path(weights_dir).expanduser()
        self._weight_folder: WeightFolder | None = None
        self._update_lock = UpdateLock()
        self._inconsistent = ""
        """Why the server's weights are of no known version; empty if they are."""

    def attach(self, template: Template) -> None:
        """Take the size of the vocabulary from the template's tokenizer, unless `vocab_size` was given."""
        if self._response_limits.vocab_size is None:
            self._response_limits = self._response_limits._replace(vocab_size=template.codec.vocab_size)

    async def generate(self, request: Request) -> Completion:
        """Sample one turn; waits while weights are being updated."""
        async with self._update_lock.turn():
            if self._inconsistent:
                raise BackendFault(self._inconsistent)
            if self.prompt_format is PromptFormat.MESSAGES:
                return await self._chat(request)
            if request.images:
                raise ConfigError("/completions takes no images; use prompt_format='messages' for a vision model")
            read = partial(openai_responses.read_completion, request=request, version=self.weight_version)
            max_tokens = await self._max_tokens(len(request.prompt), request.sampling.max_tokens)
            body = {**openai_api.completions_body(self.model, request, max_tokens), **self.extra_body}
            return await self._send("/completions", body, read, chain=request.chain)

    async def score_prompt(self, tokens: Sequence[int]) -> list[float]:
        """[tokens] The log-probability of each token given those before it, at temperature 1; 0 for the first.

        Raises BackendFault unless the server returns `prompt_logprobs`, as vLLM does.
        """
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0, **self.extra_body}
        return await self._send("/completions", body, partial(openai_responses.read_prompt_logprobs, prompt=tokens))

    async def tokenize(self, text: str) -> list[int]:
        """The token ids of a text in the server's vocabulary, without special tokens added to it.

        Raises BackendFault unless the server returns the ids of a prompt, as vLLM does from 0.10.2 on.
        """
        body = {"model": self.model, "prompt": text, "max_tokens": 1, "add_special_tokens": False}
        return await self._send(
            "/completions", {**body, "return_token_ids": True, **self.extra_body}, openai_responses.read_prompt_ids
        )

    async def list_models(self) -> list[openai_responses.ModelCard]:
        """The models that the server lists."""
        return await self._send("/models", None, openai_responses.read_models)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Have the server load weights, given by their names in the checkpoint, after the running turns.

        The server must run vLLM, have been started by `agentfly serve --updatable`, and have no other client meanwhile.
        """
        from agentfly.backends.weight_files import WeightFolder

        async with self._update_lock.update():
            if self._weight_folder is None:
                self._weight_folder = WeightFolder(self.model, lora=None, adapter=None, parent=self._weights_parent)
            files = await compute(self._weight_folder.write, weights)
            try:
                if files.model is not None:
                    await self._reload(files.model, version)
            except BaseException:
                files.release()
                raise
            self._weight_folder.commit(files)
            self.weight_version = version
            self._inconsistent = ""

    async def close(self) -> None:
        """Close all connections and delete the files of weight updates."""
        if self._weight_folder is not None:
            self._weight_folder.close()
        await self._clients.close()

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Call one of vLLM's endpoints for weight updates."""
        url = f"{self.base_url.removesuffix('/v1')}{path}"
        try:
            async with (await self._clients.get()).client.stream("POST", url, json=body or {}) as response:
                text = await read_error_text(response)
        except httpx.TransportError as error:
            raise BackendFault(f"{url} cannot be reached: {openai_api.reason(error)}") from None
        if response.status_code in (404, 405):
            raise ConfigError(f"{url} is not served: start the server with `agentfly serve MODEL --updatable`")
        if not response.is_success:
            raise BackendFault(f"{url} answered {response.status_code}: {text[:500]}")

    async def _reload(self, path: Path, version: int) -> None:
        """Load weights while the server pauses. Clearing the cache discards what the old weights computed."""
        await self._post("/pause?mode=wait&clear_cache=true")
        try:
            await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        except BaseException as error:
            self._inconsistent = (
                f"the server did not take the weights of version {version}: {describe(error)}; update again"
            )
            raise
        finally:
            await self._post("/resume")

    async def _max_tokens(self, prompt: int, requested: int | None) -> int:
        """The maximum number of tokens of a completion, given the length of the prompt and the requested limit."""
        if self.context_length is None and not self._context_requested:
            async with (await self._clients.get()).lock:
                if not self._context_requested:
                    try:
                        cards = await self.list_models()
                    except (openai_api.Rejected, ConfigError):
                        cards = []
                    lengths = (card.max_model_len for card in cards if card.id == self.model)  # vLLM reports it
                    self.context_length = next(lengths, None)
                    self._context_requested = True
        if self.context_length is None:
            if requested is None:
                raise ConfigError(
                    f"{self.base_url} does not report its context length, and max_tokens is None: "
                    "give the backend context_length=, or the sampling max_tokens="
                )
            return requested
        room = self.context_length - prompt
        if room < 1:
            raise BackendFault(
                f"the prompt has {prompt} tokens, the server's context {self.context_length}: no room left"
            )
        return room if requested is None else min(requested, room)

    async def _chat(self, request: Request) -> Completion:
        """Send messages in the most capable dialect that the server has not rejected."""
        read = partial(openai_responses.read_chat, request=request, version=self.weight_version)
        bodies: list[dict[str, Any]] = []
        rejections: list[str] = []
        for dialect in itertools.dropwhile(lambda candidate: candidate is not self._dialect, openai_api.Dialect):
            exact = self.exact and self._returns_ids
            body = {**openai_api.chat_body(self.model, request, dialect, exact), **self.extra_body}
            if body in bodies:
                continue
            bodies.append(body)
            try:
                completion = await self._send("/chat/completions", body, read, chain=request.chain)
            except openai_api.Rejected as rejection:
                if rejection.context_exceeded:
                    raise
                rejections.append(str(rejection))
                continue
            if rejections:
                if self.exact and self._dialect is openai_api.Dialect.EXTENDED:
                    _LOG.warning("no token ids from this server, so its replies cannot train: %s", rejections[0])
                self._dialect = dialect
            if not completion.token_ids:
                self._returns_ids = False
            return completion
        raise BackendFault("; and with fewer fields, ".join(dict.fromkeys(rejections)))

    async def _send(self, path: str, body: dict[str, Any] | None, read: Reader[T], *, chain: str = "") -> T:
        """Send a request (GET without a body), retry failures that are `Retryable`, and parse the response."""
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(openai_api.Retryable),
            wait=WaitAsAsked(self.backoff, jitter=0.25),
            stop=lambda state: state.attempt_number > self.retries or state.upcoming_sleep > _MAX_WAIT,
            retry_error_callback=_raise_last,
        )
        return await attempts(self._attempt, path, body, read, chain)

    async def _attempt(self, path: str, body: dict[str, Any] | None, read: Reader[T], chain: str) -> T:
        if self._rate_limiter is not None:
            await self._rate_limiter.acquire()
        client = (await self._clients.get()).client
        headers = {"x-session-id": chain} if chain else {}
        method = "GET" if body is None else "POST"
        try:
            async with client.stream(method, path, json=body, headers=headers) as response:
                self._connected = True
                if not response.is_success:
                    text = await read_error_text(response)
                    raise openai_api.status_error(response, text, model=self.model, api_key=self._api_key)
                return await read(response, self._response_limits)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            # A server that was reachable before may restart; one that never was is probably not running.
            fault = openai_api.Retryable if self._connected else openai_api.ServerUnavailable
            raise fault(
                f"cannot reach {self.base_url}: {openai_api.reason(error)}; check that the server is running "
                f"(`agentfly serve {self.model}` starts one) and that base_url= is its address, with /v1"
            ) from None  # the transport's traceback says nothing more
        except httpx.TimeoutException:
            raise openai_api.ServerUnavailable(
                f"no answer from {self.base_url} in {self._timeout:g} s; timeout= allows more"
            ) from None
        except httpx.TransportError as error:
            raise openai_api.Retryable(
                f"{self.base_url} closed the connection during its response: {openai_api.reason(error)}"
            ) from None
        except BodyError as error:
            raise openai_api.MalformedResponse(
                f"{self.base_url} sent a response that cannot be read: {error}"
            ) from error


def _raise_last(state: RetryCallState) -> None:
    """Raise the error of the last attempt."""
    error = state.outcome.exception() if state.outcome is not None else None
    raise openai_api.ServerUnavailable(f"{error} (asked {state.attempt_number} times)") from None
