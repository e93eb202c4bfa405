"""The viewer without a browser: sources, index, filters, the explanation of the mask, the server's checks, export."""

import gzip
import http.client
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from agentfly.errors import ConfigError, DataError
from agentfly.runs import RunWriter, StepRecord
from agentfly.runs.summary import ChainSummary
from agentfly.segment import Author
from agentfly.view.chains import Tokenizers, explain_mask, show_chain, split_tokens
from agentfly.view.export import write_export
from agentfly.view.index import FILTERS, ChainIndex
from agentfly.view.server import HEADERS, STATIC, ViewData, ViewServer
from agentfly.view.sources import find_sources
from tests.view.pieces import HOSTILE, encode, make_chain, make_run


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ChainIndex]:
    make_run(tmp_path / "run").close()
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as opened:
        opened.update()
        yield opened


def data_of(index: ChainIndex) -> ViewData:
    return ViewData(index, Tokenizers())


def names(index: ChainIndex, **filters: str) -> list[str]:
    total, rows = index.select(filters)
    assert total == len(rows)
    return [f"{'eval' if row['held_out'] else row['step']} {row['grp']}/{row['chain']}" for row in rows]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"step": "1", "group": "1"}, ["1 1/0", "1 1/1"]),
        ({"held_out": "1"}, ["eval 0/0", "eval 0/0"]),
        ({"task": "task-2", "step": "2"}, ["2 2/0", "2 2/1"]),
        ({"min_reward": "0.4", "max_reward": "0.6", "step": "1"}, ["1 1/0", "1 1/1"]),
        ({"stop": "tool_fault"}, ["1 2/0", "2 2/0"]),
        ({"failure": "tool", "step": "1"}, ["1 2/0"]),
        ({"failure": "*", "step": "2"}, ["2 2/0"]),
        ({"failure": "too"}, []),
        ({"tool": "search", "step": "1", "group": "0"}, ["1 0/0", "1 0/1"]),
        ({"tool": "sear"}, []),
        ({"trained": "1"}, ["1 0/0", "1 0/1", "2 0/0", "2 0/1"]),
        ({"text": "tool broke", "step": "1"}, ["1 2/0"]),
        ({"text": "bro", "step": "1"}, ["1 2/0"]),
        ({"text": '"broke tool"'}, []),
        ({"text": "color OR AND NOT NEAR( -"}, []),
        ({"text": 'blue1"', "step": "1", "group": "0"}, ["1 0/1"]),
    ],
)
def test_filters(index: ChainIndex, filters: dict[str, str], expected: list[str]) -> None:
    assert names(index, **filters) == expected


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"stepp": "1"}, "no filter 'stepp'"),
        ({"step": "x"}, "a number is needed"),
        ({"text": ' " '}, "search is empty"),
    ],
)
def test_a_bad_filter_is_refused(index: ChainIndex, filters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        index.select(filters)


def test_rows_are_sorted_and_paged(index: ChainIndex) -> None:
    _, rows = index.select({"step": "1"}, sort="reward", descending=False, limit=3)
    assert [row["reward"] for row in rows] == [0.0, 0.5, 0.5]
    _, last_rows = index.select({"step": "1"}, sort="reward", offset=3, limit=9)
    assert [row["reward"] for row in last_rows] == [1.0, 1.0, None]
    _, best = index.select({"step": "1"}, sort="reward", descending=True)
    assert [row["reward"] for row in best] == [1.0, 1.0, 0.5, 0.5, 0.0, None]
    with pytest.raises(ConfigError, match="sorted by"):
        index.select({}, sort="1; DROP TABLE chains")


def test_a_running_run_is_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    sources = find_sources([tmp_path / "run"])
    with ChainIndex(sources, tmp_path / "cache") as index:
        index.update()
        assert sources[0].live
        assert index.select({})[0] == 8
        assert sources[0].curves()["reward/mean"] == [(1, 0.1)]
        run.write_trajectories(2, [make_chain(0, 0, 1.0)])
        run.append(StepRecord(2, 3, {"reward/mean": 0.7}))
        index.update()
        assert index.select({"step": "2"})[0] == 1
        assert sources[0].curves()["reward/mean"] == [(1, 0.1), (2, 0.7)]
        changes = index.changes
        index.update()
        assert index.changes == changes  # nothing is read twice
        run.close()
        # Resuming removes what is later than the checkpoint.
        RunWriter.resume(tmp_path / "run", 1).close()
        index.update()
        assert index.select({"step": "2"})[0] == 0
        assert index.select({"text": "blue"})[0] == 8
        assert sources[0].curves()["reward/mean"] == [(1, 0.1)]


def test_an_evaluation_is_read_while_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "out" / "chains.jsonl"
    path.parent.mkdir()
    line = json.dumps({"result": {}, "trajectory": make_chain(0, 0, 1.0).to_json()}) + "\n"
    path.write_text(json.dumps({"settings": {"model": "bytes"}}) + "\n" + line + line[:100])
    with ChainIndex(find_sources([path.parent]), tmp_path / "cache") as index:
        index.update()
        assert index.select({})[0] == 1
        with path.open("a") as file:
            file.write(line[100:])
        index.update()
        assert index.select({})[0] == 2
        chain = show_chain(index, 2, Tokenizers())
        assert chain["why"] == ["These chains are not of a training run."]
        assert chain["segments"][0]["spans"][1]["texts"] == ["c", "a", "l", "l"]


def test_greedy_chains_and_tasks_are_recognized_across_sources(tmp_path: Path) -> None:
    with make_run(tmp_path / "run", config={"evaluation": {"chains": 1}}) as run:
        run.write_trajectories(3, [make_chain(0, chain, 1.0, question="Color?") for chain in (0, 1)], held_out=True)
        run.write_trajectories(3, [make_chain(0, chain, 1.0) for chain in (0, 1)])
    chains = [make_chain(0, 0, 1.0, question="Color?"), make_chain(0, 1, 1.0, question="Shape?")]
    lines = [{"settings": {"chains": 1, "greedy": True}}, *({"trajectory": chain.to_json()} for chain in chains)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with ChainIndex(find_sources([tmp_path / "run", tmp_path / "eval.jsonl"]), tmp_path / "cache") as index:
        index.update()
        rows = [*index.select({"step": "3"})[1], *index.select({"source": "2"})[1]]
        assert [(row["held_out"], row["chain"], row["greedy"]) for row in rows] == [
            (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1), (0, 0, 0), (0, 1, 1),
        ]  # fmt: skip
        # The id of the task is the same everywhere, the question is not.
        same = index.select({"digest": rows[2]["digest"]})[1]
        assert [row["id"] for row in same] == [row["id"] for row in rows[2:5]]


def test_saved_trajectories_and_a_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "saved.jsonl").write_text(json.dumps(make_chain(0, 0, 1.0).to_json()) + "\n")
    saved = tmp_path / "saved.jsonl"
    make_run(tmp_path / "runs" / "a").close()
    make_run(tmp_path / "runs" / "b").close()
    sources = find_sources([tmp_path / "saved.jsonl", tmp_path / "runs"])
    assert [(source.name, source.kind) for source in sources] == [
        ("saved.jsonl", "trajectories"),
        ("a", "run"),
        ("b", "run"),
    ]
    with ChainIndex(sources, tmp_path / "cache") as index:
        index.update()
        assert index.select({"source": "1"})[0] == 1
        assert "--tokenizer" in show_chain(index, 1, Tokenizers())["tokenizer_problem"]
        saved.write_text("".join(json.dumps(make_chain(0, i, 1.0, text="again").to_json()) + "\n" for i in range(3)))
        index.update()
        assert [row["chain"] for row in index.select({"source": "1", "text": "again"})[1]] == [0, 1, 2]
        assert index.select({"source": "1"})[0] == 3  # the file was replaced, not continued


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no"), ("x\n", "not JSON"), ('{"a": 1}\n', "holds no chains")]
)
def test_a_path_without_chains_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "file.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        find_sources([path])


