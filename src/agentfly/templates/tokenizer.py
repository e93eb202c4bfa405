"""Loading of tokenizers: from a local folder, from the Hugging Face hub, or the built-in `bytes`."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentfly.errors import ConfigError

BYTES = "bytes"
"""The name of the tokenizer that needs no files: one token per byte, and ChatML's special tokens."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that templates use."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...
    @property
    def special_tokens_map(self) -> dict[str, Any]: ...

    chat_template: Any


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> ChatTokenizer:
    """Load the tokenizer of a local folder or of a model on the hub; `bytes` needs no files."""
    if name == BYTES:
        return ByteTokenizer()
    logging.getLogger("transformers").addFilter(_drop_torch_warning)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded: ChatTokenizer
    try:
        try:
            loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except ValueError:  # it needs remote code, which is never run; tokenizer.json may suffice
            loaded = PreTrainedTokenizerFast.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer for {name!r}: it is neither a local folder with tokenizer.json nor a model that the hub "
            f"provided ({' '.join(str(error).split())[:200]}). Download the model once and pass its folder, or use "
            f"{BYTES!r} with the scripted backend."
        ) from error
    return loaded


def _drop_torch_warning(record: logging.LogRecord) -> bool:
    """Log filter: a tokenizer does not need torch, so its absence is not worth a warning."""
    return "PyTorch was not found" not in record.getMessage()


class ByteTokenizer:
    """One token per byte, built without files."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        self.backend_tokenizer = tokenizer
        self.special_tokens_map = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        self.chat_template: Any = None
