"""A tree of letters: each way from the root to a marked node is a word, with how often it was put in."""


class Node:
    """A letter on the way."""

    def __init__(self):
        self.children = {}
        self.count = 0
        self.below = 0


class Trie:
    """Words, each with a count."""

    def __init__(self, words=()):
        self._root = Node()
        for word in words:
            self.insert(word)

    def insert(self, word, times=1):
        """Put a word in, so many times."""
        if not word or times < 1:
            raise ValueError("a word has letters, and is put in at least once")
        node = self._root
        node.below -= times
        for letter in word:
            node = node.children.setdefault(letter, Node())
            node.below += times
        node.count += times

    def count(self, word):
        """How often a word is in."""
        node = self._find(word)
        return node.count if node is not None and word else 0

    def remove(self, word, times=1):
        """Take a word out, at most as often as it is in; how often that was."""
        taken = min(times, self.count(word))
        if taken < 1:
            return 0
        node = self._root
        node.below -= taken
        for letter in word:
            child = node.children[letter]
            child.below -= taken
            if child.below == 0:
                del node.children[letter]
                return taken
            node = child
        node.count -= taken
        return taken

    def size(self, prefix=""):
        """How many words begin so, each counted as often as it is in."""
        node = self._find(prefix)
        return 0 if node is None else node.below

    def words(self, prefix=""):
        """All words that begin so, in order."""
        node = self._find(prefix)
        if node is None:
            return []
        found = [prefix] if node.count > 0 else []
        for letter in sorted(node.children):
            found += self.words(prefix + letter)
        return found

    def best(self, prefix, limit=3):
        """The words that begin so and are in most often, the first by the alphabet among equals."""
        ranked = sorted(self.words(prefix), key=lambda word: (-self.count(word), word))
        return ranked[:limit]

    def longest_prefix(self, text):
        """The longest word that a text begins with; empty where there is none."""
        node, best = self._root, 0
        for place, letter in enumerate(text):
            node = node.children.get(letter)
            if node is None:
                break
            if node.count > 0:
                best = place + 1
        return text[:best]

    def matches(self, pattern):
        """The words of a pattern, in which a dot stands for any letter."""
        found = []
        nodes = [("", self._root)]
        for wanted in pattern:
            following = []
            for so_far, node in nodes:
                for letter, child in node.children.items():
                    if wanted in (".", letter):
                        following.append((so_far + letter, child))
            nodes = following
        for so_far, node in nodes:
            if node.count > 0:
                found.append(so_far)
        return sorted(found)

    def common(self):
        """The beginning that all words share."""
        node, shared = self._root, ""
        while len(node.children) == 1 and node.count == 0:
            letter = next(iter(node.children))
            shared += letter
            node = node.children[letter]
        return shared

    def _find(self, prefix):
        node = self._root
        for letter in prefix:
            if letter not in node.children:
                return None
            node = node.children[letter]
        return node
