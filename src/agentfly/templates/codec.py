"""Text to ids and back. Control tokens come only from the template, never from message text.

Control tokens are all special tokens and all other added tokens except words and whitespace: chat and tool-call tags,
but also fill-in-the-middle and repository tokens that no template mentions. Text is split at the control tokens that
the template wrote, and the text between them is encoded by a tokenizer without control tokens. The literal text
`<|im_end|>` inside a tool result therefore stays text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer, models

from agentfly.errors import ConfigError
from agentfly.templates.tokenizer import ChatTokenizer

_SPACE = re.compile(r"\s*")
CACHED_WORDS = 1_000
"""Size of the tokenizer's word cache (library default: 10,000; entries are never evicted). For tokenizers that do not
split text at spaces (Gemma, InternLM, `bytes`) a text of up to 255 bytes is one word of about 6 KB native memory: the
default grows to about 60 MB over thousands of chains."""
MAX_CACHED_LENGTH = 300
"""Characters of an observation whose ids are cached: at most about 3 KB each."""


class Codec:
    """A tokenizer that handles control tokens separately from text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._whole = tokenizer.backend_tokenizer
        added = {i: token for i, token in self._whole.get_added_tokens_decoder().items() if token.content}
        self.vocab_size = max(self._whole.get_vocab_size(), 1 + max(added, default=0))
        """Upper bound (exclusive) of all token ids."""
        control: dict[int, AddedToken] = {}
        for i, token in added.items():
            # Words, numbers and whitespace only extend the vocabulary. SentencePiece writes a space as U+2581;
            # combining marks are parts of words in many scripts.
            is_word = all(unicodedata.category(c)[0] in "LMN" or c.isspace() or c == "\u2581" for c in token.content)
            if token.special or not is_word:
                control[i] = token
        if not control:
            raise ConfigError("this tokenizer has no control tokens, so the end of a turn cannot be detected")
        self.control: dict[str, int] = {token.content: i for i, token in control.items()}
        self._control_ids = frozenset(control)
        self._plain = _remove_control_tokens(tokenizer, self._control_ids)
        self._strips_left = frozenset(i for i, token in control.items() if token.lstrip)
        self._strips_right = frozenset(i for i, token in control.items() if token.rstrip)
        self.strips_space = bool(self._strips_left or self._strips_right)
        """Whether some control tokens strip the whitespace next to them."""
        self._pattern = re.compile(match_any(self.control))
        self.forged = re.compile(match_any(self.control, open_end=True))
        """Matches control tokens spelled out in text, and the beginning of one at the end of the text."""
        self.plain_cached = lru_cache(maxsize=512)(self.plain)
        self._short_cached = lru_cache(maxsize=1024)(self.plain)

    def encode(self, text: str, guard: str = "") -> list[int]:
        """Encode rendered text. `guard` is the character that splits forged control tokens; it is removed again."""
        out: list[int] = []
        for piece in self.pieces(text):
            if isinstance(piece, int):
                out.append(piece)
            else:
                out += self.plain_cached(piece, guard)
        return out

    def cut(self, text: str, guard: str) -> str:
        """Insert `guard` into everything in the text that could become a control token."""
        return self.forged.sub(lambda match: f"{match[0][0]}{guard}{match[0][1:]}", text)

    def pieces(self, text: str) -> Iterator[str | int]:
        """Split text at its control tokens. Yields plain text, and the ids of control tokens."""
        at = 0
        for match in self._pattern.finditer(text):
            token = self.control[match[0]]
            plain_text = text[at : match.start()]
            if token in self._strips_left:
                plain_text = plain_text.rstrip()
            if plain_text:
                yield plain_text
            yield token
            at = match.end()
            if token in self._strips_right:
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches anywhere
        if at < len(text):
            yield text[at:]

    def plain(self, text: str, guard: str = "") -> list[int]:
        """Encode plain text. The ids never contain a control token, whatever the text is."""
        ids: list[int] = self._plain.encode(text.replace(guard, "") if guard else text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # The merges of some tokenizers rebuild a control token from plain characters: encode the parts separately.
        if not guard:
            guard = unused_character([text])
            text = self.cut(text, guard)
        out: list[int] = []
        for piece in filter(None, text.split(guard)):
            ids = self._plain.encode(piece, add_special_tokens=False).ids
            if not self._control_ids.isdisjoint(ids):
                ids = [i for character in piece for i in self._plain.encode(character, add_special_tokens=False).ids]
            out += ids
        return out

    def plain_observation(self, text: str) -> list[int]:
        """Encode an observation. Short ones are cached: the chains of a group, and of every step, see the same."""
        return self._short_cached(text) if len(text) <= MAX_CACHED_LENGTH else self.plain(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, including control tokens."""
        text: str = self._whole.decode(ids, skip_special_tokens=False)
        return text


def unused_character(texts: Sequence[str]) -> str:
    """Return a private-use character that none of the texts contains."""
    for mark in map(chr, chain(range(0xE000, 0xF8FE), range(0xF0000, 0xFFFFE))):
        if not any(mark in text for text in texts):
            return mark
    raise ConfigError("these messages contain every private-use character; none is left to guard them with")


_plain_tokenizers: WeakKeyDictionary[ChatTokenizer, dict[tuple[int, frozenset[int]], Tokenizer]] = WeakKeyDictionary()
"""Cache of tokenizers without control tokens: building one takes about a second."""


def _remove_control_tokens(tokenizer: ChatTokenizer, control: frozenset[int]) -> Tokenizer:
    """Build the tokenizer without these added tokens and without its post-processor."""
    whole = tokenizer.backend_tokenizer
    cached = _plain_tokenizers.setdefault(tokenizer, {})
    key = (whole.get_vocab_size(), control)
    if key not in cached:
        spec = json.loads(whole.to_str())
        # The id of a token outside the model's vocabulary is its position in the list. Removing one would shift the
        # ids of those after it, so it stays under a name that no text contains.
        vocab_size = whole.get_vocab_size(with_added_tokens=False)
        spec["added_tokens"] = [t for t in spec["added_tokens"] if t["id"] not in control or t["id"] >= vocab_size]
        for token in spec["added_tokens"]:
            if token["id"] in control:
                token["content"] = f"\U0010fffe{token['id']}\U0010fffe"
        spec["post_processor"] = spec["truncation"] = spec["padding"] = None
        plain = cached[key] = Tokenizer.from_str(json.dumps(spec))
        if isinstance(plain.model, models.BPE | models.Unigram):
            plain.model._resize_cache(CACHED_WORDS)
    return cached[key]


def match_any(words: Iterable[str], open_end: bool = False) -> str:
    """Build a pattern that matches the longest word; with `open_end` also a word truncated by the end of the text.

    The pattern is a prefix tree: tokenizers have up to thousands of control tokens with the same first characters.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def to_pattern(node: dict[str, Any], top: bool = False) -> str:
        branches = [re.escape(character) + to_pattern(child) for character, child in node.items() if character]
        if open_end and not top and branches:
            branches.append(r"\s*\Z")
        if not branches:
            return ""
        if len(branches) == 1 and "" not in node:
            return branches[0]
        return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")

    return to_pattern(tree, top=True)
