"""Agents of the original AgentFly: `generate_async(messages_list, **args)`, `parse(responses, tools)`, `llm_engine`.

The original calls these methods with a batch. Here the batch is one turn of one chain. `messages_list` shows the
recorded history; `llm_engine.generate_async` sends the recorded tokens, never a rendering of what it is passed, and
returns text that carries its `Completion`. A history that the agent changed seals the segment and begins a new one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any

from agentfly.backends.base import Request
from agentfly.errors import ConfigError
from agentfly.rollout.config import ChainAgent, parse_sampling
from agentfly.rollout.limits import seed_for_turn
from agentfly.templates.template import Template
from agentfly.tooling import Tool
from agentfly.types import Completion, Message, Reply, Sampling

GENERATE_ARGUMENTS = ("tools", *(field.name for field in fields(Sampling)))
"""Keywords of `generate_async(messages_list, **args)`."""
PARSE_ARGUMENTS = ("tools",)
"""Keywords of `parse(responses, tools)`."""
_BATCHES = ("messages_list", "messages", "responses")
"""Names of the first parameter in the original's signatures."""


def takes_batch(method: Callable[..., Any], arguments: Sequence[str]) -> bool:
    """Whether a method of an agent has the original's signature: a batch, and `arguments` by keyword.

    Raises ConfigError if it can be called in neither form.
    """
    signature = inspect.signature(method)
    batch = next(iter(signature.parameters), "") in _BATCHES or "tools" in signature.parameters
    try:
        signature.bind(None, **(_select(method, dict.fromkeys(arguments)) if batch else {}))
    except TypeError as error:
        name = getattr(method, "__qualname__", method)
        offered = f"a batch, and by name {', '.join(arguments)}" if batch else "one turn"
        raise ConfigError(f"{name}{signature} is called with {offered}: {error}") from None
    return batch


