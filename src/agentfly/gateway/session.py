"""A session is what one API key may use: a chain with its limits, its sampling settings and its recorder.

A session belongs to the event loop of its gateway. `prepare` does what can be refused before anything is sampled;
`run` reserves what the turn may use of the limits, since others may run at the same time; `Turn.sample` samples and
records.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

from agentfly.backends.base import Backend, Request
from agentfly.errors import AgentFlyError, BackendFault, ConfigError, DataError, TemplateError
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
from agentfly.types import Completion, DefaultLimit, FinishReason, Message, Sampling, Task

DeltaSink = Callable[[Iterator[Delta]], None]
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
        self._numbers = 0
        self._prefix = secrets.token_hex(4)

    @cached_property
    def base(self) -> Template:
        """The template without tools."""
        return self._load(tools=())

    async def get(self, tools: Sequence[Mapping[str, Any]]) -> Template:
        """The template with these tools. Loading one takes a moment; it happens in a thread."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._templates:
            async with self._lock:
                if key not in self._templates:
                    self._templates[key] = await call(self._load, tools=tools)
                    if len(self._templates) > MAX_TEMPLATES:
                        self._templates.popitem(last=False)
        self._templates.move_to_end(key)
        return self._templates[key]

    def new_id(self) -> str:
        """An id for a reply."""
        self._numbers += 1
        return f"{self._prefix}{self._numbers:08x}"


