"""The history of a chain: its transcript, the folding rules that shorten it, and the fork points of tree sampling.

With a template, the prompt is the segment's own buffer: the initial messages, the sampled tokens, the delta that
`extend` renders, and so on. With a server that renders the prompt, the segment follows the prompt ids that the server
returns. In both cases a history that no longer starts with the buffer seals the segment and begins a new one; both
train.

A folding rule receives the initial messages of the chain and the later ones, and returns the conversation to continue
with, or None for no change. A rule that needs a summary asks for it with `summary_request`: the model's next turn is
the summary, and trains like any other turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic import Field

from agentfly.errors import ConfigError
from agentfly.segment import Author, Segment
from agentfly.templates.template import History, Template
from agentfly.types import Completion, Content, Image, Message
from agentfly.validation import record


class Transcript:
    """One chain's conversation, as messages and as tokens."""

    __slots__ = ("_pending", "_template", "messages", "segment", "segments")

    def __init__(self, template: Template | None) -> None:
        """`template` is None if the server renders the prompt."""
        self._template = template
        self.messages: list[Message] = []
        """The conversation as a new segment would render it."""
        self.segments: list[Segment] = []
        self.segment: Segment
        """The last segment. There is none before `begin`."""
        self._pending: tuple[Author, list[Message], int] = (Author.TASK, [], 0)
        """Author, messages and turn of what was added since the last reply; its ids come with the next completion."""

    def begin(self, messages: Sequence[Message], author: Author, turn: int, ids: Sequence[int] | None = None) -> None:
        """Begin a segment with a whole conversation. `ids`: its rendering, if already known."""
        if self._template is not None and ids is None:
            ids = self._template.start(messages)
        self._new_segment()
        self.messages = list(messages)
        if ids is None:
            self._pending = (author, self.messages.copy(), turn)
        else:
            self.segment.append(author, ids, messages, turn=turn)

    def add(self, delta: Sequence[Message], author: Author, turn: int) -> None:
        """Append messages after the model's last turn, up to the generation prompt of its next turn."""
        self.messages.extend(delta)
        if self._template is None:
            self._pending = (author, list(delta), turn)
        elif self._template.history is History.TEMPLATE:
            # The template rewrites earlier turns: render the whole conversation and compare it with the buffer.
            rendered = self._template.start(self.messages)
            current = self.segment.prompt.tolist()
            if rendered[: len(current)] != current:
                self.begin(self.messages, Author.HISTORY, turn, rendered)
                return
            added_ids = rendered[len(current) :]
            if current[-1] not in self._template.stop_ids and added_ids and added_ids[0] in self._template.stop_ids:
                self.segment.append(Author.TEMPLATE, added_ids[:1], turn=turn)
                added_ids = added_ids[1:]
            self.segment.append(author, added_ids, delta, turn=turn)
        else:
            extended = self._template.extend(delta)
            if self.segment.last_id not in extended.closers:
                self.segment.append(Author.TEMPLATE, [extended.close], turn=turn)
            self.segment.append(author, extended.ids, delta, turn=turn)

    def add_completion(self, completion: Completion, message: Message, history_message: Message, turn: int) -> None:
        """Record a turn of the model. `history_message` is how a rewritten history renders it."""
        if self._template is None:
            self._append_pending(completion.prompt_ids)
            if completion.prompt_ids is None and completion.token_ids:
                # Tokens with an unknown prompt cannot be trained: without ids the segment is marked as not exact.
                completion = Completion((), (), (), completion.finish, message=message)
        self.segment.append_completion(completion, message, turn=turn)
        self.messages.append(history_message)

    def _append_pending(self, prompt_ids: Sequence[int] | None) -> None:
        """Append the pending messages with the prompt ids the server returned; None if it returned none."""
        author, messages, turn = self._pending
        self._pending = (Author.USER, [], turn)
        current = self.segment.prompt.tolist()
        if prompt_ids is not None and list(prompt_ids[: len(current)]) != current:
            self._new_segment()
            author, messages, current = Author.HISTORY, self.messages, []
        if prompt_ids is not None or messages:
            self.segment.append(author, [] if prompt_ids is None else prompt_ids[len(current) :], messages, turn=turn)

    def note(self, delta: Sequence[Message], author: Author, turn: int) -> None:
        """Record messages after the end of the chain: part of the conversation, never shown to the model."""
        if delta:
            self.messages.extend(delta)
            self.segment.append(author, [], delta, turn=turn)

    def __copy__(self) -> Transcript:
        """A copy that goes on separately; sealed segments are shared."""
        other = Transcript(self._template)
        other.messages = list(self.messages)
        other.segment = self.segment.copy()
        other.segments = [*self.segments[:-1], other.segment]
        other._pending = self._pending
        return other

    def close(self) -> tuple[Segment, ...]:
        """Seal all segments and return them."""
        if self.segments and self._pending[1]:  # the server never replied
            self._append_pending(None)
        return tuple([segment.seal() for segment in self.segments])

    def _new_segment(self) -> None:
        if self.segments:
            self.segment.seal()
        processor = None if self._template is None else self._template.image_processor
        self.segment = Segment(None if processor is None else processor.token_id)
        self.segments.append(self.segment)


