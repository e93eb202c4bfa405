"""`BaseAgent`: binds a model to tools, a system prompt and loop control, and runs it."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import agentfly.rewards
import agentfly.tools  # noqa: F401  (registers the general rewards and tools by name)
from agentfly.backends import open_backend
from agentfly.backends.base import Backend, PromptFormat, Request
from agentfly.errors import ConfigError, DataError
from agentfly.models import resolve
from agentfly.resources import ResourceManager
from agentfly.rollout import Chain, RunResult, rollout
from agentfly.rollout.config import RunOptions, find_option, parse_settings, parse_tasks
from agentfly.rollout.events import Event
from agentfly.rollout.history import append_user_text
from agentfly.rollout.limits import LoopControl, NextStep, RecoveryRule
from agentfly.rollout.llm_engine import (
    GENERATE_ARGUMENTS,
    PARSE_ARGUMENTS,
    LLMEngine,
    SampledText,
    completion_text,
    parse_batch,
    sample_batch,
    takes_batch,
)
from agentfly.rollout.waiting import report_waiting
from agentfly.scoring import RewardSpec, Scorer
from agentfly.templates import load_template
from agentfly.templates.template import History, Template
from agentfly.templates.tokenizer import BYTES, download_files, load_tokenizer
from agentfly.threads import wait_for
from agentfly.tooling import Tool, Toolbox, ToolLike, ToolResult
from agentfly.trajectory import Trajectory
from agentfly.types import Completion, Content, Image, Message, Reply, Task, ToolCall, parse_content
from agentfly.vision.images import ImageConfig, fetch_image, normalize_image
from agentfly.vision.processor import has_processor, load_image_processor

_LOG = logging.getLogger(__name__)
_NEAR_MISSES = {
    "model": "model_name_or_path", "model_name": "model_name_or_path", "model_path": "model_name_or_path",
    "path": "model_name_or_path", "rewards": "reward", "reward_function": "reward", "reward_name": "reward",
    "prompt": "system_prompt", "system": "system_prompt", "chat_template": "template", "engine": "backend",
}  # fmt: skip
"""Arguments that users try → those they mean."""
HIDDEN_IMAGE = "(an image, which cannot be shown here)"
"""Replaces an image in the prompt of a model that cannot see it."""
RecoveryRuleLike = RecoveryRule | str | Mapping[str, Any]


class BaseAgent:
    """Binds a model to tools, a system prompt and loop-control settings.

    A subclass defines how tools are presented and how replies are parsed: it overrides `parse` and, if needed,
    `generate_async`, `observe` or `describe_tools`. `parse` and `generate_async` may have the signatures of the
    original AgentFly. An agent can run any number of times, also concurrently.
    """

    native_tools = True
    """Whether the chat template renders the tools; otherwise `{tools}` in the system prompt describes them."""
    default_system_prompt: str | None = None
    """None: no system prompt by default."""
    default_on_no_call: RecoveryRuleLike = "end"
    chain_class: type[Chain] = Chain
    """The loop that runs a chain."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        # An argument that no constructor of the agent takes gets an error with the name that was meant.
        accepted: dict[str, inspect.Parameter] = {}
        for base in cls.__mro__:
            if "__init__" in vars(base):
                parameters = inspect.signature(vars(base)["__init__"]).parameters
                accepted |= parameters
                if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
                    break
        for name in settings:
            if name in accepted:
                continue
            if meant := find_option(name):
                hint = f"it is an option of a run: agent.run(…, {meant})"
            elif close := _NEAR_MISSES.get(name) or next(iter(difflib.get_close_matches(name, accepted, 1)), ""):
                hint = f"write {close}=…"
            else:
                taken = [name for name in accepted if name not in ("self", "args", "kwargs")]
                hint = f"it takes {', '.join(taken)}"
            raise ConfigError(f"{cls.__name__} takes no {name!r}; {hint}")
        return super().__new__(cls)

    def __init__(
        self,
        model_name_or_path: str = BYTES,
        *,
        tools: Sequence[ToolLike] = (),
        reward: RewardSpec | None = None,
        reward_fn: RewardSpec | None = None,
        system_prompt: str | None = None,
        template: str | None = None,
        template_config: Mapping[str, Any] | None = None,
        backend: str | Backend | None = None,
        backend_config: Mapping[str, Any] | None = None,
        image_config: Mapping[str, Any] | None = None,
        on_no_call: RecoveryRuleLike | None = None,
        on_invalid_call: RecoveryRuleLike = "continue",
        on_tool_error: RecoveryRuleLike = "continue",
        on_repeated_call: RecoveryRuleLike | None = None,
        manager: ResourceManager | None = None,
    ) -> None:
        """Validate all settings before anything is sampled.

        `template`: a name, or None to follow the tokenizer. `template_config`: `history` ("append" or "template") and
        the template's own variables, such as `enable_thinking`. `backend`: a name or an object (or `backend_config`
        names it); `backend_config`: its settings. `image_config`: the fields of `ImageConfig`. `reward_fn` is another
        name for `reward`.
        """
        if reward is not None and reward_fn is not None:
            raise ConfigError("reward= and reward_fn= are two names for one thing; give one")
        self.model_name_or_path = model_name_or_path
        self.image_config = ImageConfig.parse(image_config or {})
        self.toolbox = Toolbox(tools)
        reward = reward if reward is not None else reward_fn
        env_classes = [env_class for tool in self.toolbox for env_class in tool.environments]
        self.scorer = None if reward is None else Scorer(reward, env_classes)
        prompt = self.default_system_prompt if system_prompt is None else system_prompt
        if not isinstance(prompt, str | None):
            raise ConfigError(f"system_prompt is text, not {prompt!r:.80}")
        self.control = LoopControl(
            RecoveryRule.of(self.default_on_no_call if on_no_call is None else on_no_call),
            RecoveryRule.of(on_invalid_call),
            RecoveryRule.of(on_tool_error),
            None if on_repeated_call is None else RecoveryRule.of(on_repeated_call),
        )
        self._samples_batch = takes_batch(self.generate_async, GENERATE_ARGUMENTS)
        self._parses_batch = takes_batch(self.parse, PARSE_ARGUMENTS)
        self.no_vision_reason = ""
        """Why images are hidden from the model, until it was reported."""
        self._own_manager = manager is None
        self.manager = manager or ResourceManager()
        self.backend = self._build_backend(backend, dict(backend_config or {}), template)
        self.load_template: partial[Template]
        """Returns the template for other tools than the agent's; absent if the server renders the prompt."""
        self.template = self._build_template(template, dict(template_config or {}))
        self.system_prompt = (prompt or "").replace("{tools}", self.describe_tools())
        self.trajectories: tuple[Trajectory, ...] = ()
        """The trajectories of the last finished run."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, with those of environments one by one."""
        return tuple(self.toolbox)

    @property
    def backend_model(self) -> str:
        """Name of the model that the backend samples from; that of a server may differ from `model_name_or_path`."""
        served = getattr(self.backend, "model", None)  # the embedded engine has the weights here
        return served if isinstance(served, str) else self.model_name_or_path

    @property
    def llm_engine(self) -> LLMEngine:
        """Samples the turns of agents with the signatures of the original AgentFly."""
        return LLMEngine(self)

    # ── methods that subclasses override ──

    async def generate_async(self, request: Request) -> Completion:
        """Sample one turn."""
        return await self.backend.generate(request)

    def parse(self, text: str) -> Reply:
        """Parse the text of one turn. Report what cannot be parsed in the reply; an exception ends the chain.

        If the chat template renders calls, the content of the message is the text outside the calls.
        """
        return Reply(Message("assistant", text)) if self.template is None else self.template.parse_text(text)

    def history_message(self, message: Message) -> Message:
        """The assistant message to render if the history is rendered again."""
        return message

    def write_reply(self, message: Message) -> Message:
        """A reply of an expert in the form in which the model would write it; the inverse of `parse`."""
        return message

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> Sequence[Message]:
        """Convert tool results to messages for the model."""
        return [
            Message("tool", self.visible(result.observation), name=result.name or call.name, tool_call_id=call.id)
            for call, result in zip(calls, results, strict=True)
        ]

    def visible(self, content: Content, *, strict: bool = False) -> Content:
        """The content as the model can take it: images are normalized, or become a note if the model cannot see.

        That a template has an image placeholder is not enough to see: the tokenizers of text-only Qwen models have one.
        `strict`: raise DataError for a broken image, or one that must not be fetched, instead of writing a note.
        """
        if isinstance(content, str):
            return content
        if self.template is not None and not (self.template.shows_images and self.backend.supports_images):
            if self.no_vision_reason:
                _LOG.warning("images are replaced by a note: %s", self.no_vision_reason)
                self.no_vision_reason = ""  # once is enough
            return "\n".join(piece if isinstance(piece, str) else HIDDEN_IMAGE for piece in content)
        pieces: list[str | Image] = []
        for piece in content:
            if isinstance(piece, Image):
                try:
                    piece = self._prepare_image(piece)
                except DataError as error:
                    if strict:
                        raise
                    piece = f"(an image, which cannot be shown: {error})"
            pieces.append(piece)
        return parse_content(pieces)

    def _prepare_image(self, image: Image) -> Image:
        """Normalize an image. An address is sent to a server as it is; for a model in this process it is fetched."""
        if not image.url.startswith("data:"):
            if self.template is None:
                return image
            if not self.image_config.fetch:
                raise DataError(
                    f"the image {image.url!r:.120} is an address; image_config={{'fetch': True}} allows fetching it"
                )
            image = fetch_image(image)
        image = normalize_image(image)
        processor = None if self.template is None else self.template.image_processor
        return image if processor is None else processor.fit(image)

    def describe_tools(self) -> str:
        """A text description of the tools, for `{tools}` in the system prompt."""
        lines = []
        for tool in self.toolbox:
            function = tool.schema["function"]
            lines.append(f"- {tool.name}: {function['description']} {tool.arguments.usage}")
        text = "\n".join(lines) or "(none)"
        # A system prompt may hold control tokens, and the descriptions of an MCP server must not forge any in it.
        return text if self.template is None else self.template.codec.cut(text, " ")

    # ── running ──

    async def run(
        self, messages: Any, max_turns: int = 10, num_chains: int = 1, **options: Unpack[RunOptions]
    ) -> RunResult:
        """Run `num_chains` chains per task. The result is ordered by task and chain.

        Reports to stderr, or to the log, that it waits for chains; warns of chains without a score.

        `messages`: a question, a conversation, a row `{"question" or "messages": …, column: …}`, or a list of these.
        """
        tasks = parse_tasks(messages)
        chains = self.iterate(tasks, max_turns, num_chains, **options)
        finished: list[Trajectory] = []
        async with AsyncExitStack() as stack:
            if options.get("observer") is None:  # an observer shows the progress itself
                limits = parse_settings(max_turns, options).describe_limits()
                await stack.enter_async_context(
                    report_waiting(lambda: f"{len(finished)} of {len(tasks) * num_chains} chains ({limits}) finished")
                )
            async for chain in chains:
                finished.append(chain)  # noqa: PERF401  (one by one: the report counts them)
        self.trajectories = tuple(sorted(finished, key=lambda t: (t.group, t.chain)))
        result = RunResult(self.trajectories)
        if self.scorer is not None and (reason := result.unscored_reason):
            _LOG.warning(reason)
        return result

    def iterate(
        self, messages: Any, max_turns: int = 10, num_chains: int = 1, **options: Unpack[RunOptions]
    ) -> AsyncIterator[Trajectory]:
        """Like `run`, but yield each trajectory when it finishes."""
        return rollout(
            self,
            parse_tasks(messages),
            num_chains=num_chains,
            settings=parse_settings(max_turns, options),
            max_concurrent_chains=options.get("max_concurrent_chains"),
            manager=self.manager,
        )

    async def stream(
        self, messages: Any, max_turns: int = 10, num_chains: int = 1, **options: Unpack[RunOptions]
    ) -> AsyncIterator[Event]:
        """Like `run`, but yield every event when it happens. Ends after the last chain."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        user_observer = options.get("observer")

        def observe(event: Event) -> None:
            events.put_nowait(event)
            if user_observer is not None:
                user_observer(event)

        observed: RunOptions = {**options, "observer": observe}
        running = asyncio.create_task(self.run(messages, max_turns, num_chains, **observed))
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
        """Blocking `run`, for scripts and notebooks."""
        return wait_for(self.run(messages, max_turns, num_chains, **options))

    async def close(self) -> None:
        """Close the backend, and the resource manager unless it was passed in."""
        await self.backend.close()
        if self._own_manager:
            await self.manager.close()

    # ── used by the rollout ──

    def initial_messages(self, task: Task) -> Sequence[Message]:
        """The initial messages of a chain. The agent's system prompt precedes the task's own."""
        messages = tuple(
            m if isinstance(m.content, str) else replace(m, content=self.visible(m.content, strict=True))
            for m in task.messages
        )
        if not self.system_prompt:
            return messages
        first, *later_messages = messages
        if first.role != "system":
            return (Message("system", self.system_prompt), *messages)
        return (Message("system", f"{self.system_prompt}\n\n{first.text}"), *later_messages)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tool schemas for the chat template; empty if the system prompt describes the tools."""
        return self.toolbox.schemas if self.native_tools else ()

    async def sample(
        self, request: Request, messages: Sequence[Message], replace_history: Callable[[Sequence[Message]], Request]
    ) -> tuple[Request, Completion]:
        """Sample one turn with `generate_async`. Returns the request that was sampled, too.

        `replace_history` replaces the history of the chain and returns the new request.
        """
        if self._samples_batch:
            return await sample_batch(self.generate_async, request, messages, self.schemas, replace_history)
        return request, await self.generate_async(request)

    def read(self, request: Request, completion: Completion) -> Reply:
        """Parse a completion: its tokens, or the message that a server already parsed."""
        message = completion.message
        if message is not None and (message.tool_calls or type(self).parse is BaseAgent.parse):
            return Reply(message)
        text = completion_text(self.template, request, completion)
        if self._parses_batch:
            return parse_batch(self.parse, SampledText(text, completion), self.tools)
        return self.parse(text)

    # ── construction ──

    def _build_backend(self, backend: str | Backend | None, settings: dict[str, Any], template: str | None) -> Backend:
        if isinstance(backend, Backend):
            if settings:
                raise ConfigError("backend_config= goes with the name of a backend, not with a backend object")
            return backend
        name = settings.pop("backend", backend) or "transformers"
        if backend is not None and name != backend:
            raise ConfigError(f"backend={backend!r} and backend_config['backend']={name!r} disagree; write one")
        if name in ("transformers", "vllm", "async_vllm") and self.model_name_or_path == BYTES:
            raise ConfigError("name a model (`agentfly models` lists those available offline), or a backend")
        if name in ("client", "fleet", "transformers", "vllm", "async_vllm"):
            settings.setdefault("model", self.model_name_or_path)
        if name == "client":
            settings.setdefault("prompt_format", PromptFormat.MESSAGES if template is None else PromptFormat.TOKENS)
        return open_backend(name, **settings)

    def _build_template(self, name: str | None, settings: dict[str, Any]) -> Template | None:
        if self.backend.prompt_format is PromptFormat.MESSAGES:
            if name is not None or settings:
                raise ConfigError("the server renders the prompt: template= and template_config= have no effect")
            return None
        history = settings.pop("history", History.APPEND)
        folder = resolve(self.model_name_or_path)
        tokenizer = load_tokenizer(folder)
        try:
            files = folder if folder == BYTES or Path(folder).is_dir() else str(download_files(folder))
            image_processor = load_image_processor(files) if has_processor(files) else None
        except (ConfigError, OSError) as error:
            image_processor = None
            self.no_vision_reason = str(error)
        if name is None and tokenizer.chat_template is None:
            raise ConfigError(f"{self.model_name_or_path!r} has no chat template of its own; name one with template=")
        self.load_template = partial(
            load_template, name, tokenizer, history=history, variables=settings, image_processor=image_processor
        )
        template = self.load_template(tools=self.schemas)
        if template.prints_time and "now" not in settings:
            _LOG.warning(
                "the chat template tells the model the time of day, and it is midnight in every prompt, so that runs "
                "can be repeated; template_config={'now': '2026-03-01T14:30'} sets another date and time"
            )
        self.backend.attach(template)
        if template.history is History.TEMPLATE:
            return template
        # Raise now, not during a run, if the template cannot render tool results or nudges.
        no_call = self.control.on_no_call
        if no_call.then is NextStep.CONTINUE:
            template.extend([] if no_call.nudge is None else [Message("user", no_call.nudge)])
        if not self.native_tools:
            template.extend([Message("user", "u")])
            return template
        rules = (self.control.on_invalid_call, self.control.on_tool_error, self.control.on_repeated_call)
        for tool in self.toolbox:
            result = Message("tool", "x", name=tool.name, tool_call_id="call00001")
            for nudge in {None, *[rule.nudge for rule in rules if rule is not None]}:
                template.extend(append_user_text([result], [] if nudge is None else [nudge]))
        return template
