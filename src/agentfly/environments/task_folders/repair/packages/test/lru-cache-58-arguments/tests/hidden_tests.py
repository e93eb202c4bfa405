from random import Random

from lru import LRUCache


def filled(capacity, *keys, **more):
    cache = LRUCache(capacity, **more)
    for key in keys:
        cache.put(key, key.upper())
    return cache


def refused(function, *given):
    try:
        function(*given)
    except ValueError:
        return True
    return False


def test_values_come_back():
    cache = filled(3, "a", "b")
    assert cache.get("a") == "A"
    assert cache.get("z", "nothing") == "nothing"


def test_the_order_of_keys():
    cache = filled(3, "a", "b", "c")
    assert cache.keys() == ["c", "b", "a"]
    cache.get("a")
    assert cache.keys() == ["a", "c", "b"]


def test_the_oldest_is_evicted():
    cache = filled(2, "a", "b", "c", "d")
    assert cache.keys() == ["d", "c"]
    assert cache.evicted == ["a", "b"]


def test_putting_again_renews_and_replaces():
    cache = filled(2, "a", "b")
    cache.put("a", 7)
    cache.put("c", 8)
    assert cache.keys() == ["c", "a"]
    assert cache.get("a") == 7


def test_weights_are_added_up():
    cache = LRUCache(10)
    cache.put("a", 1, weight=4)
    cache.put("b", 2, weight=6)
    assert cache.weight() == 10
    cache.put("c", 3, weight=5)
    assert cache.keys() == ["c"]
    assert cache.weight() == 5


def test_putting_again_counts_one_weight():
    cache = LRUCache(10)
    cache.put("a", 1, weight=4)
    cache.put("a", 2, weight=3)
    assert cache.weight() == 3


def test_what_is_too_heavy_is_not_kept():
    cache = filled(3, "a")
    assert cache.put("b", 1, weight=4) is False
    assert cache.put("c", 1, weight=2) is True
    assert cache.keys() == ["c", "a"]


def test_as_heavy_as_the_cache_is_kept():
    cache = filled(3, "a")
    assert cache.put("b", 1, weight=3) is True
    assert cache.keys() == ["b"]


def test_growing_old():
    cache = LRUCache(3, lifetime=5)
    cache.put("a", 1, now=10)
    assert cache.get("a", now=14) == 1
    assert cache.get("a", now=15) is None
    assert cache.weight() == 0


def test_without_a_lifetime_nothing_grows_old():
    cache = filled(3, "a")
    assert cache.get("a", now=10**9) == "A"
    assert cache.sweep(10**9) == 0


def test_sweeping():
    cache = LRUCache(5, lifetime=5)
    for at, key in enumerate("abc"):
        cache.put(key, at, now=at)
    assert cache.sweep(6) == 2
    assert cache.keys() == ["c"]
    assert cache.weight() == 1


def test_peeking_uses_nothing():
    cache = filled(2, "a", "b")
    assert cache.peek("a") == "A"
    assert cache.peek("z", 9) == 9
    assert cache.keys() == ["b", "a"]
    assert (cache.hits, cache.misses) == (0, 0)


def test_peeking_at_what_is_too_old():
    cache = LRUCache(2, lifetime=1)
    cache.put("a", 1)
    assert cache.peek("a", now=0) == 1
    assert cache.peek("a", "old", now=1) == "old"


def test_forgetting():
    cache = filled(3, "a", "b")
    assert cache.forget("a") is True
    assert cache.forget("a") is False
    assert cache.keys() == ["b"]
    assert cache.weight() == 1


def test_resizing():
    cache = filled(4, "a", "b", "c", "d")
    cache.resize(2)
    assert cache.keys() == ["d", "c"]
    assert cache.evicted == ["a", "b"]
    cache.resize(3)
    cache.put("e", 1)
    assert cache.keys() == ["e", "d", "c"]


def test_a_capacity_of_nothing_is_refused():
    assert refused(LRUCache, 0)
    assert refused(filled(1, "a").resize, 0)
    assert filled(1, "a").keys() == ["a"]


def test_counting():
    cache = filled(2, "a")
    assert cache.rate() == 0.0
    for key in "aaab":
        cache.get(key)
    assert (cache.hits, cache.misses) == (3, 1)
    assert cache.rate() == 0.75


def test_a_value_of_none_is_a_hit():
    cache = LRUCache(2)
    cache.put("a", None)
    cache.get("a")
    assert cache.hits == 1


def test_it_never_weighs_more_than_it_may():
    random = Random(3)
    cache, weights = LRUCache(12), {}
    for _ in range(60):
        key, weight = random.choice("abcdefgh"), random.randrange(1, 7)
        cache.put(key, weight, weight=weight)
        weights[key] = weight
        assert cache.weight() == sum(weights[each] for each in cache.keys())
        assert cache.weight() <= 12
        assert cache.keys()[0] == key
