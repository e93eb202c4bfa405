"""`BaseAgent`: how a model is prompted and read, and the doors to running it."""

from __future__ import annotations

import asyncio
import difflib
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from agentfly.backend import Backend, Request, Speaks
from agentfly.backends import open_backend
from agentfly.chain import Settings
from agentfly.codec import BYTES, load_tokenizer
from agentfly.environment import Environment
from agentfly.errors import ConfigError, TemplateError
from agentfly.events import ChainEnded, Event, Observer
from agentfly.folding import Folding, Steps
from agentfly.policy import Control, FailurePolicy, Limits, Reaction
from agentfly.resources import ResourceManager
from agentfly.rollout import RunResult, rollout
from agentfly.scoring import RewardSpec, Scorer
from agentfly.template import History, Template
from agentfly.templates import load_template
from agentfly.tooling import Tool, Toolbox, ToolResult
from agentfly.trajectory import Trajectory
from agentfly.types import Completion, Message, Reply, Sampling, Task, ToolCall

T = TypeVar("T")
ReactionLike = Reaction | str | Mapping[str, Any]


class RunOptions(TypedDict, total=False):
    """What a run may be told beside the tasks, the turns and the chains."""

    sampling: Sampling | Mapping[str, Any]
    """Temperature, tokens a turn and so on."""
    max_chain_tokens: int | None
    """Sampled tokens of a whole chain; None: no limit."""
    context_length: int | None
    """Tokens of prompt and reply together; None takes the backend's own limit."""
    chain_seconds: float | None
    """Wall-clock seconds of a chain; None: no limit."""
    max_concurrent_chains: int | None
    """None: all at once."""
    failures: FailurePolicy | Mapping[str, Any]
    """What becomes of a chain that failed."""
    strategy: Literal["chain", "step"]
    """One growing history, or each step its own segment with a bounded history."""
    folding: Folding
    """How the history is shortened; absent: it only grows."""
    seed: int | None
    """The same seed repeats a run, as far as the backend repeats itself; None draws anew."""
    observer: Observer
    """Called with every event."""


