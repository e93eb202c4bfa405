"""One attempt at a task. `Chain._loop` is the whole loop: sample, parse, call tools, decide, show the results.

Whatever is raised during the loop becomes a typed stop reason; then the chain is scored.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentfly.backends.base import PromptFormat, Request
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
from agentfly.rollout.history import ForkPoint, Transcript, append_user_text, join_content
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
_FORKED = (
    "transcript", "turns", "failures", "prediction", "_stop_policy", "_initial", "_num_calls", "_num_sampled",
    "_summarizing",
)  # fmt: skip
"""The state of a chain between two turns."""


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
        self.transcript = Transcript(agent.template if agent.backend.prompt_format is PromptFormat.TOKENS else None)
        self.turns: list[TurnRecord] = []
        self.failures: list[Failure] = []
        self.prediction = ""
        self._name = chain_id(group, chain)
        self._stop_policy = StopPolicy(agent.control)
        self._initial: Sequence[Message] = ()
        self._num_calls = 0
        self._num_sampled = 0
        self._truncation = StopReason.TRUNCATED
        """Stop reason if the current turn is truncated at its token limit."""
        self._summarizing = False
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
        if not self.turns and stop is StopReason.CONTEXT_LIMIT:  # no reply of the model: nothing to score or train
            self._add_failure(FailureKind.TRUNCATION, "the task's prompt leaves no room for a reply in the context")
            treatment = TrainingTreatment.MASK
        trajectory = Trajectory(
            task=self.task,
            segments=self.transcript.close(),
            turns=tuple(self.turns),
            stop=stop,
            prediction=self.prediction,
            group=self.group,
            chain=self.chain,
            treatment=treatment,
            failures=(*earlier, *self.failures),
            seconds=time.perf_counter() - started,
            attempts=attempt + 1,
        )
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
            self.turns.append(TurnRecord(self._unrecorded))
        return stop

    async def _begin(self) -> StopReason | None:
        """Show the task to the model, or continue from a fork point. Returns a stop reason where that is impossible."""
        self._emit(ChainStarted, self.task)
        if (start := self._start) is not None:
            vars(self).update({name: copy(value) for name, value in start.state.items()})
            if self._attempt:  # an earlier attempt has recorded them
                self.failures = []
            await self.leases.restore(start.environments)
            return None
        try:
            prepare = partial(self.agent.initial_messages, self.task)
            has_images = any(message.images for message in self.task.messages)  # decoding would block other chains
            self._initial = await asyncio.to_thread(prepare) if has_images else prepare()
        except DataError as error:  # a bad image ends this chain, not the run
            self._add_failure(FailureKind.AGENT, f"task {self.task.id!r}: {error}")
            return StopReason.AGENT_FAULT
        self.transcript.begin(self._initial, Author.TASK, turn=0)
        return None

    async def _fork(self) -> None:
        """At the branching point: pass on the state that other chains continue from."""
        branching = self.settings.branching
        if self._on_fork is None or branching is None or len(self.turns) != branching.turn:
            return
        state = {name: copy(getattr(self, name)) for name in _FORKED}
        self._on_fork(ForkPoint(len(self.turns), state, await self.leases.snapshot()))
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
                self._build_request(sampling), self.transcript.messages, self._replace_history
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
            results = await self._run_calls(calls) if calls and not self._summarizing else []
            self._record_turn(completion, results, generation_s, time.perf_counter() - started)
            if self._summarizing:
                self._fold_summary(message.text)
                continue
            # The answer if the chain ends here: the ending tool's observation, the marked answer, or the whole text.
            self.prediction = message.text if reply.answer is None else reply.answer
            ending = next((result for result in results if result.ends_chain), None)
            if ending is not None and ending.status is not CallStatus.TIMEOUT:
                self.prediction = Message("tool", ending.observation).text
            truncation = self._truncation if completion.finish is FinishReason.LENGTH else None
            stop, nudge = self._stop_policy.decide(reply, results, truncation)
            observe = partial(self.agent.observe, calls[: len(results)], results)
            has_images = any(isinstance(result.observation, tuple) for result in results)
            observations = append_user_text(await asyncio.to_thread(observe) if has_images else observe(), nudge)
            author = Author.TOOL if results else Author.USER
            if stop is None and len(self.turns) >= self.settings.limits.max_turns:
                stop = StopReason.MAX_TURNS
            if stop is not None:
                self.transcript.note(observations, author, turn=len(self.turns) - 1)
                return stop
            self._show(observations, author)

    # ── before a turn ──

    def _next_sampling(self) -> Sampling | StopReason:
        """Sampling parameters of the next turn, with max_tokens within all limits; a stop reason if none are left."""
        limits, sampling = self.settings.limits, self.settings.sampling
        if len(self.turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        limited, self._truncation = limit_sampling(
            sampling,
            limits,
            prompt=len(self.transcript.segment),
            sampled=self._num_sampled,
            context_length=self.agent.backend.context_length,
            seed=seed_for_turn(self.settings.seed, self.group, self.chain, len(self.turns)),
        )
        return self._truncation if limited is None else limited

    def _build_request(self, sampling: Sampling) -> Request:
        turn = len(self.turns)
        template = self.agent.template
        if template is None or self.agent.backend.prompt_format is PromptFormat.MESSAGES:
            on_text = None if self.settings.observer is None else partial(self._emit, TokensSampled, turn, ())
            return Request(
                (),
                sampling,
                messages=tuple(self.transcript.messages),
                tools=self.agent.schemas,
                chain=self._name,
                turn=turn,
                priority=self.settings.priority,
                on_text=on_text,
            )
        segment = self.transcript.segment
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
        self.transcript.begin(messages, Author.HISTORY, len(self.turns))
        sampling = self._next_sampling()
        if isinstance(sampling, StopReason):
            raise Fault(f"the history that generate_async passed leaves no room for a reply ({sampling.value})")
        return self._build_request(sampling)

    # ── after a turn ──

    def _parse_reply(self, request: Request, completion: Completion) -> tuple[Reply, Message]:
        """Parse a turn and record its message, in which every call has an id, which pairs it with its result."""
        turn = len(self.turns)
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
                self._num_calls += 1
                call_id = call.id or f"call{self._num_calls:05d}"
                calls.append(ToolCall(call.name, call.arguments, call_id, call.problem, call.raw))
            message = Message("assistant", message.content, tuple(calls), message.thinking)
        self.transcript.add_completion(completion, message, self.agent.history_message(message), turn)
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
            return [replace(result, observation=join_content([result.observation, note]))]
        return await runner.run(calls, limit)

    def _context(self) -> Context:
        return Context(self.task, self.group, self.chain, len(self.turns))

    def _record_turn(
        self, completion: Completion, results: Sequence[ToolResult], generation_s: float, tools_s: float
    ) -> None:
        for result in results:
            if result.status in (CallStatus.ERROR, CallStatus.TIMEOUT):
                self._add_failure(FailureKind.TOOL, Message("tool", result.observation).text)
        records = tuple([result.record for result in results])
        self.turns.append(TurnRecord(completion.finish, records, generation_s, tools_s))
        self._unrecorded = None
        self._num_sampled += len(completion.token_ids)
        if not completion.token_ids:  # without ids nothing can be counted, so a token limit would have no effect
            for name in ("max_chain_tokens", "context_length"):
                if getattr(self.settings.limits, name) is not None:
                    raise ConfigError(f"{name} cannot be enforced: the server returns no token ids to count")

    def _add_failure(self, kind: FailureKind, message: str) -> None:
        self.failures.append(Failure(kind, message, len(self.turns), self._attempt))

    def _show(self, observations: Sequence[Message], author: Author) -> None:
        """Append the observations to the prompt, or begin a new segment if the folding rule rewrites the history."""
        folding, turn = self.settings.folding, len(self.turns)
        if folding is not None:
            later = [*self.transcript.messages[len(self._initial) :], *observations]
            if (question := folding.summary_request(later, len(self.transcript.segment))) is not None:
                self._summarizing = True
                observations = append_user_text(observations, [question])
            elif (folded := folding.fold(self._initial, later, None)) is not None:
                self.transcript.begin(folded, Author.HISTORY, turn)
                return
        self.transcript.add(observations, author, turn)

    def _fold_summary(self, summary: str) -> None:
        self._summarizing = False
        assert self.settings.folding is not None
        messages = self.transcript.messages
        folded = self.settings.folding.fold(self._initial, messages[len(self._initial) :], summary)
        self.transcript.begin(messages if folded is None else folded, Author.HISTORY, len(self.turns))

    async def _score(self, trajectory: Trajectory) -> Trajectory:
        """Attach the score; it stays None without a scorer, if scoring failed, or if there is no behavior to score."""
        scorer, policy = self.agent.scorer, self.settings.failures
        if scorer is None or trajectory.stop.failure in _UNSCORED:
            return trajectory
        if not trajectory.turns and trajectory.stop is StopReason.CONTEXT_LIMIT:
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
