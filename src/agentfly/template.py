"""Messages to tokens and back: `start` renders a conversation, `extend` what follows a turn, `write` a turn.

The invariant: what was sampled is never encoded again. `extend` renders a stand-in conversation with the template's own
Jinja, cuts right behind the closing token of the stand-in's assistant turn, and keeps the rest. A control token splits
text before any merge, so what follows the cut is exactly what the template would have put after the sampled turn.
"""

from __future__ import annotations

import datetime
import enum
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from agentfly.encoding.codec import Codec, any_of, free_mark
from agentfly.encoding.forms import Form, learn
from agentfly.encoding.rendering import Renderer, special_tokens
from agentfly.encoding.tokenizer import ChatTokenizer
from agentfly.errors import ConfigError, TemplateError
from agentfly.types import Message, Reply, ToolCall

GUARDED = frozenset({"user", "tool"})
"""Roles whose text may never become a control token; system text and earlier assistant turns are trusted."""
_THINKING = ("<think>", "[THINK]", "<|START_THINKING|>", "<mm:think>", "<|open|>think<|sep|>")
"""What a prompt ends with when it has already opened the model's thinking."""

_HELD_BACK = 64
"""Most tokens that are held back because their text ends in an incomplete character."""


class Rendering(Protocol):
    """Renders messages: the closing token before them, and their text. Untrusted text in them is cut by `guard`."""

    __name__: str

    def __call__(self, messages: Sequence[Message], guard: str) -> tuple[int, str]: ...


class Reader(Protocol):
    """Reads the text of one assistant turn; never raises."""

    def __call__(self, text: str) -> Reply: ...


class History(enum.Enum):
    """What later turns see of earlier ones, where a template's full rendering rewrites them (Qwen3, gpt-oss)."""

    APPEND = "append"
    """Everything stays as it was sampled; one segment a chain."""
    TEMPLATE = "template"
    """As the template renders it, e.g. without earlier thinking; each rewrite seals a segment and begins the next."""


@dataclass(frozen=True, slots=True)
class Extended:
    """What follows a sampled turn."""

    close: int
    """The closing token the template ends such a turn with, for a turn that was cut off before it."""
    ids: list[int]
    """From right behind the closing token up to and with the opening of the model's next turn."""
    closers: frozenset[int]
    """Sampled tokens that stand for `close`: all stop tokens; only `close` where it opens what follows (GLM)."""

    def after(self, last: int | None) -> list[int]:
        """What to append to a turn whose last token is `last`: the ids, behind the close if the turn lacks it."""
        return self.ids if last in self.closers else [self.close, *self.ids]


