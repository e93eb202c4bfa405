"""The writing of a chain's record: which tokens the model is shown next, and who wrote them.

With a template of ours the prompt is the segment's own buffer: an opening, then what the model sampled, then the delta
that `extend` renders, and so on. With a server that renders for itself, the record follows what the server says it
showed. Either way a history that changed behind the buffer seals the segment and begins the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.template import History, Template
from agentfly.trajectory import Author, Segment
from agentfly.types import Completion, Message


class Transcript:
    """One chain's conversation, as messages and as tokens."""

    __slots__ = ("_pending", "_template", "messages", "segments")

    def __init__(self, template: Template | None) -> None:
        """`template` is None where the server renders."""
        self._template = template
        self.messages: list[Message] = []
        self.segments: list[Segment] = []
        self._pending: tuple[Author, list[Message]] = (Author.TASK, [])
        """What was said since the last reply and awaits the server's rendering."""

    @property
    def segment(self) -> Segment:
        return self.segments[-1]

    def begin(self, messages: Sequence[Message], author: Author, turn: int, ids: Sequence[int] | None = None) -> None:
        """Open a segment with a whole conversation. `ids` is its rendering, where it is known already."""
        if self.segments:
            self.segment.seal()
        self.segments.append(Segment())
        self.messages = list(messages)
        if self._template is None:
            self._pending = (author, self.messages.copy())
        else:
            self.segment.show(author, self._template.start(messages) if ids is None else ids, messages, turn=turn)

    def add(self, delta: Sequence[Message], turn: int) -> None:
        """Show what came after the model's last turn, up to the opening of its next."""
        self.messages.extend(delta)
        author = Author.TOOL if any(m.role == "tool" for m in delta) else Author.USER
        if self._template is None:
            self._pending = (author, [*self._pending[1], *delta])
        elif self._template.history is History.TEMPLATE:
            self._add_as_rendered(delta, author, turn)
        else:
            extended = self._template.extend(delta)
            if self.segment.last not in extended.closers:
                self.segment.show(Author.TEMPLATE, [extended.close], turn=turn)
            self.segment.show(author, extended.ids, delta, turn=turn)

    def _add_as_rendered(self, delta: Sequence[Message], author: Author, turn: int) -> None:
        assert self._template is not None
        whole, shown = self._template.start(self.messages), self.segment.prompt.tolist()
        if whole[: len(shown)] == shown:
            self.segment.show(author, whole[len(shown) :], delta, turn=turn)
        else:
            self.begin(self.messages, Author.HISTORY, turn, whole)

    def sampled(self, completion: Completion, message: Message, turn: int) -> None:
        """Record a turn of the model."""
        if self._template is None:
            self._show_pending(completion.prompt_ids, turn)
        self.segment.sample(completion, message, turn=turn)
        self.messages.append(message)

    def _show_pending(self, prompt_ids: Sequence[int] | None, turn: int) -> None:
        author, said = self._pending
        self._pending = (Author.USER, [])
        if prompt_ids is None:
            self.segment.show(author, [], said, turn=turn)
            return
        shown = self.segment.prompt.tolist()
        if list(prompt_ids[: len(shown)]) != shown:
            self.segment.seal()
            self.segments.append(Segment())
            author, said, shown = Author.HISTORY, self.messages, []
        self.segment.show(author, prompt_ids[len(shown) :], said, turn=turn)

    def note(self, delta: Sequence[Message], turn: int) -> None:
        """Record what was said when the chain was over: part of the conversation, never shown to the model."""
        if delta:
            self.messages.extend(delta)
            self.segment.show(Author.TOOL, [], delta, turn=turn)

    def close(self) -> tuple[Segment, ...]:
        """Seal the record."""
        author, said = self._pending
        if self._template is None and said and self.segments:
            self.segment.show(author, [], said, turn=0)
        return tuple(segment.seal() for segment in self.segments)