def _select(method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a method takes by keyword."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


class SampledText(str):
    """The text of one reply, with the exact tokens that were sampled."""

    completion: Completion

    def __new__(cls, text: str, completion: Completion) -> SampledText:
        """`completion`: ids, log-probabilities and weight versions of the reply."""
        sampled = super().__new__(cls, text)
        sampled.completion = completion
        return sampled

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # A copy is plain text: `parse` may put the reply into its message, which is copied in every further turn.
        return str, (str(self),)


def completion_text(template: Template | None, request: Request, completion: Completion) -> str:
    """The text of a completion, with its control tokens as the template's parser expects them."""
    if completion.message is not None:
        return completion.message.text
    if not completion.token_ids:  # aborted before the first token
        return ""
    if template is None:
        raise ConfigError("this backend returns tokens, and the agent has no template to parse them with")
    return template.text(completion.token_ids, request.prompt)


@dataclass(slots=True)
class _Turn:
    """The turn that an agent is sampling."""

    request: Request
    messages: Sequence[Message]
    """The history of the request."""
    message_dicts: Sequence[Mapping[str, Any]]
    """The history as the agent was shown it."""
    arguments: Mapping[str, Any]
    """The keywords that the agent was called with."""
    replace_history: Callable[[Sequence[Message]], Request]
    num_requests: int = 0
    """Replies that were requested, possibly at the same time."""
    completions: list[Completion] = field(default_factory=list)


_TURN: ContextVar[_Turn] = ContextVar("turn")


class LLMEngine:
    """`agent.llm_engine`: samples the turn whose messages `generate_async` was called with."""

    def __init__(self, agent: ChainAgent) -> None:
        self._agent = agent

    async def generate_async(
        self, messages_list: Sequence[Sequence[Message | Mapping[str, Any]]], *, tools: Any = None, **sampling: Any
    ) -> list[SampledText]:
        """Sample a reply to the one conversation of `messages_list`. `sampling`: fields of `Sampling` to change.

        The conversation is the history that `generate_async` of the agent was called with. A changed one becomes the
        history of the chain, in a new segment. Raises ConfigError outside of a turn.
        """
        turn = _TURN.get(None)
        if turn is None:
            raise ConfigError("llm_engine samples the turns of a chain, in `generate_async` of an agent: use agent.run")
        if isinstance(messages_list, str | Mapping) or len(messages_list) != 1:
            raise ConfigError("messages_list is one conversation in a list: every chain samples its own turns")
        if tools is not None and tools != turn.arguments["tools"]:
            raise ConfigError("the prompt has the tools of the agent; pass others to its constructor, as tools=")
        conversation = [m.to_dict() if isinstance(m, Message) else m for m in messages_list[0]]
        if conversation != turn.message_dicts:
            if turn.num_requests:
                raise ConfigError("a turn has one history: change it before the first reply of the turn is sampled")
            # An unchanged message is kept as it is recorded: its dict lacks what could not be parsed.
            recorded = list(zip(turn.message_dicts, turn.messages, strict=True))
            turn.messages = [
                next((message for message_dict, message in recorded if message_dict == values), None)
                or Message.of(values)
                for values in conversation
            ]
            turn.request = turn.replace_history(turn.messages)
            turn.message_dicts = conversation

        request = turn.request
        changes = {name: value for name, value in sampling.items() if value != turn.arguments.get(name, ...)}
        if turn.num_requests:  # with the same seed, further replies of the turn would be equal
            changes.setdefault("seed", seed_for_turn(request.sampling.seed, 0, 0, turn.num_requests))
        turn.num_requests += 1
        if changes:
            limit = request.sampling.max_tokens
            current = {name: getattr(request.sampling, name) for name in Sampling.__slots__}
            changed = parse_sampling({**current, **changes})
            if limit is not None:
                changed = replace(changed, max_tokens=min(changed.max_tokens or limit, limit))
            request = replace(request, sampling=changed)
        completion = await self._agent.backend.generate(request)
        turn.completions.append(completion)
        return [SampledText(completion_text(self._agent.template, request, completion), completion)]


async def sample_batch(
    method: Callable[..., Any],
    request: Request,
    messages: Sequence[Message],
    schemas: Sequence[Mapping[str, Any]],
    replace_history: Callable[[Sequence[Message]], Request],
) -> tuple[Request, Completion]:
    """Sample one turn with `generate_async(messages_list, **args)`. Returns the request that was sampled, too."""
    message_dicts = [message.to_dict() for message in messages]
    sampling = {name: getattr(request.sampling, name) for name in Sampling.__slots__}
    arguments = {"tools": list(schemas), **sampling}
    turn = _Turn(request, messages, message_dicts, arguments, replace_history)
    token = _TURN.set(turn)
    try:
        replies = await method([copy.deepcopy(message_dicts)], **_select(method, arguments))
    finally:
        _TURN.reset(token)
    reply = replies[0] if isinstance(replies, Sequence) and len(replies) == 1 else None
    if not isinstance(reply, SampledText) or not any(reply.completion is sampled for sampled in turn.completions):
        raise ConfigError(
            f"generate_async returned {replies!r:.80}; it must return a list with the reply of llm_engine, unchanged: "
            "its tokens are recorded and trained. `parse` may change the text"
        )
    return turn.request, reply.completion


def parse_batch(method: Callable[..., Any], reply: SampledText, tools: Sequence[Tool]) -> Reply:
    """Parse one turn with `parse(responses, tools)`, which returns a list of one message."""
    parsed = method([reply], **_select(method, {"tools": tools}))
    message = parsed[0] if isinstance(parsed, Sequence) and len(parsed) == 1 else None
    if not isinstance(message, Message | Mapping | Reply):
        raise ConfigError(
            f"parse returned {parsed!r:.80}; it must return a list with one message per response, such as "
            "{'role': 'assistant', 'content': …, 'tool_calls': [{'function': {'name': …, 'arguments': …}}]}"
        )
    if isinstance(message, Reply):
        return message
    if isinstance(message, Message):
        return Reply(message)
    if not message.get("loss", True):
        raise ConfigError("parse returned a message with loss=False; every sampled token is trained")
    ends = message.get("status") in ("terminal", "finish")
    parsed_message = Message.of({"role": "assistant", **message})
    return Reply(parsed_message, answer=parsed_message.text if ends else None)
