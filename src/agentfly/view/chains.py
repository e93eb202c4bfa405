"""One chain as the page shows it: the conversation, every token with its figures, and why it is trained or not.

The text of a token is what it adds to the text before it, by the tokenizer of the run.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agentfly.errors import AgentFlyError, ConfigError
from agentfly.models import PREPARED, find_fault
from agentfly.runs import RunDirectory
from agentfly.segment import Floats, message_to_json
from agentfly.templates.tokenizer import BYTES, load_tokenizer
from agentfly.training.selection import find_exclusions
from agentfly.trajectory import TrainingTreatment, Trajectory
from agentfly.types import Message
from agentfly.view.index import ChainIndex, StoredLine
from agentfly.view.sources import Source

_INCOMPLETE = "\ufffd"
"""Ends the text of tokens whose last character has further bytes in the next token."""
MAX_TOKEN_TEXT = 200
"""Characters shown of one token."""
MAX_MESSAGE_TEXT = 200_000
"""Characters shown of one message."""
_DATA_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,")


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
                if self._name is not None:
                    folder = find_tokenizer(None, self._name)
                else:
                    folder = find_tokenizer(source.run, source.settings.get("model"))
                self._loaded[source.number] = (load_tokenizer(folder).backend_tokenizer, "")
            except AgentFlyError as error:
                hint = "give the model's folder with --tokenizer to see the text of every token"
                self._loaded[source.number] = (None, f"{error}; {hint}")
        return self._loaded[source.number]


def find_tokenizer(run: RunDirectory | None, model: object) -> str:
    """The folder or name to load the tokenizer of a run from, without a download.

    It is that of the newest checkpoint, or of `model`, the model in the settings. Raises ConfigError if there is none.
    """
    saved = sorted(run.checkpoints.glob("step-*/**/tokenizer.json")) if run is not None else []
    if saved:
        return str(saved[-1].parent)
    if not isinstance(model, str):
        raise ConfigError("these chains do not say which model they are of")
    if model == BYTES or Path(model).expanduser().is_dir():
        return model
    if model in PREPARED:
        if fault := find_fault(PREPARED[model]):
            raise ConfigError(f"the tokenizer of {model!r} is not on this machine: {fault}")
        return str(PREPARED[model].folder)
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(model, local_files_only=True)
    except Exception as error:  # OSError, ValueError or one of the hub's own
        raise ConfigError(f"the tokenizer of {model!r} is not on this machine") from error


def split_tokens(ids: Sequence[int], tokenizer: _Decoder) -> list[str]:
    """The text that each token adds to the text of those before it.

    A character whose bytes are spread over several tokens belongs to the last of them; the others are empty.
    """
    texts = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
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
    for number_in_chain, segment in enumerate(chain.segments):
        segment_advantages = next(remaining, None) if segment.num_sampled_tokens else None
        scores = learner.get(f"{chain.id}#{number_in_chain}")  # [sampled tokens]
        learner_logprobs = np.zeros(len(segment), np.float32)  # [tokens]
        learner_logprobs[segment.mask] = 0.0 if scores is None else scores
        masked: dict[int, str] = {}
        if scores is not None:
            sampler = np.concatenate([span.logprobs for span in segment.spans if span.logprobs is not None])
            reasons = explain_mask(source.settings.get("loss") or {}, scores, sampler)
            # Reasons count sampled tokens, the page counts all tokens of the segment.
            positions = np.flatnonzero(segment.mask)
            masked = {int(positions[number]): reason for number, reason in reasons.items()}
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
                    "learner": _round(learner_logprobs[start:end].tolist()) if sampled and scores is not None else None,
                    "advantages": segment_advantages[start:end] if sampled and segment_advantages else None,
                    "trained": sampled and verdict[0],
                    "masked": {
                        position - start: reason for position, reason in masked.items() if start <= position < end
                    },
                    "why": [span.author.loss_rule, *(verdict[1] if sampled else ())],
                    "messages": [_show_message(message, source) for message in span.messages],
                }
            )
            start = end
        segments.append({"exact": segment.exact, "spans": spans})
    return {
        **stored.row,
        # Only what was sampled to be trained has one: not an evaluation, and not a chain outside of a run.
        "treatment": "" if stored.row["step"] is None or stored.row["held_out"] else stored.row["treatment"],
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
    chains = [Trajectory.from_json(line.value["trajectory"]) for line in index.read(group)]
    position = group.index(row["id"])
    reason = find_exclusions(chains, min_chains=2, keep_zero_variance=False)[position]
    if reason is not None:
        return False, [reason.rule]
    return False, [
        "The failure policy would train this chain, but its group was left out of the update, for example since the "
        "greedy chain that it is compared with failed."
    ]


def explain_mask(loss: Mapping[str, Any], learner: Floats, sampler: Floats) -> dict[int, str]:
    """Why the importance mask removed tokens of a segment from the policy loss, by index among its sampled tokens.

    The rule is that of `agentfly.algorithms.loss.correction_weights`, which needs torch.
    loss: the settings of the loss. learner, sampler: [sampled tokens] log-probabilities before the update.
    """
    level, _, mode = str(loss.get("correction") or "").partition("-")
    if mode != "mask":
        return {}
    cap = float(loss["correction_cap"])
    log_ratio = np.asarray(learner, np.float32) - np.asarray(sampler, np.float32)
    if level == "sequence":
        log_ratio = np.full_like(log_ratio, log_ratio.sum())
    elif level == "geometric":
        log_ratio = np.full_like(log_ratio, log_ratio.mean())
    with np.errstate(over="ignore"):  # an infinite ratio is outside as well
        ratio = np.exp(log_ratio)
    what = {"token": "its ratio", "sequence": "the product of its segment's ratios"}
    what["geometric"] = "the geometric mean of its segment's ratios"
    return {
        int(position): f"loss.correction={level}-{mode} removes it from the policy loss: {what[level]} of learner to "
        f"sampler, {ratio[position]:.4g}, is not from {1 / cap:.4g} to {cap:.4g} (loss.correction_cap)."
        for position in np.flatnonzero((ratio < 1 / cap) | (ratio > cap))
    }


def _show_message(message: Message, source: Source) -> dict[str, Any]:
    """A message as JSON, with long texts cut and images as `data:` URIs."""
    value = message_to_json(message)
    contents = [value["content"]] if isinstance(value["content"], str) else value["content"]
    page_contents: list[Any] = []
    for content in contents:
        if isinstance(content, str):
            page_contents.append(_clip(content, MAX_MESSAGE_TEXT))
            continue
        uri = content["image"]
        if source.run is not None:
            with contextlib.suppress(OSError, ValueError):  # missing, or not the name of an image: the text is shown
                uri = source.run.load_image(uri)
        # Nothing is loaded from the network, and no kind of image that could contain a program.
        page_contents.append({"image": uri} if _DATA_IMAGE.match(uri) else f"(an image that is not shown: {uri[:200]})")
    calls = []
    for call in message.tool_calls:
        arguments = _clip(json.dumps(dict(call.arguments), ensure_ascii=False), MAX_MESSAGE_TEXT)
        raw = _clip(call.raw, MAX_MESSAGE_TEXT)
        calls.append({"name": call.name, "arguments": arguments, "problem": call.problem, "raw": raw})
    thinking = _clip(value.get("reasoning_content", ""), MAX_MESSAGE_TEXT)
    return {
        "role": value["role"],
        "name": value.get("name", ""),
        "parts": page_contents,
        "thinking": thinking,
        "calls": calls,
    }


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def _round(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]
