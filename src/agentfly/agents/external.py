"""`ExternalAgent`: a chain is a function or a process of the user that calls the model through the gateway."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agentfly.agent import BaseAgent
from agentfly.backends.base import Backend
from agentfly.environment import Environment
from agentfly.errors import ConfigError, describe
from agentfly.gateway import Gateway
from agentfly.resources import ResourceManager
from agentfly.rollout.chain import Chain
from agentfly.rollout.events import ChainStarted, Event
from agentfly.schema import type_hints
from agentfly.scoring import RewardSpec
from agentfly.templates.tokenizer import BYTES
from agentfly.threads import call
from agentfly.trajectory import FailureKind, Score, StopReason, Trajectory
from agentfly.types import Task

OFFERED = ("task", "messages", "question", "base_url", "api_key", "model")
"""Parameters that every program may have, besides environments by their type and the columns of the dataset."""
MAX_OUTPUT = 1 << 20
"""Bytes of a process's output that are read; the last ones are kept."""

_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Starts a program that the kernel kills when the process that runs the chains ends in any way."""


class ExternalChain(Chain):
    """Runs the agent's program once, with a session of the gateway."""

    agent: ExternalAgent

    _returned_score: Score | None = None

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
            settings, name=self._name, place=(self.group, self.chain), attempt=self._attempt
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
            self.prediction = session.last_message.text
            return session.stop
        else:
            await gateway.close_session(key)
            self.prediction, self._returned_score = self._parse_result(result, session.last_message.text)
            return session.stop or StopReason.ANSWER
        finally:
            recorder = session.recorder
            assert recorder is not None
            self.transcript = recorder  # type: ignore[assignment]  # it has what a finished chain needs of one
            self.turns = recorder.turns
            self.failures += session.failures

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
            return await run_process(agent.program, self.task, connection)
        program = agent.program
        parameters = inspect.signature(program).parameters
        arguments = {name: offered[name] for name in parameters if name in offered and name not in agent.env_parameters}

        def run(environments: Mapping[type[Environment], Environment]) -> Awaitable[Any]:
            injected = {name: environments[env_class] for name, env_class in agent.env_parameters.items()}
            return call(program, **arguments, **injected)

        env_classes = tuple(dict.fromkeys(agent.env_parameters.values()))
        return await (self.leases.act(env_classes, run) if env_classes else run({}))

    def _parse_result(self, result: Any, last: str) -> tuple[str, Score | None]:
        """The prediction and, if the program returned one, the score."""
        if result is None:
            return last, None
        if not isinstance(result, Mapping):
            return str(result), None
        metrics = dict(result)
        prediction = str(metrics.pop("prediction", last))
        reward = metrics.pop("reward", None)
        if reward is None:
            return prediction, None
        if self.agent.scorer is not None:
            raise ConfigError("the program returns a reward, and the agent has reward=; keep one")
        if isinstance(reward, bool | str) or not math.isfinite(float(reward)):
            raise ConfigError(f"the program returned the reward {reward!r:.80}; it must be a finite number")
        return prediction, Score(float(reward), None, metrics)

    async def _score(self, trajectory: Trajectory) -> Trajectory:
        if self._returned_score is not None:
            return replace(trajectory, score=self._returned_score)
        return await super()._score(trajectory)


class ExternalAgent(BaseAgent):
    """An agent of another package, unchanged: it calls the model at `base_url` with `api_key`.

    The program is a function, also async, or the command line of a process. A function asks by parameter name for
    `base_url`, `api_key`, `model`, `task`, `messages`, `question`, columns of the dataset, and environments by their
    type. It returns the final answer, or a mapping with `prediction` and `reward`; None: the model's last reply is the
    answer. Training and evaluation need `reward=`, which excludes a returned reward. A process finds the address and
    the key in the variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and the model's
    name in AGENTFLY_MODEL. It reads the task as JSON from its input and writes its result as the last line of its
    output.
    """

    native_tools = False  # the program brings its tools with every request
    chain_class = ExternalChain

    def __init__(
        self,
        model_name_or_path: str = BYTES,
        *,
        program: Callable[..., Any] | Sequence[str],
        reward: RewardSpec | None = None,
        template: str | None = None,
        template_config: Mapping[str, Any] | None = None,
        backend: str | Backend | None = None,
        backend_config: Mapping[str, Any] | None = None,
        manager: ResourceManager | None = None,
    ) -> None:
        """The arguments besides `program` are those of `BaseAgent`; the backend must take token ids."""
        self.program = program
        self.env_parameters: dict[str, type[Environment]] = {}
        """Parameters of the program that receive an environment, with its class."""
        if callable(program):
            for name, hint in type_hints(program, {}).items():
                if inspect.isclass(hint) and issubclass(hint, Environment):
                    self.env_parameters[name] = hint
        elif isinstance(program, str) or not all(isinstance(each, str) for each in program) or not program:
            raise ConfigError(f"program must be a function or the words of a command line, not {program!r:.80}")
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
        """The messages of the task. Raises ConfigError for a parameter of the program that this task cannot fill."""
        parameters = inspect.signature(self.program).parameters if callable(self.program) else {}
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


async def run_process(command: Sequence[str], task: Task, connection: Mapping[str, str]) -> Any:
    """Run a program as a process; returns the last line of its output, parsed if it is a JSON object.

    The process has a group of its own, which is killed when the chain ends. Raises RuntimeError if it fails.
    """
    url = connection["base_url"]
    variables = {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": connection["api_key"],
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": connection["api_key"],
        "AGENTFLY_MODEL": connection["model"],
    }
    row = {"messages": [message.to_dict() for message in task.messages], **task.columns, "id": task.id}
    if sys.platform == "linux":
        command = [sys.executable, "-S", "-c", _LAUNCH, str(os.getpid()), *command]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    async def write() -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):  # a program need not read its task
            process.stdin.write(json.dumps(row).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()

    try:
        _, out, err = await asyncio.gather(write(), _read_tail(process.stdout), _read_tail(process.stderr))
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if code != 0:
        raise RuntimeError(f"the program ended with exit code {code}: {err.decode(errors='replace').strip()[-2000:]}")
    lines = out.decode(errors="replace").strip().splitlines()
    if not lines:
        return None
    try:
        result = json.loads(lines[-1])
    except ValueError:
        return lines[-1]
    return result if isinstance(result, dict) else lines[-1]


async def _read_tail(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end; returns its last bytes."""
    tail = b""
    while chunk := await stream.read(1 << 16):
        tail = (tail + chunk)[-MAX_OUTPUT:]
    return tail
