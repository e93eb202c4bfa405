"""`BaseAgent`: how a model is prompted and read, and the doors to running it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import agentfly.environments
import agentfly.rewards
import agentfly.tools  # noqa: F401  (so that the prebuilt tools are found by name)
from agentfly.backend import Backend, Request, Speaks
from agentfly.backends import open_backend
from agentfly.encoding.tokenizer import BYTES, load_tokenizer
from agentfly.environment import Environment
from agentfly.errors import ConfigError
from agentfly.models import resolve
from agentfly.resources import ResourceManager
from agentfly.rollout import RunResult, rollout
from agentfly.rollout.events import Event
from agentfly.rollout.folding import told_also
from agentfly.rollout.options import RunOptions, settings_of, tasks_of
from agentfly.rollout.policy import Control, Reaction, Then
from agentfly.scoring import RewardSpec, Scorer
from agentfly.template import History, Template
from agentfly.templates import load_template
from agentfly.tooling import Tool, Toolbox, ToolResult
from agentfly.trajectory import Trajectory
from agentfly.types import Completion, Content, Message, Reply, Task, ToolCall

T = TypeVar("T")
ReactionLike = Reaction | str | Mapping[str, Any]


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
        the template's own variables, such as `enable_thinking`. `backend`: a name or an object (or `backend_config`
        names it); `backend_config`: its settings. `reward_fn` is another name for `reward`.
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
        self._own_manager = manager is None
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
        """What the model said in one turn. What cannot be read is told in the reply; raising ends the chain.

        Where the chat format carries the calls, the message's content is what was said beside them.
        """
        return Reply(Message("assistant", text)) if self.template is None else self.template.read(text)

    def retell(self, said: Message) -> Message:
        """How a turn of the model reads where the history is rendered anew."""
        return said

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> Sequence[Message]:
        """What the model is told of its calls."""
        return [
            Message("tool", self.visible(result.observation), (), "", result.name or call.name, call.id)
            for call, result in zip(calls, results, strict=True)
        ]

    def visible(self, content: Content) -> Content:
        """The content as this model can be shown it: where its chat format has no pictures, it is told of them."""
        if isinstance(content, str) or self.template is None or self.template.shows_images:
            return content
        said = [part if isinstance(part, str) else "(a picture, which cannot be shown here)" for part in content]
        return "\n".join(said)

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
            settings=settings_of(max_turns, options),
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
        return wait_for(self.run(messages, max_turns, num_chains, **options))

    async def close(self) -> None:
        """Release the backend, and the environments unless the manager was given."""
        await self.backend.close()
        if self._own_manager:
            await self.manager.close()

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
        said = completion.message
        if said is not None:
            own = type(self).parse is not BaseAgent.parse
            return self.parse(said.text) if own and not said.tool_calls else Reply(said)
        if self.template is None:
            raise ConfigError("this backend returns tokens, and the agent has no template to read them with")
        return self.parse(self.template.text(completion.token_ids, request.prompt))

    # ── construction ──

    def _written(self, system_prompt: str | None) -> str:
        if not isinstance(system_prompt, str | None):
            raise ConfigError(f"system_prompt is text, not {system_prompt!r:.80}")
        return (system_prompt or "").replace("{tools}", self.describe_tools())

    def _opened(self, backend: str | Backend | None, settings: dict[str, Any], template: str | None) -> Backend:
        if isinstance(backend, Backend):
            if settings:
                raise ConfigError("backend_config= goes with the name of a backend, not with a backend object")
            return backend
        named = settings.pop("backend", backend)
        named = named or "transformers"
        if backend is not None and named != backend:
            raise ConfigError(f"backend={backend!r} and backend_config['backend']={named!r} disagree; write one")
        if named in ("transformers", "vllm", "async_vllm") and self.model_name_or_path == BYTES:
            raise ConfigError("name a model (`agentfly models` lists what can be had offline), or a backend")
        if named in ("client", "transformers", "vllm", "async_vllm"):
            settings.setdefault("model", self.model_name_or_path)
        if named == "client":
            settings.setdefault("speaks", Speaks.MESSAGES if template is None else Speaks.TOKENS)
        return open_backend(named, **settings)

    def _loaded(self, name: str | None, settings: dict[str, Any]) -> Template | None:
        if self.backend.speaks is Speaks.MESSAGES:
            if name is not None or settings:
                raise ConfigError("this backend's server renders the prompt: template= and template_config= do nothing")
            return None
        history = settings.pop("history", History.APPEND)
        tokenizer = load_tokenizer(resolve(self.model_name_or_path))
        if name is None and tokenizer.chat_template is None:
            raise ConfigError(f"{self.model_name_or_path!r} has no chat template of its own; name one with template=")
        template = load_template(name, tokenizer, tools=self.schemas, history=history, variables=settings)
        self.backend.attach(template)
        return template

    def _refuse_what_the_template_cannot_say(self) -> None:
        """Find out now, not in the middle of a run, that the chat format has no way to carry answers or nudges."""
        template = self.template
        if template is None:
            return
        if template.history is History.TEMPLATE:
            return
        no_call = self.control.on_no_call
        if no_call.then is Then.CONTINUE:
            template.extend([] if no_call.nudge is None else [Message("user", no_call.nudge)])
        if not self.native_tools:
            template.extend([Message("user", "u")])
            return
        nudges = {reaction.nudge for reaction in (self.control.on_invalid_call, self.control.on_tool_error)}
        for each in self.toolbox:
            answer = Message("tool", "x", name=each.name, tool_call_id="call00001")
            for nudge in {None, *nudges}:
                template.extend(told_also([answer], [] if nudge is None else [nudge]))


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
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

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    thread.start()
    thread.join()
    if error:
        raise error[0]
    return outcome[0]
