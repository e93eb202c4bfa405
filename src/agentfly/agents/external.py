"""`ExternalAgent`: a chain is a function or a process of the user that calls the model through the gateway."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agentfly.agent import BaseAgent
from agentfly.backends.base import Backend
from agentfly.environment import Environment
from agentfly.errors import ConfigError, DataError, RecordError, RewardFault, describe, sanitize
from agentfly.gateway import Gateway
from agentfly.resources import ResourceManager
from agentfly.resources.guarded import GuardedProcess
from agentfly.rollout.chain import Chain
from agentfly.rollout.events import ChainStarted, Event
from agentfly.scoring import RewardSpec, to_score
from agentfly.segment import require_json, to_plain
from agentfly.templates.tokenizer import BYTES
from agentfly.threads import LoopTimer, call
from agentfly.tooling.schema import type_hints
from agentfly.trajectory import Failure, FailureKind, Score, StopReason, TrainingTreatment, Trajectory
from agentfly.types import Task

OFFERED = ("task", "messages", "question", "base_url", "api_key", "model")
"""Parameters that every program may have, besides environments by their type and the columns of the dataset."""
PASSED_VARIABLES = (
    *("HOME", "LOGNAME", "USER", "SHELL", "TERM", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR"),
    *("LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Environment variables that a process inherits; any other, such as a key of another service, only by `env=`."""
SET_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "AGENTFLY_MODEL")
"""Environment variables that tell a process how to call the model."""
PASSED_FIELDS = ("id", "messages", "question")
"""What a process always reads of its task."""
MAX_OUTPUT = 1 << 20
"""Bytes of a process's output that are read; the last ones are kept."""
MAX_ERROR = 2000
"""Characters of a process's stderr in a recorded failure, the last ones."""
_DRAIN_SECONDS = 1.0
"""Time to read the rest of the output of a process that has ended."""


class ExternalChain(Chain):
    """Runs the agent's program once, with a session of the gateway."""

    agent: ExternalAgent

    _returned: Mapping[str, Any] | None = None
    """What the program returned besides the prediction."""

    async def _loop(self) -> StopReason:
        self._emit(ChainStarted, self.task)
        gateway = await self.agent.gateway.start()
        settings = self.settings
        if settings.folding is not None:
            raise ConfigError("strategy= and folding= have no effect: an external agent keeps its own history")
        if settings.branching is not None:
            raise ConfigError("branching= has no effect: the program of an external agent cannot be continued twice")
        if (observer := settings.observer) is not None:
            loop = asyncio.get_running_loop()

            def observe(event: Event) -> None:  # the gateway has an event loop of its own
                loop.call_soon_threadsafe(observer, event)

            settings = replace(settings, observer=observe)
        key, session = await gateway.open_session(
            settings, name=self._name, position=(self.group, self.chain), attempt=self._attempt
        )
        try:
            result = await self._run_program({"base_url": gateway.base_url, "api_key": key, "model": gateway.model})
        except (Exception, asyncio.CancelledError) as error:
            await gateway.close_session(key)
            task = asyncio.current_task()
            cancelled = task is not None and task.cancelling() > 0
            if cancelled or session.stop is None:
                raise
            # The program gave up because of what the gateway answered last.
            self._add_failure(FailureKind.AGENT, f"the program gave up: {describe(error)}")
            self.state.prediction = session.last_message.text
            return session.stop
        else:
            await gateway.close_session(key)
            if isinstance(result, Mapping):
                self._returned = dict(result)
                result = self._returned.pop("prediction", None)
            self.state.prediction = session.last_message.text if result is None else str(result)
            return session.stop or StopReason.ANSWER
        finally:
            recorder = session.recorder
            assert recorder is not None
            self.state.transcript = recorder  # type: ignore[assignment]  # it has what a finished chain needs of one
            self.state.turns = recorder.turns
            self.state.failures += session.failures

    async def _run_program(self, connection: Mapping[str, str]) -> Any:
        agent = self.agent
        offered = {
            **self.task.columns,
            "task": self.task,
            "messages": [message.to_dict() for message in self.task.messages],
            "question": self.task.question,
            **connection,
        }
        if not callable(agent.program):
            return await run_process(
                agent.program, self.task, connection, columns=agent.columns, variables=agent.variables
            )
        program = agent.program
        parameters = inspect.signature(program).parameters
        arguments = {name: offered[name] for name in parameters if name in offered and name not in agent.env_parameters}

        def run(environments: Mapping[type[Environment], Environment]) -> Awaitable[Any]:
            injected = {name: environments[env_class] for name, env_class in agent.env_parameters.items()}
            name = getattr(program, "__name__", type(program).__name__)
            return LoopTimer(call(program, **arguments, **injected), f"program {name!r}")

        env_classes = tuple(dict.fromkeys(agent.env_parameters.values()))
        return await (self.leases.act(env_classes, run) if env_classes else run({}))

    async def _score(self, trajectory: Trajectory) -> Trajectory:
        """Score by the agent's reward, or by the one that the program returned; it may also return metrics."""
        try:
            returned = self._check_returned(len(trajectory.turns))
        except RewardFault as error:  # of this chain alone: a program may depend on what the model wrote
            failure = Failure(FailureKind.REWARD, str(error), len(trajectory.turns), self._attempt)
            is_trained = trajectory.treatment is TrainingTreatment.TRAIN
            treatment = self.settings.failures.reward if is_trained else trajectory.treatment
            return replace(trajectory, failures=(*trajectory.failures, failure), treatment=treatment)
        if isinstance(returned, Score):
            return replace(trajectory, score=returned)
        trajectory = await super()._score(trajectory)
        if trajectory.score is None or not returned:
            return trajectory
        return replace(trajectory, score=replace(trajectory.score, metrics={**returned, **trajectory.score.metrics}))

    def _check_returned(self, turns: int) -> Score | dict[str, Any]:
        """The score that the program returned, or the metrics if it returned none. Raises RewardFault."""
        returned = self._returned or {}
        metrics = to_plain({name: value for name, value in returned.items() if name != "reward"})
        try:
            metrics = require_json(metrics, "the program returned a metric")
        except RecordError as error:
            raise RewardFault(str(error)) from error
        if returned.get("reward") is None:
            return metrics
        if self.agent.scorer is not None:
            raise RewardFault("the program returned a reward, and the agent has reward=; keep one")
        return to_score({**metrics, "reward": returned["reward"]}, turns, "the program")