class BaseAgent:
    """A model with its tools, its prompt and its manners.

    A subclass says how the model is told of its tools and how it is read: it overrides `parse` and, where needed,
    `generate_async`, `observe` or `describe_tools`. An agent may run any number of times, also at once.
    """

    native_tools = True
    """Whether the chat format itself carries the tools; else `{tools}` in the system prompt describes them."""
    default_system_prompt: str | None = None
    """None: no system prompt unless one is given."""
    default_on_no_call: ReactionLike = "end"

    def __init__(
        self,
        model_name_or_path: str = BYTES,
        *,
        tools: Sequence[Tool | type[Environment] | str] = (),
        reward: RewardSpec | None = None,
        reward_fn: RewardSpec | None = None,
        system_prompt: str | None = None,
        template: str | None = None,
        template_config: Mapping[str, Any] | None = None,
        backend: str | Backend | None = None,
        backend_config: Mapping[str, Any] | None = None,
        on_no_call: ReactionLike | None = None,
        on_invalid_call: ReactionLike = "continue",
        on_tool_error: ReactionLike = "continue",
        manager: ResourceManager | None = None,
    ) -> None:
        """Everything is checked here, before anything is sampled.

        `template`: a name, or None to follow the tokenizer. `template_config`: `history` ("append" or "template") and
        the template's own variables, such as `enable_thinking`. `backend`: a name or an object, None for the embedded
        default; `backend_config`: its settings. `reward_fn` is another name for `reward`.
        """
        if reward is not None and reward_fn is not None:
            raise ConfigError("reward= and reward_fn= are two names for one thing; give one")
        self.model_name_or_path = model_name_or_path
        self.toolbox = Toolbox(tools)
        rewarded = reward if reward is not None else reward_fn
        kinds = [kind for each in self.toolbox for kind in each.environments]
        self.scorer = None if rewarded is None else Scorer(rewarded, kinds)
        self.system_prompt = self._written(self.default_system_prompt if system_prompt is None else system_prompt)
        self.control = Control(
            Reaction.of(self.default_on_no_call if on_no_call is None else on_no_call),
            Reaction.of(on_invalid_call),
            Reaction.of(on_tool_error),
        )
        self.manager = manager or ResourceManager()
        self.backend = self._opened(backend, dict(backend_config or {}), template)
        self.template = self._loaded(template, dict(template_config or {}))
        self._refuse_what_the_template_cannot_say()
        self.trajectories: tuple[Trajectory, ...] = ()
        """Of the run that ended last."""

    # ── what a subclass may change ──

    async def generate_async(self, request: Request) -> Completion:
        """Sample one turn."""
        return await self.backend.generate(request)

    def parse(self, text: str) -> Reply:
        """What the model said in one turn. Must not raise: what cannot be read is told in the reply."""
        return Reply(Message("assistant", text)) if self.template is None else self.template.read(text)

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> Sequence[Message]:
        """What the model is told of its calls."""
        return [
            Message("tool", result.observation, (), "", result.name or call.name, call.id)
            for call, result in zip(calls, results, strict=True)
        ]

    def describe_tools(self) -> str:
        """The tools in words, for `{tools}` in the system prompt."""
        lines = []
        for each in self.toolbox:
            function = each.schema["function"]
            lines.append(f"- {each.name}: {function['description']} {each.arguments.usage}")
        return "\n".join(lines) or "(none)"

    # ── running ──

    async def run(
        self, messages: Any, max_turns: int = 10, num_chains: int = 1, **options: Unpack[RunOptions]
    ) -> RunResult:
        """Run `num_chains` chains of each task; they come back in the order of tasks and chains.

        `messages`: a question, a conversation, a row `{"question" or "messages": …, column: …}`, or a list of these.
        """
        finished = [chain async for chain in self.iterate(messages, max_turns, num_chains, **options)]
        self.trajectories = tuple(sorted(finished, key=lambda t: (t.group, t.chain)))
        return RunResult(self.trajectories)

    def iterate(
        self, messages: Any, max_turns: int = 10, num_chains: int = 1, **options: Unpack[RunOptions]
    ) -> AsyncIterator[Trajectory]:
        """The same, yielding each trajectory as it is finished."""
        return rollout(
            self,
            tasks_of(messages),
            num_chains=num_chains,
            settings=_settings(max_turns, options),
            max_concurrent_chains=options.get("max_concurrent_chains"),
            manager=self.manager,
        )

    async def stream(
        self, messages: Any, max_turns: int = 10, num_chains: int = 1, **options: Unpack[RunOptions]
    ) -> AsyncIterator[Event]:
        """The same, yielding everything that happens as it happens. Ends after the last chain has."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        also = options.get("observer")

        def observe(event: Event) -> None:
            events.put_nowait(event)
            if also is not None:
                also(event)

        watched: RunOptions = {**options, "observer": observe}
        running = asyncio.create_task(self.run(messages, max_turns, num_chains, **watched))
        running.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def run_sync(
        self, messages: Any, max_turns: int = 10, num_chains: int = 1, **options: Unpack[RunOptions]
    ) -> RunResult:
        """`run` for scripts and notebooks, where no `await` can be written."""
        return _wait_for(self.run(messages, max_turns, num_chains, **options))

    async def close(self) -> None:
        """Release the backend."""
        await self.backend.close()

    # ── what a chain asks of an agent ──

    def opening(self, task: Task) -> Sequence[Message]:
        """The conversation a chain starts with. The agent's system prompt goes before the task's own."""
        if not self.system_prompt:
            return task.messages
        first, *rest = task.messages
        if first.role != "system":
            return (Message("system", self.system_prompt), *task.messages)
        return (Message("system", f"{self.system_prompt}\n\n{first.text}"), *rest)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools as the chat format carries them; empty where the system prompt describes them."""
        return self.toolbox.schemas if self.native_tools else ()

    def read(self, request: Request, completion: Completion) -> Reply:
        """What the model said, from its tokens or from what a server read out of them."""
        if completion.message is not None:
            return Reply(completion.message) if self.native_tools else self.parse(completion.message.text)
        if self.template is None:
            raise ConfigError("this backend returns tokens, and the agent has no template to read them with")
        return self.parse(self.template.text(completion.token_ids, request.prompt))

    # ── construction ──

    def _written(self, system_prompt: str | None) -> str:
        return (system_prompt or "").replace("{tools}", self.describe_tools())

    def _opened(self, backend: str | Backend | None, settings: dict[str, Any], template: str | None) -> Backend:
        if isinstance(backend, Backend):
            if settings:
                raise ConfigError("backend_config= goes with the name of a backend, not with a backend object")
            return backend
        named = settings.pop("backend", backend) or "transformers"
        if backend is not None and named != backend:
            raise ConfigError(f"backend={backend!r} and backend_config['backend']={named!r} disagree; write one of them")
        if named == "client":
            settings.setdefault("model", self.model_name_or_path)
            settings.setdefault("speaks", Speaks.MESSAGES if template is None else Speaks.TOKENS)
        return open_backend(named, **settings)

    def _loaded(self, name: str | None, settings: dict[str, Any]) -> Template | None:
        if self.backend.speaks is Speaks.MESSAGES:
            if name is not None or settings:
                raise ConfigError("this backend's server renders the prompt, so template= and template_config= do nothing")
            return None
        history = History(settings.pop("history", "append"))
        tokenizer = load_tokenizer(self.model_name_or_path)
        if name is None and tokenizer.chat_template is None:
            raise ConfigError(f"{self.model_name_or_path!r} has no chat template of its own; name one with template=")
        template = load_template(name, tokenizer, tools=self.schemas, history=history, variables=settings)
        self.backend.attach(template)
        return template

    def _refuse_what_the_template_cannot_say(self) -> None:
        """Find out now, not in the middle of a run, that the chat format has no way to carry tools or answers."""
        template = self.template
        if template is None:
            return
        tools = list(self.toolbox)
        if tools and self.schemas and tools[0].name not in template.render([Message("user", "u")]):
            raise TemplateError(
                f"template {template.name!r} does not show the model its tools; use an agent that describes them in its "
                "prompt (ReactAgent, CodeAgent, ActionAgent) or another template"
            )
        if template.history is History.APPEND:
            nudges = [r.nudge for r in (self.control.on_no_call,) if r.nudge is not None]
            for nudge in nudges:
                template.extend([Message("user", nudge)])
            for each in tools:
                template.extend(self.observe([ToolCall(each.name, {}, "call00001")], [ToolResult("x", name=each.name)]))


