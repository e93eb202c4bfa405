"""Row formats of other frameworks, converted to the one row format inside: `question` or `messages`, and columns.

The column that becomes the prompt is left out of the columns, as `messages` is. All others are kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.errors import ConfigError, DataError
from agentfly.types import Message, Task

_LOG = logging.getLogger(__name__)
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The rows of one framework."""

    name: str
    shape: str
    """What a row of this format has, for error messages."""
    fits: Callable[[Row], bool]
    convert: Callable[[Row], dict[str, Any]]
    without_effect: tuple[str, ...] = ()
    """Columns that the framework acts on and that have no effect here; `a.b` is the key `b` of the column `a`."""

    def find_ignored(self, row: Row, converted: Row) -> set[str]:
        """The columns of a row that have no effect."""
        ignored = set()
        for name in self.without_effect:
            column, _, key = name.partition(".")
            value = row.get(column)
            if key:
                value = value.get(key) if isinstance(value, Mapping) else None
            if value not in (None, [], {}):
                ignored.add(name)
        if converted.get("messages") is not None:  # images of a conversation are parts of its messages
            ignored |= {name for name in ("image", "images") if converted.get(name)}
        return ignored


class RowConverter:
    """Converts the rows of one source to ours. The first row decides the format, unless it is given."""

    def __init__(self, source: str, name: str | None, rename: Mapping[str, str]) -> None:
        """`name`: of the format. `rename`: new names of columns, by old names."""
        if name is not None and name not in FORMATS:
            raise ConfigError(f"there is no row format {name!r}; there are {', '.join(FORMATS)}")
        if len(set(rename.values())) < len(rename):
            raise ConfigError(f"rename= gives two columns one name: {dict(rename)}")
        self.source = source
        self.rename = rename
        self.row_format = FORMATS[name] if name is not None else None
        self.is_detected = name is None
        self.ignored: set[str] = set()
        """The columns without effect in the rows until now."""

    def convert(self, row: Row) -> dict[str, Any]:
        """The row with `question` or `messages`. Raises DataError where it is not of the format of the first row."""
        for old, new in self.rename.items():
            if old not in row:
                raise DataError(f"no column {old!r} to rename; {list_columns(row)}")
            if new in row and new not in self.rename:
                raise DataError(f"{old!r} cannot become {new!r}, which the row has, too; rename that column as well")
        row = {self.rename.get(name, name): value for name, value in row.items()}
        row_format = self.row_format or self._detect(row)
        if row_format.name != "agentfly" and not row_format.fits(row):
            problem = f"it is not a row of {row_format.name}, where {row_format.shape}; {list_columns(row)}"
            if fitting := list_fitting(row):
                problem += f" and is one of {' or '.join(fitting)}"
            if self.is_detected:
                problem += f"; the first row is one of {row_format.name}, and decides for all"
            raise DataError(problem)
        converted = row_format.convert(row)
        self.ignored |= row_format.find_ignored(row, converted)
        return converted

    def _detect(self, row: Row) -> RowFormat:
        """The format of a row. Ours goes before others, with a warning; two others raise ConfigError."""
        fitting = [row_format for row_format in FORMATS.values() if row_format.fits(row)]
        if not fitting:  # the error for a row of ours says what is missing; a later row decides the format
            return FORMATS["agentfly"]
        self.row_format = first = fitting[0]
        if len(fitting) > 1:
            problem = f"the rows of {self.source} fit the formats {' and '.join(fit.name for fit in fitting)}"
            if first.name != "agentfly":
                choices = " or ".join(f"format={fit.name!r}" for fit in fitting)
                raise ConfigError(f"{problem}; choose one: {choices}")
            others = " or ".join(f"format={fit.name!r}" for fit in fitting[1:])
            _LOG.warning("%s: read as agentfly, where %s; %s reads the other", problem, first.shape, others)
        return first


def list_fitting(row: Row) -> list[str]:
    """The names of the formats that a row fits."""
    return [row_format.name for row_format in FORMATS.values() if row_format.fits(row)]


def list_columns(row: Row) -> str:
    return f"the row has {', '.join(map(repr, row)) or 'nothing'}"


