"""The console logger, in a terminal and in a log."""

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from agentfly.runs import Alarm, EvalFigures, Progress, RunWriter, StepRecord
from agentfly.runs.console import ConsoleLogger, RunPanel, sparkline
from agentfly.runs.record import format_duration
from tests.runs.chains import step

METRICS = {
    "reward/success": 0.5,
    "calls/chain": 1.4,
    "chain/sampled_tokens": 1182.0,
    "policy/kl": 0.012,
    "policy/entropy": 1.31,
    "policy/clip_fraction": 0.041,
    "policy/grad_norm": 0.82,
    "throughput/tokens_per_second": 3412.0,
}
ALARM = Alarm("entropy_collapse", "the model [bold]hardly[/bold] varies", ("3/1", "5/2"), 2)
RECORDS = [
    StepRecord(0, 10, eval=EvalFigures(0.31, 0.24, 0.39, 64)),
    step(1, 0.4, metrics=METRICS),
    step(2, 0.5, metrics=METRICS, eval=EvalFigures(0.52, 0.4, 0.6, 64), leased=12, waiting=3, alarms=(ALARM,)),
]


def render(scene: RunPanel, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(scene)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_panel_shows_everything_and_fits(width: int) -> None:
    text = render(RunPanel("agentfly · tiny", RECORDS, 10, 100, 400, Progress("generate", 3, 8, 12, 3)), width)
    assert max(map(len, text.splitlines())) == width
    for part in (
        "step 2/10", "7 min left", "reward 0.5", "best 0.5", "held out 0.31 → 0.52 (0.40–0.60)", "success 50%",
        "turns 2.0", "calls 1.4", "tokens 1,182", "kl 0.012", "entropy 1.31", "clipped 4.1%", "grad norm 0.82",
        "tokens/s 3,412", "leased/waiting 12/3", "4 s/step", "generate 75%", "update 25%", "generate 3/8",
        "step 2 entropy collapse: the model [bold]hardly[/bold] varies", "[3/1, 5/2]", "▁█",
    ):  # fmt: skip
        assert part in text, part


def test_live_panel_leaves_room_for_the_echo_of_ctrl_c(tmp_path: Path) -> None:
    output = io.StringIO()
    with RunWriter.create(tmp_path, {}) as run:
        logger = ConsoleLogger(run, Console(file=output, width=80, height=40, force_terminal=True, color_system=None))
        logger.start({"steps": 1})
        logger.close()
    borders = re.findall("[╭╰][^\n]*[╮╯]", output.getvalue())
    assert {len(border) for border in borders} == {78}


@pytest.mark.parametrize("width", [1, 5, 20, 40])
def test_the_panel_survives_any_width(width: int) -> None:
    assert render(RunPanel("agentfly · a long name of a run", RECORDS, 10, 100, None), width)


def test_panel_before_the_first_step_and_with_unusual_values() -> None:
    assert "step 0/0" in render(RunPanel("agentfly", [], 0, 0, None), 80)
    assert "held out 0.31 (0.24–0.39) before training" in render(RunPanel("agentfly", RECORDS[:1], 10, 3, None), 80)
    unsure = StepRecord(0, 10, eval=EvalFigures(0.31, math.nan, math.nan, 1))
    assert "nan" not in render(RunPanel("agentfly", [unsure], 10, 3, None), 80)
    odd = step(1, math.nan, metrics={"policy/kl": math.inf, "policy/entropy": math.nan})
    assert "kl inf" in render(RunPanel("agentfly", [odd], 10, 3, None), 80)


def test_log_has_one_line_per_step(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=40)
    with RunWriter.create(tmp_path, {}) as run:
        sink = ConsoleLogger(run, console)
        sink.start({"recipe": "recipes/count.py", "model": "tiny", "algorithm": {"name": "grpo"}, "steps": 10})
        for record in RECORDS:
            sink.progress(Progress("generate", 1, 8))
            sink.step(record)
        sink.close()
        sink.close()
    assert isinstance(console.file, io.StringIO)
    title, start, before, first, second, held, alarm = console.file.getvalue().splitlines()
    assert title == f"agentfly · count · tiny · grpo · {tmp_path.name} · 10 steps"
    assert start == "generate …"
    assert before == "held out before training: reward 0.310 (0.240 to 0.390, 64 tasks)"
    assert first.startswith("step  1/10  reward 0.400  success 50%  turns 2.0  calls 1.4  tokens 1,182  kl 0.012")
    assert second.startswith("step  2/10  reward 0.500")
    assert held == "held out after step 2: reward 0.520 (0.400 to 0.600, 64 tasks)"
    assert alarm == "ALARM entropy_collapse: the model [bold]hardly[/bold] varies [chains 3/1, 5/2]"


def test_log_reports_progress_of_a_long_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    clock = iter(range(0, 1000, 25))  # seconds
    monkeypatch.setattr("agentfly.runs.console.time.monotonic", lambda: float(next(clock)))
    with RunWriter.create(tmp_path, {}) as run:
        logger = ConsoleLogger(run, Console(file=output))
        logger.progress(Progress("evaluate"))
        for done in range(8):
            logger.progress(Progress("evaluate", done, 8))
    assert output.getvalue().splitlines() == ["evaluate …", "evaluate: 2 of 8 chains", "evaluate: 5 of 8 chains"]


def test_step_line_shows_invalid_and_unknown_calls_if_there_are_any(tmp_path: Path) -> None:
    output = io.StringIO()
    rates = {"calls/chain": 1.0, "calls/invalid_rate": 0.25, "calls/unknown_rate": 0.5}
    with RunWriter.create(tmp_path, {}) as run:
        logger = ConsoleLogger(run, Console(file=output))
        logger.step(step(1, 0.0, metrics=rates))
        logger.step(step(2, 0.0, metrics={**rates, "calls/invalid_rate": 0.0, "calls/unknown_rate": 0.0}))
    first, second = output.getvalue().splitlines()
    assert "calls 1.0  invalid calls 25%  unknown tools 50%" in first
    assert "invalid" not in second
    assert "unknown" not in second


def test_single_step_is_singular(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as run:
        output = io.StringIO()
        ConsoleLogger(run, Console(file=output, width=100)).start({"steps": 1})
    assert output.getvalue().endswith(" · 1 step\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_alarms_carry_no_control_characters_to_a_terminal(tmp_path: Path, terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=terminal, color_system=None)
    alarm = Alarm("failures", "tool said \x1b]0;owned\x07\x9b31m", ("3/1",), 1)
    with RunWriter.create(tmp_path, {}) as run:
        sink = ConsoleLogger(run, console)
        sink.start({"steps": 10})
        sink.step(step(1, 0.5, alarms=(alarm,)))
        sink.close()
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert "tool said \ufffd]0;owned\ufffd\ufffd31m" in output
    assert not {"\x07", "\x9b"} & set(output)


def test_a_terminal_shows_the_panel_with_the_steps_before_a_resume(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=True, color_system=None)
    with RunWriter.create(tmp_path, {}) as run:
        for record in RECORDS[:2]:
            run.append(record)
        sink = ConsoleLogger(run, console)
        sink.start({"steps": 10})
        try:
            sink.step(RECORDS[2])
        finally:
            sink.close()
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().rpartition("╭")[2]
    assert "step 2/10" in last
    assert "held out 0.31 → 0.52" in last
    assert "▁█" in last


def test_the_panel_is_left_on_the_screen_with_the_cursor_shown_when_the_run_fails(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=True)
    with RunWriter.create(tmp_path, {}) as run:
        ConsoleLogger(run, console).close()  # never started
        sink = ConsoleLogger(run, console)
        sink.start({})
        sink.close()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")


def test_sparkline_has_one_column_per_value_up_to_its_width() -> None:
    assert sparkline([0.0, 1.0, 0.5], 10) == "▁█▄"
    assert sparkline([2.0] * 3, 10) == "▄▄▄"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert len(sparkline(range(1000), 76)) == 76
    assert sparkline([], 10) == ""


def test_durations_are_formatted() -> None:
    assert [format_duration(s) for s in (0.2, 42, 200, 7500)] == ["0 s", "42 s", "3 min", "2 h 05 min"]


@pytest.mark.parametrize("terminal", [False, True])
def test_solved_tasks_are_shown_without_a_warning(tmp_path: Path, terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=terminal, color_system=None)
    with RunWriter.create(tmp_path, {}) as run:
        logger = ConsoleLogger(run, console)
        logger.start({"steps": 10})
        logger.step(step(1, 0.97, alarms=(Alarm("solved", "the tasks are solved: use harder ones", (), 1),)))
        logger.close()
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert "the tasks are solved: use harder ones" in output
    assert "ALARM" not in output
    assert "▲" not in output
