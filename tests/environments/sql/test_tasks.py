"""Generated questions, and Spider's files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentfly.data import read_tasks
from agentfly.environments.sql import SQL, spider_tasks
from agentfly.environments.sql.tasks import KINDS
from agentfly.errors import DataError
from agentfly.types import Task


def test_splits_are_fixed_and_share_no_question() -> None:
    question_row = {
        (split, seed): [row["question"] for row in SQL.draw_tasks(split, 60, seed=seed)]
        for split in ("train", "validation", "test")
        for seed in (0, 1)
    }
    seen = {split: {*question_row[split, 0], *question_row[split, 1]} for split, _ in question_row}
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    assert question_row["train", 0] != question_row["train", 1]
    assert SQL.draw_tasks("test", 20) == SQL.draw_tasks("test", 40)[:20]


def test_every_kind_of_question_is_drawn() -> None:
    rows = SQL.draw_tasks("train", 400)
    for level, kinds in KINDS.items():
        assert {row["kind"] for row in rows if row["level"] == level} == set(kinds)
    assert {row["level"] for row in SQL.draw_tasks("train", 50, levels=(2,))} == {2}


async def test_row_names_its_database_and_survives_a_file(tmp_path: Path) -> None:
    rows = SQL.draw_tasks("train", 6)
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert max(map(len, path.read_text().splitlines())) < 1000
    observations = []
    for task in (*read_tasks(path), *map(Task.of, rows)):
        env = SQL()
        await env.reset(task)
        observations.append(await env.sql_schema() + str(await env.evaluate(task.columns["gold"])))
        await env.close()
    assert observations[:6] == observations[6:]


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(DataError, match="train, validation, test"):
        SQL.draw_tasks("dev", 1)
    with pytest.raises(DataError, match="levels are a list of 1, 2, 3"):
        SQL.draw_tasks("train", 1, levels=(4,))
    with pytest.raises(DataError, match="validation"):
        spider_tasks("dev")


def test_missing_spider_is_reported_with_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AGENTFLY_DATA", raising=False)
    with pytest.raises(DataError, match="yale-lily"):
        spider_tasks("test")
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"no train_spider\.json"):
        spider_tasks("train")


def write(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))


def test_published_files_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    names = [f"db_{number}" for number in range(40)]
    for name in names:
        write(tmp_path / "spider" / "database" / name / f"{name}.sqlite", "")
    file = tmp_path / "spider" / "train_spider.json"
    write(file, [{"db_id": name, "question": f"How many in {name}?", "query": "SELECT 1"} for name in names])
    train, validation = spider_tasks("train"), spider_tasks("validation")
    assert len(train) + len(validation) == 40
    assert 0 < len(validation) < 10
    assert (train[0]["question"], train[0]["gold"]) == ("How many in db_0?", "SELECT 1")
    for bad_row, error in (
        ([{"db_id": "x"}], "row 0"),
        ("[", "cannot be read"),
        ([7], "not an object with columns"),
    ):
        write(file, bad_row)
        with pytest.raises(DataError, match=error):
            spider_tasks("train")
    write(file, [{"db_id": "gone", "question": "?", "query": "SELECT 1"}])
    with pytest.raises(DataError, match=r"no gone\.sqlite"):
        spider_tasks("train")


async def test_gold_queries_of_spider_match() -> None:
    data = os.environ.get("AGENTFLY_DATA")
    if not data or not (Path(data) / "spider" / "questions.json").is_file():
        pytest.skip("AGENTFLY_DATA has no spider/questions.json")
    rows, empty = spider_tasks("test"), 0
    env = SQL()
    for row in rows:
        await env.reset(Task.of(row))
        scores = await env.evaluate(row["gold"])
        assert scores["match"], row
        assert scores["iou"] == 1.0
        empty += scores["empty"]
        assert not (await env.evaluate("SELECT 1 WHERE 0"))["match"]
    await env.close()
    assert len(rows) >= 661
    assert empty < len(rows) / 8
