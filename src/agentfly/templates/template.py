"""Messages to tokens and back: `start` renders a conversation, `extend` what follows a turn, `write` an assistant turn.

Invariant: sampled tokens are never decoded and encoded again. `extend` renders a placeholder conversation with the
template's own Jinja, cuts it after the closing token of the placeholder's assistant turn, and keeps the rest. A control
token splits text before any merge, so the rest is exactly what the template would render after the sampled turn.
"""

from __future__ import annotations

import datetime
import enum
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from agentfly.errors import ConfigError, TemplateError
from agentfly.templates.codec import Codec, match_any, unused_character
from agentfly.templates.rendering import Form, Renderer, learn_form, special_tokens
from agentfly.templates.tokenizer import ChatTokenizer
from agentfly.types import Image, Message, Reply, ToolCall
from agentfly.vision.processor import ImageProcessor

GUARDED = frozenset({"user", "tool"})
"""Roles whose text must never become a control token, and nor must the tools': MCP servers and clients write them.
System text and earlier assistant turns are trusted."""
_THINKING_OPENINGS = ("<think>", "[THINK]", "<|START_THINKING|>", "<mm:think>", "<|open|>think<|sep|>")
"""Endings of a prompt that has already opened the model's thinking."""

_MAX_FORM_MESSAGES = 32
"""Longer conversations and deltas are rendered: to learn a form takes some twenty renderings."""

_MAX_PENDING_TOKENS = 64
"""Maximum number of streamed tokens that are withheld because their text ends in an incomplete character."""


class Rendering(Protocol):
    """Renders messages: returns the closing token before them and their text. `guard` splits forged control tokens."""

    __name__: str

    def __call__(self, messages: Sequence[Message], guard: str) -> tuple[int, str]: ...


TurnParser = Callable[[str], Reply]
"""Parses the text of one assistant turn; never raises."""


class History(enum.Enum):
    """What later turns see of earlier ones if the template's full rendering rewrites them (Qwen3, gpt-oss)."""

    APPEND = "append"
    """Everything stays as sampled; one segment per chain."""
    TEMPLATE = "template"
    """As the template renders it, e.g. without earlier thinking; each rewrite seals a segment and starts the next."""


