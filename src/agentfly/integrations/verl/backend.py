"""verl's load-balanced servers as a `Backend`, and a client that takes dead servers out of the balancer."""

from __future__ import annotations

import contextvars
import logging
from typing import Any

from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from agentfly.backends.base import Backend, Request
from agentfly.errors import BackendFault, describe
from agentfly.types import Completion, FinishReason

_LOG = logging.getLogger(__name__)
current_group: contextvars.ContextVar[str] = contextvars.ContextVar("current_group", default="")
"""Id of the group whose chains run in this context. `Request.chain` is unique only within a group."""

_last_server: contextvars.ContextVar[str] = contextvars.ContextVar("_last_server")
"""The server that the request of this context was sent to."""


class _RemoveDeadServers:
    """Takes a server that died out of the balancer, and sends its requests to another one.

    verl's balancer would prefer a dead server: it has the fewest requests. A request has all tokens of its segment, so
    that any server can answer it.
    """

    _load_balancer: Any

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server: tuple[str, Any] = await super()._acquire_server(request_id, **extra)  # type: ignore[misc]
        _last_server.set(server[0])
        return server

    async def generate(self, request_id: str, **request: Any) -> Any:
        while True:  # until the balancer has no server left, which raises
            _last_server.set("")
            try:
                return await super().generate(request_id, **request)  # type: ignore[misc]
            except RayActorError as error:
                server = _last_server.get()
                if not server:
                    raise  # the balancer itself died
                _LOG.warning("the rollout server %s died and is taken out of the balancer: %s", server, describe(error))
                await self._load_balancer.remove_servers.remote([server])


class ResilientClient(_RemoveDeadServers, LLMServerClient):  # type: ignore[misc]
    """For synchronous training."""


class ResilientAsyncClient(_RemoveDeadServers, FullyAsyncLLMServerClient):  # type: ignore[misc]
    """For asynchronous training: it resumes requests that a weight update aborted."""


class VerlBackend(Backend):
    """Samples through verl's client. All requests of a chain go to one server, so that its prefix cache serves them."""

    def __init__(self, client: LLMServerClient, context_length: int) -> None:
        self._client = client
        self.context_length: int = context_length
        self._version = 0

    @property
    def weight_version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        sampling = request.sampling
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logprobs": True,
            "stop_token_ids": sorted(request.stop_ids),
            "stop": list(sampling.stop) or None,
            "include_stop_str_in_output": bool(sampling.stop) or None,
            "seed": sampling.seed,
            "max_tokens": sampling.max_tokens,
        }
        params = {name: value for name, value in params.items() if value is not None}
        try:
            output = await self._client.generate(
                f"{current_group.get()}/{request.chain}", prompt_ids=list(request.prompt), sampling_params=params
            )
        except Exception as error:  # Ray and the servers raise many types
            raise BackendFault(f"verl's rollout server failed: {describe(error)}") from error
        ids = output.token_ids
        logprobs = output.log_probs or []  # None of a request that was aborted before its first token
        if len(logprobs) != len(ids):
            raise BackendFault("verl's rollout server sent no log-probabilities: calculate_log_probs must be true")
        # A request that was resumed after a weight update reports the first and the last version, not one per token:
        # the older one bounds the staleness.
        version = output.extra_fields.get("min_global_steps") or 0
        self._version = max(self._version, version)
        if output.stop_reason in ("aborted", "abort"):
            finish = FinishReason.ABORTED
        else:
            # The servers do not tell `stop` from `length`.
            below_limit = bool(sampling.stop) and len(ids) < (sampling.max_tokens or self.context_length)
            closed = bool(ids) and ids[-1] in request.stop_ids
            finish = FinishReason.STOP if closed or below_limit else FinishReason.LENGTH
        return Completion(ids, logprobs, [version] * len(ids), finish)
