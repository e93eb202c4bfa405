"""One chain: the loop on one screen (`Chain._turns`), and below it what each of its steps does."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from agentfly.backend import Backend, Request, Speaks
from agentfly.errors import ConfigError, ModelBroken
from agentfly.outcome import CallStatus, Failure, FailureKind, StopReason, Turn
from agentfly.resources import Leases
from agentfly.rollout.acting import Actions
from agentfly.rollout.ending import cancelled_from_outside, scored, stop_of
from agentfly.rollout.events import ChainStarted, Event, Observer, Replied, Rewarded, Tokens
from agentfly.rollout.folding import Folding, joined, told_also
from agentfly.rollout.judging import Judge, prediction
from agentfly.rollout.policy import Control, FailurePolicy, Limits
from agentfly.rollout.transcript import Transcript
from agentfly.scoring import Scorer
from agentfly.segment import Author
from agentfly.template import Template
from agentfly.tooling import Context, Toolbox, ToolResult
from agentfly.trajectory import Trajectory, chain_id
from agentfly.types import Completion, Finish, Message, Reply, Sampling, Task, ToolCall


class ChainAgent(Protocol):
    """What a chain needs of an agent."""

    backend: Backend
    template: Template | None
    """None where the server renders."""
    toolbox: Toolbox
    scorer: Scorer | None
    control: Control

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools as the chat format carries them."""

    def opening(self, task: Task) -> Sequence[Message]:
        """The conversation a chain starts with."""

    async def generate_async(self, request: Request) -> Completion:
        """Sample one turn."""

    def read(self, request: Request, completion: Completion) -> Reply:
        """What the model said in a turn."""

    def retell(self, said: Message) -> Message:
        """How a turn of the model reads where the history is rendered anew."""

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> Sequence[Message]:
        """What the model is told of its calls."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the chains of a run are run."""

    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    folding: Folding | None = None
    """None: the history only grows."""
    seed: int | None = None
    """The same seed gives each chain and turn the same draws, whatever the interleaving; None draws anew."""
    observer: Observer | None = None