def join_completion(task: Task) -> Task:
    """A demonstration in TRL's prompt-completion form as one conversation; other tasks are returned as they are."""
    completion = task.columns.get("completion")
    if completion is None or task.messages[-1].role == "assistant":
        return task
    if isinstance(completion, str):  # it continues the text of the prompt, often after a space
        completion = [{"role": "assistant", "content": completion.strip()}]
    if not isinstance(completion, Sequence):
        raise DataError(f"'completion' must be text or a list of messages, not {completion!r:.80}")
    return Task((*task.messages, *map(Message.of, completion)), task.columns, task.id)


# ── one function per format ──


def _convert_prompt(row: Row) -> dict[str, Any]:
    """TRL: `prompt` is text or a list of messages."""
    prompt = row["prompt"]
    column = "question" if isinstance(prompt, str) else "messages"
    if row.get(column) is not None:
        raise DataError(f"'prompt' becomes {column!r}, which the row has, too; rename that column")
    return {**{name: value for name, value in row.items() if name != "prompt"}, column: prompt}


def _convert_verl(row: Row) -> dict[str, Any]:
    """verl: `ground_truth` becomes a column, which a reward can ask for."""
    columns = _convert_prompt(row)
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        ground_truth = reward_model["ground_truth"]
        if columns.setdefault("ground_truth", ground_truth) != ground_truth:
            raise DataError("the column 'ground_truth' differs from reward_model['ground_truth']; rename the column")
    return columns


def _convert_sharegpt(row: Row) -> dict[str, Any]:
    """ShareGPT: turns with `from` and `value`; calls are JSON text, and belong to the reply before them."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    calls: list[dict[str, Any]] = []
    num_answered = 0
    for turn in row["conversations"]:
        if not isinstance(turn, Mapping):
            raise DataError(f"a turn of 'conversations' must have 'from' and 'value', not {turn!r:.80}")
        author, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        role = _SHAREGPT_ROLES.get(str(author))
        if role is None:
            raise DataError(f"a turn is from {author!r}; authors are {', '.join(_SHAREGPT_ROLES)}")
        message: dict[str, Any] = {"role": role, "content": text}
        if author in ("function_call", "tool_call"):
            new_calls = _parse_calls(text, first=len(calls) + 1)
            calls += new_calls
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).extend(new_calls)
                continue
            message = {"role": role, "content": "", "tool_calls": new_calls}
        elif role == "tool" and num_answered < len(calls):
            call = calls[num_answered]
            message |= {"name": call["function"]["name"], "tool_call_id": call["id"]}
            num_answered += 1
        messages.append(message)
    columns = {name: value for name, value in row.items() if name not in ("conversations", "system")}
    return {**columns, "messages": messages}


def _parse_calls(text: Any, first: int) -> list[dict[str, Any]]:
    try:
        parsed = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise DataError(f"a call is not JSON: {error}") from error
    functions = parsed if isinstance(parsed, list) else [parsed]
    if bad := [function for function in functions if not (isinstance(function, Mapping) and "name" in function)]:
        raise DataError(f"a call must have a 'name' and 'arguments', not {bad[0]!r:.80}")
    return [{"id": f"call{number:05d}", "function": function} for number, function in enumerate(functions, first)]


_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "observation": "tool", "function_response": "tool", "tool_response": "tool", "tool": "tool",
}  # fmt: skip


def _is_verl(row: Row) -> bool:
    return isinstance(row.get("prompt"), str | list) and isinstance(row.get("reward_model"), Mapping)


FORMATS = {
    row_format.name: row_format
    for row_format in (
        RowFormat(
            "agentfly",
            "'question' or 'messages' is the prompt",
            fits=lambda row: row.get("question") is not None or row.get("messages") is not None,
            convert=dict,
        ),
        RowFormat(
            "verl",
            "'prompt' is text or a list of messages, 'reward_model' has 'ground_truth'",
            fits=_is_verl,
            convert=_convert_verl,
            without_effect=("agent_name", "extra_info.tools_kwargs", "extra_info.interaction_kwargs", "videos"),
        ),
        RowFormat(
            "trl",
            "'prompt' is text or a list of messages",
            fits=lambda row: isinstance(row.get("prompt"), str | list) and not _is_verl(row),
            convert=_convert_prompt,
            without_effect=("chat_template_kwargs",),
        ),
        RowFormat(
            "sharegpt",
            "'conversations' is a list of turns with 'from' and 'value'",
            fits=lambda row: isinstance(row.get("conversations"), list),
            convert=_convert_sharegpt,
        ),
    )
}
"""The formats in the order in which they are tried."""
