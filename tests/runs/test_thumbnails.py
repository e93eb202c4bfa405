"""Images in terminals, reports and dashboards."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentfly.cli.live_view import ChainView, LiveView
from agentfly.rollout.events import ChainStarted, ToolReturned
from agentfly.runs import EvalFigures, RunWriter, StepRecord
from agentfly.runs.loggers import WandbLogger
from agentfly.runs.report import write_report
from agentfly.runs.thumbnails import describe_image
from agentfly.segment import Author, Segment
from agentfly.tooling import ToolResult
from agentfly.trajectory import Score, StopReason, Trajectory, TurnRecord
from agentfly.types import Completion, FinishReason, Image, Message, Task, ToolCall
from tests.runs.chains import step

pillow = pytest.importorskip("PIL.Image", reason="the extra vision is not installed")


def draw(width: int = 4, height: int = 4) -> Image:
    """Red above, blue below."""
    pixels = pillow.new("RGB", (width, height), (255, 0, 0))
    pixels.paste((0, 0, 255), (0, height // 2, width, height))
    return Image.of(pixels)


BROKEN = Image("data:image/png;base64,iVBORw0KGgo=")


def test_labels_have_size_and_content() -> None:
    assert re.fullmatch(r"\[image 504x252 [0-9a-f]{8}\]", describe_image(draw(504, 252)))
    assert describe_image(draw(8, 4)) != describe_image(draw(8, 6))
    assert re.fullmatch(r"\[image [0-9a-f]{8}\]", describe_image(BROKEN))
    assert describe_image(Image("https://example.org/a.png")) == "[image https://example.org/a.png]"


def test_live_view_labels_images() -> None:
    view = ChainView("0/0")
    view.handle(ChainStarted(0, 0, Task.of({"question": "What is it?", "image": draw(8, 8).url})))
    line = view.handle(ToolReturned(0, 0, 0, ToolCall("look"), ToolResult(("now", draw(16, 16)))))
    assert line is not None
    assert re.match(r"← now\n\[image 16x16 ", line.plain)
    plain = Console(file=io.StringIO(), width=100)
    with LiveView(plain) as live:
        live(ChainStarted(0, 0, Task.of({"question": "What is it?", "image": draw(8, 8).url})))
    assert isinstance(plain.file, io.StringIO)
    assert re.search(r"\[image 8x8 [0-9a-f]{8}\]\n.*What is it\?", plain.file.getvalue())


def seeing_chain(name: str, image: Image, reward: float | None = 1.0) -> Trajectory:
    group, number = map(int, name.split("/"))
    segment = Segment()
    segment.append(Author.TASK, range(4), [Message("user", (image, "What is it?"))], turn=0)
    sampled = Completion([1, 2], [-0.5] * 2, [0] * 2, FinishReason.STOP)
    segment.append_completion(sampled, Message("assistant", "Red."), turn=0)
    return Trajectory(
        task=Task((Message("user", (image, "What is it?")),), id=str(group)),
        segments=(segment.seal(),),
        turns=(TurnRecord(FinishReason.STOP),),
        stop=StopReason.ANSWER,
        prediction="Red.",
        group=group,
        chain=number,
        score=None if reward is None else Score(reward),
    )


def seeing_run(path: Path) -> RunWriter:
    run = RunWriter.create(path, {})
    for number in (0, 1):
        run.append(StepRecord(number, 1, {"reward/mean": 1.0} if number else {}, eval=EvalFigures(0.5, 0.4, 0.6, 2)))
        chains = [seeing_chain("0/0", draw(600, 300)), seeing_chain("1/0", BROKEN)]
        run.write_trajectories(number, chains, held_out=True)
    return run


def test_report_has_thumbnails_and_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'agentfly-rl[train]'")
    with seeing_run(tmp_path) as run:
        write_report(run, decode=lambda ids: "<|image_pad|>" * 200)
        page = run.report.read_text()
        sources = re.findall(r'<img src="([^"]+)"', page)
        assert len(sources) == 2
        assert "&lt;|image_pad|&gt; × 200" in page
        for url in sources:
            assert max(pillow.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size) == 240
        assert describe_image(BROKEN) in page
        monkeypatch.setattr("agentfly.runs.report.MAX_IMAGE_BYTES", len(sources[0]))
        write_report(run)
        page = run.report.read_text()
        assert page.count("<img") == 1
        assert page.count(describe_image(draw(600, 300))) == 1


@pytest.mark.integration
def test_wandb_gets_images_of_the_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'agentfly-rl[wandb]'")
    logged: list[dict[str, Any]] = []

    class Run:
        def log(self, values: dict[str, Any]) -> None:
            logged.append(values)

    with seeing_run(tmp_path) as run:
        logger = WandbLogger(run)
        logger._run = Run()  # type: ignore[assignment]
        for record in (*run.records(), step(2)):
            logger.step(record)
    assert ["eval/images" in values for values in logged] == [True, True, False]
    (image,) = logged[0]["eval/images"]
    assert (*image.image.size, image._caption) == (600, 300, "What is it? → Red.")
