"""HotpotQA and 2WikiMultihopQA, as their authors publish them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bm25s", reason="searching by words needs bm25s: pip install 'agentfly-rl[search]'")

from agentfly.environments.search import Search, hotpotqa_tasks, two_wiki_passages, two_wiki_tasks
from agentfly.environments.search.index import BM25Index
from agentfly.errors import DataError
from agentfly.types import Task

ROW = {
    "_id": "5a8b", "question": "Were Ed Wood and Al of one nationality?", "answer": "yes", "type": "comparison",
    "level": "hard", "supporting_facts": [["Al", 0], ["Ed Wood", 0], ["Ed Wood", 1]],
    "context": [["Ed Wood", ["Ed Wood was American.", " He made films."]], ["Al", ["Al is American."]]],
}  # fmt: skip


def write(folder: Path, name: str, rows: Any) -> Path:
    path = folder / "retrieval" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    return tmp_path


def test_published_format_is_read(folder: Path) -> None:
    write(folder, "hotpot_dev_distractor_v1.json", [ROW])
    write(folder, "2wikimultihop/dev.json", [{**ROW, "evidences": [["a", "b", "c"]]}])
    texts = {"Ed Wood": "Ed Wood was American. He made films.", "Al": "Al is American."}
    expected = {
        "id": "5a8b", "question": ROW["question"], "answer": "yes", "kind": "comparison", "titles": ["Al", "Ed Wood"],
        "passages": [{"title": title, "text": text} for title, text in texts.items()],
    }  # fmt: skip
    assert hotpotqa_tasks("test") == two_wiki_tasks("test") == [expected]


def test_train_and_validation_share_no_question(folder: Path) -> None:
    write(folder, "hotpot_train_v1.1.json", [{**ROW, "_id": str(n), "question": f"Q{n}?"} for n in range(400)])
    train, validation = ({row["question"] for row in hotpotqa_tasks(s)} for s in ("train", "validation"))
    assert not train & validation
    assert len(train | validation) == 400
    assert 5 < len(validation) < 40


def test_missing_file_is_reported_with_its_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"has no 2wiki_train.json or .*https://github.com/Alab-NII/2wikimultihop"):
        two_wiki_tasks("train")
    with pytest.raises(DataError, match="no split 'dev'; there are train, validation, test"):
        hotpotqa_tasks("dev")
    monkeypatch.delenv("AGENTFLY_DATA")
    with pytest.raises(DataError, match=r"HotpotQA is not shipped: get it from https://hotpotqa.*set AGENTFLY_DATA"):
        hotpotqa_tasks("train")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": 1}, "a list of rows, not a dict"),
        ([ROW, {"question": "Q"}], "row 1: a row has the texts question and answer"),
        ([{**ROW, "context": [["only a title"]]}], "row 0: its context or supporting facts have an unknown shape"),
        ([{**ROW, "context": {"title": ["a"]}}], "row 0: its context"),
    ],
)
def test_corrupt_files_are_reported(folder: Path, rows: Any, message: str) -> None:
    write(folder, "hotpot_dev_distractor_v1.json", rows)
    with pytest.raises(DataError, match=message):
        hotpotqa_tasks("test")
    (folder / "retrieval" / "hotpot_dev_distractor_v1.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        hotpotqa_tasks("test")


@pytest.fixture
def data() -> None:
    if not Path(os.environ.get("AGENTFLY_DATA", "nowhere"), "retrieval").is_dir():
        pytest.skip("AGENTFLY_DATA names no folder with `retrieval` in it")


async def test_questions_with_passages_are_searchable(data: None) -> None:
    rows = hotpotqa_tasks("test", file="hotpotqa_closed_60.json")
    assert len(rows) == 60
    assert rows[0]["answer"] == "yes"
    assert len(rows[0]["passages"]) == 10
    hits = 0
    for row in rows:
        world = Search()
        await world.start()
        await world.reset(Task.of(row))
        for title in row["titles"]:
            hits += title in (await world.search(query=title))["titles"]
    assert hits >= 115  # of 120; some titles are words of all the texts


def test_dev_set_is_read(data: None) -> None:
    rows = hotpotqa_tasks("test", file="hotpotqa_dev_pairs.json")
    assert len(rows) == 7405
    assert "passages" not in rows[0]


def test_two_wiki_corpus_is_read_and_indexed(data: None) -> None:
    passages = two_wiki_passages()
    assert len(passages) == 6119
    assert passages[0].title == "Teutberga"
    index = BM25Index(passages)
    (hits,) = index.search(["Who was the husband of Teutberga?"], 3)
    assert hits[0].passage.title == "Teutberga"
