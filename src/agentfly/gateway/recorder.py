"""The conversations of one chain, as clients send them, and the segments of tokens that the model was shown.

Invariant: what was sampled is never tokenized again. The messages of all turns form a tree. A request walks it from the
root; the deepest node with a sampled turn tells how far the client's history agrees with what was sampled. From there
the recorded tokens are continued by `template.extend`; a history that disagrees (compaction, dropped thinking, an
edited prompt) is rendered as a whole and begins a new segment.

Nothing is recorded before a turn is complete, so a request that fails or is cancelled adds no tokens, and two requests
that continue the same turn do not interfere: the first to finish continues the segment, the other begins one
with a copy of the tokens. Parallel requests that were answered alike have a segment each, and each is continued.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import dataclass, replace

from agentfly.errors import TemplateError
from agentfly.gateway.adapters.smolagents import restates_calls
from agentfly.gateway.chat import ApiError, rendering_size, run_unblocked
from agentfly.segment import Author, Segment
from agentfly.templates.template import History, Template
from agentfly.trajectory import TurnRecord
from agentfly.types import Completion, Message

MessageKey = tuple[str, str, str, tuple[tuple[str, str], ...]]


class Node:
    """A message in the tree of conversations."""

    __slots__ = ("children", "message", "parent", "turns")

    def __init__(self, parent: Node | None = None, message: Message | None = None) -> None:
        self.parent = parent
        self.message = message
        self.children: dict[MessageKey, Node] = {}
        self.turns: list[tuple[Segment, int]] = []
        """The segments in which this message was sampled, each with its number of tokens up to the end of this message;
        empty if the client wrote it."""

    @property
    def messages(self) -> list[Message]:
        """The conversation up to this message."""
        out = []
        node: Node | None = self
        while node is not None and node.message is not None:
            out.append(node.message)
            node = node.parent
        return out[::-1]

    def find(self, message: Message) -> Node | None:
        """The node of a message that follows; None if no conversation has it here."""
        node = self.children.get(message_key(message))
        if node is None and message.role == "assistant" and not message.tool_calls:
            sampled = [child for child in self.children.values() if child.turns]
            node = next((child for child in sampled if restates_calls(child.message, message.text)), None)
        return node

    def find_open(self, tokens: array[int] | None = None) -> tuple[Segment, int] | None:
        """A segment that ends with this message, and has these tokens if given; None if all have been continued."""
        ends = (turn for turn in self.turns if len(turn[0]) == turn[1])
        return next((turn for turn in ends if tokens is None or turn[0].prompt == tokens), None)

    def child(self, message: Message) -> Node:
        """The node of a message that follows; created if needed."""
        node = self.find(message)
        if node is None:
            node = self.children[message_key(message)] = Node(self, message)
        return node


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one turn."""

    ids: array[int]
    messages: tuple[Message, ...]
    template: Template
    last_node: Node | None = None
    """The last message of the conversation that is in the tree; None if the turn is not recorded."""
    depth: int = 0
    """Number of messages up to and including `last_node`."""
    node: Node | None = None
    """The sampled message that it continues; None if it is rendered as a whole."""
    num_recorded: int = 0
    """Number of messages up to and including `node`."""
    segment: Segment | None = None
    """The segment of `node` whose tokens it has."""
    end: int = 0
    """Number of tokens up to the end of `node`."""
    closed: int = 0
    """Number of tokens up to where the turn of `node` is closed; one more than its end if the template closes it."""

    @property
    def is_follow_up(self) -> bool:
        """Whether the conversation has an earlier turn of the model."""
        return any(message.role == "assistant" for message in self.messages)


