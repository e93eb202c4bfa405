"""The run directory: round trip, and integrity after a kill, on a full disk and with a second process."""

import dataclasses
import enum
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentfly.errors import ConfigError, DataError
from agentfly.runs import Alarm, EvalFigures, RunDirectory, RunWriter, StepRecord
from agentfly.runs.summary import ChainSummary
from agentfly.trajectory import CallStatus, Score
from agentfly.types import Task
from tests.runs.chains import call, chain, step

CONFIG = {"model": "tiny", "steps": 10, "where": Path("here")}


def create(path: Path) -> RunWriter:
    return RunWriter.create(path, CONFIG)


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text("agent = None\n")
    alarm = Alarm("kl_blow_up", "far \udc80 off", ("0/1", "2/3"), 1)
    records = [
        StepRecord(0, 10, eval=EvalFigures(0.25, 0.1, 0.4, 16, {"pass@1": 0.25})),
        step(1, leased=3, waiting=2, alarms=(alarm,)),
        step(2, eval=EvalFigures(0.5, 0.3, 0.7, 16)),
    ]
    with RunWriter.create(tmp_path / "run", CONFIG, recipe) as run:
        for record in records:
            run.append(record)
        assert RunDirectory(run.path).records() == records  # while it is being written
    assert run.config == {"model": "tiny", "steps": 10, "where": "here"}
    assert (run.path / "recipe.py").read_text() == recipe.read_text()
    assert run.alarms() == [alarm]


def test_nan_is_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.append(step(1, metrics={"policy/kl": math.nan, "policy/grad_norm": math.inf}))
    assert "NaN" not in run.metrics_file.read_text()
    (record,) = run.records()
    assert math.isnan(record.metrics["policy/kl"])
    assert math.isnan(record.metrics["policy/grad_norm"])


def test_metrics_of_any_type_and_name_are_kept(tmp_path: Path) -> None:
    metrics = {"policy/kl": np.float32(0.5), "count": np.int64(3), "eval/own": 1.0, "step": 77.0}
    record = step(1, metrics=metrics, eval=EvalFigures(np.float32(0.5), 0.0, 1.0, 4, {"turns": np.float64(2)}))
    with create(tmp_path) as run:
        run.append(record)
    (kept,) = run.records()
    assert (kept.step, kept.metrics["policy/kl"], kept.metrics["count"], kept.metrics["eval/own"]) == (1, 0.5, 3, 1)
    assert kept.eval == EvalFigures(0.5, 0.0, 1.0, 4, {"turns": 2.0})


def test_run_directory_is_absolute_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunWriter.create("run", {"odd": math.nan, 3: "three"}) as run:
        monkeypatch.chdir("/")
        run.append(step(1))
        assert len(RunDirectory(tmp_path / "run").records()) == 1
        assert run.config == {"odd": None, "3": "three"}


def test_values_of_derived_types_are_stored_as_plain_json(tmp_path: Path) -> None:
    class Level(str, enum.Enum):  # noqa: UP042
        HIGH = "high"

        def __new__(cls, text: str) -> "Level":
            level = str.__new__(cls, text)
            level._value_ = (text, 3)
            return level

    @dataclasses.dataclass
    class Size(dict[str, int]):
        width: int = 5

    size = Size()
    size["height"] = 2
    stored_chain = chain(reward=1.0, metrics={"level": Level.HIGH})
    stored_chain = dataclasses.replace(
        stored_chain, task=Task(stored_chain.task.messages, {"size": size}, stored_chain.task.id)
    )
    with create(tmp_path) as run:
        assert run.write_trajectories(1, [stored_chain]) == []
    (kept,) = run.trajectories(1)
    assert kept.trajectory.score == Score(1.0, None, {"level": "high"})
    assert kept.trajectory.task.columns == {"size": {"height": 2}}


def test_deeply_nested_value_is_kept_or_named(tmp_path: Path) -> None:
    value: list[Any] = []
    with create(tmp_path) as run:
        for depth in range(1, 1100):
            value = [value]
            if depth == 600 or depth > 900:
                problems = run.write_trajectories(depth, [chain(reward=1.0, metrics={"deep": value})])
                assert all("is not stored" in problem for problem in problems)
                assert len(run.trajectories(depth)) == 1 - len(problems)


