import unittest

from texttable import Table, wrap


class TableTest(unittest.TestCase):
    def test_wrapping(self):
        self.assertEqual(wrap("to be or not", 6), ["to be", "or not"])

    def test_a_table(self):
        table = Table(["name", "n"])
        table.add("Ann", 12)
        table.add("Bo", 7)
        self.assertEqual(table.text(), "name | n\n-----+---\nAnn  | 12\nBo   |  7")

    def test_too_many_cells(self):
        with self.assertRaises(ValueError):
            Table(["a"]).add(1, 2)
