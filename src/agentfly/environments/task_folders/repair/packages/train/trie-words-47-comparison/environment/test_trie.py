import unittest

from trie import Trie


class TrieTest(unittest.TestCase):
    def test_words_that_begin_so(self):
        self.assertEqual(Trie(["car", "cat", "dog"]).words("ca"), ["car", "cat"])

    def test_counts(self):
        words = Trie(["a", "a", "b"])
        self.assertEqual(words.count("a"), 2)
        self.assertEqual(words.size(), 3)

    def test_the_best(self):
        self.assertEqual(Trie(["on", "one", "one", "only"]).best("on", 2), ["one", "on"])

    def test_the_longest_prefix(self):
        self.assertEqual(Trie(["a", "app", "apple"]).longest_prefix("applause"), "app")
