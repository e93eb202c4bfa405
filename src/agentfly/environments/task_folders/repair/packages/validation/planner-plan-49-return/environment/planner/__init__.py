"""Plans of work: what comes first, how long it takes, who does it."""

from planner.plan import Plan, PlanError

__all__ = ["Plan", "PlanError"]
