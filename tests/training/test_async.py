"""Asynchronous training: bounded staleness, slow chains, and resuming without losing finished chains."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentfly import reward
from agentfly.agents import HFAgent
from agentfly.backends.base import Request
from agentfly.cli.recipes import Recipe
from agentfly.cli.train import plan_recipe, resume_run
from agentfly.errors import Fault
from agentfly.runs import RunDirectory
from agentfly.runs.record import StepRecord
from agentfly.training.config import TrainConfig, parse_overrides
from agentfly.training.plan import TrainPlan
from agentfly.training.task_sampler import TaskSampler
from agentfly.training.trainer import Trainer
from agentfly.trajectory import Trajectory
from agentfly.types import Completion, FinishReason, Task
from tests.commands import fork
from tests.training.test_loop import RECIPE

ASYNC = {"max_staleness": 1}
TASKS = [Task.of({"question": f"say something about {number}", "number": number}, str(number)) for number in range(24)]
HELD_OUT = [Task.of({"question": f"say something about {number}", "number": number}, "") for number in range(90, 93)]


pytestmark = pytest.mark.usefixtures("vowels_model")


def plan_of(score: Any, small_model: Path, *, eval_tasks: Any = (), **fields: Any) -> TrainPlan:
    """A plan of 3 groups of 4 chains a step, each of one turn, scored by `score`."""
    config = TrainConfig(
        **{
            "model": str(small_model),
            "backend": {"backend": "transformers", "dtype": "float32", "kv_memory": 1 << 24},
            "tasks_per_step": 3,
            "num_chains": 4,
            "max_turns": 1,
            "sampling": {"max_tokens": 8},
            "optimizer": {"learning_rate": 2e-2},
            "loss": {"correction": "token-truncate"},
            "async_training": ASYNC,
            "steps": 6,
            "loggers": (),
            **fields,
        }
    )
    return TrainPlan(lambda **model: HFAgent(**model, reward=score), TASKS, config, eval_tasks=eval_tasks)


@reward
def vowels(trajectory: Any) -> float:
    reply = "".join(message.text for message in trajectory.messages if message.role == "assistant")
    return sum(letter in "aeiou" for letter in reply) / 12


def trained_steps(folder: Path) -> list[StepRecord]:
    return [record for record in RunDirectory(folder).records() if record.metrics]


def ages(record: StepRecord) -> list[float]:
    """Trained tokens by age, in updates."""
    return [value for name, value in sorted(record.metrics.items()) if name.startswith("staleness/age_")]


def token_ages(folder: Path, step: int) -> set[int]:
    """Ages of the sampled tokens of a step, from the stored chains."""
    stored = [trajectory.trajectory for trajectory in RunDirectory(folder).trajectories(step)]
    versions = [segment.weight_versions[segment.mask] for chain in stored for segment in chain.segments]
    return set((step - 1 - np.concatenate(versions)).tolist())


@pytest.mark.parametrize(
    ("staleness", "fields"),
    [
        (1, {}),
        (2, {"algorithm": "ppo", "epochs": 2, "mini_batches": 2}),
        (1, {"algorithm": "remax", "max_turns": 1}),
        (1, {"algorithm": "rloo", "zero_variance": "resample", "run_options": {"max_concurrent_chains": 10}}),
        (1, {"lora_rank": 4}),
    ],
    ids=["grpo", "ppo", "remax", "resample", "lora"],
)
async def test_no_trained_token_is_older_than_max_staleness(
    tmp_path: Path, small_model: Path, staleness: int, fields: dict[str, Any]
) -> None:
    plan = plan_of(
        vowels, small_model, **fields, steps=4, async_training={"max_staleness": staleness}, eval_tasks=HELD_OUT
    )
    await Trainer.create(plan, tmp_path / "run").run()
    records = trained_steps(tmp_path / "run")
    assert [record.step for record in records] == [1, 2, 3, 4]
    for record in records:
        assert max(token_ages(tmp_path / "run", record.step)) <= staleness
        assert len(ages(record)) == staleness + 1
        assert sum(ages(record)) == pytest.approx(record.metrics["policy/tokens"] / plan.config.epochs)
        assert 0 <= record.metrics["wait/learner"] <= 1
        assert 0 <= record.metrics["wait/rollout"] <= 1
    if "run_options" not in fields:  # the groups of step 2 are started with those of step 1, before the first update
        assert sum(sum(ages(record)[1:]) for record in records[1:]) > 0
    held_out = RunDirectory(tmp_path / "run").trajectories(4, held_out=True)
    versions = {span.weight_version for chain in held_out for s in chain.trajectory.segments for span in s.spans}
    assert versions - {None} == {4}


class Gate:
    """A reward that waits, for chosen tasks, until it is opened: a chain of these tasks is not finished before."""

    def __init__(self, *positions: int) -> None:
        sampler = TaskSampler(TASKS, seed=0)
        self.slow = {sampler.task_at(position).columns["number"] for position in positions}
        self.opened = asyncio.Event()
        self.waiting: Counter[int] = Counter()

        @reward
        async def score(trajectory: Trajectory, number: int) -> float:
            if number in self.slow and not self.opened.is_set():
                self.waiting[number] += 1
                await self.opened.wait()
            return float(len(trajectory.prediction) % 3) + number / 100

        self.score = score


def steps_of(folder: Path, number: int) -> list[int]:
    """The steps that trained a task."""
    run = RunDirectory(folder)
    stored = {step: run.trajectories(step) for step in range(1, 7)}
    return [
        step for step, chains in stored.items() if any(s.trajectory.task.columns["number"] == number for s in chains)
    ]


async def wait_for_chains(folder: Path, group: int, attempt: int = 0) -> None:
    """Wait until the journal has all chains of a group."""
    while sum((line.get("group"), line.get("attempt")) == (group, attempt) for line in read_journal(folder)) < 4:
        await asyncio.sleep(0.005)


async def test_a_slow_chain_carries_over_to_a_later_step(tmp_path: Path, small_model: Path) -> None:
    gate = Gate(0)
    plan = plan_of(gate.score, small_model, async_training={"max_staleness": 3}, zero_variance="keep")
    async with Trainer.create(plan, tmp_path / "run") as trainer:
        for _ in range(3):
            await trainer.train_step()  # would not return if it waited for the slow chains
        (slow,) = gate.slow
        assert gate.waiting[slow] > 0
        assert steps_of(tmp_path / "run", slow) == []
        gate.opened.set()
        await wait_for_chains(tmp_path / "run", 0)
        for _ in range(3):
            await trainer.train_step()
    assert steps_of(tmp_path / "run", slow) == [4]
    assert max(token_ages(tmp_path / "run", 4)) == 3
    records = trained_steps(tmp_path / "run")
    assert sum(r.metrics["staleness/dropped_chains"] + r.metrics["staleness/recomputed_chains"] for r in records) == 0
    assert ages(records[3])[3] > 0


@pytest.mark.parametrize("rule", ["drop", "recompute"])
async def test_a_chain_that_becomes_too_old_is_discarded_and_counted(
    tmp_path: Path, small_model: Path, rule: str
) -> None:
    folder = tmp_path / "run"
    gate = Gate(0)
    (slow,) = gate.slow
    staleness = {"max_staleness": 1, "on_stale": rule}
    plan = plan_of(gate.score, small_model, async_training=staleness, zero_variance="keep")
    with pytest.raises(InterruptedError):  # noqa: PT012
        async with Trainer.create(plan, folder) as trainer:
            for _ in range(2):
                await trainer.train_step()
            gate.opened.set()
            if rule == "recompute":
                await wait_for_chains(folder, 0, attempt=1)
            await trainer.train_step()
            raise InterruptedError
    counted = f"staleness/{'dropped' if rule == 'drop' else 'recomputed'}_chains"
    assert [record.metrics[counted] for record in trained_steps(folder)[:2]] == [0, 4]
    assert steps_of(folder, slow) == ([] if rule == "drop" else [3])
    await Trainer.resume(plan, folder).run()
    assert len(trained_steps(folder)) == 6
    assert [record.metrics[counted] for record in trained_steps(folder)[:2]] == [0, 4]  # repeated from the journal
    assert steps_of(folder, slow) == ([] if rule == "drop" else [3])
    assert all(max(token_ages(folder, step)) <= 1 for step in range(1, 7))


class WaitingAgent(HFAgent):
    """Every chain has two turns, and those of the first group begin the second one when the gate is open."""

    gate: asyncio.Event

    async def generate_async(self, request: Request) -> Completion:
        if request.turn == 1 and request.chain.startswith("0/"):
            await self.gate.wait()
        completion = await super().generate_async(request)
        return replace(completion, finish=FinishReason.STOP)  # a turn that is cut at its limit would end the chain


async def test_tokens_of_one_chain_have_the_probabilities_of_their_own_weights(
    tmp_path: Path, small_model: Path
) -> None:
    folder = tmp_path / "run"
    gate = asyncio.Event()

    def agent(**model: Any) -> HFAgent:
        agent = WaitingAgent(**model, reward=vowels, on_no_call={"then": "continue", "nudge": "go on", "limit": 3})
        agent.gate = gate
        return agent

    config = plan_of(vowels, small_model, async_training={"max_staleness": 2}, max_turns=2).config
    async with Trainer.create(TrainPlan(agent, TASKS, config), folder) as trainer:
        await trainer.train_step()
        trainer.learner.save(tmp_path / "version-1")
        gate.set()
        await wait_for_chains(folder, 0)
        await trainer.train_step()
    stored = [chain.trajectory for chain in RunDirectory(folder).trajectories(2)]
    first = TaskSampler(TASKS, seed=0).task_at(0)
    chains = [chain for chain in stored if chain.task.columns == first.columns]
    assert len(chains) == 4
    for chain in chains:
        (segment,) = chain.segments
        versions = segment.weight_versions[segment.mask]
        assert set(versions.tolist()) == {0, 1}
        for version, path in ((0, small_model), (1, tmp_path / "version-1")):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            tokens = torch.from_numpy(segment.tokens.astype(np.int64))
            with torch.no_grad():
                scores = model(tokens[None]).logits[0].log_softmax(-1)
            expected = scores[:-1].gather(1, tokens[1:, None])[:, 0].numpy()[segment.mask[1:]]
            sampled = segment.logprobs[segment.mask]
            is_current = versions == version
            assert np.abs(expected - sampled)[is_current].max() < 1e-3
            assert np.abs(expected - sampled)[~is_current].max() > 1e-3  # the other weights give other probabilities


async def test_at_most_one_step_is_sampled_ahead(tmp_path: Path, small_model: Path) -> None:
    gate = Gate(*range(6, 24))
    plan = plan_of(gate.score, small_model, async_training={"max_staleness": 3}, zero_variance="keep")
    async with Trainer.create(plan, tmp_path / "run") as trainer:
        await trainer.train_step()
        await trainer.train_step()
        step = asyncio.create_task(trainer.train_step())
        while sum(gate.waiting.values()) < 6 * 4:  # the groups of steps 3 and 4
            await asyncio.sleep(0.001)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert sum(gate.waiting.values()) == 6 * 4
        gate.opened.set()
        await step


async def test_failure_of_a_chain_ends_the_run(tmp_path: Path, small_model: Path) -> None:
    @reward
    def broken(trajectory: Any) -> float:
        raise ValueError("oops")

    with pytest.raises(Fault, match=r"not one of the 12 chains of step 1 can be trained; most often: reward: .*oops"):
        await Trainer.create(plan_of(broken, small_model), tmp_path / "run").run()


async def test_cancelled_run_ends_its_chains_and_resumes(tmp_path: Path, small_model: Path) -> None:
    gate = Gate(4)
    plan = plan_of(gate.score, small_model, async_training={"max_staleness": 3}, zero_variance="keep")
    trainer = Trainer.create(plan, tmp_path / "run")
    run = asyncio.create_task(trainer.run())
    while len(trained_steps(tmp_path / "run")) < 2 or sum(gate.waiting.values()) < 4:
        await asyncio.sleep(0.001)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert [task for task in others if "run_group" in repr(task)] == []
    gate.opened.set()
    await Trainer.resume(plan, tmp_path / "run").run()
    assert [record.step for record in trained_steps(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


async def test_run_with_a_journal_that_lacks_lines_is_resumed(
    tmp_path: Path, small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that is not recorded, before one that is: the groups of the first must be run again."""
    plan = plan_of(vowels, small_model, zero_variance="keep")
    async with Trainer.create(plan, tmp_path / "run") as trainer:
        for _ in range(3):
            await trainer.train_step()
    lines = read_journal(tmp_path / "run")
    first = next(line["groups"][0] for line in lines if line.get("step") == 1)
    kept = [line for line in lines if line.get("step") != 1 and line.get("group") != first]
    (tmp_path / "run" / "rollout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    async with asyncio.timeout(60):
        await Trainer.resume(plan, tmp_path / "run").run()
    assert "step 2 cannot be repeated" in caplog.text
    assert [record.step for record in trained_steps(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


CHANGES = [
    "loggers=[]", "steps=8", "checkpoint.every=3", "evaluation.every=null", "async_training.max_staleness=2",
    "loss.correction=token-truncate",
]  # fmt: skip


@pytest.mark.slow_smoke
def test_killed_run_loses_no_finished_chain(tmp_path: Path) -> None:
    """Kill -9 two steps after a checkpoint, with chains that have finished and are not trained."""
    folder = tmp_path / "run"
    with fork(_train_five_steps, folder) as process:
        while len(_lines(folder / "metrics.jsonl")) < 5 or "chain" not in read_journal(folder)[-1]:
            assert process.is_alive()
            time.sleep(0.01)
        process.kill()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    before = {line["step"]: line for line in _lines(folder / "metrics.jsonl")}
    journal = read_journal(folder)
    assert journal[0] == {"checkpoint": 3}
    assert [line["step"] for line in journal if "step" in line] == [4, 5]
    finished = Counter(_tokens(line["chain"]) for line in journal if "chain" in line)
    resume_run(folder, None)
    after = {line["step"]: line for line in _lines(folder / "metrics.jsonl")}
    assert sorted(after) == list(range(1, 9))
    for step, line in before.items():  # the batches were recorded, so the repeated steps compute the same
        repeated = ("reward/mean", "policy/loss", "policy/grad_norm", "policy/staleness")
        assert {name: after[step][name] for name in repeated} == {name: line[name] for name in repeated}
    run = RunDirectory(folder)
    stored = [trajectory.trajectory for step in range(1, 9) for trajectory in run.trajectories(step)]
    trained = Counter(_tokens(chain.to_json()) for chain in stored)
    discarded = sum(line["staleness/dropped_chains"] + line["staleness/recomputed_chains"] for line in after.values())
    assert (finished - trained).total() <= discarded


def _train_five_steps(folder: Path) -> None:
    """Train, then wait to be killed while chains go on. In a process of its own."""
    overrides = parse_overrides(CHANGES)
    plan = plan_recipe(Recipe(RECIPE), overrides)

    async def train() -> None:
        async with Trainer.create(plan, folder, metadata={"recipe": str(RECIPE), "overrides": overrides}) as trainer:
            for _ in range(5):
                await trainer.train_step()
            await asyncio.Event().wait()

    asyncio.run(train())


def read_journal(folder: Path) -> list[dict[str, Any]]:
    return _lines(folder / "rollout.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _tokens(chain: dict[str, Any]) -> str:
    """What identifies a chain: its task and its tokens."""
    return json.dumps([chain["task"]["id"], chain["segments"]])
