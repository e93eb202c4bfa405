"""Loggers: by name, combined, and each with its real library."""

import json
import logging
import math
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ConfigError
from agentfly.runs import Alarm, EvalFigures, Progress, RunLoggers, RunWriter, StepRecord, open_loggers
from agentfly.runs.loggers import LOGGED_CHAINS, format_chain_html, format_chain_markdown, sample_chains
from agentfly.training.config import TrainConfig
from tests.runs.chains import chain, step

RECORDS = [
    StepRecord(0, 10, eval=EvalFigures(0.25, 0.1, 0.4, 16)),
    step(1, 0.5, alarms=(Alarm("kl_blow_up", "far off", ("0/1",), 1),)),
    step(2, 0.75, metrics={"policy/kl": math.nan}),
]


class RecordingLogger:
    """A logger that records its calls, and fails where it is asked to."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self._fails = fails

    def _record(self, what: str) -> None:
        self.calls.append(what)
        if what == self._fails:
            raise RuntimeError(f"no {what} today")

    def start(self, config: Mapping[str, Any]) -> None:
        self._record("start")

    def progress(self, progress: Progress) -> None:
        self._record("progress")

    def step(self, record: StepRecord) -> None:
        self._record("step")

    def close(self) -> None:
        self._record("close")


def test_failing_logger_is_dropped_and_the_others_continue(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = RecordingLogger(), RecordingLogger("step")
    loggers = RunLoggers({"bad": bad, "good": good})
    loggers.start({})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            loggers.progress(Progress("generate"))
            loggers.step(RECORDS[1])
    assert loggers.names == ("good",)
    assert "logger 'bad' failed and is removed: RuntimeError: no step today" in caplog.text
    loggers.close()
    loggers.close()
    assert bad.calls == ["start", "progress", "step", "close"]
    assert good.calls == ["start", *["progress", "step"] * 2, "close"]


def test_logger_that_cannot_start_is_an_error_and_closes_the_others() -> None:
    good, bad = RecordingLogger(), RecordingLogger("start")
    with pytest.raises(RuntimeError, match="no start today"):
        RunLoggers({"good": good, "bad": bad}).start({})
    assert good.calls == ["start", "close"]


def test_unknown_logger_is_rejected(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as run:
        with pytest.raises(ConfigError, match="no logger 'tensorbord', did you mean 'tensorboard'"):
            open_loggers(["tensorbord"], run)
        with pytest.raises(ConfigError, match=r"no logger 'jsonl'.*metrics\.jsonl is always written"):
            open_loggers(["jsonl"], run)
        assert open_loggers("console", run).names == ("console",)


def test_missing_logger_package_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with RunWriter.create(tmp_path, {}) as run, pytest.raises(ConfigError, match=r"pip install 'agentfly-rl\[wandb\]'"):
        open_loggers(["wandb"], run)


@pytest.mark.integration
def test_runs_import_no_torch_and_no_dashboard() -> None:
    heavy = ("torch", "wandb", "tensorboardX", "matplotlib")
    code = f"import sys, agentfly.runs, agentfly.runs.report; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


CUSTOM = """
class Count:
    def __init__(self, directory):
        self.file = directory.path / "count.txt"

    def start(self, config):
        self.file.write_text("0")

    def progress(self, progress):
        pass

    def step(self, record):
        self.file.write_text(str(record.step))

    def close(self):
        pass


class NoStep:
    start = progress = close = print


class Exits(Count):
    def __init__(self, directory):
        raise SystemExit(3)
"""


@pytest.fixture
def custom_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "custom_loggers.py").write_text(CUSTOM)
    (tmp_path / "exiting_loggers.py").write_text("raise SystemExit(1)")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "custom_loggers"


def test_class_is_named_as_logger(tmp_path: Path, custom_loggers: str) -> None:
    config = TrainConfig().override({"loggers": f"console,{custom_loggers}:Count"})
    assert config.loggers == ("console", f"{custom_loggers}:Count")
    with RunWriter.create(tmp_path / "run", {}) as run:
        loggers = open_loggers(config.loggers[1:], run)
        loggers.start({})
        for record in RECORDS:
            loggers.step(record)
        loggers.close()
    assert (tmp_path / "run" / "count.txt").read_text() == "2"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("NoStep", "has no step; a logger has start, progress, step, close"),
        ("Missing", "logger 'custom_loggers:Missing' cannot be imported"),
        ("Exits", "could not be created from the run directory: SystemExit"),
    ],
)
def test_class_that_is_no_logger_is_rejected(tmp_path: Path, custom_loggers: str, name: str, problem: str) -> None:
    with RunWriter.create(tmp_path / "run", {}) as run, pytest.raises(ConfigError, match=problem):
        open_loggers([f"{custom_loggers}:{name}"], run)


def test_module_that_exits_is_no_logger(custom_loggers: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported: SystemExit"):
        TrainConfig(loggers=("exiting_loggers:Count",))


# ── TensorBoard ──


def events(folder: Path) -> list[Any]:
    """The events of a log, in the order they were written: each record is a length, a checksum, data, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    out = []
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            out.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return out


def test_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: pip install 'agentfly-rl[tensorboard]'")
    with RunWriter.create(tmp_path, {}) as run:
        loggers = open_loggers(["tensorboard"], run)
        loggers.start({})
        for record in RECORDS:
            loggers.step(record)
            run.append(record)
        assert loggers.names == ("tensorboard",)
        loggers.close()
        seen = {(v.tag, e.step): v.simple_value for e in events(tmp_path / "tensorboard") for v in e.summary.value}
        assert seen["eval/reward", 0] == 0.25
        assert [seen["reward/mean", number] for number in (1, 2)] == [0.5, 0.75]
        assert seen["time/generate", 1] == 3.0
        assert math.isnan(seen["policy/kl", 2])
        assert any(tag.startswith("alarm/kl_blow_up") for tag, _ in seen)
    with RunWriter.resume(tmp_path, 1) as run:
        loggers = open_loggers(["tensorboard"], run)
        loggers.start({})
        loggers.close()
        starts = [e.step for e in events(tmp_path / "tensorboard") if e.HasField("session_log")]
        assert starts == [2]  # what was written from there on is to be forgotten


