"""Dataset files, written and read."""

from __future__ import annotations

import datetime
import gzip
import json
import lzma
import subprocess
import sys
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentfly.data import load_trajectories, read_tasks, save_trajectories, select
from agentfly.errors import ConfigError, DataError
from agentfly.types import Task
from tests.runs.chains import chain

try:
    from PIL import Image as Picture
except ModuleNotFoundError:  # pillow is not in the core
    Picture = None

needs_pillow = pytest.mark.skipif(Picture is None, reason="needs pillow")

ROWS: list[dict[str, Any]] = [
    {"question": "1 + 1?", "answer": 2, "id": "sum"},
    {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}], "answer": 4},
]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("t.json", json.dumps(ROWS, indent=1).encode(), id="json"),
        pytest.param("t.JSON", b"\xef\xbb\xbf" + json.dumps(ROWS).encode(), id="json with a BOM"),
        pytest.param("t.jsonl", LINES.encode(), id="jsonl"),
        pytest.param("t.ndjson", b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n\r\n").encode() + b"\n\n", id="ndjson"),
        pytest.param("t.jsonl.gz", gzip.compress(LINES.encode()), id="gz"),
        pytest.param("t.v2.jsonl.xz", lzma.compress(LINES.encode()), id="xz"),
        pytest.param("t.json.gz", gzip.compress(json.dumps(ROWS).encode()), id="json gz"),
    ],
)
def test_every_format_of_json_gives_the_same_tasks(tmp_path: Path, name: str, content: bytes) -> None:
    first, second = read_tasks(write_file(tmp_path, name, content))
    assert (first.id, first.question, first.columns) == ("sum", "1 + 1?", ROWS[0])
    assert (second.id, second.question, second.columns) == ("1", "2 + 2?", {"answer": 4})
    assert [message.role for message in second.messages] == ["system", "user"]


def test_unicode_line_separator_does_not_end_a_row(tmp_path: Path) -> None:
    path = write_file(tmp_path, "t.jsonl", json.dumps({"question": "a\u2028b\u0085c"}, ensure_ascii=False))
    assert [task.question for task in read_tasks(path)] == ["a\u2028b\u0085c"]


# CSV.


def test_csv_cells_are_text(tmp_path: Path) -> None:
    path = write_file(
        tmp_path,
        "t.csv",
        "\ufeffid,question,answer,price,done,note\r\n"
        '01,42,2,1.5,true,"two\r\nlines, ""quoted"""\r\n'
        "\r\n"
        ",17,-8,,false,\r\n",
    )
    first, second = read_tasks(path)
    assert (first.id, first.question, second.id, second.question) == ("01", "42", "1", "17")
    assert {**first.columns} == {
        "id": "01", "question": "42", "answer": "2", "price": "1.5", "done": "true", "note": 'two\r\nlines, "quoted"',
    }  # fmt: skip
    assert {**second.columns} == {
        "id": None, "question": "17", "answer": "-8", "price": None, "done": "false", "note": None,
    }  # fmt: skip


def test_csv_holds_conversations_as_json(tmp_path: Path) -> None:
    path = write_file(tmp_path, "t.csv", 'messages,target\n"[{""role"": ""user"", ""content"": ""Hi""}]",3\n')
    (task,) = read_tasks(path)
    assert (task.question, task.columns) == ("Hi", {"target": "3"})


def test_csv_cells_may_be_long(tmp_path: Path) -> None:
    path = write_file(tmp_path, "t.csv.gz", gzip.compress(b"question\n" + b"x" * 200_000))
    assert len(read_tasks(path)[0].question) == 200_000


# Parquet.


def test_parquet_values_are_json_values(tmp_path: Path) -> None:
    when = datetime.datetime(2025, 1, 2, 3, 4, 5)
    row = {
        "question": "Q",
        "targets": [1, 2],
        "meta": {"level": 1.5, "tags": ["a"]},
        "when": when,
        "day": when.date(),
        "took": datetime.timedelta(seconds=90),
        "price": Decimal("1.50"),
        "none": None,
    }
    (task,) = read_tasks(parquet(tmp_path / "t.parquet", [row]))
    assert task.columns == {
        **row, "when": "2025-01-02T03:04:05", "day": "2025-01-02", "took": 90.0, "price": 1.5,
    }  # fmt: skip
    assert json.loads(json.dumps(task.columns)) == task.columns


