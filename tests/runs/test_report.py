"""The reward curve and the report of a run."""

import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentfly.runs import Alarm, EvalFigures, RunWriter, StepRecord, report
from agentfly.runs.record import PHASES
from agentfly.runs.report import draw_curve, smooth, write_curve, write_report, write_report_files
from tests.runs.chains import chain, step

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'agentfly-rl[train]'")
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\x00\udc80 ' onload='x"


class Page(HTMLParser):
    """The tags and the ids of a page, and everything that could run or fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.active: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if tag == "a" and name == "href":
                self.links.add(value or "")
            if name.startswith("on") or name == "src" or (name == "href" and not (value or "").startswith("#")):
                self.active.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.text += data


def create_run(path: Path) -> RunWriter:
    run = RunWriter.create(path, {"recipe": f"{EVIL}.py", "model": "tiny"})
    run.append(StepRecord(0, 10, eval=EvalFigures(0.25, 0.1, 0.4, 2)))
    run.append(step(1, 0.4, metrics={"chains": 8.0}))
    alarm = Alarm("kl_blow_up", f"far {EVIL}", ("5/0", "9/9"), 2)
    run.append(step(2, 0.6, metrics={"chains": 8.0}, eval=EvalFigures(0.75, 0.5, 0.9, 2), alarms=(alarm,)))
    run.write_trajectories(2, [chain("5/0", 1.0, question=EVIL.replace("\udc80", ""), says=f"named {EVIL}")])
    before = [
        chain(f"{group}/{i}", 0.0, question=f"task {group}", says="was wrong") for group in range(5) for i in (0, 1)
    ]
    after = [
        chain(f"{group}/{i}", group / 5, question=f"task {group}", says=EVIL) for group in range(5) for i in (0, 1)
    ]
    run.write_trajectories(0, before, held_out=True)
    run.write_trajectories(2, after, held_out=True)
    return run


def test_page_summarizes_the_run(tmp_path: Path) -> None:
    with create_run(tmp_path) as run:
        write_report(run)
    page = Page(run.report.read_text(encoding="utf-8"))
    for part in (
        "2 of 10 steps",
        "0.250 → 0.750",
        "0.400 → 0.600",
        "step 2, kl blow up:",
        "generate 75 %",
        "(0.500 to 0.900)",
        "chain 5/0: answer after 1 turn, reward 1",
    ):
        assert part in re.sub(r"\s+", " ", page.text), part
    assert "16" in page.text  # chains
    assert page.links == {"#chain-2-5/0"}  # the other was not kept
    assert "chain-2-5/0" in page.ids
    headings = re.findall(r"<h3>(.*?)</h3>", run.report.read_text())
    assert headings == ["task 4", "task 3", "task 0"]  # most gained, and the least
    assert page.text.count("was wrong") == 3


def test_model_text_is_escaped_in_the_page(tmp_path: Path) -> None:
    with create_run(tmp_path) as run:
        write_report(run)
        write_report(run, lambda ids: f"{EVIL}{len(ids)}")
    page = Page(run.report.read_text(encoding="utf-8"))
    assert not {"script", "img", "iframe", "link", "object"} & set(page.tags)
    assert page.active == []
    assert "<script>alert(1)</script>" in page.text  # as text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page.text)
    assert "default-src 'none'" in run.report.read_text()


def test_with_a_tokenizer_the_tokens_are_shown_by_author(tmp_path: Path) -> None:
    with create_run(tmp_path) as run:
        write_report(run, lambda ids: f"⟨{' '.join(map(str, ids))}⟩")
    text = run.report.read_text()
    assert '<span class="bold green" title="model">⟨0 1 2⟩</span>' in text
    assert '<span class="cyan" title="task">⟨0 1 2 3⟩</span>' in text


def test_page_of_an_empty_run(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as run:
        write_report(run)
        assert "0 of 0 steps" in run.report.read_text()
        run.append(StepRecord(0, 10, eval=EvalFigures(0.25, math.nan, math.nan, 1)))
        run.append(step(1, math.nan))
        write_report(run)
        write_curve(run)
    assert "nan" not in Page(run.report.read_text()).text
    assert run.curve.read_bytes().startswith(b"\x89PNG")


def test_page_without_matplotlib_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with create_run(tmp_path) as run:
        write_report(run)
    assert "needs matplotlib" in Page(run.report.read_text()).text


# ── the picture ──


def test_report_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "write_curve", end)
    with RunWriter.create(tmp_path, {}) as run:
        with pytest.raises(KeyboardInterrupt):
            write_report_files(run)
        assert not run.report.exists()  # a run with a report is finished


def test_the_curve_shows_training_and_held_out_rewards() -> None:
    records = [
        StepRecord(0, 10, eval=EvalFigures(0.2, 0.1, 0.4, 16)),
        *(step(i, i / 10, eval=EvalFigures(0.8, 0.7, 0.9, 16) if i == 9 else None) for i in range(1, 10)),
    ]
    axes = draw_curve(records, "what $x costs").axes[0]
    raw, smooth, held = (axes.lines[i].get_xydata().tolist() for i in (0, 1, 2))  # type: ignore[union-attr]
    assert raw == [[i, i / 10] for i in range(1, 10)]
    assert smooth[4] == [5, pytest.approx(0.5)]
    assert held == [[0, 0.2], [9, 0.8]]
    words = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert words == ["training tasks", "held-out tasks, sampled, 95 % interval"]


@pytest.mark.parametrize(
    "records", [[], [step(1, math.nan)], [step(1)], [StepRecord(0, 1, eval=EvalFigures(0.5, math.nan, math.nan, 1))]]
)
def test_curve_of_an_empty_run(records: list[StepRecord]) -> None:
    draw_curve(records, "$broken$ {formula").savefig(io.BytesIO())


def test_smoothing_neither_lags_nor_changes_a_straight_line() -> None:
    line = [float(i) for i in range(200)]
    assert smooth(line)[5:-5] == pytest.approx(line[5:-5])
    assert smooth([]) == []


def test_every_phase_has_a_color(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as run:
        run.append(StepRecord(1, 1, {"reward/mean": 0.0}, dict.fromkeys([*PHASES, "another"], 1.0)))
        write_report(run)
    text = run.report.read_text()
    colors = {phase: re.findall(rf"\.{phase} {{ background: (#\w+);", text) for phase in PHASES}
    assert len({color for (color,) in colors.values()}) == len(PHASES)
    assert ":where(.bar div, .swatch) { background: #" in text


def test_greedy_evaluation_is_shown_beside_the_sampled_one(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as run:
        for at, sampled, greedy in ((0, 0.1, 0.2), (2, 0.3, 0.45)):
            run.append(step(at, eval=EvalFigures(sampled, 0.0, 1.0, 2, {"greedy": greedy})))
        write_report(run)
        text = re.sub(r"\s+", " ", Page(run.report.read_text()).text)
        assert "held-out reward, sampled0.100 → 0.300" in text
        assert "held-out reward, greedy0.200 → 0.450" in text
        labels = draw_curve(run.records()).axes[0].get_legend_handles_labels()[1]
    assert labels == ["training tasks", "greedy", "held-out tasks, sampled, 95 % interval"]


@pytest.mark.integration
def test_command_reports_a_run_under_way_and_one_without_steps(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from agentfly.cli.app import app

    with create_run(tmp_path / "busy") as run, RunWriter.create(tmp_path / "empty", {"steps": 5}):
        for name in ("busy", "empty"):
            result = CliRunner().invoke(app, ["report", str(tmp_path / name)])
            assert result.exit_code == 0, result.output
        assert "2 of 10 steps" in run.report.read_text()
        assert "; not finished" in run.report.read_text()
        assert run.curve.exists()
        assert "0 of 5 steps" in (tmp_path / "empty" / "report.html").read_text()
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code != 0
