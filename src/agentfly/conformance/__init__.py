"""Whether an environment keeps the contract, property by property: `agentfly env check`, and the same for pytest.

from agentfly.conformance import check_environment

def test_the_contract() -> None:
    report = check_environment(MyWorld)
    assert report.passed, report
"""

from agentfly.conformance.check import PROPERTIES, check_environment
from agentfly.conformance.report import Finding, Report, Verdict

__all__ = ["PROPERTIES", "Finding", "Report", "Verdict", "check_environment"]