def test_the_index_is_continued_by_the_next_viewer_and_locked_by_one(tmp_path: Path) -> None:
    make_run(tmp_path / "run").close()
    sources = find_sources([tmp_path / "run"])
    with ChainIndex(sources, tmp_path / "cache") as first, ChainIndex(sources, tmp_path / "cache") as second:
        first.update()
        second.update()
        assert first.select({})[0] == second.select({})[0] == 14
    with ChainIndex(sources, tmp_path / "cache") as third:
        assert third.select({})[0] == 14  # before any update


def test_a_damaged_file_is_reported_and_the_others_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.close()
    whole = run.trajectory_file(1).read_bytes()
    run.trajectory_file(1).write_bytes(whole[:-40])
    run.trajectory_file(2).write_bytes(gzip.compress(b'{"trajectory": {"task": 1}}\n'))
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index:
        index.update()
        assert index.select({})[0] == 2  # the evaluations
        problems = data_of(index).runs({})["problems"]
        assert [re.search(r"step-\d+", problem)[0] for problem in problems] == ["step-000001", "step-000002"]  # type: ignore[index]
        run.trajectory_file(1).write_bytes(whole)
        index.update()
        assert index.select({"step": "1"})[0] == 6
        assert len(index.problems) == 1


def test_a_named_pipe_in_a_run_directory_does_not_block_the_viewer(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.close()
    pipes = [run.metrics_file, run.evals_file, run.alarms_file, run.trajectory_file(1), run.path / ".lock"]
    for path in pipes:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index:
        index.update()
        assert index.select({})[0] == 8
        problems = data_of(index).runs({})["problems"]
    assert len(problems) == 2  # curves have none: what is no file has no lines yet
    assert all("not a regular file" in problem for problem in problems)
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read: not a regular file"):
        run.records()


def edit_first_line(run: RunWriter, **changes: object) -> None:
    """Change fields of the first line of step 1."""
    path = run.trajectory_file(1)
    first, *other_lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    line = json.dumps({**json.loads(first), **changes}).encode() + b"\n"
    path.write_bytes(gzip.compress(b"".join([line, *other_lines])))


@pytest.mark.parametrize("changes", [{"group": 10**30}, {"reward": [1]}, {"text": 1}, {"tools": None}])
def test_a_value_of_any_type_damages_its_file_only(tmp_path: Path, changes: dict[str, object]) -> None:
    run = make_run(tmp_path / "run")
    run.close()
    edit_first_line(run, summary={**asdict(ChainSummary.of(make_chain(0, 0, 1.0))), **changes})
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index:
        index.update()
        assert index.select({})[0] == 8
        assert list(index.problems) == [str(run.trajectory_file(1))]


@pytest.mark.parametrize("line", ["[1]", "[" * 100_000])
def test_a_line_of_any_shape_damages_its_file_only(tmp_path: Path, line: str) -> None:
    run = make_run(tmp_path / "run")
    run.close()
    run.trajectory_file(1).write_bytes(gzip.compress(f"{line}\n".encode()))
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index:
        index.update()
        assert index.select({})[0] == 8
        assert list(index.problems) == [str(run.trajectory_file(1))]


def test_half_a_surrogate_pair_in_a_name_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.close()
    edit_first_line(run, summary=asdict(ChainSummary.of(make_chain(0, 0, 1.0, task="task \ud800"))))
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index:
        index.update()
        assert index.problems == {}
        assert index.select({"task": "task ?"})[0] == 1


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"a": 1}', '{"step": "a"}', f'{{"step": 9, "a": 1{"0" * 400}}}'])
def test_damaged_files_of_one_run_leave_the_page_usable(tmp_path: Path, line: str) -> None:
    run = make_run(tmp_path / "damaged")
    run.close()
    make_run(tmp_path / "whole").close()
    with run.metrics_file.open("a") as file:
        file.write(f'{line}\n{{"step": 10, "reward/mean": 0.75}}\n')
    run.alarms_file.write_text('{"step": 1}\n')
    (tmp_path / "damaged" / ".lock").write_text("9" * 30)
    sources = find_sources([tmp_path / "damaged", tmp_path / "whole", tmp_path / "damaged"])
    (tmp_path / "damaged" / "config.json").write_text("{")
    with ChainIndex(sources, tmp_path / "cache") as index:
        index.update()
        page = data_of(index).runs({})
    assert [source["name"] for source in page["sources"]] == ["damaged", "whole"]  # given twice, shown once
    assert page["sources"][0]["last"]["reward/mean"] == 0.75
    damaged = [problem.partition(" cannot be read: ")[0].replace(str(tmp_path), "") for problem in page["problems"]]
    assert sorted(damaged) == ["/damaged/metrics.jsonl", "the alarms of /damaged", "the settings of /damaged"]


