"""One chain as the page shows it: the conversation, every token with its figures, and why it is trained or not."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agentfly.errors import AgentFlyError, ConfigError
from agentfly.models import PREPARED, find_fault
from agentfly.runs.selection import find_exclusions
from agentfly.segment import Floats, message_to_json
from agentfly.templates.tokenizer import BYTES, load_tokenizer
from agentfly.trajectory import TrainingTreatment, Trajectory
from agentfly.types import Message
from agentfly.view.index import ChainIndex, StoredLine
from agentfly.view.sources import Source

MAX_TOKEN_TEXT = 200
"""Characters shown of one token."""
MAX_MESSAGE_TEXT = 200_000
"""Characters shown of one message."""
"""An image in a stored chain: the name of a file in the run's folder `images`."""
_DATA_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,")
_INCOMPLETE = "\ufffd"
"""Ends the text of tokens whose last character has further bytes in the next token."""


class _Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool = True) -> list[str]: ...


class Tokenizers:
    """The tokenizers of the sources, loaded when a chain is opened. Nothing is downloaded."""

    def __init__(self, name: str | None = None) -> None:
        """name: folder or hub name of the tokenizer for all sources; None: each run's own."""
        self._name = name
        self._loaded: dict[int, tuple[_Decoder | None, str]] = {}

    def get(self, source: Source) -> tuple[_Decoder | None, str]:
        """The tokenizer of a source; or None, and why there is none."""
        if source.number not in self._loaded:
            try:
                self._loaded[source.number] = (load_tokenizer(self._find(source)).backend_tokenizer, "")
            except AgentFlyError as error:
                hint = "give the model's folder with --tokenizer to see the text of every token"
                self._loaded[source.number] = (None, f"{error}; {hint}")
        return self._loaded[source.number]

    def _find(self, source: Source) -> str:
        """A folder with the tokenizer: that of the newest checkpoint, or of the model in the settings."""
        name = self._name or source.settings.get("model")
        if self._name is None and source.run is not None:
            saved = sorted(source.run.checkpoints.glob("step-*/**/tokenizer.json"))
            if saved:
                return str(saved[-1].parent)
        if not isinstance(name, str):
            raise ConfigError("these chains do not say which model they are of")
        if name == BYTES or Path(name).expanduser().is_dir():
            return name
        if name in PREPARED:
            if fault := find_fault(PREPARED[name]):
                raise ConfigError(f"the tokenizer of {name!r} is not on this machine: {fault}")
            return str(PREPARED[name].folder)
        from huggingface_hub import snapshot_download

        try:
            return snapshot_download(name, local_files_only=True)
        except Exception as error:  # OSError, ValueError or one of the hub's own
            raise ConfigError(f"the tokenizer of {name!r} is not on this machine") from error


def split_tokens(ids: Sequence[int], tokenizer: _Decoder) -> list[str]:
    """The text that each token adds to the text of those before it.

    A character whose bytes are spread over several tokens belongs to the last of them; the others are empty.
    """
    texts = tokenizer.decode_batch([[each] for each in ids], skip_special_tokens=False)
    if "".join(texts) == tokenizer.decode(ids, skip_special_tokens=False):  # the usual case, which is faster
        return texts
    texts = []
    start = end = 0  # the tokens [start, end) are decoded again as context: some tokenizers strip a leading space
    for index in range(len(ids)):
        context = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        text = tokenizer.decode(ids[start : index + 1], skip_special_tokens=False)
        if text.endswith(_INCOMPLETE) and index + 1 < len(ids) and index - end < 8:
            texts.append("")
            continue
        texts.append(text[len(context) :])
        start, end = end, index + 1
    return texts