# ── Weights & Biases ──


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'agentfly-rl[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.delenv("WANDB_DIR")


def read_records(path: Path) -> Iterator[bytes]:
    """The records of a W&B file: blocks of 32 KiB, in them parts with a checksum, a length and a kind (1: whole)."""
    data, at = path.read_bytes(), 7
    while at + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        assert kind == 1, "none of these records is long enough to be split"
        yield data[at + 7 : at + 7 + length]
        at += 7 + length


@pytest.mark.integration
def test_wandb_keeps_a_run_offline_and_resumes_it(tmp_path: Path, offline: None) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    with RunWriter.create(tmp_path / "run", {}) as run:
        for part in (RECORDS, RECORDS[1:2]):  # the second time as if resumed
            loggers = open_loggers(["wandb"], run)
            loggers.start({"model": "tiny", "steps": 10})
            for record in part:
                loggers.step(record)
            assert loggers.names == ("wandb",)
            loggers.close()
    kept = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(kept) == 2
    assert len({path.name for path in kept}) == 1, "one run, kept in two parts"
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in map(Record.FromString, read_records(kept[0]))
        if record.HasField("history")
    ]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row.get("reward/mean") for row in rows] == [None, 0.5, 0.75]
    assert rows[1]["alarm/kl_blow_up"] == 1


# ── chains of an evaluation ──

EVIL = "<script>alert(1)</script> **bold**"


def create_evaluated_run(path: Path) -> RunWriter:
    run = RunWriter.create(path, {})
    chains = [chain(f"{task}/{number}", task / 10, says=f"{EVIL} {task}") for task in range(10) for number in range(2)]
    run.write_trajectories(0, chains, held_out=True)
    return run


def test_a_few_chains_are_logged_from_the_lowest_reward_to_the_highest(tmp_path: Path) -> None:
    with create_evaluated_run(tmp_path) as run:
        assert [sampled.id for sampled in sample_chains(run, 0)] == ["0/0", "3/0", "6/0", "9/0"]
        assert sample_chains(run, 1) == []
        (html, markdown) = (
            format_chain(sample_chains(run, 0)[0]) for format_chain in (format_chain_html, format_chain_markdown)
        )
    assert "<script>" not in html
    assert 'title="model"' in html
    assert f"**model**\n\n    assistant: {EVIL} 0" in markdown
    long = format_chain_html(chain(says="x" * 100_000))
    assert "more characters)" in long
    assert len(long) < 30_000


def test_tensorboard_gets_chains(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: pip install 'agentfly-rl[tensorboard]'")
    with create_evaluated_run(tmp_path) as run:
        loggers = open_loggers(["tensorboard"], run)
        loggers.start({})
        loggers.step(RECORDS[0])
        loggers.close()
    texts = {
        v.tag: v.tensor.string_val[0].decode()
        for e in events(tmp_path / "tensorboard")
        for v in e.summary.value
        if v.tag.startswith("chains/")
    }
    assert len(texts) == LOGGED_CHAINS
    assert any(f"assistant: {EVIL} 9" in text for text in texts.values())


@pytest.mark.integration
def test_wandb_gets_a_table_of_chains(tmp_path: Path, offline: None) -> None:
    with create_evaluated_run(tmp_path / "run") as run:
        loggers = open_loggers(["wandb"], run)
        loggers.start({})
        loggers.step(RECORDS[0])
        assert loggers.names == ("wandb",)
        loggers.close()
    (table,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["chain", "task", "reward", "stop", "text"]
    assert [row[0] for row in content["data"]] == ["0/0", "3/0", "6/0", "9/0"]
    assert all(f"**model**\n\n    assistant: {EVIL} {row[0][0]}" in row[-1] for row in content["data"])


@pytest.mark.integration
def test_settings_of_wandb_apply(tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    for name in ("PROJECT", "ENTITY", "NAME"):
        monkeypatch.setenv(f"WANDB_{name}", f"our-{name.lower()}")
    with RunWriter.create(tmp_path / "run", {}) as run:
        loggers = open_loggers(["wandb"], run)
        loggers.start({})
        assert wandb.run is not None
        assert (wandb.run.project, wandb.run.entity, wandb.run.name) == ("our-project", "our-entity", "our-name")
        loggers.close()


# ── MLflow ──


@pytest.mark.integration
def test_mlflow_keeps_one_run_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'agentfly-rl[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)  # where MLflow stores without a server
    with create_evaluated_run(tmp_path / "run") as run:
        for part in (RECORDS, RECORDS[1:2]):
            loggers = open_loggers(["mlflow"], run)
            loggers.start({"model": "tiny", "optimizer": {"learning_rate": 1.0}})
            for record in part:
                loggers.step(record)
            assert loggers.names == ("mlflow",)
            loggers.close()
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("agentfly")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.data.params["model"] == "tiny"
    assert logged.info.status == "FINISHED"
    assert [metric.value for metric in client.get_metric_history(logged.info.run_id, "reward/mean")][:2] == [0.5, 0.75]
    assert [artifact.path for artifact in client.list_artifacts(logged.info.run_id, "chains")] == [
        "chains/step-000000.html"
    ]