class Recorder:
    """Records the turns of one chain."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.turns: list[TurnRecord] = []
        self.responses: dict[str, tuple[Node, Message, bool]] = {}
        """Per reply: its node, the message as it was sent, whether its conversation begins with instructions of the
        Responses API."""
        self.follow_ups = 0
        """Turns whose conversation has an earlier turn of the model."""
        self.continued = 0
        """Those of them that continued the tokens of that turn."""
        self._roots: dict[str, Node] = {}
        """Roots of the tree by the tools, which are part of the prompt."""

    async def prepare(self, template: Template, messages: tuple[Message, ...]) -> Prompt:
        """Build the prompt for a conversation. Raises TemplateError if the template cannot render it."""
        last_node = self._roots.setdefault(json.dumps(template.tools, sort_keys=True), Node())
        depth = num_recorded = 0
        node = None
        for message in messages:
            child = last_node.find(message)
            if child is None:
                break
            last_node = child
            depth += 1
            if last_node.turns:
                node, num_recorded = last_node, depth
        # A reply after the last one that agrees was changed by the client, or comes from elsewhere. It has no sampled
        # tokens to continue, and `extend` takes no assistant turns: everything is rendered, as history without loss.
        whole = Prompt(array("i"), messages, template, last_node, depth)
        if node is None or any(message.role == "assistant" for message in messages[num_recorded:]):
            return await _render_whole(whole)
        segment, end = node.find_open() or node.turns[-1]
        continued = replace(whole, node=node, num_recorded=num_recorded, segment=segment, end=end)
        if template.history is History.TEMPLATE:
            ids = segment.extend_prompt((), end)
            rendered = (await _render_whole(whole)).ids
            if rendered[:end] != ids:  # the template rewrites earlier turns, such as their thinking: a new segment
                return replace(whole, ids=rendered)
            closes = ids[-1] not in template.stop_ids and rendered[end] in template.stop_ids
            return replace(continued, ids=rendered, closed=end + closes)
        delta = messages[num_recorded:]
        try:
            extended = await run_unblocked(rendering_size(delta), template.extend, delta)
        except TemplateError:  # a kind of delta that is not exact: render everything
            return await _render_whole(whole)
        # A turn that was cut at its limit lacks the closing token, which `after` puts before the delta.
        added = extended.after(segment.id_at(end - 1))
        ids = segment.extend_prompt(added, end)
        return replace(continued, ids=ids, closed=end + len(added) - len(extended.ids))

    def record(self, prompt: Prompt, completion: Completion, sampled: Message, sent: Message) -> Node:
        """Record a turn. sampled: the parsed message. sent: as the client sees it. Returns the node of the turn."""
        turn = len(self.turns)
        node = prompt.node
        continues = False
        if node is None:
            segment = self._begin()
            author = Author.HISTORY if prompt.is_follow_up else Author.TASK
            segment.append(author, prompt.ids, prompt.messages, turn=turn)
        else:
            assert prompt.segment is not None
            segment, end = prompt.segment, prompt.end
            # While this turn was sampled, another request may have continued the segment. Another one of the same
            # tokens, of a request that was answered alike, is as good; otherwise this turn begins a copy: appended to
            # the first, its tokens would follow tokens that the model did not see.
            if len(segment) > end and (other := node.find_open(prompt.ids[:end])) is not None:
                segment = other[0]
            continues = len(segment) == end
            if not continues:
                segment = self._begin()
                segment.append(Author.HISTORY, prompt.ids[:end], prompt.messages[: prompt.num_recorded], turn=turn)
            if prompt.closed > end:  # the token that closes a turn was not sampled: it carries no loss
                segment.append(Author.TEMPLATE, prompt.ids[end : prompt.closed], turn=turn)
            delta = prompt.messages[prompt.num_recorded :]
            author = Author.TOOL if any(message.role == "tool" for message in delta) else Author.USER
            segment.append(author, prompt.ids[prompt.closed :], delta, turn=turn)
        segment.append_completion(completion, sampled, turn=turn)
        self.follow_ups += prompt.is_follow_up
        self.continued += continues
        assert prompt.last_node is not None
        last_node = prompt.last_node
        for message in prompt.messages[prompt.depth :]:
            last_node = last_node.child(message)
        reply_node = last_node.child(sent)
        reply_node.turns.append((segment, len(segment)))
        return reply_node

    def conversation(self, response_id: str, instructions: str) -> list[Message]:
        """The messages up to an earlier reply. Its instructions are replaced by those of the request."""
        if response_id not in self.responses:
            raise ApiError(
                f"there is no response {response_id!r:.80} in this chain", 400, "previous_response_not_found"
            )
        node, sent, has_instructions = self.responses[response_id]
        messages = [*node.messages[has_instructions:-1], sent]
        return [Message("system", instructions), *messages] if instructions else messages

    @property
    def counts(self) -> Counter[str]:
        """Numbers for the metrics of a gateway."""
        return Counter(
            chains=1,
            turns=len(self.turns),
            segments=len(self.segments),
            follow_ups=self.follow_ups,
            continued=self.continued,
        )

    def close(self) -> tuple[Segment, ...]:
        """Seal all segments and return them."""
        return tuple(segment.seal() for segment in self.segments)

    def _begin(self) -> Segment:
        segment = Segment()
        self.segments.append(segment)
        return segment


async def _render_whole(prompt: Prompt) -> Prompt:
    """The prompt with the ids of its whole conversation."""
    ids = await run_unblocked(rendering_size(prompt.messages), prompt.template.start, prompt.messages)
    return replace(prompt, ids=array("i", ids))


def message_key(message: Message) -> MessageKey:
    """What of a message must agree. Ids of calls are left out: they name messages, and some clients change them."""
    calls = tuple(
        (call.name, call.raw if call.problem else json.dumps(call.arguments, sort_keys=True))
        for call in message.tool_calls
    )
    # Some clients strip the white space around a reply.
    text = message.text.strip() if message.role == "assistant" else message.text
    return message.role, text, message.thinking, calls