def test_parquet_of_conversations_and_of_many_rows(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Q{i}"}], "n": i} for i in range(1000)]
    tasks = read_tasks(parquet(tmp_path / "t.parquet", rows))
    assert [(task.id, task.question, task.columns) for task in (tasks[0], tasks[999])] == [
        ("0", "Q0", {"n": 0}),
        ("999", "Q999", {"n": 999}),
    ]


def test_parquet_image_becomes_a_data_uri(tmp_path: Path) -> None:
    rows = [{"question": "Q", "image": {"bytes": b"\x89PNG", "path": None}, "images": [b"\x89PNG"]}]
    (task,) = read_tasks(parquet(tmp_path / "t.parquet", rows))
    uri = "data:image/png;base64,iVBORw=="
    assert (task.columns["image"], task.columns["images"]) == (uri, [uri])
    assert [image.url for image in task.messages[0].images] == [uri]


def test_missing_pyarrow_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path, "t.parquet", b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentfly-rl\[parquet\]'"):
        read_tasks(path)


# The question.


def test_another_column_can_be_the_question(tmp_path: Path) -> None:
    rows = [{"problem": "P", "messages": [{"role": "user", "content": "old"}], "x": 1}, {"problem": "R"}]
    first, second = read_tasks(write_file(tmp_path, "t.json", json.dumps(rows)), question="problem")
    assert (first.question, first.columns) == ("P", {"question": "P", "problem": "P", "x": 1})
    assert second.question == "R"


def test_question_column_is_kept_when_another_is_used(tmp_path: Path) -> None:
    (task,) = read_tasks(write_file(tmp_path, "t.json", '[{"problem": "P", "question": "Q"}]'), question="problem")
    assert (task.messages[0].text, task.columns["question"]) == ("P", "Q")


@needs_pillow
def test_image_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "pics").mkdir()
    Picture.new("RGB", (2, 2)).save(tmp_path / "pics" / "a.png")
    parts = [{"type": "text", "text": "See"}, {"type": "image", "image": "pics/a.png"}]
    rows: list[dict[str, Any]] = [
        {"question": "See", "image": "pics/a.png"},
        {"question": "See", "images": ["pics/a.png", "https://example.org/b.png"]},
        {"messages": [{"role": "user", "content": parts}]},
    ]
    tasks = read_tasks(write_file(tmp_path, "t.json", json.dumps(rows)))
    assert [len(task.messages[0].images) for task in tasks] == [1, 2, 1]
    assert all(task.messages[0].images[0].url.startswith("data:image/png;base64,") for task in tasks)
    assert tasks[0].columns["image"] == "pics/a.png"


# What cannot be read.

