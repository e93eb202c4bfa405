"""Progress of a command."""

import io

import pytest
from rich.console import Console

from agentfly.runs.progress import ProgressSteps


@pytest.mark.parametrize(("total", "lines"), [(3, 3), (10, 10), (95, 10)])
def test_without_terminal_every_tenth_prints_a_line(total: int, lines: int) -> None:
    output = io.StringIO()
    with ProgressSteps(Console(file=output), "chains", total) as steps:
        for number in range(total):
            steps.advance(f"reward {number}")
    printed = output.getvalue().splitlines()
    assert len(printed) == lines
    assert printed[-1] == f"chains: {total} of {total}, reward {total - 1}"


def test_terminal_bar_is_transient() -> None:
    output = io.StringIO()
    with ProgressSteps(
        Console(file=output, force_terminal=True, width=80, _environ={"TERM": "xterm"}), "chains", 2
    ) as steps:
        steps.advance("reward 1")
        steps.advance("reward 0.5")
    assert "2/2" in output.getvalue()
    assert "reward 0.5" in output.getvalue()
    assert output.getvalue().endswith("\x1b[2K")
