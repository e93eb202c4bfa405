"""Rows of other frameworks: the same tasks, whatever format they come in."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly import reward
from agentfly.data import read_tasks
from agentfly.data.huggingface import is_dataset
from agentfly.errors import ConfigError, DataError
from tests.fakes import byte_agent

SUMS = [(f"{number} + {number}?", str(2 * number)) for number in range(10)]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


OURS = [{"question": question, "ground_truth": answer} for question, answer in SUMS]
TRL = [{"prompt": user(question), "ground_truth": answer} for question, answer in SUMS]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": question}], "ground_truth": answer} for question, answer in SUMS
]
VERL = [
    {
        "data_source": "sums",
        "prompt": user(question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": index},
    }
    for index, (question, answer) in enumerate(SUMS)
]


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@reward
def exact(prediction: str, ground_truth: str) -> float:
    return float(prediction == ground_truth)


@pytest.mark.integration
async def test_ten_tasks_are_the_same_in_every_format(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(VERL).to_parquet(tmp_path / "verl.parquet")
    datasets.Dataset.from_list(TRL).save_to_disk(tmp_path / "saved")
    splits = {"train": datasets.Dataset.from_list(OURS), "test": datasets.Dataset.from_list(OURS[:3])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    native_tasks = read_tasks(write_lines(tmp_path / "ours.jsonl", *OURS))
    sources = [
        native_tasks,
        read_tasks(tmp_path / "verl.parquet"),
        read_tasks(write_lines(tmp_path / "trl.jsonl", *TRL)),
        read_tasks(write_lines(tmp_path / "sharegpt.jsonl", *SHAREGPT)),
        read_tasks(tmp_path / "saved"),
        read_tasks(tmp_path / "splits", split="train"),
        read_tasks(datasets.Dataset.from_list(VERL)),
        read_tasks(datasets.Dataset.from_list(VERL).to_iterable_dataset(), limit=10),
    ]
    replies = [answer if number % 3 else "no idea" for number, (_, answer) in enumerate(SUMS)]
    expected_rewards = [float(reply != "no idea") for reply in replies]
    for tasks in sources:
        assert [(task.id, task.messages) for task in tasks] == [(task.id, task.messages) for task in native_tasks]
        rewards = []
        for task, reply in zip(tasks, replies, strict=True):
            (chain,) = await byte_agent(reply, reward=exact).run(task)
            rewards.append(chain.reward)
        assert rewards == expected_rewards


def test_columns_of_verl_are_kept(tmp_path: Path) -> None:
    (text,) = read_tasks([{**VERL[3], "prompt": "3 + 3?", "extra_info": "none"}])
    assert (text.question, text.columns["ground_truth"], text.columns["extra_info"]) == ("3 + 3?", "6", "none")
    first, *_ = read_tasks(write_lines(tmp_path / "t.jsonl", *VERL))
    expected = {name: value for name, value in VERL[0].items() if name != "prompt"}
    assert first.columns == {**expected, "ground_truth": "0"}


def test_trl_prompt_may_be_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", {"prompt": "1 + 1?", "completion": " 2"})
    (task,) = read_tasks(path)
    assert (task.question, len(task.messages), task.columns["completion"]) == ("1 + 1?", 1, " 2")


def test_calls_of_sharegpt_belong_to_the_reply_and_results_to_the_call(tmp_path: Path) -> None:
    row = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "gpt", "value": "I look."},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "sky"}}'},
            {"from": "function_call", "value": '[{"name": "feel", "arguments": "{}"}]'},
            {"from": "observation", "value": "blue"},
            {"from": "observation", "value": "warm"},
        ],
    }
    (task,) = read_tasks(write_lines(tmp_path / "t.jsonl", row))
    system, question, reply, blue, warm = task.messages
    assert (system.role, system.text, question.text, reply.text) == ("system", "Be brief.", "Weather?", "I look.")
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("look", {"at": "sky"}), ("feel", {})]
    assert [(result.name, result.text) for result in (blue, warm)] == [("look", "blue"), ("feel", "warm")]
    assert [result.tool_call_id for result in (blue, warm)] == [call.id for call in reply.tool_calls]
    assert task.columns == {}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [*user("1 + 1?"), {"role": "assistant", "content": "2"}]},
        {"prompt": [*user("1 + 1?"), {"role": "assistant", "content": "2"}], "reward_model": {"ground_truth": "2"}},
        {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
    ],
)
async def test_task_that_ends_with_the_answer_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    tasks = read_tasks(write_lines(tmp_path / "t.jsonl", row))
    with pytest.raises(DataError, match="its messages end with a reply of the assistant"):
        await byte_agent("2").run(tasks)


# What is ambiguous, ignored or malformed.


def test_row_of_two_formats_is_ours_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_lines(tmp_path / "t.jsonl", {**VERL[1], "question": "short form"})
    with caplog.at_level(logging.WARNING):
        (task,) = read_tasks(path)
    assert task.question == "short form"
    assert "t.jsonl fit the formats agentfly and verl: read as agentfly" in caplog.text
    assert "format='verl' reads the other" in caplog.text
    caplog.clear()
    (task,) = read_tasks(path, format="verl")
    assert (task.question, task.columns["question"], caplog.text) == ("1 + 1?", "short form", "")


def test_row_of_two_other_formats_needs_the_format(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", {**TRL[0], **SHAREGPT[1]})
    with pytest.raises(ConfigError, match=r"fit the formats trl and sharegpt; choose one: format='trl' or format='sh"):
        read_tasks(path)
    assert read_tasks(path, format="sharegpt")[0].question == "1 + 1?"


def test_columns_without_effect_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "agent_name": "x", "extra_info": {"tools_kwargs": {"a": {}}}, "images": None} for row in VERL]
    with caplog.at_level(logging.WARNING):
        read_tasks(write_lines(tmp_path / "t.jsonl", *rows))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 't.jsonl'}: columns without effect: agent_name, extra_info.tools_kwargs"
    ]
    caplog.clear()
    read_tasks(write_lines(tmp_path / "t.jsonl", {"messages": user("Q"), "images": ["a.png"], "problem": "P"}))
    assert "columns without effect: images" in caplog.text
    read_tasks(tmp_path / "t.jsonl", question="problem", rename={"images": "pictures"})
    assert "columns without effect: messages" in caplog.text


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([VERL[0], TRL[0]], {}, r"line 2: it is not a row of verl, where .*; the row has 'prompt', 'ground_truth'"),
        ([{"answer": 1}, TRL[0], TRL[1]], {}, "t.jsonl, line 1: a row needs a 'question' or 'messages'"),
        (
            [{"text": "Q"}],
            {},
            r"the row has 'text'; in other formats 'prompt' \(verl, trl\) or 'conv",
        ),
        ([TRL[0], OURS[0]], {}, "is one of agentfly; the first row is one of trl, and decides for all"),
        ([VERL[0]], {"format": "trl"}, "it is not a row of trl, .* and is one of verl$"),
        ([VERL[0]], {"question": "prompt"}, "must be text, not a list; without question=, it is read as verl"),
        ([{"question": None, "messages": None, **TRL[0]}, {}], {}, "t.jsonl, line 2: it is not a row of trl"),
        ([OURS[0]], {"format": "trl"}, "line 1: it is not a row of trl, where 'prompt' is text or a list"),
        ([OURS[0]], {"format": "alpaca"}, "no row format 'alpaca'; there are agentfly, verl, trl, sharegpt"),
        ([OURS[0]], {"format": "trl", "question": "problem"}, "both select the prompt"),
        ([{**VERL[0], "ground_truth": "7"}], {}, r"differs from reward_model\['ground_truth'\]"),
        ([{**TRL[0], "messages": user("Q")}], {"format": "trl"}, "'prompt' becomes 'messages', which the row has, too"),
        ([{"prompt": []}], {}, "line 1: 'messages' must be a non-empty list"),
        ([{"conversations": [{"from": "bot", "value": "x"}]}], {}, "a turn is from 'bot'; authors are system, human"),
        ([{"conversations": ["x"]}], {}, "a turn of 'conversations' must have 'from' and 'value'"),
        ([{"conversations": [{"from": "function_call", "value": "{"}]}], {}, "a call is not JSON"),
        ([{"conversations": [{"from": "function_call", "value": "[1]"}]}], {}, "a call must have a 'name'"),
        ([OURS[0]], {"rename": {"a": "b"}}, "no column 'a' to rename; the row has 'question', 'ground_truth'"),
        ([OURS[0]], {"rename": {"ground_truth": "question"}}, "'ground_truth' cannot become 'question'"),
        ([OURS[0]], {"rename": {"a": "c", "b": "c"}}, "two columns one name"),
        ([OURS[0]], {"split": "train"}, "selects a split of a Hugging Face dataset"),
        ([OURS[0]], {"limit": 0}, "limit"),
    ],
)
def test_unusable_rows_and_options_are_explained(
    tmp_path: Path, rows: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tasks(write_lines(tmp_path / "t.jsonl", *rows), **options)


def test_columns_are_renamed_before_the_format_is_detected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", {"problem": "P", "question": "unrelated", "gold": "1"})
    (task,) = read_tasks(path, rename={"problem": "question", "question": "topic", "gold": "answer"})
    assert task.columns == {"question": "P", "topic": "unrelated", "answer": "1"}


def test_lazy_rows_are_read_as_far_as_the_limit() -> None:
    read: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            read.append(number)
            yield {"prompt": f"Q{number}"}

    assert [task.question for task in read_tasks(rows(), limit=3)] == ["Q0", "Q1", "Q2"]
    assert read == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"a generator that goes on after 100,000 of them; limit= is the number"):
        read_tasks(rows())


def test_a_file_is_read_as_far_as_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"question": "Q"}\n{"question": "R"}\n{oops}\n')
    assert [task.question for task in read_tasks(path, limit=2)] == ["Q", "R"]


# Hugging Face datasets.


@pytest.mark.integration
def test_split_of_a_saved_dataset_is_chosen_by_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {"train": datasets.Dataset.from_list(OURS), "test": datasets.Dataset.from_list(OURS[:3])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    assert len(read_tasks(tmp_path / "splits", split="test")) == 3
    with pytest.raises(DataError, match=r"has the splits train, test; choose one with split="):
        read_tasks(tmp_path / "splits")
    with pytest.raises(DataError, match=r"has no split 'dev'; it has train, test"):
        read_tasks(tmp_path / "splits", split="dev")
    with pytest.raises(DataError, match=r"is one split: leave split='test' out"):
        read_tasks(tmp_path / "splits" / "test", split="test")
    (tmp_path / "splits" / "test" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"the dataset in .* cannot be loaded: "):
        read_tasks(tmp_path / "splits" / "test")


@pytest.mark.integration
def test_images_and_json_values_of_a_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("PIL.Image").new("RGB", (2, 2)).save(tmp_path / "a.png")
    rows = [
        {"question": "See", "image": str(tmp_path / "a.png"), "images": [str(tmp_path / "a.png")], "meta": {"a": 1}}
    ]
    image = datasets.Image()
    features = {
        "question": datasets.Value("string"), "image": image, "images": datasets.List(image), "meta": datasets.Json(),
    }  # fmt: skip
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).save_to_disk(tmp_path / "saved")
    (task,) = read_tasks(tmp_path / "saved")
    assert task.columns["meta"] == {"a": 1}
    assert [str(url)[:22] for url in (task.columns["image"], *task.columns["images"])] == ["data:image/png;base64,"] * 2


@pytest.mark.integration
def test_unreachable_hub_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = (
        r"there is no file or folder some-org/some-set, and no dataset of that name can be loaded from the hub: .*"
    )
    with pytest.raises(DataError, match=message):
        read_tasks("some-org/some-set")


@pytest.mark.integration
def test_dataset_of_the_hub_is_streamed_with_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    requests: list[Any] = []

    def load_dataset(*names: str, **options: Any) -> Any:
        requests.append((*names, options))
        return datasets.Dataset.from_list(VERL).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read_tasks("org/sums-v1.0:main", split="train", limit=4)) == 4
    assert requests == [("org/sums-v1.0", "main", {"split": "train", "streaming": True})]


def test_which_paths_are_names_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    names = [
        "org/name",
        "org/name-v1.5",
        "org/name:config",
        "name",
        "here/name",
        "org/name.jsonl",
        "a/b/c",
        "/org/name",
    ]
    assert [name for name in names if is_dataset(name)] == ["org/name", "org/name-v1.5", "org/name:config"]


def test_missing_library_names_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"org/name is no file or .*, which needs .*install 'agentfly-rl\[datasets\]'"
    ):
        read_tasks("org/name")