@dataclass(slots=True)  # not frozen, which would triple the time to create one in every turn
class Extended:
    """The tokens that follow a sampled turn."""

    close: int
    """The token that closes such a turn in the template; needed if the turn was truncated before it."""
    ids: list[int]
    """From after the closing token up to and including the generation prompt of the next turn."""
    closers: frozenset[int]
    """Sampled tokens that are equivalent to `close`: all stop tokens; only `close` if it opens the next turn (GLM)."""

    def after(self, last: int | None) -> list[int]:
        """The tokens to append to a turn whose last token is `last`: `ids`, after `close` if the turn lacks it."""
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
        parser: TurnParser,
        name: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        history: History = History.APPEND,
        variables: Mapping[str, Any] | None = None,
        today: datetime.date | None = None,
        image: str = "",
        image_processor: ImageProcessor | None = None,
    ) -> None:
        """`source` is Jinja; `close` are the tokens that may end an assistant turn; `variables` are passed by name.

        `stop`: the tokens of `close` that end sampling; empty: all of them (gpt-oss also ends thinking with `<|end|>`).
        `today`: the date that the template may print; None is the day of construction. It does not change afterwards.
        `image`: the image placeholder for templates that render text only; empty: such templates refuse images.
        `image_processor`: expands placeholders to the tokens of each image; None leaves one placeholder per image.
        """
        self.name = name or "the tokenizer's own"
        self.source = source
        self.history = history
        self.tools = tuple(tools)
        all_variables = {**special_tokens(tokenizer), **(variables or {})}
        self._renderer = Renderer(
            source, name=self.name, tools=tools, variables=all_variables, today=today, image=image
        )
        self.reads = self._renderer.reads
        """Names of the variables that the template reads."""
        self.shows_tools = self._renderer.shows_tools
        self.image_processor = image_processor
        self.shows_images = bool(image) or self._renderer.shows_images
        if image_processor is not None and self.shows_images:
            with_image = self.render([Message("user", ("u", Image("data:,")))])
            self.shows_images = with_image.count(image_processor.placeholder) == 1
        self.codec = Codec(tokenizer)
        self._has_forged_tools = self._cut_tools("\0") != list(self.tools)
        self.parser = parser
        close = [text for text in close if text in self.codec.control]
        if not close:
            raise TemplateError(f"template {self.name!r}: the tokenizer has none of the tokens that end its turns")
        self.stop_ids = frozenset(self.codec.control[text] for text in close if not stop or text in stop)
        self.close_id = self.codec.control[close[0]]
        """The token with which the template itself ends a turn."""
        self._close_pattern = re.compile(match_any(close))
        self.closes_turns = True
        """An assistant turn ends with a token of its own, not with the token that opens the next turn (GLM)."""
        with suppress(TemplateError):
            # Found by rendering, not by name: derived models keep a template's name and change its tokens.
            closed = self.render([Message("user", "u"), Message("assistant", "zQ")], open_turn=False)
            self.closes_turns = self._close_pattern.search(closed, closed.rfind("zQ")) is not None
        self._closers = self.stop_ids if self.closes_turns else None
        self._forms: dict[tuple[object, ...], Form | None] = {}
        self._own_marks = "".join(
            set(re.findall("[\ue000-\uf8ff]", source + json.dumps(self.tools, ensure_ascii=False)))
        )
        self.rejections: dict[str, str] = {}
        """Kinds of delta (see `delta_kind`) that the audit found inexact, with the reason; `extend` refuses them."""
        self.rewrites: dict[str, str] = {}
        """Kinds of delta after which the template itself renders earlier turns differently, with the difference."""
        self.parser_problem = ""
        """Why the parser does not parse the calls that the template writes; empty if it does."""
        self.reply_prefix = ""
        """What the model writes before each answer in this format (Hunyuan: its role); no part of the content."""
        self.thinking_open = False
        """Whether the generation prompt opens the model's thinking."""
        with suppress(TemplateError):
            user = [Message("user", "u")]
            generation_prompt = self.render(user).removeprefix(self.render(user, open_turn=False))
            self.thinking_open = bool(self.thinking_opening(generation_prompt))
        self._opens_thinking = self.thinking_open or any(opening in source for opening in _THINKING_OPENINGS)

    def render(self, messages: Sequence[Message], *, open_turn: bool = True, guard: str = "") -> str:
        """Render a conversation, `open_turn`: with the generation prompt. `guard` splits control tokens in tools."""
        tools = self._cut_tools(guard) if guard and self._has_forged_tools else None
        return self._renderer.render(messages, open_turn=open_turn, tools=tools)

    def choose_guard(self, messages: Sequence[Message]) -> str:
        """A character that neither the messages nor the template and its tools contain."""
        return unused_character([self._own_marks, *(text for message in messages for text in _texts(message))])

    def start(self, messages: Sequence[Message | Mapping[str, Any]]) -> list[int]:
        """Encode a whole conversation, up to and including the generation prompt. Messages may be OpenAI dicts."""
        conversation = [Message.of(message) for message in messages]
        encoded = self._encode_by_form(conversation, self._render_whole, self.codec.plain_cached)
        return (encoded or self._render_and_encode(conversation, self._render_whole))[1]

    def extend(self, delta: Sequence[Message]) -> Extended:
        """Encode what follows a sampled turn when `delta` comes next, up to and including the generation prompt.

        All tool results of a turn belong in one delta: some templates render them as one block. Raises TemplateError
        for a kind of delta that the audit refused.
        """
        if self.rejections and (reason := self.rejections.get(delta_kind(delta))):
            raise TemplateError(f"template {self.name!r} cannot be extended by {delta_kind(delta)}: {reason}")
        return self.follow(delta)

    def follow(self, delta: Sequence[Message]) -> Extended:
        """`extend` without the check against the audit."""
        encoded = self._encode_by_form(delta, self._render_suffix, self.codec.plain_observation)
        close, ids = encoded or self._render_and_encode(delta, self._render_suffix)
        return Extended(close, ids, self._closers or frozenset({close}))

    def parse(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> Reply:
        """Parse one sampled turn. Never raises: the reply reports what cannot be parsed."""
        return self.parse_text(self.text(ids, prompt))

    def text(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """Decode a sampled turn, without the token that closes it.

        If `prompt` already opened the model's thinking, the text begins with the opening marker.
        """
        # Only the last token: a stop token in the middle was sampled there, and must stay visible to the parser.
        text = self.codec.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        opening = self._thinking_opening(prompt)
        return text if not opening or text.lstrip().startswith(opening) else opening + text

    def _thinking_opening(self, prompt: Sequence[int]) -> str:
        return self.thinking_opening(self.codec.decode(list(prompt[-8:]))) if self._opens_thinking else ""

    def stream(self, prompt: Sequence[int] = ()) -> Callable[[Sequence[int]], str]:
        """Return a function that takes the next tokens of a turn and returns `text` of all of them so far.

        Each token is decoded a constant number of times. A character that is not complete yet is withheld.
        """
        ids: list[int] = []
        decoded = ""  # the text of ids[:end]
        start = end = 0  # ids[start:end] is the decoding context of the tokens that follow
        opening = self._thinking_opening(prompt)

        def extend(new_ids: Sequence[int]) -> str:
            nonlocal decoded, start, end
            ids.extend(token for token in new_ids if token not in self.stop_ids)
            context = self.codec.decode(ids[start:end])
            text = self.codec.decode(ids[start:])
            # A character of several tokens decodes to the replacement character until its last token is there.
            if not text.endswith("\ufffd") or len(ids) - end > _MAX_PENDING_TOKENS:
                decoded += text[len(context) :]
                start, end = end, len(ids)
            return decoded if decoded.lstrip().startswith(opening) else opening + decoded

        return extend

    def parse_text(self, text: str) -> Reply:
        """Parse the text of one turn."""
        reply = self.parser(text)
        content = reply.message.content
        if self.reply_prefix and isinstance(content, str) and content.startswith(self.reply_prefix):
            content = content.removeprefix(self.reply_prefix)
            reply = replace(reply, message=replace(reply.message, content=content))
        return reply

    def write(self, reply: Message) -> list[int]:
        """Encode a reply as the model would sample it, with the token that ends the turn; the inverse of `parse`."""
        question = [Message("user", "u")]
        prompt = self.render(question)
        whole = self.render([*question, reply], open_turn=False)
        if not whole.startswith(prompt):
            raise TemplateError(
                f"template {self.name!r} opens a turn with {prompt[-24:]!r}, but renders a given reply with another "
                "beginning: it cannot write an assistant turn"
            )
        text = self.cut_after_close(whole[len(prompt) :])
        # Many templates drop the thinking of earlier turns: SFT would train a reply that lacks what was demonstrated.
        for passage in (reply.thinking, reply.text):
            if "".join(passage.split()) not in "".join(text.split()):
                raise TemplateError(f"template {self.name!r} does not write all of a reply: {passage!r:.80} is lost")
        # Parsed back as at sampling time: calls that the model would learn and the parser not read train to no effect.
        written = len(self.parse_text(self.thinking_opening(prompt) + text).calls) if reply.tool_calls else 0
        if written != len(reply.tool_calls):
            raise TemplateError(
                f"template {self.name!r} does not write all of a reply: of {len(reply.tool_calls)} calls {written} are "
                f"parsed back from {text!r:.160}"
            )
        ids = self.codec.encode(text)
        if not ids or ids[-1] not in self.stop_ids:  # the turn ends with the token that opens the next (GLM)
            answers = [Message("tool", "x", name=call.name, tool_call_id=call.id) for call in reply.tool_calls]
            ids.append(self.follow(answers or question).close)
        if not self.stop_ids.isdisjoint(ids[:-1]):
            raise ConfigError(f"a reply holds a token that ends turns before its end: {reply.text!r:.120}")
        return ids

    @property
    def prints_date(self) -> bool:
        """Whether the template prints the date."""
        return self._renderer.prints_date

    @property
    def prints_time(self) -> bool:
        """Whether the template prints the time of day, which is fixed like the date."""
        return self._renderer.prints_time

    @staticmethod
    def thinking_opening(prompt: str) -> str:
        """The opening marker of thinking that a prompt ends with; "" if there is none."""
        end = prompt.rstrip()
        return next((opening for opening in _THINKING_OPENINGS if end.endswith(opening)), "")

    def cut_after_close(self, text: str) -> str:
        """Rendered text up to and including its last closing token; all of it if there is none."""
        return text[: max((match.end() for match in self._close_pattern.finditer(text)), default=len(text))]

    # ── rendering: a whole conversation, or the part after the closing token of a placeholder turn ──

    def _render_and_encode(self, messages: Sequence[Message], rendering: Rendering) -> tuple[int, list[int]]:
        """Render and encode. Control tokens in untrusted text are split by a character that no message contains."""
        guard = self.choose_guard(messages)
        guarded: list[Message] = []
        for message in messages:
            if message.role not in GUARDED and self.image_processor is not None:
                # Trusted text may contain control tokens, but only an image of a message becomes image tokens.
                if any(self.image_processor.placeholder in text for text in _texts(message)):
                    message = _cut_placeholder(message, self.image_processor.placeholder, guard)
            elif message.role in GUARDED and any(map(self.codec.forged.search, _texts(message))):
                content = message.content
                if isinstance(content, str):
                    content = self.codec.cut(content, guard)
                else:
                    content = tuple(
                        self.codec.cut(block, guard) if isinstance(block, str) else block for block in content
                    )
                name = self.codec.cut(message.name, guard)
                call_id = self.codec.cut(message.tool_call_id, guard)
                message = Message(message.role, content, name=name, tool_call_id=call_id)
            guarded.append(message)
        close, text = rendering(guarded, guard)
        images = [image for message in messages for image in message.images]
        if self.image_processor is None or not images:
            return close, self.codec.encode(text, guard)
        ids = self.codec.encode(self.image_processor.expand(text, images), guard)
        expected = sum(self.image_processor.encode(image).num_tokens for image in images)
        encoded = ids.count(self.image_processor.token_id)
        if encoded != expected:
            raise TemplateError(
                f"template {self.name!r}: {expected} image tokens are needed, but {encoded} were encoded"
            )
        return close, ids

    def _render_whole(self, messages: Sequence[Message], guard: str) -> tuple[int, str]:
        """Render a conversation; also return the token that closes a turn."""
        return self.close_id, self.render(messages, guard=guard)

    def _render_suffix(self, messages: Sequence[Message], guard: str) -> tuple[int, str]:
        """Return the token that closes the turn before `messages`, and the text from there to the next turn."""
        mark = f"zQ{guard}Qz"
        problem = TemplateError(f"template {self.name!r} drops the assistant turn before {delta_kind(messages)}")
        # The text depends on the delta and not on the turn before it, so a placeholder turn gives the same suffix.
        for turn in _placeholder_turns(mark, messages):
            try:
                full = self.render([Message("user", "u"), turn, *messages], guard=guard)
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

    def _cut_tools(self, guard: str) -> list[Any]:
        """The tools, with `guard` in everything in them that could become a control token."""
        return [_map_strings(tool, lambda text: self.codec.cut(text, guard)) for tool in self.tools]

    # ── fast path: most conversations and deltas fit a form that was learned before ──

    def _encode_by_form(
        self, messages: Sequence[Message], rendering: Rendering, encode: Callable[[str], Sequence[int]]
    ) -> tuple[int, list[int]] | None:
        """The closing token and the ids if `rendering` puts these messages into a known fixed form, else None."""
        if len(messages) > _MAX_FORM_MESSAGES:
            return None
        contents: list[str] = []
        shape: tuple[object, ...] = (rendering.__name__,)
        for message in messages:
            content = message.content
            # Templates rewrite turns of the model; a forged control token needs the guard of `_render_and_encode`.
            if message.role == "assistant" or not isinstance(content, str) or self.codec.forged.search(content):
                return None
            if any(literal in content for literal in self._renderer.literals):
                return None
            contents.append(content)
            shape += (message.role, message.name)  # templates write the name of a tool beside its result
        try:
            form = self._forms[shape]
        except KeyError:

            def render_contents(contents: Sequence[str], call_ids: Sequence[str]) -> tuple[int, str]:
                filled = [
                    Message(message.role, text, name=message.name, tool_call_id=call_id)
                    for message, text, call_id in zip(messages, contents, call_ids, strict=True)
                ]
                return rendering(filled, "\ue000")

            if len(self._forms) >= 4096:  # names of tools may come from clients, without end
                self._forms.clear()
            has_forged_name = any(self.codec.forged.search(message.name) for message in messages)
            is_fixed = not (self.codec.strips_space or self._has_forged_tools or has_forged_name)
            form = learn_form(render_contents, len(messages), self.codec) if is_fixed else None
            self._forms[shape] = form
        if form is None:
            return None
        call_ids: list[str] = []
        if form.shows_ids:
            call_ids = [self._renderer.call_id(message.tool_call_id) for message in messages]
            if not all(re.fullmatch(r"[\w-]+", call_id) for call_id in call_ids):
                return None
        return form.close, form.ids(contents, call_ids, encode)


def delta_kind(delta: Sequence[Message]) -> str:
    """The roles of a delta: `tool`, `tools` (two or more), `user`, `tool, user`, `nothing`."""
    runs = [(role, len(list(run))) for role, run in groupby(message.role for message in delta)]
    return ", ".join(role if count == 1 else f"{role}s" for role, count in runs) or "nothing"


def _placeholder_turns(mark: str, delta: Sequence[Message]) -> Iterator[Message]:
    """Assistant turns that may precede `delta`, the most likely first."""
    answers = [message for message in delta if message.role == "tool"]
    calls = tuple(ToolCall(m.name or "f", {"q": mark}, m.tool_call_id or f"call{i:05d}") for i, m in enumerate(answers))
    if calls:
        yield Message("assistant", "", calls)
    if len(calls) > 1:
        yield Message("assistant", "", calls[:1])  # at most one call per turn (Llama)
    yield Message("assistant", mark, calls[:1])  # the template renders no calls, or there are none


def _cut_placeholder(message: Message, placeholder: str, guard: str) -> Message:
    """Insert `guard` into every image placeholder that is written out in the text of a message."""

    def cut(value: Any) -> Any:
        return _map_strings(value, lambda text: text.replace(placeholder, f"{placeholder[0]}{guard}{placeholder[1:]}"))

    calls = tuple(replace(call, arguments=cut(call.arguments), raw=cut(call.raw)) for call in message.tool_calls)
    return replace(message, content=cut(message.content), thinking=cut(message.thinking), tool_calls=calls)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(name, change): _map_strings(content, change) for name, content in value.items()}
    return type(value)(_map_strings(item, change) for item in value) if isinstance(value, list | tuple) else value


def _texts(message: Message) -> Iterator[str]:
    """All texts of a message that a template may render."""
    yield message.text
    yield message.name
    yield message.tool_call_id
    if message.thinking or message.tool_calls:
        yield message.thinking
        yield json.dumps([call.to_dict() for call in message.tool_calls], ensure_ascii=False, default=str)
