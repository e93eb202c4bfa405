"""The conversation of a chain, as messages and as token segments.

With a template, the prompt is the segment's own buffer: the initial messages, the sampled tokens, the delta that
`extend` renders, and so on. With a server that renders the prompt, the segment follows the prompt ids that the server
returns. In both cases a history that no longer starts with the buffer seals the segment and begins a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.segment import Author, Segment
from agentfly.templates.template import History, Template
from agentfly.types import Completion, Message


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
            rest = rendered[len(current) :]
            if current[-1] not in self._template.stop_ids and rest and rest[0] in self._template.stop_ids:
                self.segment.append(Author.TEMPLATE, rest[:1], turn=turn)
                rest = rest[1:]
            self.segment.append(author, rest, delta, turn=turn)
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

    def copy(self) -> Transcript:
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
