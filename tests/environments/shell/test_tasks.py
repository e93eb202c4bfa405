"""Generated shell tasks, and InterCode-Bash."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agentfly.environments.shell import Shell, nl2bash_tasks
from agentfly.environments.shell.environment import text_similarity
from agentfly.environments.shell.tasks import KINDS, task_key
from agentfly.errors import DataError
from agentfly.sandbox import SandboxUnavailable
from agentfly.types import Task


def test_splits_are_fixed_and_share_no_task() -> None:
    splits = {(split, seed): Shell.draw_tasks(split, 100, seed=seed) for split in ("train", "validation", "test")
              for seed in (0, 1)}  # fmt: skip
    marks = [task_key(row["question"], row["files"]) for rows in splits.values() for row in rows]
    assert len(set(marks)) == len(marks)
    assert splits["train", 0][:30] == Shell.draw_tasks("train", 30)
    assert {row["kind"] for row in splits["test", 0]} == set(KINDS)
    assert json.loads(json.dumps(splits["test", 1])) == splits["test", 1]
    assert {row["kind"] for row in Shell.draw_tasks("train", 4, kinds=["grep"])} == {"grep"}


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(DataError, match="train, validation, test"):
        Shell.draw_tasks("dev", 1)
    with pytest.raises(DataError, match="archive"):
        Shell.draw_tasks("train", 1, kinds=["dance"])


def test_text_similarity_equals_tf_idf() -> None:
    # what scikit-learn's TfidfVectorizer gives for these two texts
    assert text_similarity("the red car", "the blue car") == pytest.approx(0.5031026, abs=1e-6)
    assert text_similarity("a b", "a b") == 1.0  # words of one letter do not count; the texts are the same
    assert text_similarity("", "word") == 0.0


def test_missing_files_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AGENTFLY_DATA", raising=False)
    with pytest.raises(DataError, match="princeton-nlp/intercode"):
        nl2bash_tasks("test")
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    folder = tmp_path / "bash"
    folder.mkdir()
    with pytest.raises(DataError, match=r"no nl2bash_fs_1\.json"):
        nl2bash_tasks("test")
    (folder / "nl2bash_fs_1.json").write_text('[{"query": "?"}]')
    with pytest.raises(DataError, match=r"no setup_nl2b_fs_1\.sh .*docker/bash_scripts"):
        nl2bash_tasks("test")
    (folder / "setup_nl2b_fs_1.sh").write_text("mkdir /testbed")
    with pytest.raises(DataError, match="row 0: a row has"):
        nl2bash_tasks("test", systems=(1,))
    with pytest.raises(DataError, match="for test only"):
        nl2bash_tasks("train")
    with pytest.raises(DataError, match="1 to 4"):
        nl2bash_tasks("test", systems=(5,))


async def test_official_task_runs_on_its_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    (tmp_path / "bash").mkdir()
    questions = [{"query": "count the lines of '/testbed/dir1/a.txt'", "gold": "wc -l < /testbed/dir1/a.txt"}]
    (tmp_path / "bash" / "nl2bash_fs_1.json").write_text(json.dumps(questions))
    script = "#!/bin/bash\nrm -rf /testbed/\nmkdir -p /testbed/dir1\nprintf 'x\\ny\\n' > /testbed/dir1/a.txt\n"
    (tmp_path / "bash" / "setup_nl2b_fs_1.sh").write_text(script)
    (row,) = nl2bash_tasks("test", systems=(1,))
    assert row["question"] == "count the lines of 'testbed/dir1/a.txt'"
    env = Shell()
    try:
        await env.start()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")
    await env.reset(Task.of(row))
    await env.run_shell("cat testbed/dir1/a.txt | wc -l")
    assert (await env.evaluate())["match"]
    await env.close()


def test_official_questions_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = os.environ.get("AGENTFLY_DATA")
    if not data or not (Path(data) / "bash" / "nl2bash_fs_1.json").is_file():
        pytest.skip("AGENTFLY_DATA has no bash/nl2bash_fs_1.json")
    (tmp_path / "bash").mkdir()
    for number in range(1, 5):  # the file systems are not in this data
        name = f"nl2bash_fs_{number}.json"
        (tmp_path / "bash" / name).write_bytes((Path(data) / "bash" / name).read_bytes())
        (tmp_path / "bash" / f"setup_nl2b_fs_{number}.sh").write_text("mkdir /testbed")
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    rows = nl2bash_tasks("test")
    assert len(rows) == 200
    assert not [row for row in rows if " /testbed" in row["gold"]]
