import unittest

from roman import NumeralError, add, from_roman, shortest, to_roman


class RomanTest(unittest.TestCase):
    def test_years(self):
        self.assertEqual(to_roman(1994), "MCMXCIV")
        self.assertEqual(from_roman("MDCCLXXVI"), 1776)

    def test_sums(self):
        self.assertEqual(add("IX", "IV"), "XIII")

    def test_shortest(self):
        self.assertEqual(shortest(8, 12), [10])

    def test_what_is_wrong_is_refused(self):
        with self.assertRaises(NumeralError):
            from_roman("IIX")
