"""Checks that an environment keeps the contract, property by property: `agentfly env check`, and for pytest:

from agentfly.conformance import check_environment

def test_contract() -> None:
    report = check_environment(MyEnvironment)
    assert report.ok, report
"""

from agentfly.conformance.check import PROPERTIES, check_environment
from agentfly.conformance.subject import ConformanceReport, PropertyResult, PropertyStatus

__all__ = ["PROPERTIES", "ConformanceReport", "PropertyResult", "PropertyStatus", "check_environment"]
