"""Text to ids and back, where control tokens come from the template and from nowhere else.

Control tokens are all special tokens, and all other added tokens except words and whitespace: chat and tool-call tags,
but also fill-in-the-middle and repository tokens that no template mentions. Text is cut at the control tokens the
template wrote, and the runs between them are encoded by a tokenizer that has no control tokens at all. So the literal
text `<|im_end|>` inside a tool's answer stays text.
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

from tokenizers import Tokenizer, models

from agentfly.encoding.tokenizer import ChatTokenizer
from agentfly.errors import ConfigError

_SPACE = re.compile(r"\s*")
CACHED_WORDS = 1_000
"""Words whose ids a tokenizer remembers. It never forgets one, and the library's default is 10,000. To a tokenizer that
does not split text at spaces (Gemma's, InternLM's, `bytes`) a whole text of up to 255 bytes is one word, about 6 KB of
native memory each: the default grows for thousands of chains, to some 60 MB."""


class Codec:
    """One tokenizer, with its control tokens set apart."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._whole = tokenizer.backend_tokenizer
        added = {i: token for i, token in self._whole.get_added_tokens_decoder().items() if token.content}
        self.vocab_size = max(self._whole.get_vocab_size(), 1 + max(added, default=0))
        """Every token id is below it."""
        control = {i: token for i, token in added.items() if token.special or not _is_ordinary(token.content)}
        if not control:
            raise ConfigError("this tokenizer has no control tokens, so no turn could ever be seen to end")
        self.control: dict[str, int] = {token.content: i for i, token in control.items()}
        self._control_ids = frozenset(control)
        self._plain = _without(tokenizer, self._control_ids)
        self._eats_left = frozenset(i for i, token in control.items() if token.lstrip)
        self._eats_right = frozenset(i for i, token in control.items() if token.rstrip)
        self.eats_space = bool(self._eats_left or self._eats_right)
        """Some control tokens swallow the white space beside them."""
        self._pattern = re.compile(any_of(self.control))
        self.forged = re.compile(any_of(self.control, open_end=True))
        """Control text in somebody's words, or the beginning of some where the words end."""
        self.plain_cached = lru_cache(maxsize=512)(self.plain)

    def encode(self, text: str, guard: str = "") -> list[int]:
        """The ids of rendered text. `guard` is a character to take out again; it keeps forged control text apart."""
        out: list[int] = []
        for piece in self.pieces(text):
            if isinstance(piece, int):
                out.append(piece)
            else:
                out += self.plain_cached(piece, guard)
        return out

    def cut(self, text: str, guard: str) -> str:
        """The text with `guard` inside everything that could be read as a control token."""
        return self.forged.sub(lambda match: f"{match[0][0]}{guard}{match[0][1:]}", text)

    def pieces(self, text: str) -> Iterator[str | int]:
        """The text cut at its control tokens: runs of plain text, and the control tokens' ids."""
        at = 0
        for match in self._pattern.finditer(text):
            token, before = self.control[match[0]], text[at : match.start()]
            if token in self._eats_left:
                before = before.rstrip()
            if before:
                yield before
            yield token
            at = match.end()
            if token in self._eats_right:
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches anywhere
        if at < len(text):
            yield text[at:]

    def plain(self, text: str, guard: str = "") -> list[int]:
        """The ids of a run of plain text: never a control token, whatever the text says."""
        ids: list[int] = self._plain.encode(text.replace(guard, "") if guard else text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # Some tokenizers' merges rebuild a control token out of plain characters: cut the forged text apart for good.
        if not guard:
            guard = free_mark([text])
            text = self.cut(text, guard)
        return [i for part in text.split(guard) if part for i in self._spelled(part)]

    def _spelled(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        return [i for character in text for i in self._plain.encode(character, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        text: str = self._whole.decode(ids, skip_special_tokens=False)
        return text


def _is_ordinary(text: str) -> bool:
    """True for words, numbers and whitespace: added tokens that extend the vocabulary and mark nothing.

    SentencePiece writes a space as U+2581; combining marks are parts of words in many scripts.
    """
    return all(unicodedata.category(char)[0] in "LMN" or char.isspace() or char == "\u2581" for char in text)


def free_mark(texts: Sequence[str]) -> str:
    """A private-use character that none of the texts holds."""
    for mark in map(chr, chain(range(0xE000, 0xF8FE), range(0xF0000, 0xFFFFE))):
        if not any(mark in text for text in texts):
            return mark
    raise ConfigError("these messages hold every private-use character there is; none is left to guard them with")


_plains: WeakKeyDictionary[ChatTokenizer, dict[tuple[int, frozenset[int]], Tokenizer]] = WeakKeyDictionary()
"""Tokenizers without control tokens, by what they were made of: making one takes a second."""


def _without(tokenizer: ChatTokenizer, control: frozenset[int]) -> Tokenizer:
    """The tokenizer without these added tokens, and without what it puts around whole texts."""
    whole = tokenizer.backend_tokenizer
    made, key = _plains.setdefault(tokenizer, {}), (whole.get_vocab_size(), control)
    if key not in made:
        spec = json.loads(whole.to_str())
        # A token that is not in the model's vocabulary is numbered by its place in the list: those behind it would
        # move up if it went, so it stays, under a name that nobody writes.
        known = whole.get_vocab_size(with_added_tokens=False)
        spec["added_tokens"] = [t for t in spec["added_tokens"] if t["id"] not in control or t["id"] >= known]
        for token in spec["added_tokens"]:
            if token["id"] in control:
                token["content"] = f"\U0010fffe{token['id']}\U0010fffe"
        spec["post_processor"] = spec["truncation"] = spec["padding"] = None
        plain = made[key] = Tokenizer.from_str(json.dumps(spec))
        if isinstance(plain.model, models.BPE | models.Unigram):
            plain.model._resize_cache(CACHED_WORDS)
    return made[key]


def any_of(words: Iterable[str], open_end: bool = False) -> str:
    """A pattern of the longest word at a place; with `open_end` also of a word that the end of the text cuts off.

    Built as a tree: tokenizers have up to thousands of control tokens, and all begin with the same few characters.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def written(node: dict[str, Any], top: bool = False) -> str:
        ways = [re.escape(character) + written(child) for character, child in node.items() if character]
        if open_end and not top and ways:
            ways.append(r"\s*\Z")
        if not ways:
            return ""
        if len(ways) == 1 and "" not in node:
            return ways[0]
        return f"(?:{'|'.join(ways)})" + ("?" if "" in node else "")

    return written(tree, top=True)
