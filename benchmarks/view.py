"""CPU time of the viewer per filter, and its memory, over a run of 100,000 chains.

The run is written in the format of a real one: 100 steps of 1,000 chains, each of four turns with three tool calls and
about 700 tokens of text that differs from chain to chain. A fresh process indexes it as `agentfly view` does, and
answers each request of the page five times: the first page of the table and the number of its chains. The largest time
counts. Beside it is the time for the same filter over the rows in Python lists, which a viewer without an index would
keep in memory.

    python -m benchmarks.view [--quick] [--chains N] [--folder FOLDER]

targets: any filter under 300 ms, the process under 500 MB.
"""

import argparse
import gzip
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from agentfly.runs import RunWriter, StepRecord
from agentfly.segment import Author, Segment
from agentfly.trajectory import CallRecord, CallStatus, Score, StopReason, Trajectory, TurnRecord
from agentfly.types import Completion, FinishReason, Message, Task, ToolCall
from agentfly.view.chains import Tokenizers
from agentfly.view.index import ChainIndex
from agentfly.view.server import ViewData
from agentfly.view.sources import find_sources
from benchmarks.table import print_table

PER_STEP = 1000
WORDS = [
    f"{a}{b}{c}" for a in ("ka", "re", "to", "mi") for b in "bdfglmnprst" for c in ("on", "ar", "is", "ed", "ul", "em")
]


def has(row: dict[str, Any], *words: str) -> bool:
    return all(word in row["text"] for word in words)


FILTERS: dict[str, tuple[dict[str, str], Callable[[dict[str, Any]], bool]]] = {
    "none": ({}, lambda row: True),
    "step": ({"step": "7"}, lambda row: row["step"] == 7),
    "group": ({"group": "12"}, lambda row: row["grp"] == 12),
    "task": ({"task": "task-77"}, lambda row: row["task"] == "task-77"),
    "reward": ({"min_reward": "0.2", "max_reward": "0.9"}, lambda row: 0.2 <= (row["reward"] or 0) <= 0.9),
    "stop reason": ({"stop": "max_turns"}, lambda row: row["stop"] == "max_turns"),
    "tool": ({"tool": "calculate"}, lambda row: "\ncalculate\n" in row["tools"]),
    "failure": ({"failure": "*"}, lambda row: row["failure"] != ""),
    "rare word": ({"text": "needle7007"}, lambda row: has(row, "needle7007")),
    "word of all chains": ({"text": "kabon"}, lambda row: has(row, "kabon")),
    "two words and a beginning": ({"text": "kabon rebar tob"}, lambda row: has(row, "kabon", "rebar", "tob")),
    "phrase": ({"text": '"kabon kabar"'}, lambda row: has(row, "kabon kabar")),
    "all of them": (
        {"step": "7", "min_reward": "0.1", "stop": "answer", "tool": "search", "text": "kabon"},
        lambda row: row["step"] == 7 and row["reward"] >= 0.1 and row["stop"] == "answer" and has(row, "kabon"),
    ),
}  # fmt: skip


def make_chain(random: Random, group: int, chain: int) -> Trajectory:
    """A chain of four turns."""

    def text(count: int) -> str:
        return " ".join(random.choices(WORDS, k=count))

    segment = Segment()
    question = text(30)
    segment.append(Author.TASK, random.choices(range(30_000), k=120), [Message("user", question)], turn=0)
    turns = []
    for turn in range(4):
        count = 60
        sampled = Completion(
            random.choices(range(30_000), k=count), [-random.random()] * count, [0] * count, FinishReason.STOP
        )
        name = random.choice(("search", "search", "calculate", "open_page"))
        calls = (ToolCall(name, {"query": text(6)}, f"c{turn}"),) if turn < 3 else ()
        segment.append_completion(sampled, Message("assistant", text(40), calls), turn=turn)
        if calls:
            segment.append(
                Author.TOOL, random.choices(range(30_000), k=100), [Message("tool", text(60), name=name)], turn=turn + 1
            )
        status = CallStatus.ERROR if random.random() < 0.02 else CallStatus.OK
        turns.append(
            TurnRecord(FinishReason.STOP, tuple(CallRecord(call.name, status, 0.1) for call in calls), 0.5, 0.1)
        )
    return Trajectory(
        task=Task.of(question, f"task-{group}"),
        segments=(segment.seal(),),
        turns=tuple(turns),
        stop=random.choice((StopReason.ANSWER, StopReason.ANSWER, StopReason.MAX_TURNS, StopReason.TRUNCATED)),
        prediction=text(5),
        group=group,
        chain=chain,
        score=Score(random.random()),
        seconds=random.random() * 20,
    )