GOOD = '{"question": "Q"}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.jsonl", GOOD + "{oops}", ["t.jsonl, line 2: it is not JSON"]),
        ("t.jsonl", GOOD + "\n\n[1]", ["line 4: a row must be an object of columns, not a list"]),
        ("t.jsonl", GOOD + "null", ["line 2: a row must be an object of columns, not nothing"]),
        ("t.jsonl", GOOD + '{"answer": 3}', ["line 2: a row needs a 'question' or 'messages'; the row has 'answer'"]),
        ("t.jsonl", '{"problem": "P"}', ["question='problem' takes that column"]),
        ("t.jsonl", '{"question": " "}', ["line 1", "non-empty"]),
        ("t.jsonl", '{"question": 5}', ["line 1: 'question' must be text, not 5"]),
        ("t.jsonl", '{"question": null}', ["line 1: 'question' must be text, not nothing"]),
        ("t.jsonl", '{"question": "Q", "x": NaN}', ["line 1", "NaN is not JSON; write null"]),
        ("t.jsonl", '{"messages": []}', ["line 1", "non-empty list of messages"]),
        ("t.jsonl", '{"messages": "Hi"}', ["line 1", "non-empty list of messages"]),
        ("t.jsonl", '{"messages": [{"role": "boss", "content": "x"}]}', ["line 1", "role 'boss'"]),
        ("t.jsonl", '{"messages": [{"role": "user", "tool_calls": ["x"]}]}', ["line 1", "not a tool call"]),
        ("t.jsonl", '{"question": "Q", "image": "no.png"}', ["line 1", "no image at 'no.png'"]),
        ("t.jsonl", json.dumps({"question": "Q", "image": "A" * 9000}), ["line 1", "too long"]),
        ("t.jsonl", GOOD.encode() + b'{"question": "\xe9"}', ["line 2: it is not UTF-8"]),
        ("t.jsonl", LINES.encode("utf-16"), ["not UTF-8"]),
        ("t.jsonl", "", ["t.jsonl has no rows"]),
        ("t.jsonl", "\n \n", ["t.jsonl has no rows"]),
        ("t.json", "", ["t.json has no rows"]),
        ("t.json", "[]", ["t.json has no rows"]),
        ("t.jsonl", '{"question": "Q", "x": ' + "[" * 100_000, ["line 1", "nested too deeply"]),
        ("t.json", "[" * 100_000, ["t.json is not JSON", "nested too deeply"]),
        ("t.json", "[{]", ["t.json is not JSON", "line 1 column 3"]),
        ("t.json", GOOD * 2, ["t.json is not JSON", "name it .jsonl"]),
        ("t.json", '{"question": "Q"}', ["must hold a list of rows, not a dict"]),
        ("t.json", '[{"question": "Q"}, 7]', ["t.json, row 1: a row must be an object of columns, not 7"]),
        ("t.json", b'[{"question": "\xe9"}]', ["t.json is not UTF-8", "save it as UTF-8"]),
        ("t.csv", "", ["t.csv has no rows"]),
        ("t.csv", "question,answer\n", ["t.csv has no rows"]),
        ("t.csv", "question,a,a\nQ,1,2\n", ["line 1: the header names 'a' more than once"]),
        ("t.csv", "question,a\nQ,1\nQ\n", ["t.csv, line 3: 1 cells under a header of 2"]),
        ("t.csv", "question,a\nQ,1,2\n", ["line 2: 3 cells under a header of 2"]),
        ("t.csv", "question,a\n,1\n", ["line 2: 'question' must be text, not nothing"]),
        ("t.csv", 'question,a\n"Q"x,1\n', ["line 2: it is not CSV"]),
        ("t.csv", '"question"x,a\nQ,1\n', ["line 1: it is not CSV"]),
        ("t.csv", "messages\nHi\n", ["line 2: 'messages' is not JSON"]),
        ("t.csv", b"question\ncaf\xe9\n", ["t.csv is not UTF-8"]),
        pytest.param(
            "t.parquet",
            b"nonsense",
            ["t.parquet is not a readable parquet file"],
            marks=pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow"),
        ),
        ("t.jsonl.gz", b"nonsense", ["t.jsonl.gz cannot be read"]),
        ("t.jsonl.gz", gzip.compress(GOOD.encode() * 9, mtime=0)[:-9], ["t.jsonl.gz cannot be read"]),
        ("t.jsonl.xz", b"nonsense", ["t.jsonl.xz cannot be read"]),
        ("t.txt", GOOD, ["t.txt has no known suffix; known are .json, .jsonl"]),
        ("tasks", GOOD, ["no known suffix"]),
        ("t.gz", gzip.compress(GOOD.encode(), mtime=0), ["no known suffix"]),
        ("t.parquet.gz", b"", ["no known suffix"]),
    ],
)
def test_unreadable_row_is_named_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, words: list[str]
) -> None:
    path = write_file(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        read_tasks(path)
    assert str(path) in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


def test_bytes_that_are_not_an_image_are_rejected(tmp_path: Path) -> None:
    rows = [{"question": "Q", "hash": None}, {"question": "Q", "hash": b"\x01"}]
    path = parquet(tmp_path / "t.parquet", rows)
    with pytest.raises(DataError, match=r"row 1: it holds bytes"):
        read_tasks(path)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (1, [", line 2: "]),
        (3, ["3 of 4 rows cannot be read", "\n  line 2: ", "\n  line 4: "]),
        (4, ["4 of 5 rows cannot be read", "\n  line 4: ", "\n  and 1 more row"]),
        (15, ["15 of 16 rows cannot be read", "\n  and 12 more rows"]),
    ],
)
def test_every_bad_row_is_counted(tmp_path: Path, bad: int, words: list[str]) -> None:
    path = write_file(tmp_path, "t.jsonl", GOOD + '{"question": ""}\n' * bad)
    with pytest.raises(DataError) as caught:
        read_tasks(path)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "line 5" not in str(caught.value)
    assert ("more row" in str(caught.value)) == (bad > 3)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ('[{"question": "Q"}]', "no column 'problem' to take the question from; the row has 'question'"),
        ('[{"problem": ["P"]}]', "'problem' is to be the question and must be text, not a list"),
        ('[{"problem": ""}]', "'problem' is to be the question and must be text, not nothing"),
    ],
)
def test_missing_question_column_is_rejected(tmp_path: Path, rows: str, words: str) -> None:
    with pytest.raises(DataError, match=f"row 0: {words}"):
        read_tasks(write_file(tmp_path, "t.json", rows), question="problem")


