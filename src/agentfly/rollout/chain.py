"""One attempt at a task. `Chain._loop` is the whole loop: sample, parse, call tools, decide, show the results.

Whatever is raised during the loop becomes a typed stop reason; then the chain is scored.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentfly.backends.base import PromptFormat, Request
from agentfly.environment import Environment
from agentfly.errors import (
    BackendFault,
    ConfigError,
    DataError,
    EnvironmentFault,
    Fault,
    NonFiniteError,
    RewardFault,
    describe,
)
from agentfly.resources import Leases
from agentfly.rollout.config import ChainAgent, ChainSettings
from agentfly.rollout.events import ChainScored, ChainStarted, Event, ReplyReceived, TokensSampled
from agentfly.rollout.history import Transcript, append_user_text, join_content
from agentfly.rollout.limits import StopPolicy, limit_sampling, seed_for_turn
from agentfly.rollout.tool_calls import ToolRunner
from agentfly.segment import Author
from agentfly.tooling import Context, ToolResult
from agentfly.trajectory import (
    CallStatus,
    Failure,
    FailureKind,
    StopReason,
    TrainingTreatment,
    Trajectory,
    TurnRecord,
    chain_id,
)  # fmt: skip
from agentfly.types import Completion, FinishReason, Message, Reply, Sampling, Task, ToolCall

_UNSCORED = {FailureKind.ENVIRONMENT, FailureKind.BACKEND, FailureKind.AGENT, FailureKind.CANCELLED}
"""Failures after which the model's behavior cannot be scored."""
_RUN = {CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT}


