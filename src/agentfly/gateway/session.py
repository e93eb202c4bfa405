"""A session is what one API key may use: a chain with its limits, its sampling settings and its recorder.

A session belongs to the event loop of its gateway. `complete` takes a request from its prompt to the
record. It reserves what the turn may use of the limits, since other requests may run at the same time.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

from agentfly.backends.base import Backend, Request
from agentfly.errors import AgentFlyError, BackendFault
from agentfly.gateway.chat import (
    ApiError,
    ChatReply,
    ChatRequest,
    Delta,
    client_message,
    order_results,
    rendering_size,
    require_call,
    run_unblocked,
)
from agentfly.gateway.recorder import Prompt, Recorder
from agentfly.gateway.streaming import ReplyStream
from agentfly.rollout.config import ChainSettings
from agentfly.rollout.events import Event, ReplyReceived, TokensSampled
from agentfly.rollout.limits import limit_sampling, seed_for_turn
from agentfly.templates.template import Template
from agentfly.threads import call
from agentfly.trajectory import Failure, FailureKind, StopReason, Trajectory, TurnRecord
from agentfly.types import DefaultLimit, FinishReason, Message, Sampling, Task

DeltaSink = Callable[[Iterable[Delta]], None]
"""Receives the deltas of a streamed turn as they become certain."""
LoadTemplate = Callable[..., Template]
"""Called with `tools=` in OpenAI format."""
MAX_TEMPLATES = 64


class TemplateCache:
    """The template of a model for each set of tools that requests bring."""

    def __init__(self, load: LoadTemplate) -> None:
        self._load = load
        self._templates: OrderedDict[str, Template] = OrderedDict()
        self._lock = asyncio.Lock()

    @cached_property
    def base(self) -> Template:
        """The template without tools."""
        return self._load(tools=())

    async def get(self, tools: Sequence[Mapping[str, Any]]) -> Template:
        """The template with these tools. Loading one takes a moment; it happens in a thread."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._templates:
            async with self._lock:
                if key not in self._templates:  # another request may have loaded it while this one waited
                    self._templates[key] = await call(self._load, tools=tools)
                    # A client may send other tools with every request: without a bound, memory would grow with the
                    # requests.
                    if len(self._templates) > MAX_TEMPLATES:
                        self._templates.popitem(last=False)
        self._templates.move_to_end(key)
        return self._templates[key]


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """What a turn may sample."""

    number: int
    """Number of the turn in its chain, which decides its seed."""
    sampling: Sampling
    truncation: StopReason
    """The limit that cuts a turn of `sampling.max_tokens` tokens."""