def test_missing_file_lists_similar_names(tmp_path: Path) -> None:
    write_file(tmp_path, "train.jsonl", GOOD)
    write_file(tmp_path, "notes.txt", "")
    with pytest.raises(DataError, match=r"no file .*trian\.jsonl; near it are train\.jsonl$"):
        read_tasks(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"no file .*zzz; near it are train\.jsonl$"):
        read_tasks(str(tmp_path / "zzz"))
    with pytest.raises(DataError, match=r"no file .*: there is no folder .*nowhere$"):
        read_tasks(tmp_path / "nowhere" / "train.jsonl")
    with pytest.raises(
        DataError,
        match=r"is a folder without task folders .NAME/task.toml.; name one file in it; near it are train\.jsonl$",
    ):
        read_tasks(tmp_path)


# Picking tasks.

TASKS = [Task.of("a", "0"), Task.of("b", "algebra-1"), Task.of("c", "2"), Task.of("d", "1"), Task.of("e", "twin")]
TASKS.append(Task.of("f", "twin"))


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("0", "a"),
        (" 4 ", "e"),
        ("-1", "f"),
        ("1", "d"),  # an id goes before an index
        ("1:2", "b"),
        ("2:4", "cd"),
        (":2", "ab"),
        ("4:", "ef"),
        (":", "abcdef"),
        ("-2:", "ef"),
        ("4:100", "ef"),
        ("algebra-1", "b"),
        ("twin", "ef"),
    ],
)
def test_select_by_id_index_and_range(spec: str, chosen: str) -> None:
    assert "".join(task.question for task in select(TASKS, spec)) == chosen


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("6", "no task 6: there are 6, counted from 0"),
        ("-7", "no task -7"),
        ("3:3", "the range '3:3' selects none of the 6 tasks"),
        ("10:20", "the range '10:20' selects none"),
        ("algebra1", "no task has the id 'algebra1'; close ones are 'algebra-1'"),
        ("", "no task has the id ''"),
        ("1:2:3", "no task has the id '1:2:3'.*a range"),
    ],
)
def test_select_without_match_is_an_error(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        select(TASKS, spec)


@pytest.mark.integration
def test_reading_data_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "pyarrow", "datasets"}
    code = f"import sys, agentfly.data; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_saved_trajectories_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "chains.jsonl"
    chains = [chain("0/0", 1.0), chain("0/1", says="\ud800")]
    save_trajectories(path, chains)
    assert [chain.to_json() for chain in load_trajectories(path)] == [chain.to_json() for chain in chains]
    path.write_text('{"no": "trajectory"}\n')
    with pytest.raises(DataError, match=r"chains.jsonl, line 1: not a trajectory"):
        load_trajectories(path)
    with pytest.raises(DataError, match="cannot be read"):
        load_trajectories(tmp_path / "none.jsonl")
