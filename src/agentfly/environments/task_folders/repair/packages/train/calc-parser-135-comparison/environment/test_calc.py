import unittest

from calc import CalcError, evaluate, variables


class CalcTest(unittest.TestCase):
    def test_products_come_before_sums(self):
        self.assertEqual(evaluate("2 + 3 * 4"), 14)

    def test_powers(self):
        self.assertEqual(evaluate("2 ^ 3 ^ 2"), 512)

    def test_names(self):
        self.assertEqual(evaluate("2 * (x - 3)", x=5), 4)
        self.assertEqual(variables("max(a, b) + a"), ["a", "b"])

    def test_division_by_zero(self):
        with self.assertRaises(CalcError):
            evaluate("1 / 0")