def test_a_chain_that_cannot_be_shown_is_left_out_of_an_export(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.close()
    edit_first_line(run, advantages=5)
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index:
        index.update()
        _, (row, *_) = index.select({"step": "1", "group": "0"})
        with pytest.raises(DataError, match="its record is damaged"):
            data_of(index).chain({"id": str(row["id"])})
        left_out = write_export(data_of(index), tmp_path / "page.html", {})
    assert "This page has 13 of the 14 chains" in left_out
    assert left_out.endswith("Chains left out since their records are damaged: 1.")


def explain(index: ChainIndex, **filters: str) -> tuple[bool, list[str]]:
    _, (row, *_) = index.select(filters)
    chain = show_chain(index, row["id"], Tokenizers())
    model = next(span for span in chain["segments"][0]["spans"] if span["author"] == "model")
    return model["trained"], model["why"]


def test_why_a_token_is_trained_or_not(index: ChainIndex) -> None:
    assert explain(index, step="1", group="0") == (
        True,
        [Author.MODEL.loss_rule, "The chain is part of the update of its step."],
    )
    trained, reasons = explain(index, step="1", group="1")
    assert not trained
    assert "same return" in reasons[-1]
    assert "treatment mask" in explain(index, step="1", group="2", stop="tool_fault")[1][-1]
    assert "Too few chains" in explain(index, step="1", group="2", stop="answer")[1][-1]
    assert "evaluation" in explain(index, held_out="1")[1][-1]


def test_only_chains_of_a_training_step_have_a_treatment(index: ChainIndex) -> None:
    def treatment(**filters: str) -> str:
        _, (row, *_) = index.select(filters)
        return str(show_chain(index, row["id"], Tokenizers())["treatment"])

    assert treatment(step="1", group="0") == "train"
    assert treatment(held_out="1") == ""


def test_tokens_that_the_importance_mask_removed_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config={"loss": {"correction": "token-mask", "correction_cap": 1.05}}).close()
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index:
        index.update()
        _, rows = index.select({"step": "1", "group": "0"})
        _, call, _, answer = show_chain(index, rows[0]["id"], Tokenizers())["segments"][0]["spans"]
    # log-probabilities of sampler and learner: -0.125 and -0.1, -0.0625 and 0; then -1 and -1, -2 and -1.9
    assert (list(call["masked"]), list(answer["masked"])) == ([3], [1])
    assert call["masked"][3] == (
        "loss.correction=token-mask removes it from the policy loss: its ratio of learner to sampler, 1.064, is not "
        "from 0.9524 to 1.05 (loss.correction_cap)."
    )


