import unittest

from intervals import IntervalSet


class IntervalTest(unittest.TestCase):
    def test_spans_that_touch_become_one(self):
        self.assertEqual(IntervalSet([(1, 3), (3, 5)]).spans(), [(1, 5)])

    def test_removing_splits(self):
        numbers = IntervalSet([(0, 10)])
        numbers.remove(3, 5)
        self.assertEqual(numbers.spans(), [(0, 3), (5, 10)])

    def test_containing(self):
        numbers = IntervalSet([(0, 2), (4, 6)])
        self.assertTrue(numbers.contains(4))
        self.assertFalse(numbers.contains(6))

    def test_free_room(self):
        self.assertEqual(IntervalSet([(2, 4)]).free(3, (0, 10)), 4)
