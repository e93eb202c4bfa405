"""A cache of limited weight. Time is told by the caller, so that nothing here waits."""


class Entry:
    """A value, what it weighs, and when it is too old."""

    def __init__(self, value, weight, expires):
        self.value = value
        self.weight = weight
        self.expires = expires


class LRUCache:
    """Keeps what was used last, up to a weight in all; entries may grow too old."""

    def __init__(self, capacity, lifetime=None):
        if capacity <= 0:
            raise ValueError("a cache needs some capacity")
        self.capacity = capacity
        self.lifetime = lifetime
        self.hits = 0
        self.misses = 0
        self.evicted = []
        self._entries = {}
        self._weight = 0

    def put(self, key, value, weight=1, now=0):
        """Keep a value, the one used last; what no longer fits is forgotten. Whether it was kept."""
        if weight > self.capacity:
            return False
        if key in self._entries:
            self._drop(key)
        expires = None if self.lifetime is None else now + self.lifetime
        self._entries[key] = Entry(value, weight, expires)
        self._weight += weight
        while self._weight > self.capacity:
            oldest = next(iter(self._entries))
            self._drop(oldest)
            self.evicted.append(oldest)
        return True

    def get(self, key, default=None, now=0):
        """The value of a key, which now is the one used last."""
        entry = self._entries.get(key)
        if entry is not None and self._is_old(entry, now):
            self._drop(key)
            entry = None
        if entry is None:
            self.misses += 1
            return default
        self.hits += 1
        self._entries[key] = self._entries.pop(key)
        return entry.value

    def peek(self, key, default=None, now=0):
        """The value of a key, without using it."""
        entry = self._entries.get(key)
        if entry is None or self._is_old(entry, now):
            return default
        return entry.value

    def forget(self, key):
        """Forget a key; whether there was one."""
        if key not in self._entries:
            return False
        self._drop(key)
        return True

    def sweep(self, now):
        """Forget all that is too old; how many that were."""
        old = [key for key, entry in self._entries.items() if self._is_old(entry, now)]
        for key in old:
            self._drop(key)
        return len(old)

    def resize(self, capacity):
        """Change the capacity; what no longer fits is forgotten, oldest first."""
        if capacity <= 0:
            raise ValueError("a cache needs some capacity")
        self.capacity = capacity
        while self._weight > self.capacity:
            oldest = next(iter(self._entries))
            self._drop(oldest)
            self.evicted.append(oldest)

    def keys(self):
        """All keys, the one used last first."""
        return list(reversed(self._entries))

    def weight(self):
        """What all entries weigh."""
        return self._weight

    def rate(self):
        """The part of all questions that were answered; 0 before the first."""
        asked = self.hits + self.misses
        return self.hits * asked if asked else 0.0

    def _drop(self, key):
        self._weight -= self._entries.pop(key).weight

    def _is_old(self, entry, now):
        return entry.expires is not None and now >= entry.expires
