"""The viewer in a real Chromium: every page, keys, both themes, an exported file, and hostile text in all fields."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly import save_trajectories
from agentfly.runs import StepRecord
from agentfly.view.chains import Tokenizers
from agentfly.view.export import write_export
from agentfly.view.index import ChainIndex
from agentfly.view.server import ViewData, ViewServer
from agentfly.view.sources import find_sources
from tests.view.pieces import HOSTILE, make_chain, make_run

pytestmark = [pytest.mark.slow_smoke, pytest.mark.integration]
PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
    if PROGRAM is None:
        pytest.skip("there is no chromium in PATH: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and one with hostile text in every field that a model, a tool or a user writes."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "plain", config={"loss": {"correction": "token-mask", "correction_cap": 1.05}}).close()
    # A megabyte of text without a space, as the answer of one chain.
    hostile = make_run(folder / "hostile", text=HOSTILE, steps=1)
    hostile.write_trajectories(2, [make_chain(0, 0, 1.0, text="x" * 1_000_000)])
    hostile.close()
    return folder


@pytest.fixture(scope="module")
def data(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewData]:
    with ChainIndex(find_sources([runs / "plain", runs / "hostile"]), tmp_path_factory.mktemp("cache")) as index:
        index.update()
        yield ViewData(index, Tokenizers())


@pytest.fixture(scope="module")
def server(data: ViewData) -> Iterator[ViewServer]:
    with ViewServer(data) as opened:
        yield opened


class Tab:
    """A page that records everything that could run or load something foreign."""

    def __init__(self, browser: Any, address: str, **settings: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1360, "height": 860}, **settings)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.addresses: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.page.on("dialog", lambda dialog: self.problems.append("a dialog"))
        self.address = address

    def __enter__(self) -> "Tab":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def open(self, fragment: str) -> Any:
        self.page.goto(self.address + fragment)
        return self.wait(fragment)

    def wait(self, fragment: str) -> Any:
        self.page.locator(f'#page[data-ready="{fragment}"]').wait_for()
        return self.page


def first_chain(data: ViewData, **filters: str) -> int:
    _, rows = data.index.select(filters)
    return int(rows[0]["id"])


def test_pages_and_keys(browser: Any, server: ViewServer, data: ViewData) -> None:
    with Tab(browser, server.url) as tab:
        page = tab.open("#/runs")
        assert page.locator(".charts .card").count() >= 2
        legend = page.locator(".legend", has_text="eval/greedy")  # beside reward/mean and eval/reward
        assert legend.locator(".swatch.d2").count() == 2  # one curve per run
        page.get_by_label("Metric").fill("time/generate")
        page.get_by_label("Metric").press("Enter")
        page.locator("h2", has_text="time/generate").wait_for()

        page.keyboard.press("Escape")
        page.keyboard.press("t")
        tab.wait("#/chains")
        page.get_by_label("all runs").select_option("1")
        tab.wait("#/chains?source=1")
        assert page.locator("#count").inner_text() == "14 chains"
        page.get_by_label("all steps").select_option("0 1")
        tab.wait("#/chains?source=1&held_out=0&step=1")
        page.keyboard.press("/")
        page.keyboard.type("broke")
        page.keyboard.press("Enter")
        tab.wait("#/chains?source=1&held_out=0&step=1&text=broke")
        assert page.locator(".rows .row").count() == 1

        tab.open("#/chains?source=1&held_out=0&step=1")
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        chain = first_chain(data, source="1", step="1", held_out="0") + 1
        tab.wait(f"#/chain/{chain}")
        assert page.locator("h1").inner_text() == "Chain 0/1"
        page.keyboard.press("j")
        tab.wait(f"#/chain/{chain + 1}")
        page.keyboard.press("k")
        tab.wait(f"#/chain/{chain}")
        page.keyboard.press("g")
        tab.wait(f"#/compare/{chain - 1},{chain}")
        assert page.locator(".beside > .card").count() == 2
        assert tab.problems == []


def test_tokens_say_why_they_are_trained(browser: Any, server: ViewServer, data: ViewData) -> None:
    with Tab(browser, server.url) as tab:
        page = tab.open(f"#/chain/{first_chain(data, source='1', step='1', trained='1')}")
        assert page.locator(".fold .token").count() == 0  # the prompt is folded
        token = page.locator(".token.trained").first
        token.hover()
        tip = page.locator("#tip").inner_text()
        assert re.search(r"log p, sampler\s+-0.5000", tip)
        assert re.search(r"ratio\s+1\b", tip)
        assert re.search(r"weight version\s+3", tip)
        token.click()
        reasons = page.locator(".why").inner_text()
        assert "Why is this token trained?" in reasons
        assert "The model sampled these tokens: they carry loss." in reasons
        page.locator(".a-model .token:not(.trained)").first.click()
        reasons = page.locator(".why").inner_text()
        assert "Why is this token not trained?" in reasons
        assert "loss.correction=token-mask removes it from the policy loss" in reasons
        page.get_by_label("Color of tokens").select_option("ratio")
        assert "more probable for the learner" in page.locator("p.legend").inner_text()
        page.locator(".fold summary").click()
        page.locator(".fold .token").first.click()
        assert "Prompt tokens are given, not sampled" in page.locator(".why").inner_text()
        page.locator(".a-tool .token").first.click()
        assert "it carries no loss" in page.locator(".why").inner_text()
        assert page.locator("table.calls").inner_text().split()[-4:] == ["ok", "250", "ms", '{"hits":""}']
        assert tab.problems == []


def test_the_same_task_before_and_after(browser: Any, server: ViewServer, data: ViewData) -> None:
    with Tab(browser, server.url) as tab:
        page = tab.open(f"#/chain/{first_chain(data, source='1', held_out='1')}")
        page.locator(".chip").first.click()
        page.locator("mark").first.wait_for()
        assert page.locator("h1").inner_text() == "Task task-0: eval 0 and eval 2"
        assert {"before", "after"} < set(page.locator("mark").all_inner_texts())


def test_the_same_task_in_two_evaluations(browser: Any, tmp_path: Path) -> None:
    for name, text in (("base.jsonl", "before"), ("trained.jsonl", "after")):
        save_trajectories(tmp_path / name, [make_chain(0, 0, 0.0, text=text, question="Color?")])
    with (
        ChainIndex(find_sources([tmp_path / "base.jsonl", tmp_path / "trained.jsonl"]), tmp_path / "cache") as index,
        ViewServer(ViewData(index, Tokenizers())) as server,
        Tab(browser, server.url) as tab,
    ):
        index.update()
        _, rows = index.select({})
        page = tab.open(f"#/chain/{rows[1]['id']}")
        page.set_viewport_size({"width": 1360, "height": 300})
        chip = page.locator(".chip")
        assert "base" in chip.inner_text()
        chip.click()  # scrolls down to it
        tab.wait(f"#/compare/{rows[0]['id']},{rows[1]['id']}?diff=1")
        assert re.fullmatch(r"Task task-0: base\S* and trained\S*", page.locator("h1").inner_text())
        assert {"before", "after"} < set(page.locator("mark").all_inner_texts())
        assert page.evaluate("() => document.getElementById('page').scrollTop") == 0
        assert tab.problems == []


def test_a_running_run_appears_as_it_goes_on(browser: Any, tmp_path: Path) -> None:
    with (
        make_run(tmp_path / "run", steps=1) as run,
        ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index,
        ViewServer(ViewData(index, Tokenizers())) as server,
        Tab(browser, server.url) as tab,
    ):
        page = tab.open("#/runs")
        page.locator(".figures", has_text="1 step").wait_for()
        assert page.locator(".badge.live").inner_text() == "running"
        run.write_trajectories(2, [make_chain(0, 0, 1.0)])
        run.append(StepRecord(2, 3, {"reward/mean": 0.75}))
        page.locator(".figures", has_text="0.750 reward").wait_for()
        page.keyboard.press("t")
        page.locator("#count", has_text="9 chains").wait_for()
        run.write_trajectories(3, [make_chain(0, 0, 1.0)])
        page.locator("#count", has_text="10 chains").wait_for()
        assert tab.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes(browser: Any, server: ViewServer, scheme: str) -> None:
    with Tab(browser, server.url, color_scheme=scheme) as tab:
        page = tab.open("#/runs")
        assert page.locator("html").get_attribute("data-theme") == scheme
        page.keyboard.press("d")
        page.reload()
        tab.wait("#/runs")
        assert page.locator("html").get_attribute("data-theme") != scheme


def test_hostile_text_is_shown_and_never_run(browser: Any, server: ViewServer, data: ViewData, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_export(data, path, {})
    _, rows = data.index.select({"source": "2"})
    ids = [row["id"] for row in rows]
    places = ["#/runs", "#/chains?source=2", *(f"#/chain/{number}" for number in ids), f"#/compare/{ids[1]},{ids[2]}"]
    places += [f"{places[-1]}?diff=1", "#/chains?source=2&text=%3Cscript%3E", "#/chain/%3Cimg%20src=x%3E"]
    for address in (server.url, path.as_uri()):
        with Tab(browser, address) as tab:
            for fragment in places:
                page = tab.open(fragment)
                page.evaluate("() => document.querySelectorAll('details').forEach((each) => (each.open = true))")
                if page.locator(".token").count():
                    page.locator(".token").first.click()
                assert page.evaluate("() => window.hacked") is None
                assert "[object" not in page.locator("main").inner_text()
                assert page.evaluate("() => document.querySelectorAll('script').length") == (
                    1 if address == server.url else 2
                )
                assert (
                    page.evaluate(
                        "() => document.querySelectorAll('main img, main svg[onload], main [onclick]').length"
                    )
                    == 0
                )
            assert [problem for problem in tab.problems if "400" not in problem] == []
            assert all(request.startswith((server.url, "file:", "data:")) for request in tab.addresses)


def test_an_exported_page_works_without_a_server(browser: Any, data: ViewData, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    left_out = write_export(data, path, {"source": "1", "step": "1"})
    with Tab(browser, path.as_uri()) as tab:
        page = tab.open("#/runs")
        assert page.get_by_text(left_out).is_visible()
        page.keyboard.press("t")
        tab.wait("#/chains")
        assert page.locator("#count").inner_text() == "6 chains"
        tab.open("#/chains?group=0&text=blue1")
        assert page.locator(".rows .row").count() == 1
        page.locator(".rows .row").click()
        page.locator(".token.trained").first.click()
        assert "they carry loss" in page.locator(".why").inner_text()
        assert tab.problems == []
        assert all(request.startswith(("file:", "data:")) for request in tab.addresses)