class Chain:
    """One attempt at a task."""

    def __init__(
        self, agent: ChainAgent, task: Task, group: int, chain: int, settings: Settings, leases: Leases
    ) -> None:
        self.agent, self.task, self.group, self.chain = agent, task, group, chain
        self.settings, self.leases = settings, leases
        self.transcript = Transcript(agent.template if agent.backend.speaks is Speaks.TOKENS else None)
        self.turns: list[Turn] = []
        self.failures: list[Failure] = []
        self.prediction = ""
        self._judge = Judge(agent.control)
        self._opening: Sequence[Message] = ()
        self._calls = 0
        self._sampled = 0
        self._cut = StopReason.TRUNCATED
        """What it means if the turn under way is cut at its token limit."""
        self._summing_up = False
        self._attempt = 0
        self._unrecorded: Finish | None = None
        """How the reply ended that is being acted on; None between turns."""

    async def run(self, attempt: int = 0, earlier: Sequence[Failure] = ()) -> Trajectory:
        """Run to an end of any kind, and score it. Raises only the user's own mistakes, and cancellation."""
        started, self._attempt = time.perf_counter(), attempt
        stop = await self._stop()
        policy = self.settings.failures
        trajectory = Trajectory(
            task=self.task,
            segments=self.transcript.close(),
            turns=tuple(self.turns),
            stop=stop,
            prediction=self.prediction,
            group=self.group,
            chain=self.chain,
            treatment=policy.treatment(stop.failure),
            failures=(*earlier, *self.failures),
            seconds=time.perf_counter() - started,
            attempts=attempt + 1,
        )
        trajectory = await scored(trajectory, self.agent.scorer, self._context(), self.leases, policy)
        if trajectory.score is not None:
            self._emit(Rewarded, trajectory.score)
        return trajectory

    async def _stop(self) -> StopReason:
        """Take the turns, and make a typed end of whatever they raise."""
        limit = asyncio.timeout(self.settings.limits.chain_seconds)
        try:
            async with limit:
                return await self._turns()
        except (ConfigError, ModelBroken):
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelled_from_outside():
                raise
            stop, what = stop_of(error)
            if limit.expired():
                stop, what = StopReason.TIMEOUT, f"the chain took longer than {self.settings.limits.chain_seconds:g} s"
        assert stop.failure is not None
        self._fail(stop.failure, what)
        if self._unrecorded is not None:  # what was sampled is a turn, also where its calls came to nothing
            self.turns.append(Turn(self._unrecorded))
        return stop

    async def _turns(self) -> StopReason:
        self._emit(ChainStarted, self.task)
        self._opening = self.agent.opening(self.task)
        self.transcript.begin(self._opening, Author.TASK, turn=0)
        while True:
            sampling = self._room()
            if isinstance(sampling, StopReason):
                return sampling
            request, asked = self._request(sampling), time.perf_counter()
            completion = await self.agent.generate_async(request)
            answered = time.perf_counter()
            if completion.finish is Finish.ABORTED:
                return self._aborted(request, completion)
            reply = self._read(request, completion)
            results = await self._act(reply.calls) if reply.calls and not self._summing_up else []
            self._record(completion, results, answered - asked, time.perf_counter() - answered)
            if self._summing_up:
                self._fold(reply.message.text)
                continue
            self.prediction = prediction(reply, results)
            stop, nudge = self._judge.verdict(reply, results, self._cut if completion.finish is Finish.LENGTH else None)
            told = told_also(self.agent.observe(reply.calls[: len(results)], results), nudge)
            author = Author.TOOL if results else Author.USER
            if stop is None and len(self.turns) >= self.settings.limits.max_turns:
                stop = StopReason.MAX_TURNS
            if stop is not None:
                self.transcript.note(told, author, turn=len(self.turns) - 1)
                return stop
            self._go_on(told, author)

    # ── before a reply ──

    def _room(self) -> Sampling | StopReason:
        """The sampling of the next turn, cut to the room that is left; or why there is none."""
        limits, sampling = self.settings.limits, self.settings.sampling
        if len(self.turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        shown, room, self._cut = len(self.transcript.segment), sampling.max_tokens, StopReason.TRUNCATED
        for limit, used, reason in (
            (limits.context_length, shown, StopReason.CONTEXT_LIMIT),
            (self.agent.backend.context_length, shown, StopReason.CONTEXT_LIMIT),
            (limits.max_chain_tokens, self._sampled, StopReason.MAX_TOKENS),
        ):
            if limit is not None and (room is None or limit - used < room):
                room, self._cut = limit - used, reason
        if room is not None and room <= 0:
            return self._cut
        if self.settings.seed is not None:
            seed = _mixed(self.settings.seed, self.group, self.chain, len(self.turns))
            return replace(sampling, max_tokens=room, seed=seed)
        return sampling if room == sampling.max_tokens else replace(sampling, max_tokens=room)

    def _request(self, sampling: Sampling) -> Request:
        name, turn, template = chain_id(self.group, self.chain), len(self.turns), self.agent.template
        if template is None or self.agent.backend.speaks is Speaks.MESSAGES:
            messages = tuple(self.transcript.messages)
            heard = None if self.settings.observer is None else partial(self._emit, Tokens, turn, ())
            tools = self.agent.schemas
            return Request((), sampling, messages=messages, tools=tools, chain=name, turn=turn, on_text=heard)
        segment = self.transcript.segment
        prompt = segment.prompt
        watch = None if self.settings.observer is None else self._watch(template, prompt, turn)
        return Request(prompt, sampling, template.stop_ids, (), (), segment.images, name, turn, watch)

    def _watch(self, template: Template, prompt: Sequence[int], turn: int) -> Callable[[Sequence[int]], None]:
        stream = template.stream(prompt)

        def on_tokens(ids: Sequence[int]) -> None:
            self._emit(Tokens, turn, tuple(ids), stream(ids))

        return on_tokens

    # ── after a reply ──

    def _read(self, request: Request, completion: Completion) -> Reply:
        """What the model said, written into the record; its calls with the ids that pair them with their answers."""
        reply, turn = self.agent.read(request, completion), len(self.turns)
        if not isinstance(reply, Reply):
            raise ConfigError(
                f"{type(self.agent).__name__} made a {type(reply).__name__} of a turn; parse gives a Reply"
            )
        said, allowed = reply.message, self.settings.limits.max_calls_per_turn
        if len(said.tool_calls) > allowed:
            # The first call above the limit is kept: its answer states the limit, and every kept call has an answer.
            said = replace(said, tool_calls=said.tool_calls[: allowed + 1])
            reply = replace(reply, message=said)
        if not all(call.id for call in said.tool_calls):
            calls = []
            for call in said.tool_calls:
                self._calls += 1
                name = call.id or f"call{self._calls:05d}"
                calls.append(ToolCall(call.name, call.arguments, name, call.problem, call.raw))
            said = Message("assistant", said.content, tuple(calls), said.thinking)
            reply = Reply(said, reply.answer, reply.problems)
        self.transcript.sampled(completion, said, self.agent.retell(said), turn)
        self._unrecorded = completion.finish
        self._emit(Replied, turn, said)
        return reply

    def _aborted(self, request: Request, completion: Completion) -> StopReason:
        if completion.token_ids:
            self._read(request, completion)
            self._record(completion, (), 0.0, 0.0)
        self._fail(FailureKind.CANCELLED, "the backend gave the turn up")
        return StopReason.CANCELLED

    async def _act(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        actions = Actions(self.agent.toolbox, self.leases, self._context(), self.settings.observer)
        limit = self.settings.limits.max_calls_per_turn
        if len(calls) > 1 and self.agent.template is not None and "tools" in self.agent.template.refused:
            # This chat format carries one answer a turn (Llama): the first call is run, and the model is told so.
            only = (await actions.run(calls[:1], limit))[0]
            count = f"more than {limit}" if len(calls) > limit else len(calls)
            note = f"(Only the first of your {count} calls was run: make one call a turn.)"
            return [replace(only, observation=joined([only.observation, note]))]
        return await actions.run(calls, limit)

    def _context(self) -> Context:
        return Context(self.task, self.group, self.chain, len(self.turns))

    def _record(self, completion: Completion, results: Sequence[ToolResult], generating: float, acting: float) -> None:
        for result in results:
            if result.status is CallStatus.ERROR:
                self._fail(FailureKind.TOOL, Message("tool", result.observation).text)
        self.turns.append(Turn(completion.finish, tuple([result.record for result in results]), generating, acting))
        self._unrecorded = None
        self._sampled += len(completion.token_ids)
        if not completion.token_ids:
            self._refuse_uncounted()

    def _fail(self, kind: FailureKind, what: str) -> None:
        self.failures.append(Failure(kind, what, len(self.turns), self._attempt))

    def _refuse_uncounted(self) -> None:
        """Without ids nothing can be counted, and a limit that nobody keeps would be none."""
        limits = self.settings.limits
        for name in ("max_chain_tokens", "context_length"):
            if getattr(limits, name) is not None:
                raise ConfigError(f"{name} cannot be kept: the server returns no token ids to count")

    def _go_on(self, told: Sequence[Message], author: Author) -> None:
        """Show the model what it is told, with the history as the folding rule leaves it."""
        folding, turn = self.settings.folding, len(self.turns)
        if folding is not None:
            since = [*self.transcript.messages[len(self._opening) :], *told]
            if (asked := folding.asks(since, len(self.transcript.segment))) is not None:
                self._summing_up = True
                told = told_also(told, [asked])
            elif (folded := folding.fold(self._opening, since, None)) is not None:
                self.transcript.begin(folded, Author.HISTORY, turn)
                return
        self.transcript.add(told, author, turn)

    def _fold(self, summary: str) -> None:
        self._summing_up = False
        assert self.settings.folding is not None
        messages = self.transcript.messages
        folded = self.settings.folding.fold(self._opening, messages[len(self._opening) :], summary)
        self.transcript.begin(messages if folded is None else folded, Author.HISTORY, len(self.turns))

    def _emit(self, event: type[Event], *fields: Any) -> None:
        if self.settings.observer is not None:
            self.settings.observer(event(self.group, self.chain, *fields))


def _mixed(*numbers: int) -> int:
    """One seed made of several numbers."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "big")
