"""One chain: the loop on one screen (`Chain._turns`), and below it what each of its steps does."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentfly.acting import Actions
from agentfly.backend import Backend, Request, Speaks
from agentfly.errors import AgentFlyError, BackendFault, ConfigError, EnvironmentFault, RewardFault, TemplateError
from agentfly.events import ChainStarted, Event, Observer, Replied, Rewarded, Tokens
from agentfly.folding import Folding
from agentfly.policy import Control, FailurePolicy, Limits, Reaction, Then
from agentfly.resources import Leases
from agentfly.scoring import Scorer
from agentfly.template import Template
from agentfly.tooling import Context, Toolbox, ToolResult
from agentfly.trajectory import Author, CallStatus, Failure, FailureKind, StopReason, Trajectory, Turn, chain_id
from agentfly.transcript import Transcript
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

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> Sequence[Message]:
        """What the model is told of its calls."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the chains of a run are run."""

    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    failures: FailurePolicy = FailurePolicy()
    folding: Folding | None = None
    """None: the history only grows."""
    seed: int | None = None
    """The same seed gives each chain and turn the same draws, whatever the interleaving; None draws anew."""
    observer: Observer | None = None


_UNSCORED = {FailureKind.ENVIRONMENT, FailureKind.BACKEND, FailureKind.AGENT, FailureKind.CANCELLED}
"""Ends at which there is nothing of the model's to score."""