@pytest.mark.integration
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["mask", "truncate"])
def test_the_mask_is_that_of_the_loss(level: str, mode: str) -> None:
    import torch

    from agentfly.algorithms.loss import correction_weights

    random = np.random.default_rng(0)
    for length in random.integers(1, 9, 50):
        learner, sampler = random.normal(-1, 0.4, (2, length)).astype(np.float32)
        weights, _ = correction_weights(
            torch.from_numpy(learner), torch.from_numpy(sampler), torch.zeros(length, dtype=torch.long),
            num_sequences=1, correction=f"{level}-{mode}", cap=1.5,  # type: ignore[arg-type]
        )  # fmt: skip
        removed = explain_mask({"correction": f"{level}-{mode}", "correction_cap": 1.5}, learner, sampler)
        assert list(removed) == (weights == 0).nonzero().flatten().tolist()


def test_the_tokens_of_a_chain(index: ChainIndex) -> None:
    _, rows = index.select({"step": "1", "group": "0"})
    chain = show_chain(index, rows[1]["id"], Tokenizers())
    prompt, call, observation, answer = chain["segments"][0]["spans"]
    assert (prompt["trained"], prompt["why"]) == (False, [Author.TASK.loss_rule])
    assert (observation["author"], observation["trained"], observation["logprobs"]) == ("tool", False, None)
    assert (call["logprobs"], call["learner"], call["version"]) == (
        [-0.5, -0.25, -0.125, -0.0625],
        [-0.5, -0.25, -0.1, 0.0],
        3,
    )
    assert (answer["learner"], answer["advantages"], answer["texts"]) == ([-1.0, -1.9], [1.0, 1.0], ["o", "k"])
    (written_call,) = call["messages"][0]["calls"]
    assert written_call["name"] == "search"
    assert written_call["arguments"] == '{"query": "color of 0 ", "other": [1, ""]}'
    call = chain["turn_records"][0]["calls"][0]
    assert (call["name"], call["status"], call["seconds"]) == ("search", "ok", 0.25)
    assert chain["group_ids"] == [row["id"] for row in rows]


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    from agentfly.templates.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("bytes").backend_tokenizer
    assert split_tokens(encode("aé€!"), tokenizer) == ["a", "", "é", "", "", "€", "!"]