class Folding(Protocol):
    """A rule that shortens the history."""

    def summary_request(self, later: Sequence[Message], tokens: int) -> str | None:
        """A request for a summary if one is due, else None. `tokens`: length of the prompt so far."""

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The history to continue with, or None for no change. It begins with as many messages as `initial` has.

        initial: the messages the chain started with. later: the messages after them, as the last fold left them.
        summary: the reply to `summary_request`; None if no summary was requested.
        """


class _NoSummary:
    """Base of rules that need no summary."""

    def summary_request(self, later: Sequence[Message], tokens: int) -> str | None:
        return None


@record(prefix="KeepObservations: ")
class KeepObservations(_NoSummary):
    """Replaces all but the last observations with a placeholder."""

    last: int = Field(default=3, ge=0)
    placeholder: str = "(left out)"

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """Without tool messages, as with agents that receive observations in user messages, user messages count."""
        role = "tool" if any(m.role == "tool" for m in later) else "user"
        answers = [i for i, m in enumerate(later) if m.role == role]
        old = {i for i in answers[: max(len(answers) - self.last, 0)] if later[i].content != self.placeholder}
        if not old:
            return None
        return [*initial, *(replace(m, content=self.placeholder) if i in old else m for i, m in enumerate(later))]


@record(prefix="KeepImages: ")
class KeepImages(_NoSummary):
    """Replaces all but the last images with a placeholder, also in the initial messages."""

    last: int = Field(default=1, ge=0)
    placeholder: str = "(earlier image left out)"

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The history with the placeholder for all but the last images, or None if there are few enough."""
        messages = [*initial, *later]
        excess = sum(len(m.images) for m in messages) - self.last
        if excess <= 0:
            return None
        out = []
        for message in messages:
            if not isinstance(message.content, str) and excess > 0:
                content: list[str | Image] = []
                for piece in message.content:
                    if isinstance(piece, Image) and excess > 0:
                        piece, excess = self.placeholder, excess - 1
                    content.append(piece)
                message = replace(message, content=tuple(content))
            out.append(message)
        return out


@record(prefix="Summarize: ")
class Summarize:
    """Asks the model for a summary; the initial messages and the summary replace the history."""

    over_tokens: int = Field(ge=0)
    """Prompt length in tokens above which a summary is requested."""
    request: str = "Sum up what you have done and found, and what is left to do. You will go on from this summary."
    heading: str = "Summary of what happened so far:"

    def summary_request(self, later: Sequence[Message], tokens: int) -> str | None:
        """The request once the prompt is longer than `over_tokens`."""
        if tokens == 0:
            raise ConfigError("Summarize depends on the prompt length, but this server returns no token ids to count")
        return self.request if tokens > self.over_tokens else None

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The initial messages with the summary appended, or None without a summary."""
        return None if summary is None else append_user_text(initial, [f"{self.heading}\n{summary}"])


@record(prefix="StepHistory: ")
class StepHistory(_NoSummary):
    """Every step is its own segment: the initial messages and the last few turns with their observations."""

    history: int = Field(default=2, ge=0)
    """Number of earlier turns in the prompt. With 0, the last observation is appended to the question."""

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The initial messages and the last turns, or None before the first turn."""
        turns = [i for i, m in enumerate(later) if m.role == "assistant"]
        if not turns:
            return None
        if self.history == 0:
            return append_user_text(initial, [m.content for m in later[turns[-1] + 1 :]])
        return [*initial, *later[turns[max(len(turns) - self.history, 0)] :]]


def append_user_text(messages: Sequence[Message], contents: Sequence[Content]) -> list[Message]:
    """Append to the user message at the end: many chat templates reject two user messages in a row."""
    if not contents:
        return list(messages)
    if not messages or messages[-1].role != "user":
        return [*messages, Message("user", join_content(contents))]
    *earlier, last = messages
    return [*earlier, replace(last, content=join_content([last.content, *contents]))]


def join_content(contents: Sequence[Content]) -> Content:
    """Join contents with blank lines between them."""
    pieces: list[str | Image] = []
    for content in contents:
        if pieces:
            pieces.append("\n\n")
        pieces.extend([content] if isinstance(content, str) else content)
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return "".join(texts) if len(texts) == len(pieces) else tuple(pieces)


@record(prefix="branching: ")
class Branching:
    """Tree sampling: a chain that goes on after `turn` turns is continued `branches` times from there."""

    turn: int = Field(ge=1)
    """Turns before the branching point, which the branches share."""
    branches: int = Field(ge=2)
    """Continuations from there, that of the chain itself included."""

    @classmethod
    def of(cls, value: Branching | Mapping[str, Any] | None, max_turns: int) -> Branching | None:
        """Convert a mapping of both fields; None stays None. Raises ConfigError if no chain can reach the turn."""
        if isinstance(value, Mapping) and set(value) != {"turn", "branches"}:
            raise ConfigError(f"branching={dict(value)!r}: it has turn and branches, such as turn=1, branches=4")
        if value is not None and not isinstance(value, Branching | Mapping):
            raise ConfigError(f"branching must be a Branching or a mapping of its fields, not {value!r:.80}")
        branching = cls(**value) if isinstance(value, Mapping) else value
        if branching is not None and branching.turn >= max_turns:
            raise ConfigError(
                f"branching after {branching.turn} turns would have no effect: chains have at most {max_turns}"
            )
        return branching