class Chain:
    """One attempt at a task."""

    def __init__(self, agent: ChainAgent, task: Task, group: int, chain: int, settings: Settings, leases: Leases) -> None:
        self.agent, self.task, self.group, self.chain = agent, task, group, chain
        self.settings, self.leases = settings, leases
        self.transcript = Transcript(agent.template if agent.backend.speaks is Speaks.TOKENS else None)
        self.turns: list[Turn] = []
        self.failures: list[Failure] = []
        self.prediction = ""
        self._slips: Counter[StopReason] = Counter()
        """Turns since the last good one that did not move the chain on, by the end they lead to."""
        self._calls = 0
        self._sampled = 0
        self._cut = StopReason.TRUNCATED
        """What it means if the turn under way is cut at its token limit."""
        self._summing_up = False

    async def run(self, attempt: int = 0, earlier: Sequence[Failure] = ()) -> Trajectory:
        """Run to an end of any kind, and score it. Raises only the user's own mistakes, and cancellation."""
        started = time.perf_counter()
        stop = await self._stop(attempt)
        trajectory = Trajectory(
            task=self.task,
            segments=self.transcript.close(),
            turns=tuple(self.turns),
            stop=stop,
            prediction=self.prediction,
            group=self.group,
            chain=self.chain,
            failures=(*earlier, *self.failures),
            seconds=time.perf_counter() - started,
            attempts=attempt + 1,
        )
        return await self._scored(trajectory, attempt)

    async def _stop(self, attempt: int) -> StopReason:
        limit = asyncio.timeout(self.settings.limits.chain_seconds)
        try:
            async with limit:
                return await self._turns()
        except EnvironmentFault as error:
            return self._failed(StopReason.ENVIRONMENT_FAULT, error, attempt)
        except BackendFault as error:
            return self._failed(StopReason.BACKEND_FAULT, error, attempt)
        except (ConfigError, TemplateError):
            raise
        except Exception as error:
            if limit.expired():
                return self._failed(StopReason.TIMEOUT, error, attempt)
            return self._failed(StopReason.AGENT_FAULT, error, attempt)

    async def _turns(self) -> StopReason:
        self._emit(ChainStarted, self.task)
        self.transcript.begin(self.agent.opening(self.task), Author.TASK, turn=0)
        while True:
            sampling = self._room()
            if isinstance(sampling, StopReason):
                return sampling
            started = time.perf_counter()
            request = self._request(sampling)
            completion = await self.agent.generate_async(request)
            generated = time.perf_counter()
            reply = self._numbered(self.agent.read(request, completion))
            self.transcript.sampled(completion, reply.message, turn=len(self.turns))
            self._emit(Replied, len(self.turns), reply.message)
            if completion.finish is Finish.ABORTED:
                return StopReason.CANCELLED
            results = [] if self._summing_up or not reply.calls else await self._act(reply.calls)
            self._record(completion, results, generated - started, time.perf_counter() - generated)
            if self._summing_up:
                self._fold(reply.message.text)
                continue
            stop, nudge = self._judge(completion, reply, results)
            told = [*self.agent.observe(reply.calls, results), *nudge]
            if stop is None and len(self.turns) >= self.settings.limits.max_turns:
                stop = StopReason.MAX_TURNS
            if stop is not None:
                self.transcript.note(told, turn=len(self.turns) - 1)
                return stop
            self._go_on(told)

    # ── before a reply ──

    def _room(self) -> Sampling | StopReason:
        """The sampling of the next turn, cut to the room that is left; or why there is none."""
        limits, sampling = self.settings.limits, self.settings.sampling
        if len(self.turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        context = limits.context_length or self.agent.backend.context_length
        room, self._cut = sampling.max_tokens, StopReason.TRUNCATED
        for limit, used, reason in (
            (context, len(self.transcript.segment), StopReason.CONTEXT_LIMIT),
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
            return Request((), sampling, messages=messages, tools=self.agent.schemas, chain=name, turn=turn)
        return Request(
            self.transcript.segment.prompt,
            sampling,
            template.stop_ids,
            images=self.transcript.segment.images,
            chain=name,
            turn=turn,
            on_tokens=None if self.settings.observer is None else self._watch(template, turn),
        )

    def _watch(self, template: Template, turn: int) -> Callable[[Sequence[int]], None]:
        so_far: list[int] = []

        def on_tokens(ids: Sequence[int]) -> None:
            so_far.extend(ids)
            self._emit(Tokens, turn, tuple(ids), template.text(so_far))

        return on_tokens

    # ── after a reply ──

    def _numbered(self, reply: Reply) -> Reply:
        """Give the calls the ids that pair them with their answers."""
        said = reply.message
        if all(call.id for call in said.tool_calls):
            return reply
        calls = []
        for call in said.tool_calls:
            self._calls += 1
            name = call.id or f"call{self._calls:05d}"
            calls.append(ToolCall(call.name, call.arguments, name, call.problem, call.raw))
        return Reply(Message("assistant", said.content, tuple(calls), said.thinking), reply.answer, reply.problems)

    async def _act(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        actions = Actions(self.agent.toolbox, self.leases, self._context(), self.settings.observer)
        return await actions.run(calls)

    def _context(self) -> Context:
        return Context(self.task, self.group, self.chain, len(self.turns))

    def _record(self, completion: Completion, results: Sequence[ToolResult], generating: float, acting: float) -> None:
        self.turns.append(Turn(completion.finish, tuple(result.record for result in results), generating, acting))
        self._sampled += len(completion.token_ids)

    def _judge(
        self, completion: Completion, reply: Reply, results: Sequence[ToolResult]
    ) -> tuple[StopReason | None, Sequence[Message]]:
        """Whether the chain ends here, and the nudge to go on with if not."""
        control, statuses = self.agent.control, {result.status for result in results}
        self.prediction = reply.message.text if reply.answer is None else reply.answer
        ending = next((result for result in results if result.ends_chain), None)
        if ending is not None:
            self.prediction = Message("tool", ending.observation).text
            return StopReason.TOOL_END, ()
        if reply.answer is not None:
            return StopReason.ANSWER, ()
        if completion.finish is Finish.LENGTH and CallStatus.OK not in statuses:
            return self._cut, ()
        if not results and not reply.problems:
            ends = control.on_no_call.then is Then.END
            return self._react(control.on_no_call, StopReason.ANSWER if ends else StopReason.NO_CALL)
        if CallStatus.ERROR in statuses:
            for result in results:
                if result.status is CallStatus.ERROR:
                    text = Message("tool", result.observation).text
                    self.failures.append(Failure(FailureKind.TOOL, text, len(self.turns) - 1))
            return self._react(control.on_tool_error, StopReason.TOOL_FAULT)
        if not statuses <= {CallStatus.OK, CallStatus.SKIPPED} or reply.problems:
            stop, nudge = self._react(control.on_invalid_call, StopReason.INVALID_CALL)
            if not results:
                wrong = "; ".join(reply.problems)
                nudge = (Message("user", f"Error: your reply could not be read: {wrong}."), *nudge)
            return stop, nudge
        self._slips.clear()
        return None, ()

    def _react(self, reaction: Reaction, over: StopReason) -> tuple[StopReason | None, Sequence[Message]]:
        self._slips[over] += 1
        if reaction.then is Then.END or (reaction.limit is not None and self._slips[over] > reaction.limit):
            return over, ()
        return None, () if reaction.nudge is None else (Message("user", reaction.nudge),)

    def _go_on(self, told: Sequence[Message]) -> None:
        """Show the model what it is told, with the history as the folding rule leaves it."""
        folding, turn = self.settings.folding, len(self.turns)
        if folding is not None:
            history = [*self.transcript.messages, *told]
            asked = folding.asks(history, len(self.transcript.segment))
            if asked is not None:
                self._summing_up = True
                told = [*told, Message("user", asked)]
            elif (folded := folding.fold(history, None)) is not None:
                self.transcript.begin(folded, Author.HISTORY, turn)
                return
        self.transcript.add(told, turn)

    def _fold(self, summary: str) -> None:
        self._summing_up = False
        assert self.settings.folding is not None
        folded = self.settings.folding.fold(self.transcript.messages, summary)
        self.transcript.begin(folded or self.transcript.messages, Author.HISTORY, len(self.turns))

    # ── after the last turn ──

    def _failed(self, stop: StopReason, error: Exception, attempt: int) -> StopReason:
        assert stop.failure is not None
        what = str(error) if isinstance(error, AgentFlyError) else f"{type(error).__name__}: {error}"
        if stop is StopReason.TIMEOUT:
            what = f"the chain took longer than {self.settings.limits.chain_seconds:g} s"
        self.failures.append(Failure(stop.failure, what, len(self.turns), attempt))
        return stop

    async def _scored(self, trajectory: Trajectory, attempt: int) -> Trajectory:
        policy, kind = self.settings.failures, trajectory.stop.failure
        if kind is not None:
            trajectory = replace(trajectory, treatment=policy.treatment(kind))
        if self.agent.scorer is None or kind in _UNSCORED:
            return trajectory
        try:
            score = await self.agent.scorer.score(trajectory, self._context(), self.leases)
        except (RewardFault, EnvironmentFault) as error:
            failed = Failure(FailureKind.REWARD, str(error), len(self.turns), attempt)
            treatment = policy.treatment(FailureKind.REWARD)
            return replace(trajectory, failures=(*trajectory.failures, failed), treatment=treatment)
        self._emit(Rewarded, score)
        return replace(trajectory, score=score)

    def _emit(self, event: type[Event], *fields: Any) -> None:
        if self.settings.observer is not None:
            self.settings.observer(event(self.group, self.chain, *fields))


def _mixed(*numbers: int) -> int:
    """One seed made of several numbers."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "big")
