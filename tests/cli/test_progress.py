"""Progress of a command."""

import io

import pytest
from rich.console import Console

from agentfly.runs.progress import ProgressSteps


@pytest.mark.parametrize(("total", "lines"), [(3, 3), (10, 10), (95, 10)])
def test_without_terminal_every_tenth_prints_a_line(total: int, lines: int) -> None:
    shown = io.StringIO()
    with ProgressSteps(Console(file=shown), "chains", total) as steps:
        for number in range(total):
            steps.advance(f"reward {number}")
    printed = shown.getvalue().splitlines()
    assert len(printed) == lines
    assert printed[-1] == f"chains: {total} of {total}, reward {total - 1}"


def test_terminal_bar_is_transient() -> None:
    shown = io.StringIO()
    with ProgressSteps(
        Console(file=shown, force_terminal=True, width=80, _environ={"TERM": "xterm"}), "chains", 2
    ) as steps:
        steps.advance("reward 1")
        steps.advance("reward 0.5")
    assert "2/2" in shown.getvalue()
    assert "reward 0.5" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K")