class ExternalAgent(BaseAgent):
    """An agent of another package, unchanged: it calls the model at `base_url` with `api_key`.

    The program is a function, also async, or the command line of a process. A function asks by parameter name for
    `base_url`, `api_key`, `model`, `task`, `messages`, `question`, columns of the dataset, and environments by their
    type. It returns the final answer, or a mapping with `prediction` and `reward`; None: the model's last reply is the
    answer. Training and evaluation need `reward=`, which excludes a returned reward.

    A process finds the address and the key in the variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY, and the model's name in AGENTFLY_MODEL. It reads a line of JSON from its input, with `id`,
    `messages` and `question` of the task and the columns in `columns=`, and writes its result as the last line of its
    output. It inherits the environment variables in PASSED_VARIABLES and those in `env=`. All its descendants end with
    it.
    """

    native_tools = False  # the program brings its tools with every request
    chain_class = ExternalChain

    def __init__(
        self,
        model_name_or_path: str = BYTES,
        *,
        program: Callable[..., Any] | Sequence[str],
        columns: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        reward: RewardSpec | None = None,
        template: str | None = None,
        template_config: Mapping[str, Any] | None = None,
        backend: str | Backend | None = None,
        backend_config: Mapping[str, Any] | None = None,
        manager: ResourceManager | None = None,
    ) -> None:
        """
        Args:
            program: A function, or the words of a command line.
            columns: Columns of the dataset that a process reads; a function asks for them by parameter name.
            env: Environment variables of a process, besides those in PASSED_VARIABLES.
            (others): As in `BaseAgent`; the backend must take token ids.
        """
        self.program = program
        self.columns = tuple(columns)
        self.variables = dict(env or {})
        self.env_parameters: dict[str, type[Environment]] = {}
        """Parameters of the program that receive an environment, with its class."""
        if callable(program):
            if columns or env:
                raise ConfigError("columns= and env= are for a process; a function asks for columns by parameter name")
            for name, hint in type_hints(program, {}).items():
                if inspect.isclass(hint) and issubclass(hint, Environment):
                    self.env_parameters[name] = hint
        elif isinstance(program, str) or not all(isinstance(word, str) for word in program) or not program:
            raise ConfigError(f"program must be a function or the words of a command line, not {program!r:.80}")
        elif isinstance(columns, str) or not all(isinstance(column, str) for column in columns):
            raise ConfigError(f"columns must be a list of column names, not {columns!r:.80}")
        elif taken := [name for name in columns if name in PASSED_FIELDS]:
            raise ConfigError(f"a process always reads {', '.join(PASSED_FIELDS)}: leave {taken[0]!r} out of columns")
        elif taken := [name for name in self.variables if name in SET_VARIABLES]:
            raise ConfigError(f"{taken[0]} is set for every chain: leave it out of env")
        super().__init__(
            model_name_or_path,
            tools=list(dict.fromkeys(self.env_parameters.values())),
            reward=reward,
            template=template,
            template_config=template_config,
            backend=backend,
            backend_config=backend_config,
            manager=manager,
        )
        if self.template is None:
            raise ConfigError("an external agent needs token ids: use a backend that takes them")
        self.gateway = Gateway(self.backend, self.load_template, model=model_name_or_path)

    def initial_messages(self, task: Task) -> Sequence[Any]:
        """The messages of the task. Raises ConfigError or DataError if this task lacks what the program asks for."""
        parameters = inspect.signature(self.program).parameters if callable(self.program) else {}
        if not callable(self.program):
            process_input(task, self.columns)
        for name, parameter in parameters.items():
            optional = parameter.default is not parameter.empty
            if optional or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if name not in OFFERED and name not in task.columns and name not in self.env_parameters:
                may = ", ".join(sorted({*OFFERED, *task.columns}))
                raise ConfigError(f"the program asks for {name!r}; it may ask for {may}, or an environment by its type")
        return super().initial_messages(task)

    async def close(self) -> None:
        """Stop the gateway, then close the backend and the agent's own resource manager."""
        await self.gateway.close()
        await super().close()


