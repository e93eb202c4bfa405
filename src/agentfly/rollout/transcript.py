"""The writing of a chain's record: which tokens the model is shown next, and who wrote them.

With a template of ours the prompt is the segment's own buffer: an opening, then what the model sampled, then the delta
that `extend` renders, and so on. With a server that renders for itself, the record follows what the server says it
showed. Either way a history that changed behind the buffer seals the segment and begins the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.segment import Author, Segment
from agentfly.template import History, Template
from agentfly.types import Completion, Message


class Transcript:
    """One chain's conversation, as messages and as tokens."""

    __slots__ = ("_pending", "_template", "messages", "segments")

    def __init__(self, template: Template | None) -> None:
        """`template` is None where the server renders."""
        self._template = template
        self.messages: list[Message] = []
        """The conversation as it would be rendered anew."""
        self.segments: list[Segment] = []
        self._pending: tuple[Author, list[Message], int] = (Author.TASK, [], 0)
        """What was said since the last reply and awaits the server's rendering: by whom, what, and in which turn."""

    @property
    def segment(self) -> Segment:
        return self.segments[-1]

    def begin(self, messages: Sequence[Message], author: Author, turn: int, ids: Sequence[int] | None = None) -> None:
        """Open a segment with a whole conversation. `ids` is its rendering, where it is known already."""
        if self._template is not None and ids is None:
            ids = self._template.start(messages)
        self._next_segment()
        self.messages = list(messages)
        if ids is None:
            self._pending = (author, self.messages.copy(), turn)
        else:
            self.segment.show(author, ids, messages, turn=turn)

    def add(self, delta: Sequence[Message], author: Author, turn: int) -> None:
        """Show what came after the model's last turn, up to the opening of its next."""
        self.messages.extend(delta)
        if self._template is None:
            self._pending = (author, list(delta), turn)
        elif self._template.history is History.TEMPLATE:
            self._add_as_rendered(self._template, delta, author, turn)
        else:
            extended = self._template.extend(delta)
            if self.segment.last not in extended.closers:
                self.segment.show(Author.TEMPLATE, [extended.close], turn=turn)
            self.segment.show(author, extended.ids, delta, turn=turn)

    def _add_as_rendered(self, template: Template, delta: Sequence[Message], author: Author, turn: int) -> None:
        whole, shown = template.start(self.messages), self.segment.prompt.tolist()
        if whole[: len(shown)] != shown:
            self.begin(self.messages, Author.HISTORY, turn, whole)
            return
        rest = whole[len(shown) :]
        if shown[-1] not in template.stop_ids and rest and rest[0] in template.stop_ids:
            self.segment.show(Author.TEMPLATE, rest[:1], turn=turn)
            rest = rest[1:]
        self.segment.show(author, rest, delta, turn=turn)

    def sampled(self, completion: Completion, said: Message, retold: Message, turn: int) -> None:
        """Record a turn of the model. `retold` is how it reads where the history is rendered anew."""
        if self._template is None:
            self._show_pending(completion.prompt_ids)
            if completion.prompt_ids is None and completion.token_ids:
                # Tokens whose prompt nobody knows cannot be trained: the segment has to say so.
                completion = Completion((), (), (), completion.finish, message=said)
        self.segment.sample(completion, said, turn=turn)
        self.messages.append(retold)

    def _show_pending(self, prompt_ids: Sequence[int] | None) -> None:
        """Record what the server was told, by the ids it says it showed the model."""
        author, said, turn = self._pending
        self._pending = (Author.USER, [], turn)
        shown = self.segment.prompt.tolist()
        if prompt_ids is not None and list(prompt_ids[: len(shown)]) != shown:
            self._next_segment()
            author, said, shown = Author.HISTORY, self.messages, []
        if prompt_ids is not None or said:
            self.segment.show(author, [] if prompt_ids is None else prompt_ids[len(shown) :], said, turn=turn)

    def note(self, delta: Sequence[Message], author: Author, turn: int) -> None:
        """Record what was said when the chain was over: part of the conversation, never shown to the model."""
        if delta:
            self.messages.extend(delta)
            self.segment.show(author, [], delta, turn=turn)

    def close(self) -> tuple[Segment, ...]:
        """Seal the record."""
        if self.segments and self._pending[1]:  # the server never answered
            self._show_pending(None)
        return tuple([segment.seal() for segment in self.segments])

    def _next_segment(self) -> None:
        if self.segments:
            self.segment.seal()
        self.segments.append(Segment())
