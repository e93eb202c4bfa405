"""Words by their beginnings."""

from trie.words import Trie

__all__ = ["Trie"]