async def run_process(
    command: Sequence[str],
    task: Task,
    connection: Mapping[str, str],
    *,
    columns: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Run a program as a process; returns the last line of its output, parsed if it is a JSON object.

    columns: those of the task that the process reads. variables: environment variables besides PASSED_VARIABLES. When
    the program or the chain ends, everything that the program has started is killed. Raises RuntimeError if it fails.
    """
    url, key = connection["base_url"], connection["api_key"]
    values = (url, key, url.removesuffix("/v1"), key, connection["model"])
    env = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    env |= {**(variables or {}), **dict(zip(SET_VARIABLES, values, strict=True))}
    process = await GuardedProcess.start(command, env=env)
    outputs = [_OutputTail(process.stdout), _OutputTail(process.stderr)]

    async def write() -> None:
        with suppress(ConnectionError):  # a program need not read its task
            process.stdin.write(process_input(task, columns))
            await process.stdin.drain()
        process.stdin.close()

    tasks = [asyncio.create_task(work) for work in (write(), *(output.read() for output in outputs))]
    try:
        code = await process.wait()
        # Everything that the program has started is gone. Only a process of someone else may still hold its output.
        await asyncio.wait(tasks, timeout=_DRAIN_SECONDS)
    finally:
        for reading in tasks:
            reading.cancel()
        await process.end()
        await asyncio.gather(*tasks, return_exceptions=True)
    out, err = (output.text for output in outputs)
    if code != 0:
        reason = f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        raise RuntimeError(f"the program {reason}: {sanitize(err).strip()[-MAX_ERROR:]}")
    lines = out.strip().splitlines()
    if not lines:
        return None
    try:
        result = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return lines[-1]
    return result if isinstance(result, dict) else lines[-1]


def process_input(task: Task, columns: Sequence[str]) -> bytes:
    """The line of JSON that a process reads. Raises DataError for a column that is missing or that JSON cannot hold."""
    if missing := [name for name in columns if name not in task.columns]:
        has = ", ".join(map(repr, task.columns)) or "none"
        raise DataError(f"columns= has {missing[0]!r}, which task {task.id!r} lacks; its columns are {has}")
    messages = [message.to_dict() for message in task.messages]
    row = {"id": task.id, "messages": messages, "question": task.question}
    try:
        return json.dumps({**row, **{name: task.columns[name] for name in columns}}, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"task {task.id!r} cannot be passed to a process as JSON: {error}") from error


class _OutputTail:
    """The last bytes of a stream."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._tail = b""

    async def read(self) -> None:
        while chunk := await self._stream.read(1 << 16):
            self._tail = (self._tail + chunk)[-MAX_OUTPUT:]

    @property
    def text(self) -> str:
        return self._tail.decode(errors="replace")