def test_chains_are_kept_with_the_advantage_of_each_token(tmp_path: Path) -> None:
    first, second = chain("0/0", 1.0, says="NaN"), chain("0/1", 0.0, says="No \x00 \u2028 \udc80.")
    worth = [np.array([0, 0, 0, 0, 0.5, -0.25, 1e-6], np.float32)]
    with create(tmp_path) as run:
        assert run.write_trajectories(7, [first, second], {"0/0": worth}) == []
        run.write_trajectories(7, [second], held_out=True)
    kept = RunDirectory(tmp_path).trajectories(7)
    assert [stored.trajectory for stored in kept] == [first, second]
    assert kept[0].advantages[0] == pytest.approx(worth[0], abs=1e-6)
    assert kept[1].advantages[0].tolist() == [0] * 7  # scored and not trained: its group had no variance
    (held_out,) = run.trajectories(7, held_out=True)
    assert (held_out.trajectory, held_out.advantages) == (second, ())
    assert run.trajectories(8) == []


def test_step_of_long_chains_is_written_and_read_line_by_line(tmp_path: Path) -> None:
    count, tokens = 96, 8_000
    with create(tmp_path) as run:
        run.write_trajectories(1, [chain()])  # what it imports on first use is not counted
        tracemalloc.start()
        try:
            assert run.write_trajectories(1, (chain(f"0/{number}", tokens=tokens) for number in range(count))) == []
            written_peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            stored = run.trajectories(1)
            kept, read_peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        text_size = len(gzip.decompress(run.trajectory_file(1).read_bytes()))
    assert [entry.trajectory.id for entry in stored] == [f"0/{number}" for number in range(count)]
    assert written_peak < text_size / 2  # never the text of all chains
    assert read_peak - kept < text_size / 2