class GatewaySession:
    """The requests of one chain; without recording, those of all clients."""

    def __init__(
        self,
        backend: Backend,
        templates: TemplateCache,
        settings: ChainSettings,
        *,
        name: str = "",
        place: tuple[int, int] = (0, 0),
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
            place: Group and chain in a run.
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
        self._group, self._chain = place
        self._attempt = attempt
        self._client_sampling = client_sampling
        self._num_sampled = 0
        self._numbers: set[int] = set()
        """Numbers of the turns that are recorded or running."""
        self._reserved: dict[Turn, int] = {}
        """Maximum number of tokens of each running turn."""
        self._released = asyncio.Event()
        """Set and replaced when a running turn ends."""
        seconds = settings.limits.chain_seconds
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._requests: set[asyncio.Task[object]] = set()
        self._closed = False

    async def prepare(self, request: ChatRequest) -> Turn:
        """Build the prompt within the limits of the chain. Raises ApiError."""
        self._require_open()
        recorder = self.recorder
        if request.previous:
            if recorder is None:
                raise ApiError("previous_response_id needs a gateway that records; send the whole conversation instead")
            earlier = recorder.conversation(request.previous, request.instructions)
            names = {call.id: call.name for message in earlier for call in message.tool_calls}
            added = [
                replace(message, name=message.name or require_call(message.tool_call_id, names))
                if message.role == "tool"
                else message
                for message in request.messages
            ]
            request = replace(request, messages=(*earlier, *added))
        request = replace(request, messages=order_results(request.messages))
        try:
            template = await self.templates.get(request.tools)
            if recorder is None:
                ids = await run_unblocked(rendering_size(request.messages), template.start, request.messages)
                prompt = Prompt(array("i", ids), request.messages, template)
            else:
                prompt = await recorder.prepare(template, request.messages)
        except (ConfigError, DataError, TemplateError) as error:
            raise ApiError(str(error)) from error
        return Turn(self, request, prompt, self._limit(request.sampling, len(prompt.ids)))

    def prepare_tokens(self, ids: Sequence[int], request: ChatRequest, template: Template) -> Turn:
        """Build a turn for a prompt of token ids. Raises ApiError if the session records conversations."""
        self._require_open()
        if self.recorder is not None:
            raise ApiError("/completions has no conversation to record; use /chat/completions", 404, "not_found")
        prompt = Prompt(array("i", ids), (), template)
        return Turn(self, request, prompt, self._limit(request.sampling, len(ids)))

    def _limit(self, asked: Sampling, prompt: int, number: int = 0) -> tuple[Sampling, StopReason]:
        """The sampling of a turn, and the limit that would cut it. Raises ApiError if recorded turns leave nothing."""
        limits, sampling = self.settings.limits, self.settings.sampling
        if self.recorder is not None and len(self.recorder.turns) >= limits.max_turns:
            self.stop = StopReason.MAX_TURNS
            raise ApiError(f"the chain has had its {limits.max_turns} turns (max_turns)", 400, "max_turns")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise self._time_out()
        if self._client_sampling:
            sampling = asked
        else:
            # A default is a limit only for requests without one: a client is not told that it was cut below its own.
            set_limit = (
                None if isinstance(sampling.max_tokens, DefaultLimit) and asked.max_tokens else sampling.max_tokens
            )
            max_tokens = min((limit for limit in (set_limit, asked.max_tokens) if limit is not None), default=None)
            stop = tuple(dict.fromkeys((*sampling.stop, *asked.stop)))
            sampling = replace(sampling, max_tokens=max_tokens, stop=stop)
        limited, truncation = limit_sampling(
            sampling,
            limits,
            prompt=prompt,
            sampled=self._num_sampled,
            context_length=self.backend.context_length,
            seed=None if self._client_sampling else seed_for_turn(self.settings.seed, self._group, self._chain, number),
        )
        if limited is None:
            self.stop = truncation
            if truncation is StopReason.MAX_TOKENS:
                message = f"the chain has sampled its {limits.max_chain_tokens} tokens (max_chain_tokens)"
                raise ApiError(message, 400, "max_chain_tokens")
            message = f"the prompt has {prompt} tokens, which leaves no room in the context: context_length_exceeded"
            raise ApiError(message, 400, "context_length_exceeded")
        return limited, truncation

    async def _reserve(self, turn: Turn) -> None:
        """Reserve the number, the seed and the tokens of a turn. Raises ApiError if nothing is left.

        While running turns may use up what this one needs, it waits for them: refused or cut by what they only may
        sample, it would depend on their timing.
        """
        if self.recorder is None:
            return
        limits = self.settings.limits
        while True:
            number = next(number for number in count() if number not in self._numbers)
            sampling, truncation = self._limit(turn.request.sampling, len(turn.prompt.ids), number)
            tokens = sampling.max_tokens or 0
            possible = self._num_sampled + sum(self._reserved.values()) + tokens
            has_tokens = limits.max_chain_tokens is None or possible <= limits.max_chain_tokens
            if has_tokens and len(self.recorder.turns) + len(self._reserved) < limits.max_turns:
                break
            await self._released.wait()
        turn.number, turn.sampling, turn.truncation = number, sampling, truncation
        self._numbers.add(number)
        self._reserved[turn] = tokens

    def _release(self, turn: Turn) -> None:
        """Give back what a turn that has ended did not use; its number too, if it was not recorded."""
        if self._reserved.pop(turn, None) is not None:
            self._numbers.discard(turn.number)
        self._released.set()
        self._released = asyncio.Event()

    async def run(self, turn: Turn, sink: DeltaSink | None) -> ChatReply:
        """Sample a turn, record it and return it. Raises ApiError. Cancelling it aborts the request in the backend."""
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        self.last_used = time.monotonic()
        try:
            self._require_open()
            remaining = None if self._deadline is None else max(self._deadline - time.monotonic(), 0)
            async with asyncio.timeout(remaining):
                await self._reserve(turn)
                return await turn.sample(sink)
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
            self._release(turn)
            self._requests.discard(task)
            self.last_used = time.monotonic()

    def add_turn(self, turn: Turn, completion: Completion, reply_id: str, sampled: Message, sent: Message) -> None:
        """Record a complete turn."""
        self._reserved.pop(turn, None)
        self._num_sampled += len(completion.token_ids)
        self.last_message = sent
        self.stop = turn.truncation if completion.finish is FinishReason.LENGTH else None
        if self.recorder is None:
            return
        node = self.recorder.record(turn.prompt, completion, sampled, sent)
        self.recorder.turns.append(TurnRecord(completion.finish, (), time.perf_counter() - turn.begun))
        self.recorder.responses[f"resp_{reply_id}"] = (node, sent, bool(turn.request.instructions))
        self.emit(ReplyReceived, turn.number, sampled)

    def add_failure(self, kind: FailureKind, message: str) -> None:
        if self.recorder is not None:
            self.failures.append(Failure(kind, message, len(self.recorder.turns), self._attempt))

    def emit(self, event: type[Event], *fields: object) -> None:
        if self.settings.observer is not None:
            self.settings.observer(event(self._group, self._chain, *fields))

    @property
    def has_observer(self) -> bool:
        return self.settings.observer is not None and self.recorder is not None

    def _time_out(self) -> ApiError:
        problem = f"the chain has had its {self.settings.limits.chain_seconds:g} s (chain_seconds)"
        if self.stop is not StopReason.TIMEOUT:
            self.add_failure(FailureKind.TIMEOUT, problem)
        self.stop = StopReason.TIMEOUT
        return ApiError(problem, 400, "chain_seconds")

    def _require_open(self) -> None:
        if self._closed:
            raise ApiError("this chain has ended; its key is not valid any more", 401, "chain_ended")

    def to_trajectory(self) -> Trajectory:
        """The record of a chain that no rollout runs; its task is the first prompt."""
        assert self.recorder is not None
        segments = self.recorder.close()
        stop = self.stop or StopReason.ANSWER
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
        self._closed = True
        running = list(self._requests)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Turn:
    """One turn that is ready to be sampled."""

    def __init__(
        self, session: GatewaySession, request: ChatRequest, prompt: Prompt, limited: tuple[Sampling, StopReason]
    ) -> None:
        self.session = session
        self.request = request
        self.prompt = prompt
        self.number = 0
        self.sampling, self.truncation = limited
        self.stop_ids = prompt.template.stop_ids
        self.id = self.session.templates.new_id()
        self.created = int(time.time())
        self.begun = time.perf_counter()

    async def sample(self, sink: DeltaSink | None) -> ChatReply:
        """Sample the turn and record it. `sink` receives deltas, the last ones before this returns."""
        session, template, ids = self.session, self.prompt.template, self.prompt.ids
        stream = ReplyStream(template, self.id, self.sampling.stop)
        on_tokens = None
        if sink is not None or session.has_observer:
            decode = template.stream(ids)

            def pass_on(new: Sequence[int]) -> None:
                text = decode(new)
                if sink is not None:
                    sink(stream.add(text))
                session.emit(TokensSampled, self.number, tuple(new), text)

            on_tokens = pass_on
        self.begun = time.perf_counter()
        completion = await session.backend.generate(
            Request(
                ids,
                self.sampling,
                stop_ids=self.stop_ids,
                chain=session.name,
                turn=self.number,
                priority=session.settings.priority,
                on_tokens=on_tokens,
            )
        )
        if completion.finish is FinishReason.ABORTED:
            session.stop = StopReason.CANCELLED
            session.add_failure(FailureKind.CANCELLED, "the backend aborted the turn")
            raise ApiError("the backend aborted the turn", 503, "aborted")
        if not self.request.messages:  # /completions: nothing to parse
            message = Message("assistant", template.codec.decode(completion.token_ids))
            session.add_turn(self, completion, self.id, message, message)
        else:
            reply = template.parse_text(stream.cut(template.text(completion.token_ids, ids)))
            message = client_message(reply, self.id, template.tools)
            session.add_turn(self, completion, self.id, reply.message, message)
            if sink is not None:
                sink(stream.finish(message))
        return ChatReply(self.id, message, completion, ids, self.request, self.created)