class Template:
    """One chat format over one tokenizer, with one set of tools."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        source: str,
        *,
        close: Sequence[str],
        stop: Sequence[str] = (),
        reader: Reader,
        name: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        history: History = History.APPEND,
        variables: Mapping[str, Any] | None = None,
        today: datetime.date | None = None,
        image: str = "",
    ) -> None:
        """`source` is Jinja; `close` the tokens it may end an assistant turn with; `variables` go to it by name.

        `stop` are those of `close` that end the sampling; none: all. gpt-oss also ends its thinking with `<|end|>`.
        `today` is the date the template may print; None takes the day of construction. It stays for the whole run.
        `image` stands for a picture in templates that can only show text; empty: pictures are refused there.
        """
        self.name, self.source, self.history = name or "the tokenizer's own", source, history
        self.tools = tuple(tools)
        given = {**special_tokens(tokenizer), **(variables or {})}
        self._renderer = Renderer(source, name=self.name, tools=tools, variables=given, today=today, image=image)
        self.render = self._renderer.render
        self.reads = self._renderer.reads
        """Names of the variables that the template looks up."""
        self.shows_tools, self.shows_images = self._renderer.shows_tools, bool(image) or self._renderer.shows_images
        self.codec = Codec(tokenizer)
        self.reader = reader
        close = [text for text in close if text in self.codec.control]
        if not close:
            raise TemplateError(f"template {self.name!r}: the tokenizer has none of the tokens that end its turns")
        self.stop_ids = frozenset(self.codec.control[text] for text in close if not stop or text in stop)
        self.close_id = self.codec.control[close[0]]
        """How the format itself ends a turn."""
        self._close_pattern = re.compile(any_of(close))
        self.closes_turns = self._closes_itself()
        """A token of its own ends an assistant turn, rather than the token that opens the next turn (GLM)."""
        self._closers = self.stop_ids if self.closes_turns else None
        self._forms: dict[tuple[object, ...], Form | None] = {}
        self._formless = re.compile("|".join([self.codec.forged.pattern, *map(re.escape, self._renderer.literals)]))
        self._own_marks = "".join(
            set(re.findall("[\ue000-\uf8ff]", source + json.dumps(self.tools, ensure_ascii=False)))
        )
        self.refused: dict[str, str] = {}
        """Kinds of delta (see `delta_kind`) that the audit found inexact, and why; `extend` refuses them."""
        self.rewritten: dict[str, str] = {}
        """Kinds of delta after which the template itself would show earlier turns differently, and how."""
        self.unread_calls = ""
        """Why the reader does not parse the calls that the template writes; empty when it does."""
        self.thinking_open = bool(self.opened_thinking(self._generation_prompt()))
        """The prompt of `start` ends inside the model's thinking."""
        self._opens_thinking = self.thinking_open or any(opening in source for opening in _THINKING)

    def start(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a whole conversation, up to and with the opening of the model's turn."""
        known = self._by_form(messages, self._whole, self.codec.plain_cached)
        return (known or self._by_rendering(messages, self._whole))[1]

    def extend(self, delta: Sequence[Message]) -> Extended:
        """What follows a sampled turn when `delta` comes next, up to and with the opening of the model's next turn.

        All answers of a turn go in one delta: some templates put them in one block.
        """
        if self.refused and (reason := self.refused.get(delta_kind(delta))):
            raise TemplateError(f"template {self.name!r} cannot be extended by {delta_kind(delta)}: {reason}")
        return self.follow(delta)

    def follow(self, delta: Sequence[Message]) -> Extended:
        """`extend`, without asking what the audit found."""
        known = self._by_form(delta, self._suffix, self.codec.plain)
        close, ids = known or self._by_rendering(delta, self._suffix)
        return Extended(close, ids, self._closers or frozenset({close}))

    def parse(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> Reply:
        """What the model said in one turn. Never raises: what cannot be read is told in the reply."""
        return self.read(self.text(ids, prompt))

    def text(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text of a sampled turn, without the token that closes it.

        Where `prompt` already opened the model's thinking, the opening is put back, so that the turn reads whole.
        """
        said = self.codec.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        opened = self.opened_thinking(self.codec.decode(list(prompt[-8:]))) if self._opens_thinking else ""
        return said if said.lstrip().startswith(opened) else opened + said

    def stream(self, prompt: Sequence[int] = ()) -> Callable[[Sequence[int]], str]:
        """Return a function that takes the next tokens of a turn and returns `text` of all of them so far.

        Each token is decoded a few times, whatever the length of the turn. A character that is not complete yet is
        held back.
        """
        ids: list[int] = []
        said, start, end = "", 0, 0  # `said` is the text of ids[:end]; ids[start:end] is the context of what follows
        opened = self.opened_thinking(self.codec.decode(list(prompt[-8:]))) if self._opens_thinking else ""

        def extend(more: Sequence[int]) -> str:
            nonlocal said, start, end
            ids.extend(token for token in more if token not in self.stop_ids)
            known, text = self.codec.decode(ids[start:end]), self.codec.decode(ids[start:])
            if not text.endswith("\ufffd") or len(ids) - end > _HELD_BACK:
                said, start, end = said + text[len(known) :], end, len(ids)
            return said if said.lstrip().startswith(opened) else opened + said

        return extend

    def read(self, text: str) -> Reply:
        """The reply in the text of one turn."""
        return self.reader(text)

    def write(self, reply: Message) -> list[int]:
        """The tokens of a reply, up to and with the one that ends the turn: what `parse` reads the reply out of."""
        asked = [Message("user", "u")]
        prompt, whole = self.render(asked), self.render([*asked, reply], open_turn=False)
        if not whole.startswith(prompt):
            raise TemplateError(
                f"template {self.name!r} opens a turn with {prompt[-24:]!r}, but a reply that it is given begins "
                "otherwise: it cannot write a turn of the model's"
            )
        text = self.through_close(whole[len(prompt) :])
        for part in (reply.thinking, reply.text):
            if "".join(part.split()) not in "".join(text.split()):
                raise TemplateError(f"template {self.name!r} does not write all of a reply: {part!r:.80} is lost")
        written = len(self.read(self.opened_thinking(prompt) + text).calls) if reply.tool_calls else 0
        if written != len(reply.tool_calls):
            raise TemplateError(
                f"template {self.name!r} does not write all of a reply: of {len(reply.tool_calls)} calls {written} are "
                f"parsed back from {text!r:.160}"
            )
        ids = self.codec.encode(text)
        if not ids or ids[-1] not in self.stop_ids:  # the turn ends with what opens the next (GLM)
            answers = [Message("tool", "x", name=call.name, tool_call_id=call.id) for call in reply.tool_calls]
            ids.append(self.follow(answers or asked).close)
        if not self.stop_ids.isdisjoint(ids[:-1]):
            raise ConfigError(f"a reply holds a token that ends turns before its end: {reply.text!r:.120}")
        return ids

    @staticmethod
    def opened_thinking(prompt: str) -> str:
        """Return the opening of the model's thinking that a prompt ends with; "" when it ends otherwise."""
        end = prompt.rstrip()
        return next((opening for opening in _THINKING if end.endswith(opening)), "")

    def through_close(self, text: str) -> str:
        """Rendered text up to and with its last closing token; all of it where there is none."""
        return text[: max((match.end() for match in self._close_pattern.finditer(text)), default=len(text))]

    # ── guarding: untrusted text that spells a control token is cut by a character that no message holds ──

    def _guard(self, messages: Sequence[Message]) -> str:
        return free_mark([self._own_marks, *(text for message in messages for text in _texts(message))])

    def _guarded(self, messages: Sequence[Message], guard: str) -> list[Message]:
        def safe(message: Message) -> Message:
            if message.role not in GUARDED or not any(map(self.codec.forged.search, _texts(message))):
                return message
            content = message.content
            if isinstance(content, str):
                content = self.codec.cut(content, guard)
            else:
                content = tuple(self.codec.cut(part, guard) if isinstance(part, str) else part for part in content)
            name, call_id = self.codec.cut(message.name, guard), self.codec.cut(message.tool_call_id, guard)
            return Message(message.role, content, (), "", name, call_id)

        return [safe(message) for message in messages]

    # ── rendering: a whole conversation, or what comes behind a stand-in turn, cut at its closing token ──

    def _by_rendering(self, messages: Sequence[Message], rendering: Rendering) -> tuple[int, list[int]]:
        guard = self._guard(messages)
        close, text = rendering(self._guarded(messages, guard), guard)
        return close, self.codec.encode(text, guard)

    def _whole(self, messages: Sequence[Message], guard: str) -> tuple[int, str]:
        """The text of a conversation, beside the token that closes a turn in it."""
        return self.close_id, self.render(messages)

    def _suffix(self, messages: Sequence[Message], guard: str) -> tuple[int, str]:
        """The closing token of the turn before `messages`, and the text from there to the model's next turn."""
        mark = f"zQ{guard}Qz"
        problem = TemplateError(f"template {self.name!r} drops the assistant turn before {delta_kind(messages)}")
        for turn in _stand_ins(mark, messages):
            try:
                full = self.render([Message("user", "u"), turn, *messages])
            except TemplateError as error:
                problem = error
                continue
            at = full.rfind(mark)
            if at < 0:
                continue
            if close := self._close_pattern.search(full, at):
                return self.codec.control[close[0]], full[close.end() :]
            problem = TemplateError(
                f"template {self.name!r} writes no closing token between an assistant turn and {delta_kind(messages)}"
            )
        raise problem

    def _closes_itself(self) -> bool:
        """The assistant turn ends with its own token, not with the token that opens the next turn."""
        try:
            text = self.render([Message("user", "u"), Message("assistant", "zQ")], open_turn=False)
        except TemplateError:
            return True
        return self._close_pattern.search(text, text.rfind("zQ")) is not None

    def _generation_prompt(self) -> str:
        try:
            user = [Message("user", "u")]
            return self.render(user).removeprefix(self.render(user, open_turn=False))
        except TemplateError:
            return ""

    # ── the fast way: most conversations and deltas are contents in a form that was learned before ──

    def _by_form(
        self, messages: Sequence[Message], rendering: Rendering, encode: Callable[[str], Sequence[int]]
    ) -> tuple[int, list[int]] | None:
        """The closing token and the ids, where `rendering` is known to put these messages in a fixed form."""
        contents: list[str] = []
        for message in messages:
            content = message.content
            if message.role == "assistant" or not isinstance(content, str) or self._formless.search(content):
                return None
            contents.append(content)
        shape = (rendering.__name__, *[(m.role, m.name) for m in messages])
        if shape not in self._forms:
            if len(self._forms) >= 4096:
                self._forms.clear()
            self._forms[shape] = self._learn(messages, rendering)
        form = self._forms[shape]
        if form is None:
            return None
        call_ids: list[str] = []
        if form.shows_ids:
            call_ids = [self._renderer.call_id(message.tool_call_id) for message in messages]
            if not all(re.fullmatch(r"[\w-]+", call_id) for call_id in call_ids):
                return None
        return form.close, form.ids(contents, call_ids, encode)

    def _learn(self, messages: Sequence[Message], rendering: Rendering) -> Form | None:
        if self.codec.eats_space or any(self.codec.forged.search(message.name) for message in messages):
            return None

        def rendered(contents: Sequence[str], call_ids: Sequence[str]) -> tuple[int, str]:
            filled = zip(messages, contents, call_ids, strict=True)
            return rendering([Message(m.role, text, (), "", m.name, call) for m, text, call in filled], "\ue000")

        return learn(rendered, len(messages), self.codec)


def delta_kind(delta: Sequence[Message]) -> str:
    """What a delta is made of, in words: `tool`, `tools` (two or more), `user`, `tool, user`, `nothing`."""
    runs = [(role, len(list(run))) for role, run in groupby(message.role for message in delta)]
    return ", ".join(role if count == 1 else f"{role}s" for role, count in runs) or "nothing"


def _stand_ins(mark: str, delta: Sequence[Message]) -> Iterator[Message]:
    """Assistant turns that could come before `delta`, the likeliest first."""
    answers = [message for message in delta if message.role == "tool"]
    calls = tuple(ToolCall(m.name or "f", {"q": mark}, m.tool_call_id or f"call{i:05d}") for i, m in enumerate(answers))
    if calls:
        yield Message("assistant", "", calls)
    if len(calls) > 1:
        yield Message("assistant", "", calls[:1])  # one call a turn at most (Llama)
    yield Message("assistant", mark, calls[:1])  # calls are not shown, or there are none


def _texts(message: Message) -> Iterator[str]:
    """Every text of a message that a template might show."""
    yield message.text
    yield message.name
    yield message.tool_call_id
    if message.thinking or message.tool_calls:
        yield message.thinking
        yield json.dumps([call.to_dict() for call in message.tool_calls], ensure_ascii=False, default=str)
