"""What `agentfly env check` does: an environment is run through the contract, and a line says how each property is."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from agentfly.commands.console import harmless
from agentfly.commands.worlds import wide_console
from agentfly.conformance import Finding, Verdict, check_environment
from agentfly.environment import Environment
from agentfly.training.data import read_tasks

STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_APPLICABLE: "dim"}


def check(kind: type[Environment], tasks: Path | None, seed: int, instances: int, seconds: float) -> bool:
    """Examine it and say what was found, as it is found. Whether no property fails."""
    console = wide_console()

    def say(finding: Finding) -> None:
        style = STYLES[finding.verdict]
        line = Text.assemble((f"{finding.verdict.value:4}", style), f"  {finding.name:<20}  {finding.seen}")
        console.print(harmless(line), soft_wrap=True)

    given = read_tasks(tasks) if tasks is not None else ()
    report = check_environment(kind, tasks=given, seed=seed, instances=instances, seconds=seconds, told=say)
    held = sum(each.verdict is Verdict.PASS for each in report.findings)
    failed = f", {len(report.failures)} do not" if report.failures else ""
    console.print(f"{kind.__name__}: {held} properties hold{failed}", highlight=False, style="bold")
    return report.passed