@dataclass(slots=True)
class ChainState:
    """What a chain has done so far. A chain that is forked from it goes on with a copy."""

    transcript: Transcript
    stop_policy: StopPolicy
    turns: list[TurnRecord] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    initial: Sequence[Message] = ()
    """Messages of the prompt before the first reply."""
    prediction: str = ""
    num_calls: int = 0
    outcomes: set[int] = field(default_factory=set)
    """Hashes of the calls that were run, each with its observation."""
    num_sampled: int = 0
    summarizing: bool = False
    """Whether the next reply is a summary of the history."""

    def copy(self) -> ChainState:
        """A copy that goes on separately."""
        return replace(
            self,
            transcript=copy(self.transcript),
            stop_policy=copy(self.stop_policy),
            turns=list(self.turns),
            failures=list(self.failures),
            outcomes=set(self.outcomes),
        )


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A chain between two turns, from which other chains continue."""

    state: ChainState
    environments: Mapping[type[Environment], Any]
    """Snapshots of its environment instances."""

    @property
    def turn(self) -> int:
        """Turns so far."""
        return len(self.state.turns)


class Chain:
    """One attempt at a task."""

    def __init__(
        self,
        agent: ChainAgent,
        task: Task,
        group: int,
        chain: int,
        settings: ChainSettings,
        leases: Leases,
        *,
        start: ForkPoint | None = None,
        on_fork: Callable[[ForkPoint], None] | None = None,
    ) -> None:
        """`start`: where the chain continues; None begins with the task. on_fork: called at the branching point."""
        self._start = start
        self._on_fork = on_fork
        self.agent = agent
        self.task = task
        self.group = group
        self.chain = chain
        self.settings = settings
        self.leases = leases
        template = agent.template if agent.backend.prompt_format is PromptFormat.TOKENS else None
        self.state = ChainState(Transcript(template), StopPolicy(agent.control))
        self._name = chain_id(group, chain)
        self._truncation = StopReason.TRUNCATED
        """Stop reason if the current turn is truncated at its token limit."""
        self._attempt = 0
        self._unrecorded: FinishReason | None = None
        """Finish reason of a reply whose calls are running; None between turns."""

    async def run(self, attempt: int = 0, earlier: Sequence[Failure] = ()) -> Trajectory:
        """Run the chain and score it. Raises only ConfigError, NonFiniteError and cancellation.

        attempt: index of this attempt. earlier: failures of the previous attempts.
        """
        started = time.perf_counter()
        self._attempt = attempt
        stop = await self._run_loop()
        treatment = self.settings.failures.treatment(stop.failure)
        is_scorable = stop.failure not in _UNSCORED
        # Without a reply of the model there is nothing to score or train.
        if not self.state.turns and stop is StopReason.CONTEXT_LIMIT:
            self._add_failure(FailureKind.TRUNCATION, "the task's prompt leaves no room for a reply in the context")
            treatment, is_scorable = TrainingTreatment.MASK, False
        trajectory = Trajectory(
            task=self.task,
            segments=self.state.transcript.close(),
            turns=tuple(self.state.turns),
            stop=stop,
            prediction=self.state.prediction,
            group=self.group,
            chain=self.chain,
            treatment=treatment,
            failures=(*earlier, *self.state.failures),
            seconds=time.perf_counter() - started,
            attempts=attempt + 1,
        )
        if is_scorable:
            trajectory = await self._score(trajectory)
        if trajectory.score is not None:
            self._emit(ChainScored, trajectory.score)
        return trajectory

    async def _run_loop(self) -> StopReason:
        """Run the loop under the chain's time limit, and convert what it raises to a stop reason."""
        limit = asyncio.timeout(self.settings.limits.chain_seconds)
        try:
            async with limit:
                return await self._loop()
        except (ConfigError, NonFiniteError):
            raise
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0:
                raise  # this task was cancelled; any other CancelledError comes from something it awaited
            if limit.expired():
                stop = StopReason.TIMEOUT
                message = f"the chain took longer than {self.settings.limits.chain_seconds:g} s"
            elif isinstance(error, EnvironmentFault):
                stop, message = StopReason.ENVIRONMENT_FAULT, str(error)
            elif isinstance(error, BackendFault):
                stop, message = StopReason.BACKEND_FAULT, str(error)
            else:
                stop, message = StopReason.AGENT_FAULT, describe(error)
                if frames := traceback.extract_tb(error.__traceback__):
                    message += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})"
        assert stop.failure is not None
        self._add_failure(stop.failure, message)
        if self._unrecorded is not None:  # sampled tokens belong to a turn even if its calls failed
            self.state.turns.append(TurnRecord(self._unrecorded))
        return stop

    async def _begin(self) -> StopReason | None:
        """Show the task to the model, or continue from a fork point. Returns a stop reason where that is impossible."""
        self._emit(ChainStarted, self.task)
        if (start := self._start) is not None:
            self.state = start.state.copy()
            if self._attempt:  # an earlier attempt has recorded them
                self.state.failures.clear()
            await self.leases.restore(start.environments)
            return None
        try:
            prepare = partial(self.agent.initial_messages, self.task)
            has_images = any(message.images for message in self.task.messages)  # decoding would block other chains
            self.state.initial = await asyncio.to_thread(prepare) if has_images else prepare()
        except DataError as error:  # a bad image ends this chain, not the run
            self._add_failure(FailureKind.AGENT, f"task {self.task.id!r}: {error}")
            return StopReason.AGENT_FAULT
        self.state.transcript.begin(self.state.initial, Author.TASK, turn=0)
        return None

    async def _fork(self) -> None:
        """At the branching point: pass on the state that other chains continue from."""
        branching = self.settings.branching
        if self._on_fork is None or branching is None or len(self.state.turns) != branching.turn:
            return
        self._on_fork(ForkPoint(self.state.copy(), await self.leases.snapshot()))
        self._on_fork = None

    async def _loop(self) -> StopReason:
        if (failed := await self._begin()) is not None:
            return failed
        while True:
            await self._fork()
            sampling = self._next_sampling()
            if isinstance(sampling, StopReason):
                return sampling
            started = time.perf_counter()
            request, completion = await self.agent.sample(
                self._build_request(sampling), self.state.transcript.messages, self._replace_history
            )
            generation_s = time.perf_counter() - started
            if completion.finish is FinishReason.ABORTED:
                if completion.token_ids:
                    self._parse_reply(request, completion)
                    self._record_turn(completion, (), 0.0, 0.0)
                self._add_failure(FailureKind.CANCELLED, "the backend aborted the turn")
                return StopReason.CANCELLED
            started = time.perf_counter()
            reply, message = self._parse_reply(request, completion)
            calls = message.tool_calls
            results = await self._run_calls(calls) if calls and not self.state.summarizing else []
            self._record_turn(completion, results, generation_s, time.perf_counter() - started)
            if self.state.summarizing:
                self._fold_summary(message.text)
                continue
            # The answer if the chain ends here: the ending tool's observation, the marked answer, or the whole text.
            self.state.prediction = message.text if reply.answer is None else reply.answer
            ending = next((result for result in results if result.ends_chain), None)
            if ending is not None and ending.status is not CallStatus.TIMEOUT:
                self.state.prediction = Message("tool", ending.observation).text
            truncation = self._truncation if completion.finish is FinishReason.LENGTH else None
            stop, nudge = self.state.stop_policy.decide(reply, results, truncation)
            observe = partial(self.agent.observe, calls[: len(results)], results)
            has_images = any(isinstance(result.observation, tuple) for result in results)
            observations = append_user_text(await asyncio.to_thread(observe) if has_images else observe(), nudge)
            author = Author.TOOL if results else Author.USER
            if stop is None and len(self.state.turns) >= self.settings.limits.max_turns:
                stop = StopReason.MAX_TURNS
            if stop is not None:
                self.state.transcript.note(observations, author, turn=len(self.state.turns) - 1)
                return stop
            self._show(observations, author)

    # ── before a turn ──

    def _next_sampling(self) -> Sampling | StopReason:
        """Sampling parameters of the next turn, with max_tokens within all limits; a stop reason if none are left."""
        limits, sampling = self.settings.limits, self.settings.sampling
        if len(self.state.turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        limited, self._truncation = limit_sampling(
            sampling,
            limits,
            prompt=len(self.state.transcript.segment),
            sampled=self.state.num_sampled,
            context_length=self.agent.backend.context_length,
            seed=seed_for_turn(self.settings.seed, self.group, self.chain, len(self.state.turns)),
        )
        return self._truncation if limited is None else limited

    def _build_request(self, sampling: Sampling) -> Request:
        turn = len(self.state.turns)
        template = self.agent.template
        if template is None or self.agent.backend.prompt_format is PromptFormat.MESSAGES:
            on_text = None if self.settings.observer is None else partial(self._emit, TokensSampled, turn, ())
            return Request(
                (),
                sampling,
                messages=tuple(self.state.transcript.messages),
                tools=self.agent.schemas,
                chain=self._name,
                turn=turn,
                priority=self.settings.priority,
                on_text=on_text,
            )
        segment = self.state.transcript.segment
        prompt = segment.prompt
        on_tokens = None
        if self.settings.observer is not None:
            decode = template.stream(prompt)

            def emit_tokens(ids: Sequence[int]) -> None:
                self._emit(TokensSampled, turn, tuple(ids), decode(ids))

            on_tokens = emit_tokens
        return Request(
            prompt,
            sampling,
            stop_ids=template.stop_ids,
            images=segment.images,
            image_positions=segment.image_positions,
            chain=self._name,
            turn=turn,
            priority=self.settings.priority,
            on_tokens=on_tokens,
        )

    def _replace_history(self, messages: Sequence[Message]) -> Request:
        """Begin a segment with the history that the agent made, and return its request."""
        if self.settings.folding is not None:
            raise ConfigError("folding= and an agent that changes its history exclude each other; keep one")
        self.state.transcript.begin(messages, Author.HISTORY, len(self.state.turns))
        sampling = self._next_sampling()
        if isinstance(sampling, StopReason):
            raise Fault(f"the history that generate_async passed leaves no room for a reply ({sampling.value})")
        return self._build_request(sampling)

    # ── after a turn ──

    def _parse_reply(self, request: Request, completion: Completion) -> tuple[Reply, Message]:
        """Parse a turn and record its message, in which every call has an id, which pairs it with its result."""
        turn = len(self.state.turns)
        reply = self.agent.read(request, completion)
        if not isinstance(reply, Reply):
            raise ConfigError(f"{type(self.agent).__name__}.parse returned a {type(reply).__name__}, not a Reply")
        message = reply.message
        limit = self.settings.limits.max_calls_per_turn
        if len(message.tool_calls) > limit:
            # The first call above the limit is kept: its result states the limit, and every kept call has a result.
            message = replace(message, tool_calls=message.tool_calls[: limit + 1])
        if not all(call.id for call in message.tool_calls):
            calls = []
            for call in message.tool_calls:
                self.state.num_calls += 1
                call_id = call.id or f"call{self.state.num_calls:05d}"
                calls.append(ToolCall(call.name, call.arguments, call_id, call.problem, call.raw))
            message = Message("assistant", message.content, tuple(calls), message.thinking)
        self.state.transcript.add_completion(completion, message, self.agent.history_message(message), turn)
        self._unrecorded = completion.finish
        self._emit(ReplyReceived, turn, message)
        return reply, message

    async def _run_calls(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        runner = ToolRunner(self.agent.toolbox, self.leases, self._context(), self.settings.observer)
        limit = self.settings.limits.max_calls_per_turn
        if len(calls) > 1 and self.agent.template is not None and "tools" in self.agent.template.rejections:
            # This chat format has one result per turn (Llama): run the first call and inform the model.
            result = (await runner.run(calls[:1], limit))[0]
            count = f"more than {limit}" if len(calls) > limit else len(calls)
            note = f"(Only the first of your {count} calls was run: make one call a turn.)"
            results = [replace(result, observation=join_content([result.observation, note]))]
        else:
            results = await runner.run(calls, limit)
        return [self._compare_call(call, result) for call, result in zip(calls, results, strict=False)]

    def _compare_call(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """The result with what identifies its call, and whether the call got the same observation before."""
        arguments = repr(call.arguments)
        action = hashlib.blake2b(f"{result.name} {arguments}".encode(errors="replace"), digest_size=6).hexdigest()
        outcome = hash((action, result.observation))
        repeated = result.status in _RUN and outcome in self.state.outcomes
        self.state.outcomes.add(outcome)
        return replace(result, action=action, repeated=repeated)

    def _context(self) -> Context:
        return Context(self.task, self.group, self.chain, len(self.state.turns))

    def _record_turn(
        self, completion: Completion, results: Sequence[ToolResult], generation_s: float, tools_s: float
    ) -> None:
        for result in results:
            if result.status in (CallStatus.ERROR, CallStatus.TIMEOUT):
                self._add_failure(FailureKind.TOOL, Message("tool", result.observation).text)
        records = tuple([result.record for result in results])
        self.state.turns.append(TurnRecord(completion.finish, records, generation_s, tools_s))
        self._unrecorded = None
        self.state.num_sampled += len(completion.token_ids)
        if not completion.token_ids:  # without ids nothing can be counted, so a token limit would have no effect
            for name in ("max_chain_tokens", "context_length"):
                if getattr(self.settings.limits, name) is not None:
                    raise ConfigError(f"{name} cannot be enforced: the server returns no token ids to count")

    def _add_failure(self, kind: FailureKind, message: str) -> None:
        self.state.failures.append(Failure(kind, message, len(self.state.turns), self._attempt))

    def _show(self, observations: Sequence[Message], author: Author) -> None:
        """Append the observations to the prompt, or begin a new segment if the folding rule rewrites the history."""
        folding, turn = self.settings.folding, len(self.state.turns)
        if folding is not None:
            later = [*self.state.transcript.messages[len(self.state.initial) :], *observations]
            if (question := folding.summary_request(later, len(self.state.transcript.segment))) is not None:
                self.state.summarizing = True
                observations = append_user_text(observations, [question])
            elif (folded := folding.fold(self.state.initial, later, None)) is not None:
                self.state.transcript.begin(folded, Author.HISTORY, turn)
                return
        self.state.transcript.add(observations, author, turn)

    def _fold_summary(self, summary: str) -> None:
        self.state.summarizing = False
        assert self.settings.folding is not None
        messages = self.state.transcript.messages
        folded = self.settings.folding.fold(self.state.initial, messages[len(self.state.initial) :], summary)
        self.state.transcript.begin(messages if folded is None else folded, Author.HISTORY, len(self.state.turns))

    async def _score(self, trajectory: Trajectory) -> Trajectory:
        """Attach the score; it stays None without a scorer, or if scoring failed."""
        scorer, policy = self.agent.scorer, self.settings.failures
        if scorer is None:
            return trajectory
        if trajectory.stop is StopReason.TIMEOUT and trajectory.treatment is not TrainingTreatment.TRAIN:
            return trajectory  # the environment may still be busy with the last action, and the score would be unused
        turn = len(trajectory.turns)
        failures = list(trajectory.failures)
        stop, treatment = trajectory.stop, policy.reward
        for _ in range(policy.retries + 1):
            try:
                score = await scorer.score(trajectory, self._context(), self.leases)
                return replace(trajectory, score=score, failures=tuple(failures))
            except RewardFault as error:
                failures.append(Failure(FailureKind.REWARD, str(error), turn, self._attempt, error.metrics))
            except EnvironmentFault as error:
                failures.append(Failure(FailureKind.ENVIRONMENT, str(error), turn, self._attempt))
                if trajectory.stop is StopReason.TOOL_TIMEOUT:  # busy with the model's own call
                    treatment = TrainingTreatment.ZERO
                else:
                    stop, treatment = StopReason.ENVIRONMENT_FAULT, policy.environment
                break
        # A chain that failed before keeps its stop reason, and one that was not to be trained its treatment.
        return replace(
            trajectory,
            failures=tuple(failures),
            stop=stop if trajectory.stop.failure is None else trajectory.stop,
            treatment=treatment if trajectory.treatment is TrainingTreatment.TRAIN else trajectory.treatment,
        )

    def _emit(self, event: type[Event], *fields: Any) -> None:
        if self.settings.observer is not None:
            self.settings.observer(event(self.group, self.chain, *fields))
