"""A cache that forgets what was used longest ago."""

from lru.cache import LRUCache

__all__ = ["LRUCache"]