def test_images_are_read_from_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    (tmp_path / "run" / "images").mkdir()
    (tmp_path / "run" / "images" / "0123456789abcdef0123456789abcdef.png").write_bytes(b"PNG")
    (tmp_path / "secret").write_bytes(b"PNG")
    (tmp_path / "run" / "images" / f"{'a' * 32}.png").symlink_to(tmp_path / "secret")
    stored = run.trajectory_file(1)
    lines = [json.loads(line) for line in gzip.decompress(stored.read_bytes()).splitlines()]
    images = [
        "run-image:0123456789abcdef0123456789abcdef.png",
        "run-image:../config.json",
        f"run-image:{'a' * 32}.png",
        "https://example.com/x.png",
        "data:image/svg+xml;base64,AA",
    ]
    message = lines[0]["trajectory"]["segments"][0]["spans"][2]["messages"][0]
    message["content"] = ["see", *({"image": image} for image in images)]
    stored.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    run.close()
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index:
        index.update()
        _, (row, *_) = index.select({"step": "1"})
        contents = show_chain(index, row["id"], Tokenizers())["segments"][0]["spans"][2]["messages"][0]["parts"]
    assert contents[:2] == ["see", {"image": "data:image/png;base64,UE5H"}]
    assert [content[:5] for content in contents[2:]] == ["(an i"] * 4


def request(server: ViewServer, path: str, host: str | None = None) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read().decode()
    finally:
        connection.close()


def test_the_server_wants_its_token_and_a_loopback_host(index: ChainIndex) -> None:
    with ViewServer(data_of(index)) as server:
        status, headers, page = request(server, f"/{server.token}/")
        assert (status, headers["Content-Security-Policy"]) == (200, HEADERS["Content-Security-Policy"])
        assert "unsafe" not in HEADERS["Content-Security-Policy"]
        assert "<script>" not in page
        assert " on" not in re.sub(r"<!--.*?-->", "", page)
        for path in ("/", "/api/runs", "/x/api/runs", f"/{server.token[:-1]}/api/runs"):
            assert request(server, path)[0] == 403
        for host in ("evil.example", f"evil.example:{server.port}", "x", "127.0.0.1.evil.example:80"):
            assert request(server, f"/{server.token}/api/runs", host)[0] == 403
        assert request(server, f"/{server.token}/api/runs", f"localhost:{server.port}")[0] == 200
        for path in ("../server.py", "%2e%2e/server.py", "nothing.js", "static/app.js"):
            assert request(server, f"/{server.token}/{path}")[0] == 404
        status, headers, body = request(server, f"/{server.token}/api/chains?step=1&limit=2")
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert (json.loads(body)["total"], len(json.loads(body)["rows"])) == (6, 2)
        status, _, body = request(server, f"/{server.token}/api/chains?nothing=1")
        assert (status, "no filter" in json.loads(body)["error"]) == (400, True)
        status, _, body = request(server, f"/{server.token}/api/chain?id=999")
        assert (status, "no chain 999" in json.loads(body)["error"]) == (400, True)
        for query in ("chain?id=", "chains?step=", "chains?step=-"):
            assert request(server, f"/{server.token}/api/{query}{'9' * 400}")[0] == 400
        assert request(server, f"/{server.token}/api/chains?offset={'9' * 400}")[0] == 200
        assert request(server, "http://[", "127.0.0.1")[0] == 403