def write_run(folder: Path, chains: int) -> None:
    """Write a run; its chains are 400 different ones with words, group, reward and answer of their own."""
    random = Random(0)
    models = [make_chain(random, 0, 0) for _ in range(400)]
    with RunWriter.create(folder, {"model": "bytes", "steps": chains // PER_STEP}) as run:
        for step in range(1, chains // PER_STEP + 1):
            trajectories = []
            advantages = {}
            for number in range(PER_STEP):
                model = random.choice(models)
                group, chain = divmod(number, 8)
                answer = f"needle{step * PER_STEP + number} {' '.join(random.choices(WORDS, k=8))}"
                task = replace(model.task, id=f"task-{(step * 125 + group) % 5000}")
                score = Score(random.random())
                trajectory = replace(model, task=task, prediction=answer, group=group, chain=chain, score=score)
                trajectories.append(trajectory)
                advantages[trajectory.id] = [np.full(len(model.segments[0]), 0.5, np.float32)]
            run.write_trajectories(step, trajectories, advantages)
            run.append(StepRecord(step, chains // PER_STEP, {f"metric/{i}": random.random() for i in range(60)}))


def measure(folder: Path, cache: Path) -> dict[str, Any]:
    """Index the run and time every filter; runs in a fresh process."""
    start = time.process_time()
    with ChainIndex(find_sources([folder]), cache) as index:
        index.update()
        indexed = time.process_time() - start
        data = ViewData(index, Tokenizers())
        requests: dict[str, Callable[[], Any]] = {
            name: lambda query=query: data.chains(query) for name, (query, _) in FILTERS.items()
        }
        requests["sorted by reward"] = lambda: data.chains({"sort": "reward", "descending": "1"})
        requests["sorted by tokens"] = lambda: data.chains({"sort": "sampled"})
        requests["row 90 % down"] = lambda: data.chains({"offset": str(int(index.select({}, limit=0)[0] * 0.9))})
        requests["runs and facets"] = lambda: data.runs({})
        requests["curves"] = lambda: data.curves({"names": "metric/1\nmetric/2"})
        requests["one chain"] = lambda: data.chain({"id": "5"})
        measured: dict[str, tuple[float, int]] = {}
        for name, ask in requests.items():
            times = []
            for _ in range(5):
                start = time.process_time()
                answer = ask()
                json.dumps(answer)
                times.append(time.process_time() - start)
            measured[name] = (max(times), answer.get("total", 0) if isinstance(answer, dict) else 0)
        size = sum(database.stat().st_size for database in cache.glob("*.sqlite*"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"indexed": indexed, "filters": measured, "peak": peak, "index": size}


def scan(folder: Path) -> dict[str, float]:
    """The CPU time of each filter over rows in Python lists, with the text of every chain; runs in a fresh process."""
    rows = []
    for path in sorted((folder / "trajectories").glob("step-*")):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            chain = json.loads(line)["trajectory"]
            messages = [m for span in chain["segments"][0]["spans"] for m in span.get("messages", ())]
            text = "\n".join([chain["prediction"], *(m["content"] for m in messages)])
            tools = "".join(["\n", *(f"{call['name']}\n" for turn in chain["turns"] for call in turn["calls"])])
            row = {
                "step": int(path.name[5:11]),
                "grp": chain["group"],
                "task": chain["task"]["id"],
                "stop": chain["stop"],
            }
            rows.append({**row, "reward": chain["score"]["total"], "tools": tools, "failure": "", "text": text})
    times = {}
    for name, (_, passes) in FILTERS.items():
        start = time.process_time()
        sum(map(passes, rows))
        times[name] = time.process_time() - start
    times["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2,000 chains; the figures are not meaningful")
    parser.add_argument("--chains", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the run is written, or was by an earlier call")
    options = parser.parse_args()
    chains = 2000 if options.quick else options.chains
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "run"
        if not (folder / "config.json").exists():
            write_run(folder, chains)
        context = get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
            measured = pool.submit(measure, folder, Path(scratch) / "cache").result()
            lists = pool.submit(scan, folder).result()
    rows = []
    for name, (seconds, total) in measured["filters"].items():
        listed = f"{1000 * lists[name]:.0f}" if name in lists else ""
        rows.append([name, f"{total:,}" if total else "", f"{1000 * seconds:.0f}", listed])
    rows.append(["peak memory of the process, MB", "", f"{measured['peak'] / 1e6:.0f}", f"{lists['memory'] / 1e6:.0f}"])
    print_table(
        f"Milliseconds of CPU per request, {chains:,} chains", ["filter", "chains", "viewer", "lists in memory"], rows
    )
    print(
        f"index: {measured['indexed']:.0f} s of CPU once, {measured['index'] / 1e6:.0f} MB on disk, "
        f"{os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
