"""The text of every token: the tokenizer of a run, and what each token adds to the text before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agentfly.errors import AgentFlyError, ConfigError
from agentfly.models import PREPARED, find_fault
from agentfly.runs import RunDirectory
from agentfly.templates.tokenizer import BYTES, load_tokenizer
from agentfly.view.sources import Source

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