def tasks_of(messages: Any) -> list[Task]:
    """The tasks in whatever was given: one question, conversation or row, or a list of them."""
    if isinstance(messages, str | Mapping | Task):
        return [Task.of(messages, "0")]
    given = list(messages)
    if given and all(isinstance(m, Message) or (isinstance(m, Mapping) and "role" in m) for m in given):
        return [Task.of(given, "0")]
    if not given:
        raise ConfigError("there is nothing to run: no messages were given")
    return [Task.of(each, "" if isinstance(each, Mapping) and "id" in each else str(i)) for i, each in enumerate(given)]


def _settings(max_turns: int, options: RunOptions) -> Settings:
    for name in options:
        if name not in RunOptions.__annotations__:
            close = difflib.get_close_matches(name, [*RunOptions.__annotations__, "max_turns", "num_chains"], 3)
            raise ConfigError(f"a run has no option {name!r}; close ones: {', '.join(close) or 'none'}")
    return Settings(
        sampling=_sampling(options.get("sampling")),
        limits=Limits(
            max_turns, options.get("max_chain_tokens"), options.get("context_length"), options.get("chain_seconds")
        ),
        failures=FailurePolicy.of(options.get("failures")),
        folding=_folding(options.get("strategy", "chain"), options.get("folding")),
        seed=options.get("seed"),
        observer=options.get("observer"),
    )


def _sampling(given: Sampling | Mapping[str, Any] | None) -> Sampling:
    if given is None or isinstance(given, Sampling):
        return given or Sampling()
    known = [field.name for field in fields(Sampling)]
    for name in given:
        if name not in known:
            raise ConfigError(f"sampling has no field {name!r}; it has {', '.join(known)}")
    try:
        return Sampling(**given)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _folding(strategy: str, folding: Folding | None) -> Folding | None:
    if strategy == "chain":
        return folding
    if strategy != "step":
        raise ConfigError(f"there is no rollout strategy {strategy!r}; there are 'chain' and 'step'")
    return Steps() if folding is None else folding


def _wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[T] = []
    error: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if error:
        raise error[0]
    return outcome[0]