def test_export_says_what_is_left_out(index: ChainIndex, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    left_out = write_export(data_of(index), path, {"step": "1"})
    assert left_out == "This page has 6 of the 14 chains of 1 run (filters: step=1)."
    page = path.read_text()
    assert left_out in page
    assert "import " not in page[page.index('<script type="module">') :]
    embedded = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])  # type: ignore[index]
    assert len(embedded["chains"]) == len(embedded["rows"]) == 6
    assert embedded["curves"]["1"]["eval/greedy"] == [[0, 0.5]]
    small = write_export(data_of(index), path, {}, max_bytes=path.stat().st_size)
    assert path.stat().st_size <= len(page.encode())
    assert re.search(r"\d chains that pass the filters are left out", small)


SELECTIONS: list[dict[str, str]] = [
    {"source": "1"}, {"source": "2"}, {"step": "1"}, {"step": "9"}, {"held_out": "1"}, {"held_out": "0", "group": "0"},
    {"trained": "1"}, {"trained": "0"}, {"task": "task-1"}, {"task": "TASK-1"}, {"digest": "0"}, {"stop": "answer"},
    {"stop": "tool_fault", "step": "2"}, {"min_reward": "0.5"}, {"max_reward": "0.5"},
    {"min_reward": "0.1", "max_reward": "0.9"}, {"tool": "*"}, {"tool": "search"}, {"tool": "sear"}, {"failure": "*"},
    {"failure": "tool"}, {"failure": "environment"}, {"text": "broke"}, {"text": "BLUE1"}, {"text": "blu"},
    {"text": "lue"}, {"text": "look blue"}, {"text": '"is blue"'}, {"text": '"blue is"'}, {"text": "ete"},
    {"text": '"été"'}, {"text": "color-of 2"}, {"text": '"before"'}, {"text": "task-0"}, {"text": "nothing here"},
    *({"sort": sort, "descending": down} for sort in ("order", "reward", "turns", "seconds") for down in ("", "1")),
]  # fmt: skip
RUN_SELECTIONS = """
import { readFileSync } from "node:fs";
const [page, queries] = process.argv.slice(2).map((path) => readFileSync(path, "utf8"));
const data = page.match(/<script type="application\\/json" id="data">(.*)<\\/script>/)[1];
globalThis.document = { getElementById: () => ({ textContent: data }) };
const { get } = await import("./api.mjs");
const found = await Promise.all(JSON.parse(queries).map((query) => get("chains", query)));
console.log(JSON.stringify(found.map(({ rows }) => rows.map((row) => row.id))));
"""


@pytest.mark.integration
def test_an_exported_page_selects_the_same_chains_as_the_index(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node in PATH: apt-get install nodejs")
    make_run(tmp_path / "first", text="Été à Paris").close()
    make_run(tmp_path / "second", steps=1).close()
    with ChainIndex(find_sources([tmp_path / "first", tmp_path / "second"]), tmp_path / "cache") as index:
        index.update()
        data = data_of(index)
        write_export(data, tmp_path / "page.html", {})
        expected = [[row["id"] for row in data.chains(query)["rows"]] for query in SELECTIONS]
    (tmp_path / "api.mjs").write_text((STATIC / "api.js").read_text())
    (tmp_path / "run.mjs").write_text(RUN_SELECTIONS)
    (tmp_path / "queries.json").write_text(json.dumps(SELECTIONS))
    command = [node, *(str(tmp_path / name) for name in ("run.mjs", "page.html", "queries.json"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for query, ids, selected in zip(SELECTIONS, json.loads(done.stdout), expected, strict=True):
        assert ids == selected, query
    tested = {name for query in SELECTIONS for name in query}
    assert FILTERS.keys() <= tested
    assert sum(map(bool, expected)) > 25  # most of the selections find something


def test_hostile_text_cannot_leave_the_data_of_an_exported_page(tmp_path: Path) -> None:
    make_run(tmp_path / "run", text=HOSTILE.replace("\x00", "")).close()
    with ChainIndex(find_sources([tmp_path / "run"]), tmp_path / "cache") as index:
        index.update()
        write_export(data_of(index), tmp_path / "page.html", {})
    page = (tmp_path / "page.html").read_text()
    data = page[page.index('id="data">') + len('id="data">') :]
    inside = data[: data.index("</script>")]
    assert "hacked" in inside
    assert "<" not in inside
    assert "hacked" not in data[data.index("</script>") :]