class GatewaySession:
    """The requests of one chain; without recording, those of all clients."""

    def __init__(
        self,
        backend: Backend,
        templates: TemplateCache,
        settings: ChainSettings,
        *,
        name: str = "",
        position: tuple[int, int] = (0, 0),
        attempt: int = 0,
        record: bool = True,
        client_sampling: bool = False,
    ) -> None:
        """
        Args:
            backend: Samples the turns.
            templates: Templates by tools.
            settings: Limits and sampling of the chain.
            name: Name of the chain, for the backend's prefix cache.
            position: Group and chain in a run.
            attempt: Index of the attempt at the task.
            record: Whether turns are recorded; otherwise every request is rendered as a whole and limits count nothing.
            client_sampling: Whether requests decide temperature and filters; otherwise `settings` does, and requests
                may only lower a max_tokens that the user set, choose one that is at its default, and add stop strings.
        """
        self.backend = backend
        self.settings = settings
        self.name = name
        self.recorder = Recorder() if record else None
        self.failures: list[Failure] = []
        """Failed requests; the client may have continued after them."""
        self.stop: StopReason | None = None
        """Why the last request failed or was cut; None after a complete turn. The stop reason if the chain ends."""
        self.last_message = Message("assistant")
        self.last_used = time.monotonic()
        self.templates = templates
        self._group, self._chain = position
        self._attempt = attempt
        self._client_sampling = client_sampling
        self._num_sampled = 0
        self._numbers: set[int] = set()
        """Numbers of the turns that are recorded or running."""
        self._reserved: dict[int, int] = {}
        """Maximum number of tokens of each running turn, by its number."""
        self._released = asyncio.Event()
        """Set and replaced when a running turn ends."""
        seconds = settings.limits.chain_seconds
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._requests: set[asyncio.Task[object]] = set()
        self._closed = False

    async def complete(self, request: ChatRequest, sink: DeltaSink | None = None) -> ChatReply:
        """Build the prompt of a request, sample a turn within the limits of the chain, record it and return it.

        sink: called without deltas when the request is admitted, and then with deltas, the last ones before this
        returns. Raises ApiError. Cancelling it aborts the request in the backend, and nothing is recorded.
        """
        if self._closed:
            raise ApiError("this chain has ended; its key is not valid any more", 401, "chain_ended")
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        self.last_used = time.monotonic()
        try:
            # The deadline is that of the chain: with a limit per request, a client would get more time by asking again.
            remaining = None if self._deadline is None else max(self._deadline - time.monotonic(), 0)
            async with asyncio.timeout(remaining):
                prompt = await self._build_prompt(request)
                turn = await self._reserve(request, len(prompt.ids))
                try:
                    if sink is not None:
                        sink(())  # admitted: the server may send the status, after which no error can change it
                    return await self._sample(request, prompt, turn, sink)
                finally:
                    self._release(turn)
        except TimeoutError:
            raise self._time_out() from None
        except asyncio.CancelledError:
            self.add_failure(FailureKind.CANCELLED, "the client closed the connection or the chain ended during a turn")
            raise
        except BackendFault as error:
            self.stop = StopReason.BACKEND_FAULT
            self.add_failure(FailureKind.BACKEND, str(error))
            raise ApiError(f"the model failed: {error}", 502, "backend_fault") from error
        except AgentFlyError as error:
            raise ApiError(str(error)) from error
        finally:
            self._requests.discard(task)
            self.last_used = time.monotonic()

    async def _build_prompt(self, request: ChatRequest) -> Prompt:
        recorder = self.recorder
        if request.prompt_ids:
            if recorder is not None:
                raise ApiError("/completions has no conversation to record; use /chat/completions", 404, "not_found")
            return Prompt(array("i", request.prompt_ids), (), self.templates.base)
        messages = request.messages
        if request.previous:
            if recorder is None:
                raise ApiError("previous_response_id needs a gateway that records; send the whole conversation instead")
            earlier = recorder.conversation(request.previous, request.instructions)
            # Results of a Responses request have an id and no name, which templates print: it is that of the call they
            # answer.
            names = {call.id: call.name for message in earlier for call in message.tool_calls}
            new_messages = [
                replace(message, name=message.name or require_call(message.tool_call_id, names))
                if message.role == "tool"
                else message
                for message in messages
            ]
            messages = (*earlier, *new_messages)
        messages = order_results(messages)
        template = await self.templates.get(request.tools)
        if recorder is not None:
            return await recorder.prepare(template, messages)
        ids = await run_unblocked(rendering_size(messages), template.start, messages)
        return Prompt(array("i", ids), messages, template)

    def _limit(self, requested: Sampling, prompt_tokens: int, number: int) -> TurnLimits:
        """What a turn with this number may sample. Raises ApiError if recorded turns leave nothing."""
        limits, sampling = self.settings.limits, self.settings.sampling
        if self.recorder is not None and len(self.recorder.turns) >= limits.max_turns:
            self.stop = StopReason.MAX_TURNS
            raise ApiError(f"the chain has had its {limits.max_turns} turns (max_turns)", 400, "max_turns")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise self._time_out()
        if self._client_sampling:
            sampling = requested
        else:
            # A default is a limit only for requests without one: a client does not learn that it was cut below its own.
            set_limit = (
                None if isinstance(sampling.max_tokens, DefaultLimit) and requested.max_tokens else sampling.max_tokens
            )
            max_tokens = min((limit for limit in (set_limit, requested.max_tokens) if limit is not None), default=None)
            stop = tuple(dict.fromkeys((*sampling.stop, *requested.stop)))
            sampling = replace(sampling, max_tokens=max_tokens, stop=stop)
        limited, truncation = limit_sampling(
            sampling,
            limits,
            prompt=prompt_tokens,
            sampled=self._num_sampled,
            context_length=self.backend.context_length,
            seed=None if self._client_sampling else seed_for_turn(self.settings.seed, self._group, self._chain, number),
        )
        if limited is None:
            self.stop = truncation
            if truncation is StopReason.MAX_TOKENS:
                message = f"the chain has sampled its {limits.max_chain_tokens} tokens (max_chain_tokens)"
                raise ApiError(message, 400, "max_chain_tokens")
            message = (
                f"the prompt has {prompt_tokens} tokens, which leaves no room in the context: context_length_exceeded"
            )
            raise ApiError(message, 400, "context_length_exceeded")
        return TurnLimits(number, limited, truncation)

    async def _reserve(self, request: ChatRequest, prompt_tokens: int) -> TurnLimits:
        """Reserve the number, the seed and the tokens of a turn. Raises ApiError if nothing is left.

        While running turns may use up what this one needs, it waits for them: refused or cut by what they only may
        sample, it would depend on their timing.
        """
        if self.recorder is None:
            return self._limit(request.sampling, prompt_tokens, number=0)
        limits = self.settings.limits
        while True:
            # The lowest free one: it decides the seed, so a turn that failed and is requested again is sampled alike.
            number = next(number for number in count() if number not in self._numbers)
            turn = self._limit(request.sampling, prompt_tokens, number)
            tokens = turn.sampling.max_tokens or 0
            # Running turns count with all they may sample: by what they have sampled, two of them could exceed the
            # limit together.
            possible = self._num_sampled + sum(self._reserved.values()) + tokens
            has_tokens = limits.max_chain_tokens is None or possible <= limits.max_chain_tokens
            if has_tokens and len(self.recorder.turns) + len(self._reserved) < limits.max_turns:
                self._numbers.add(number)
                self._reserved[number] = tokens
                return turn
            await self._released.wait()

    def _release(self, turn: TurnLimits) -> None:
        """Give back what a turn that has ended did not use; its number too, if it was not recorded."""
        if self._reserved.pop(turn.number, None) is not None:
            self._numbers.discard(turn.number)
        # Waiting turns hold the old event: a new one, so that those that still lack tokens can wait again.
        self._released.set()
        self._released = asyncio.Event()

    async def _sample(
        self, request: ChatRequest, prompt: Prompt, turn: TurnLimits, sink: DeltaSink | None
    ) -> ChatReply:
        template = prompt.template
        stream = ReplyStream(template, request.id, turn.sampling.stop)
        on_tokens = None
        if sink is not None or (self.settings.observer is not None and self.recorder is not None):
            decode = template.stream(prompt.ids)

            def send_tokens(token_ids: Sequence[int]) -> None:
                text = decode(token_ids)
                if sink is not None:
                    sink(stream.add(text))
                self._emit(TokensSampled, turn.number, tuple(token_ids), text)

            on_tokens = send_tokens
        start = time.perf_counter()
        completion = await self.backend.generate(
            Request(
                prompt.ids,
                turn.sampling,
                stop_ids=template.stop_ids if request.stop_ids is None else request.stop_ids,
                chain=self.name,
                turn=turn.number,
                priority=self.settings.priority,
                on_tokens=on_tokens,
            )
        )
        # An aborted turn is not recorded: the client goes on from before it, and no prompt would hold its tokens.
        if completion.finish is FinishReason.ABORTED:
            self.stop = StopReason.CANCELLED
            self.add_failure(FailureKind.CANCELLED, "the backend aborted the turn")
            raise ApiError("the backend aborted the turn", 503, "aborted")
        if request.prompt_ids:  # /completions: nothing to parse
            sampled = sent = Message("assistant", template.codec.decode(completion.token_ids))
        else:
            reply = template.parse_text(stream.cut(template.text(completion.token_ids, prompt.ids)))
            sampled, sent = reply.message, client_message(reply, request.id, template.tools)
        # No await from here on: a turn that is cancelled in between would be counted, but not recorded.
        self._num_sampled += len(completion.token_ids)
        self.last_message = sent
        self.stop = turn.truncation if completion.finish is FinishReason.LENGTH else None
        if self.recorder is not None:
            # From here on the turn is recorded: its number is not given back, and its tokens are counted.
            del self._reserved[turn.number]
            node = self.recorder.record(prompt, completion, sampled, sent)
            self.recorder.turns.append(TurnRecord(completion.finish, (), time.perf_counter() - start))
            self.recorder.responses[f"resp_{request.id}"] = (node, sent, bool(request.instructions))
            self._emit(ReplyReceived, turn.number, sampled)
        if sink is not None:
            sink(stream.advance(sent))
        return ChatReply(sent, completion, prompt.ids, request, template)

    def add_failure(self, kind: FailureKind, message: str) -> None:
        if self.recorder is not None:
            self.failures.append(Failure(kind, message, len(self.recorder.turns), self._attempt))

    def _emit(self, event: type[Event], *fields: object) -> None:
        if self.settings.observer is not None:
            self.settings.observer(event(self._group, self._chain, *fields))

    def _time_out(self) -> ApiError:
        problem = f"the chain has had its {self.settings.limits.chain_seconds:g} s (chain_seconds)"
        if self.stop is not StopReason.TIMEOUT:
            self.add_failure(FailureKind.TIMEOUT, problem)
        self.stop = StopReason.TIMEOUT
        return ApiError(problem, 400, "chain_seconds")

    def to_trajectory(self) -> Trajectory:
        """The record of a chain that no rollout runs; its task is the first prompt."""
        assert self.recorder is not None
        segments = self.recorder.close()
        stop = self.stop or StopReason.ANSWER
        # Only a cancellation after the last recorded turn ended the chain. After an earlier one the client went on.
        last = self.failures[-1] if self.failures else None
        if last is not None and last.kind is FailureKind.CANCELLED and last.turn == len(self.recorder.turns):
            stop = StopReason.CANCELLED
        return Trajectory(
            task=Task(segments[0].spans[0].messages if segments else (), id=self.name),
            segments=segments,
            turns=tuple(self.recorder.turns),
            stop=stop,
            prediction=self.last_message.text,
            failures=tuple(self.failures),
        )

    async def close(self) -> None:
        """Refuse further requests, cancel those that are running, and wait until they have ended."""
        # First: a request that arrives while others are cancelled would be sampled after the chain was recorded.
        self._closed = True
        running = list(self._requests)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
