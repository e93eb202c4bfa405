"""Types that every layer shares: messages, tool calls, tasks, sampling parameters, completions.

Standard library only. Every type is frozen.
"""

from __future__ import annotations

import base64
import enum
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from agentfly.errors import BackendFault, ConfigError, DataError, describe

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
MAX_CALLS = 256
"""Tool calls that are parsed in one reply; what follows them stays text."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Image:
    """An image in a message, stored as a URL so that it survives JSON."""

    url: str
    """A `data:` URI, or a URL that the backend can fetch."""

    @classmethod
    def of(cls, source: object) -> Image:
        """Convert an Image, a URL, a path, bytes, a Pillow image, or an OpenAI `image_url` part."""
        if isinstance(source, Image):
            return source
        if isinstance(source, Mapping) and "url" in source:
            return cls.of(source["url"])
        if isinstance(source, str) and (source.startswith("data:") or "://" in source[:16]):
            return cls(source)
        if isinstance(source, bytes):
            return cls._from_bytes(source)
        try:
            if isinstance(source, str | Path):
                return cls._from_bytes(Path(source).read_bytes())
            if hasattr(source, "save"):
                image: Any = source
                if getattr(image, "mode", "") in ("CMYK", "YCbCr", "HSV", "LAB", "RGBX"):  # which PNG cannot store
                    image = image.convert("RGB")
                buffer = io.BytesIO()
                image.save(buffer, format="PNG")
                return cls._from_bytes(buffer.getvalue())
        except Exception as error:
            raise DataError(
                f"no image at {str(source)!r:.80} ({describe(error):.200}); "
                "give a file, bytes, a data: URI, an http(s) address or a Pillow image"
            ) from error
        raise DataError(f"a {type(source).__name__} is not an image; give a path, bytes, a URL or a Pillow image")

    @classmethod
    def _from_bytes(cls, data: bytes) -> Image:
        kind = next((kind for start, kind in _SIGNATURES.items() if data.startswith(start)), None)
        if data[8:12] == b"WEBP":
            kind = "webp"
        if kind is None:
            raise DataError(f"bytes that begin with {data[:8]!r} are not a PNG, JPEG, GIF or WebP image")
        return cls(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
"""Magic bytes of image formats."""

Content = str | tuple[str | Image, ...]
"""Message content: text, or text parts and images in order."""


def parse_content(value: object) -> Content:
    """Convert text, None, or a list of OpenAI content parts."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise DataError(f"message content is a {type(value).__name__}; it may be text or a list of parts")
    pieces: list[str | Image] = []
    for piece in value:
        kind = piece.get("type") if isinstance(piece, Mapping) else None
        image = piece.get(kind, piece.get("image")) if kind in ("image", "image_url") else None
        if isinstance(piece, str | Image):
            pieces.append(piece)
        elif kind == "text" and isinstance(piece.get("text"), str):
            pieces.append(piece["text"])
        elif image is not None:
            pieces.append(Image.of(image))
        else:
            raise DataError(
                f"cannot read the message part {piece!r:.120}; parts are {{'type': 'text'|'image'|'image_url', …}}"
            )
    return tuple(pieces) if any(isinstance(piece, Image) for piece in pieces) else "".join(map(str, pieces))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of the model, as far as it could be parsed."""

    name: str
    """Empty if not even the name could be parsed."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    """Pairs the call with its observation; empty until the chain assigns one."""
    problem: str = ""
    """Why the call could not be parsed, as the model is shown it; empty if it could."""
    raw: str = ""
    """The text that could not be parsed; empty if it could."""

    @classmethod
    def of(cls, value: ToolCall | Mapping[str, Any]) -> ToolCall:
        """Convert an OpenAI tool call, `{"id", "type": "function", "function": {"name", "arguments"}}`."""
        if isinstance(value, ToolCall):
            return value
        function = value.get("function", value) if isinstance(value, Mapping) else None
        if not isinstance(function, Mapping):
            raise DataError(f"{value!r:.80} is not a tool call; write {{'function': {{'name': …, 'arguments': …}}}}")
        name, call_id = str(function.get("name") or ""), str(value.get("id") or "")
        arguments: Any = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                return cls(name, id=call_id, problem=f"its arguments are not JSON: {error}", raw=arguments)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, Mapping):
            problem = "its arguments are not a JSON object"
            return cls(name, id=call_id, problem=problem, raw=json.dumps(arguments, default=str))
        return cls(name, dict(arguments), call_id)

    def to_dict(self) -> dict[str, Any]:
        """OpenAI form with the arguments as an object, as chat templates expect it."""
        out: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}
        if self.id:
            out["id"] = self.id
        return out


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    thinking: str = ""
    """Reasoning content, where the model's format separates it."""
    name: str = ""
    """Of a tool message: the tool."""
    tool_call_id: str = ""
    """Of a tool message: the id of the call it answers."""

    @classmethod
    def of(cls, value: Message | Mapping[str, Any]) -> Message:
        """Convert an OpenAI message."""
        if isinstance(value, Message):
            return value
        if not isinstance(value, Mapping):
            raise DataError(f"a message is a {type(value).__name__}; it must be a mapping with 'role' and 'content'")
        role = "system" if value.get("role") == "developer" else value.get("role")
        if role not in ROLES:
            raise DataError(f"a message has the role {role!r}; roles are {', '.join(ROLES)}")
        return cls(
            role=role,
            content=parse_content(value.get("content")),
            tool_calls=tuple(ToolCall.of(call) for call in _require_list(value.get("tool_calls"), "tool_calls")),
            thinking=str(value.get("reasoning_content") or value.get("thinking") or ""),
            name=str(value.get("name") or ""),
            tool_call_id=str(value.get("tool_call_id") or ""),
        )

    @property
    def text(self) -> str:
        """The content without images."""
        if isinstance(self.content, str):
            return self.content
        return "".join(piece for piece in self.content if isinstance(piece, str))

    @property
    def images(self) -> tuple[Image, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(piece for piece in self.content if isinstance(piece, Image))

    def to_dict(self) -> dict[str, Any]:
        """OpenAI form, as chat templates, chat servers and files expect it."""
        content: Any = self.content
        if not isinstance(content, str):
            content = [
                {"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image", "image": piece.url}
                for piece in content
            ]
        out: dict[str, Any] = {"role": self.role, "content": content}
        if self.thinking:
            out["reasoning_content"] = self.thinking
        if self.tool_calls:
            out["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.name:
            out["name"] = self.name
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        return out


@dataclass(frozen=True, slots=True)
class Reply:
    """One parsed turn of the model."""

    message: Message
    answer: str | None = None
    """The final answer, if the format marks one; else None."""
    problems: tuple[str, ...] = ()
    """Parse errors, as the model is shown them; empty if everything was parsed."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return self.message.tool_calls


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and the named columns of its dataset row."""

    messages: tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every column of the row except `messages`; rewards and environments receive them by name."""
    id: str = ""

    @classmethod
    def of(cls, value: object, id: str = "") -> Task:
        """Convert a conversation, a question, or a row with `question` or `messages` and other columns."""
        if isinstance(value, Task):
            return value
        if isinstance(value, str):
            value = {"question": value}
        if isinstance(value, Sequence):
            return cls(_conversation(value), {}, id)
        if not isinstance(value, Mapping):
            raise DataError(f"a task is a {type(value).__name__}; it may be a question, a list of messages or a row")
        columns = {str(name): column for name, column in value.items() if name != "messages"}
        row_id = columns.get("id")
        if value.get("messages") is not None:
            messages = _conversation(value["messages"])
        elif isinstance(value.get("question"), str) and value["question"].strip():
            images = _require_list(value.get("images"), "images") or list(filter(None, [value.get("image")]))
            question = value["question"]
            messages = _conversation([Message("user", (*map(Image.of, images), question) if images else question)])
        elif "question" in value:
            raise DataError(f"'question' must be non-empty text, not {value['question']!r:.80}")
        else:
            has = ", ".join(map(repr, value)) or "nothing"
            raise DataError(f"a row needs a non-empty 'question' or 'messages'; it has {has}")
        return cls(messages, columns, id or (str(row_id) if row_id is not None else ""))

    @property
    def question(self) -> str:
        """The text of the last user message."""
        return next((m.text for m in reversed(self.messages) if m.role == "user"), "")


def _conversation(value: object) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"'messages' must be a non-empty list of messages, not {value!r:.80}")
    messages = tuple(map(Message.of, value))
    for message in messages:
        try:
            message.text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"a message holds half of a surrogate pair at character {error.start}: not text") from None
    return messages


def _require_list(value: object, what: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(f"{what!r} must be a list, not {value!r:.80}")
    return value


class DefaultLimit(int):
    """A limit that the user did not set. A program behind the gateway may ask for more, which it cannot know of."""


def number(
    default: Any, *, whole: bool = False, ge: float | None = None, gt: float | None = None, le: float | None = None
) -> Any:
    """A field of a dataclass that is a number within bounds, checked by `validate_numbers`.

    For classes of which environments are made: the process of an instance may have the standard library only. Others
    declare their bounds with pydantic: `agentfly.validation.record`.
    """
    requirement = "a whole number" if whole else "a number"
    requirement += f" of at least {ge:g}" if ge is not None else f" above {gt:g}" if gt is not None else ""
    requirement += f" and at most {le:g}" if le is not None else ""

    def fits(value: Any) -> bool:
        if isinstance(value, bool) or (whole and int(value) != value):
            return False
        return (ge is None or value >= ge) and (gt is None or value > gt) and (le is None or value <= le)

    return field(default=default, metadata={"requirement": requirement, "fits": fits})


def validate_numbers(instance: Any, prefix: str, *, optional: Sequence[str] = (), infinite: bool = False) -> None:
    """Raise ConfigError, `{prefix}{field} must be {requirement}, not {value}`, for a number outside its bounds.

    optional: fields that may be None. infinite: whether a number may be.
    """
    for info in fields(instance):
        value = getattr(instance, info.name)
        if "fits" not in info.metadata or (value is None and info.name in optional):
            continue
        try:
            good = info.metadata["fits"](value) and (infinite or math.isfinite(value))
        except (TypeError, ValueError, OverflowError):
            good = False
        if not good:
            raise ConfigError(f"{prefix}{info.name} must be {info.metadata['requirement']}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Every field reaches the backend; a backend rejects those it does not support."""

    temperature: float = number(1.0, ge=0)
    """0 is greedy."""
    top_p: float = number(1.0, gt=0, le=1)
    """Nucleus sampling: the smallest set of tokens with this total probability; 1 disables the filter."""
    top_k: int = number(0, whole=True, ge=0)
    """Sample from this many most likely tokens; 0 disables the filter."""
    min_p: float = number(0.0, ge=0, le=1)
    """Drop tokens below this fraction of the highest probability; 0 disables the filter."""
    repetition_penalty: float = number(1.0, gt=0)
    """Divides the logits of tokens that occurred already; 1 disables it."""
    max_tokens: int | None = number(DefaultLimit(1024), whole=True, ge=1)
    """Maximum tokens per turn, as far as the context has room; None: as many as fit the context."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn; they stay in the output."""
    seed: int | None = None
    """None draws a new seed for every turn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        validate_numbers(self, "sampling: ", optional=("max_tokens",))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"sampling: stop must be strings that are not empty, not {self.stop!r}")

    def for_turn(self, max_tokens: int | None, seed: int | None) -> Sampling:
        """A copy with the token limit and the seed of a turn. Nothing is validated again: chains call it every turn."""
        turn = object.__new__(Sampling)
        for name in Sampling.__slots__:
            object.__setattr__(turn, name, getattr(self, name))
        object.__setattr__(turn, "max_tokens", max_tokens)
        object.__setattr__(turn, "seed", seed)
        return turn


class FinishReason(enum.Enum):
    """Why the backend stopped sampling."""

    STOP = "stop"
    """The model closed its turn, or sampled a stop string."""
    LENGTH = "length"
    """The token limit was reached."""
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn: token ids, each with the log-probability and weight version it was sampled with."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weight_versions: Sequence[int]
    finish: FinishReason
    prompt_ids: Sequence[int] | None = None
    """The prompt ids, from servers that render the prompt; None: those of the request."""
    message: Message | None = None
    """The parsed reply, from servers that return messages; None: the template parses the tokens."""
    raw_logprobs: Sequence[float] | None = None
    """Log-probabilities before temperature and filters; None if the backend does not return them."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.weight_versions):
            raise BackendFault(
                f"a completion has {len(self.token_ids)} tokens, {len(self.logprobs)} log-probabilities and "
                f"{len(self.weight_versions)} weight versions; the three must be equally many"
            )
        if not math.isfinite(sum(self.logprobs)):
            raise BackendFault("a completion has log-probabilities that are not finite")
        if not len(self.token_ids) and self.message is None and self.finish is not FinishReason.ABORTED:
            raise BackendFault("a completion needs sampled tokens, or the message of a server that returns none")
