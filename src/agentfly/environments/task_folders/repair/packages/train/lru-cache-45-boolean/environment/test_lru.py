import unittest

from lru import LRUCache


class CacheTest(unittest.TestCase):
    def test_the_oldest_goes(self):
        cache = LRUCache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.get("a")
        cache.put("c", 3)
        self.assertEqual(cache.keys(), ["c", "a"])

    def test_what_is_too_old_is_gone(self):
        cache = LRUCache(2, lifetime=10)
        cache.put("a", 1, now=5)
        self.assertEqual(cache.get("a", now=14), 1)
        self.assertIsNone(cache.get("a", now=15))

    def test_the_rate(self):
        cache = LRUCache(1)
        cache.put("a", 1)
        cache.get("a")
        cache.get("b")
        self.assertEqual(cache.rate(), 0.5)