def show_chain(index: ChainIndex, number: int, tokenizers: Tokenizers) -> dict[str, Any]:
    """A chain as JSON for the page. Raises DataError if it does not exist."""
    (stored,) = index.read([number])
    source = index.sources[stored.row["source"]]
    group = index.group_of(stored.row)
    chain = Trajectory.from_json(stored.value["trajectory"])
    tokenizer, problem = tokenizers.get(source)
    verdict = explain_chain(stored, chain, index, group)
    advantages = stored.value.get("advantages") or []
    learner: dict[str, Floats] = {}
    if stored.value.get("trained") and source.run is not None:
        learner = source.run.learner_logprobs(stored.row["step"])
    remaining = iter(advantages)  # one array [tokens] for each segment with sampled tokens
    segments = []
    for place, segment in enumerate(chain.segments):
        own_advantages = next(remaining, None) if segment.num_sampled_tokens else None
        scores = learner.get(f"{chain.id}#{place}")  # [sampled tokens]
        own_learner = np.zeros(len(segment), np.float32)
        own_learner[segment.mask] = 0.0 if scores is None else scores
        start = 0
        spans = []
        for span in segment.spans:
            ids = span.ids.tolist()
            end = start + len(ids)
            texts = None if tokenizer is None else [_clip(t, MAX_TOKEN_TEXT) for t in split_tokens(ids, tokenizer)]
            sampled = span.author.carries_loss
            spans.append(
                {
                    "author": span.author.value,
                    "turn": span.turn,
                    "start": start,
                    "ids": ids,
                    "texts": texts,
                    "version": span.weight_version,
                    "logprobs": None if span.logprobs is None else _round(span.logprobs.tolist()),
                    "learner": _round(own_learner[start:end].tolist()) if sampled and scores is not None else None,
                    "advantages": own_advantages[start:end] if sampled and own_advantages else None,
                    "trained": sampled and verdict[0],
                    "why": [span.author.loss_rule, *(verdict[1] if sampled else ())],
                    "messages": [_show_message(message, source) for message in span.messages],
                }
            )
            start = end
        segments.append({"exact": segment.exact, "spans": spans})
    return {
        **stored.row,
        "source_name": source.name,
        "tokenizer_problem": problem if tokenizer is None else "",
        "prediction": _clip(chain.prediction, MAX_MESSAGE_TEXT),
        "score": stored.value["trajectory"]["score"],
        "columns": dict(chain.task.columns),
        "attempts": chain.attempts,
        "failures": [failure.to_json() for failure in chain.failures],
        "turn_records": [turn.to_json() for turn in chain.turns],
        "trained": verdict[0],
        "why": verdict[1],
        "segments": segments,
        "group_ids": group,
    }


def explain_chain(
    stored: StoredLine, chain: Trajectory, index: ChainIndex, group: Sequence[int]
) -> tuple[bool, list[str]]:
    """Whether the tokens that the model sampled in a chain were trained, and the rules that decided it."""
    row = stored.row
    if row["step"] is None:
        return False, ["These chains are not of a training run."]
    if row["held_out"]:
        return False, ["Chains of an evaluation are not trained."]
    if chain.untrainable:
        return False, [chain.untrainable]
    if stored.value.get("trained"):
        reasons = ["The chain is part of the update of its step."]
        if chain.treatment is TrainingTreatment.ZERO:
            reasons.append("The failure policy gave it treatment zero: it is trained with reward 0.")
        return True, reasons
    # It was not trained, so the settings were those under which its group is left out.
    chains = [Trajectory.from_json(each.value["trajectory"]) for each in index.read(group)]
    own = group.index(row["id"])
    reason = find_exclusions(chains, min_chains=2, keep_zero_variance=False)[own]
    if reason is not None:
        return False, [reason.rule]
    return False, [
        "The failure policy would train this chain, but its group was left out of the update, for example since the "
        "greedy chain that it is compared with failed."
    ]


def _show_message(message: Message, source: Source) -> dict[str, Any]:
    """A message as JSON, with long texts cut and images as `data:` URIs."""
    value = message_to_json(message)
    parts = [value["content"]] if isinstance(value["content"], str) else value["content"]
    shown: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            shown.append(_clip(part, MAX_MESSAGE_TEXT))
            continue
        uri = part["image"]
        if source.run is not None:
            with contextlib.suppress(OSError, ValueError):  # missing, or not the name of an image: the text is shown
                uri = source.run.load_image(uri)
        # Nothing is loaded from the network, and no kind of image that could contain a program.
        shown.append({"image": uri} if _DATA_IMAGE.match(uri) else f"(an image that is not shown: {uri[:200]})")
    calls = []
    for name, arguments, _, problem, raw in value.get("tool_calls", ()):
        written = _clip(json.dumps(arguments, ensure_ascii=False), MAX_MESSAGE_TEXT)
        calls.append([name, written, problem, _clip(raw, MAX_MESSAGE_TEXT)])
    thinking = _clip(value.get("reasoning_content", ""), MAX_MESSAGE_TEXT)
    return {"role": value["role"], "name": value.get("name", ""), "parts": shown, "thinking": thinking, "calls": calls}


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def _round(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]
