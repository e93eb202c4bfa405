"""Random conversations: appending their turns gives the tokens of the full rendering."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from agentfly.errors import TemplateError
from agentfly.templates.template import Template, delta_kind
from agentfly.types import Message, ToolCall

_KINDS = ("user", "user", "tool", "tool", "tools", "tool, user", "tools, user")


@dataclass(frozen=True)
class Conversation:
    """What comes first, then turns of the assistant, each with the messages that follow it."""

    opening: tuple[Message, ...]
    steps: tuple[tuple[Message, tuple[Message, ...]], ...]

    @property
    def kinds(self) -> set[str]:
        """The audit's names of the steps."""
        kinds, thought = set[str](), False
        for turn, delta in self.steps:
            thought = thought or bool(turn.thinking)
            kinds.add(delta_kind(delta) + (" after thinking" if thought else ""))
        return kinds


def draw_conversation(seed: int) -> Conversation:
    """One to four turns of any kind: with and without thinking, text beside calls, and a system message."""
    drawn = random.Random(seed)
    number = 0

    def word() -> str:
        return drawn.choice(["alpha", "beta", "gamma", "delta"])

    opening = [Message("system", word())] if drawn.random() < 0.4 else []
    opening.append(Message("user", word()))
    steps: list[tuple[Message, tuple[Message, ...]]] = []
    thinks = drawn.random() < 0.6
    for _ in range(drawn.randint(1, 4)):
        kind = drawn.choice(_KINDS)
        calls: list[ToolCall] = []
        for _ in range(0 if kind == "user" else 2 if kind.startswith("tools") else 1):
            number += 1
            calls.append(ToolCall("search", {"q": word()}, f"call{number:05d}"))
        delta = [Message("tool", word(), name="search", tool_call_id=call.id) for call in calls]
        if kind.endswith("user"):
            delta.append(Message("user", word()))
        text = word() if not calls or drawn.random() < 0.5 else ""
        thinking = f"{word()} {word()}" if thinks and drawn.random() < 0.5 else ""
        steps.append((Message("assistant", text, tuple(calls), thinking), tuple(delta)))
    return Conversation(tuple(opening), tuple(steps))


def is_appended_exactly(template: Template, conversation: Conversation) -> bool | None:
    """Whether every turn, appended as it is rendered when it is the last, gives the full rendering's tokens.

    None when the template cannot render the conversation, or refuses to be extended by a part of it.
    """
    messages = list(conversation.opening)
    try:
        buffer = template.start(messages)
        for turn, delta in conversation.steps:
            prompt = template.render(messages)
            closed = template.render([*messages, turn], open_turn=False)
            if not closed.startswith(prompt):
                _ = [template.follow(delta), template.render([*messages, turn, *delta])]
                return False
            buffer += template.codec.encode(template.cut_after_close(closed[len(prompt) :]))
            buffer += template.extend(delta).after(buffer[-1])
            messages += [turn, *delta]
        return buffer == template.codec.encode(template.render(messages))
    except TemplateError:
        return None


def disagreements(template: Template, exact: Sequence[str], count: int) -> tuple[list[Conversation], int]:
    """Of `count` random conversations made only of `exact` kinds, those that differ, and how many were compared."""
    compared, different, seed = 0, list[Conversation](), 0
    while compared < count and seed < 60 * count:
        conversation = draw_conversation(seed)
        seed += 1
        if conversation.kinds <= set(exact) and (same := is_appended_exactly(template, conversation)) is not None:
            compared += 1
            different += [] if same else [conversation]
    return different, compared
