"""Where tokenizers come from: a local folder, the Hugging Face hub, or nowhere (`bytes`)."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentfly.errors import ConfigError

BYTES = "bytes"
"""The name of the tokenizer that needs no files: one token a byte, and ChatML's control tokens."""


class ChatTokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...
    @property
    def special_tokens_map(self) -> dict[str, Any]: ...

    chat_template: Any


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> ChatTokenizer:
    """The tokenizer of a local folder or a model on the hub; `bytes` needs no files."""
    if name == BYTES:
        return ByteTokenizer()
    logging.getLogger("transformers").addFilter(_is_worth_saying)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded: ChatTokenizer
    try:
        try:
            loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except ValueError:  # it brings code of its own, which is never run; its tokenizer.json may do without
            loaded = PreTrainedTokenizerFast.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer for {name!r}: it is neither a local folder with tokenizer.json nor a model that the hub "
            f"gave out ({' '.join(str(error).split())[:200]}). Download the model once and pass its folder, or use "
            f"{BYTES!r} with the scripted backend."
        ) from error
    return loaded


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Not that there is no torch: a tokenizer needs none."""
    return "PyTorch was not found" not in record.getMessage()


class ByteTokenizer:
    """A tokenizer made on the spot."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        self.backend_tokenizer = tokenizer
        self.special_tokens_map = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        self.chat_template: Any = None