def test_open_reader_keeps_the_old_trajectories_while_they_are_rewritten(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.write_trajectories(1, [chain("0/0")])
        before = run.trajectory_file(1).read_bytes()
        with run.trajectory_file(1).open("rb") as reading:
            run.write_trajectories(1, [chain("0/1")])
            assert reading.read() == before


def test_chain_that_is_not_json_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    odd = chain("0/0", 1.0, metrics={"seen": {1, 2}})
    untimed = chain("0/1", 1.0, seconds=math.nan)
    with create(tmp_path) as run:
        lost = run.write_trajectories(1, [odd, untimed, chain("0/2")], {"0/2": [np.array([math.nan, 1.0])]})
    assert [line.split(" is")[0] for line in lost] == ["chain 0/0", "chain 0/1"]
    assert "'seen' holds a set" in lost[0]
    assert np.isnan(run.trajectories(1)[0].advantages[0]).tolist() == [True, False]
    assert [stored.trajectory.id for stored in run.trajectories(1)] == ["0/2"]


# ── resuming ──


def test_resuming_drops_later_records(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        for number in range(1, 6):
            held = EvalFigures(0.5, 0.4, 0.6, 8) if number % 2 else None
            run.append(step(number, eval=held, alarms=(Alarm("kl_blow_up", "far", (), number),)))
            run.write_trajectories(number, [chain("0/0")])
            run.write_trajectories(number, [chain("0/0")], held_out=True)
            run.write_learner_logprobs(number, {"0/0#0": np.array([-0.5, -0.25], np.float32)})
        before = run.records()[:3]
    (tmp_path / "trajectories" / ".step-000009.jsonl.gz.12.part").write_bytes(b"left by a kill")
    with RunWriter.resume(tmp_path, 3) as run:
        assert run.records() == before
        assert sorted(path.name[:11] for path in (tmp_path / "trajectories").iterdir()) == sorted(
            f"{kind}-{number:06}"[:11] for kind in ("eval", "learner", "step") for number in (1, 2, 3)
        )
        assert (run.learner_logprobs(3)["0/0#0"].tolist(), run.learner_logprobs(4)) == ([-0.5, -0.25], {})
        run.append(step(4))
    assert [record.step for record in run.records()] == [1, 2, 3, 4]


def test_resuming_completes_an_interrupted_truncation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with create(tmp_path) as run:
        for number in (1, 2, 3):
            run.append(step(number, alarms=(Alarm("kl_blow_up", "far", (), number),)))
    with monkeypatch.context() as patch:
        patch.setattr("agentfly.runs.directory.write_atomic", _stop_at("alarms.jsonl"))
        with pytest.raises(KeyboardInterrupt):
            RunWriter.resume(tmp_path, 1)
    assert len(run.alarms()) == 3
    with RunWriter.resume(tmp_path, 1) as run:
        assert [record.step for record in run.records()] == [1]
        assert [alarm.step for alarm in run.alarms()] == [1]


def _stop_at(name: str):  # type: ignore[no-untyped-def]
    from agentfly.runs.files import write_atomic

    def stop(path: Path, data: bytes) -> None:
        if path.name == name:
            raise KeyboardInterrupt
        write_atomic(path, data)

    return stop


@pytest.mark.parametrize("torn", [b'{"step": 3, "rew', b'{"step": 3, "steps": 10}', b"\x00\x00\x00"])
def test_torn_last_line_is_cut_without_an_error(tmp_path: Path, torn: bytes) -> None:
    with create(tmp_path) as run:
        run.append(step(1))
        run.append(step(2))
    with run.metrics_file.open("ab") as file:
        file.write(torn)
    assert [record.step for record in run.records()] == [1, 2]
    with RunWriter.resume(tmp_path, 5) as run:
        run.append(step(3, 0.75))
    assert [record.metrics["reward/mean"] for record in run.records()] == [0.5, 0.5, 0.75]


def test_corrupt_line_is_named(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.append(step(1))
    for content in (b"nonsense\n", b"[1]\n", b'{"no": "step"}\n'):
        run.metrics_file.write_bytes(content)
        with pytest.raises(DataError, match="line"):
            run.records()


KILLED = """
import sys
from agentfly.runs import RunWriter
from tests.runs.chains import call, chain, step
run = RunWriter.create(sys.argv[1], {})
print("ready", flush=True)
for number in range(1, 100_000):
    run.write_trajectories(number % 5, [chain("0/0", 1.0)])
    run.append(step(number))
"""


@pytest.mark.integration
def test_a_run_that_is_killed_can_be_read_and_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        reading = RunDirectory(tmp_path)
        while len(reading.records()) < 20:
            pass
        os.kill(process.pid, signal.SIGKILL)
    steps = [record.step for record in reading.records()]
    assert steps == list(range(1, len(steps) + 1))
    assert all(len(reading.trajectories(number)) == 1 for number in range(5))
    with RunWriter.resume(tmp_path, 10) as run:
        assert [record.step for record in run.records()] == list(range(1, 11))


# ── one writer ──


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics.jsonl", '{"step": 9}'),
        ("metrics.jsonl", f'{{"step": 9, "steps": 9, "loss": 1{"0" * 400}}}'),
        ("evals.jsonl", '{"step": 9, "steps": 9, "metrics": 1}'),
        ("alarms.jsonl", '{"step": 1}'),
    ],
)
def test_line_with_other_fields_is_reported(tmp_path: Path, name: str, line: str) -> None:
    RunWriter.create(tmp_path / "run", {}).close()
    (tmp_path / "run" / name).write_text(f"{line}\n")
    with pytest.raises(DataError, match="damaged line"):
        RunDirectory(tmp_path / "run").records()


def test_folder_with_a_run_is_rejected_for_a_new_run(tmp_path: Path) -> None:
    create(tmp_path).close()
    with create(tmp_path) as run:  # a run without a finished step may start over
        run.append(step(1))
    with pytest.raises(ConfigError, match="has a run already; resume it"):
        create(tmp_path)
    with RunWriter.resume(tmp_path, 0):
        pass


def test_second_writer_is_rejected(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        with pytest.raises(ConfigError, match=f"being written by process {os.getpid()}"):
            RunWriter.resume(tmp_path, 0)
        run.append(step(1))
    RunWriter.resume(tmp_path, 1).close()


FORKED = """
import os, sys
from agentfly.runs import RunWriter
run = RunWriter.create(sys.argv[1], {})
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
else:
    os.wait()
"""


@pytest.mark.integration
def test_a_forked_child_that_outlives_a_killed_writer_does_not_keep_the_run_locked(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"forked\n"
        with pytest.raises(ConfigError, match="being written"):
            RunWriter.resume(tmp_path, 0)
        process.kill()
        process.wait()
        RunWriter.resume(tmp_path, 0).close()


def test_closed_run_rejects_writes(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.close()
    run.close()
    with pytest.raises(DataError, match="is closed"):
        run.append(step(1))


def test_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is not a run directory"), (tmp_path / "nowhere", "there is no run directory")):
        with pytest.raises(DataError, match=message):
            RunDirectory(path)
        with pytest.raises(DataError, match=message):
            RunWriter.resume(path, 0)
    assert not (tmp_path / "nowhere").exists()


def test_uncreatable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="could not be written"):
        create(tmp_path / "file" / "run")


def test_named_pipe_is_no_file_of_a_run(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        os.mkfifo(run.metrics_file)
        with pytest.raises(DataError, match=r"metrics\.jsonl could not be written"):
            run.append(step(1))
        with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read: not a regular file"):
            run.records()


def test_loop_of_links_is_reported(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.metrics_file.symlink_to(run.metrics_file)
        with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read: Too many levels of symbolic links"):
            run.records()


# ── a full disk ──

FULL = """
import resource, signal, sys
from agentfly.errors import DataError
from agentfly.runs import RunDirectory, RunWriter
from tests.runs.chains import call, chain, step
run = RunWriter.create(sys.argv[1], {})
run.append(step(1))
run.write_trajectories(1, [chain("0/0", 1.0)])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
room = run.metrics_file.stat().st_size + 20
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))  # what a full disk does, for one process
for number in (2, 3):
    try:
        run.append(step(number))
    except DataError as error:
        print(error)
try:
    run.write_trajectories(1, [chain(f"0/{i}", says=str(i ** 99) * 50) for i in range(50)])
except DataError as error:
    print(error)
"""


@pytest.mark.integration
def test_full_disk_is_reported_and_keeps_the_files_valid(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert all("could not be written" in line and "free disk space" in line for line in lines)
    run = RunDirectory(tmp_path)
    assert run.metrics_file.read_bytes().endswith(b"}\n")
    assert [record.step for record in run.records()] == [1]
    assert [stored.trajectory.id for stored in run.trajectories(1)] == ["0/0"]
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["step-000001.jsonl.gz"]


def test_run_is_named_by_its_recipe(tmp_path: Path) -> None:
    for recipe, name in (
        (None, "one"),
        ("/a/count.py", "count"),
        ("/a/lookup/recipe.py", "lookup"),
        ("recipe.py", "recipe"),
    ):
        folder = tmp_path / f"{name}-{recipe is None}" / "one"
        with RunWriter.create(folder, {} if recipe is None else {"recipe": recipe}):
            assert RunDirectory(folder).name == name


def test_a_stored_chain_has_a_summary(tmp_path: Path) -> None:
    trajectory = chain("3/1", 0.5, calls=[call(), call("search", CallStatus.TIMEOUT)], says="Seven.")
    with create(tmp_path / "run") as run:
        run.write_trajectories(1, [trajectory])
    (line,) = gzip.decompress(run.trajectory_file(1).read_bytes()).splitlines()
    summary = ChainSummary(**json.loads(line)["summary"])
    assert summary == ChainSummary.of(trajectory)
    assert (summary.group, summary.chain, summary.reward, summary.stop) == (3, 1, 0.5, "answer")
    assert (summary.tools, summary.calls, summary.failed_calls) == (["add", "search"], 2, 1)
    assert (summary.sampled_tokens, summary.tokens) == (3, 7)
    assert summary.text.splitlines() == ["Seven.", "3", "How many?", "", "Seven."]
