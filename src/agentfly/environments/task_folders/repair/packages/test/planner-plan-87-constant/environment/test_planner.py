import unittest

from planner import Plan, PlanError


def house():
    plan = Plan()
    plan.add("walls", 5, after=["floor"])
    plan.add("floor", 3)
    plan.add("garden", 2)
    plan.add("roof", 2, after=["walls"])
    return plan


class PlanTest(unittest.TestCase):
    def test_the_order(self):
        self.assertEqual(house().order(), ["floor", "garden", "walls", "roof"])

    def test_times(self):
        self.assertEqual(house().hours(), 10)
        self.assertEqual(house().starts()["roof"], 8)

    def test_what_cannot_be_late(self):
        self.assertEqual(house().critical(), ["floor", "walls", "roof"])

    def test_a_circle(self):
        plan = Plan()
        plan.add("egg", 1, after=["hen"])
        plan.add("hen", 1, after=["egg"])
        with self.assertRaises(PlanError):
            plan.order()
