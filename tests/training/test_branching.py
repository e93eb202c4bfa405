"""Tree sampling with the real engine and an environment: cached prefixes, advantages of branches, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'agentfly-rl[train]'")

from agentfly import reward  # noqa: E402
from agentfly.agents import HFAgent  # noqa: E402
from agentfly.backends.engine.prefix_cache import PrefixCache  # noqa: E402
from agentfly.runs import RunDirectory  # noqa: E402
from agentfly.training import TrainConfig, train  # noqa: E402
from agentfly.types import Message, Reply, ToolCall  # noqa: E402
from tests.rollout.test_branching import Counter  # noqa: E402


class Presser(HFAgent):
    """Presses as often as its reply is long, whatever it says."""

    def parse(self, text: str) -> Reply:
        return Reply(Message("assistant", text, (ToolCall("press", {"times": len(text) % 7}),)))


@reward
def count_presses(env: Counter) -> float:
    return env.shown / 20


def agent(**model: Any) -> HFAgent:
    return Presser(**model, tools=[Counter], reward=count_presses)


@pytest.fixture
def config(small_model: Path) -> TrainConfig:
    torch.set_num_threads(1)
    return TrainConfig(
        model=str(small_model),
        backend={"backend": "transformers", "dtype": "float32", "kv_memory": 1 << 24},
        tasks_per_step=2,
        num_chains=2,
        max_turns=3,
        sampling={"max_tokens": 8},  # type: ignore[arg-type]
        run_options={"branching": {"turn": 1, "branches": 3}},
        algorithm="rloo",  # type: ignore[arg-type]
        optimizer={"learning_rate": 1e-2},  # type: ignore[arg-type]
        precision="float32",
        checkpoint={"every": 1},  # type: ignore[arg-type]
        loggers=(),
        steps=2,
    )


async def test_engine_computes_the_prefix_once(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    forks: list[tuple[int, int]] = []
    fork = PrefixCache.fork

    def watch(self: PrefixCache, tokens: Any) -> Any:
        node, slots = fork(self, tokens)
        forks.append((len(tokens), len(slots)))
        return node, slots

    monkeypatch.setattr(PrefixCache, "fork", watch)
    branching = agent(model_name_or_path=config.model, backend_config=config.backend)
    result = await branching.run("press", max_turns=3, sampling={"max_tokens": 8}, branching={"turn": 1, "branches": 3})
    await branching.close()
    root, *branches = result
    assert [branch.branch_of for branch in branches] == [0, 0]
    spans = root.segments[0].spans
    first_turn = sum(len(span) for span in spans if span.turn == 0)  # with its prompt
    observation = sum(len(span) for span in spans if span.turn == 1 and not span.author.carries_loss)
    cached = [slots for tokens, slots in forks if tokens == first_turn + observation - 1]
    assert len(cached) >= 3  # the chain and its two branches ask for the same prompt
    assert min(cached) >= first_turn - 1  # the last token of a turn is computed with the next one


def test_branches_are_trained_and_a_run_resumes_with_the_same_result(tmp_path: Path, config: TrainConfig) -> None:
    tasks = [f"press {number}" for number in range(8)]
    whole = train(agent, tasks, config, run=tmp_path / "whole")
    for stored in (whole.trajectories(1), whole.trajectories(2)):
        assert [chain.trajectory.branch_of for chain in stored] == [None, None, 0, 0, 1, 1] * 2
        for group in (stored[:6], stored[6:]):
            for root in (0, 1):
                family = [
                    episode for episode in group if root in (episode.trajectory.chain, episode.trajectory.branch_of)
                ]
                values = {turn: [_of_turn(episode, turn) for episode in family] for turn in range(3)}
                assert len(set(values[0])) == 1  # all of them have the advantage of the prefix
                np.testing.assert_allclose([sum(values[1]), sum(values[2])], 0, atol=1e-4)  # compared with each other
    trained = [record.metrics for record in whole.records() if record.metrics]
    assert all(metrics["policy/grad_norm"] > 0 for metrics in trained)
    train(agent, tasks, config.override({"steps": 1}), run=tmp_path / "run")
    resumed = train(agent, tasks, config, run=tmp_path / "run", resume=True)
    for name in ("reward/mean", "policy/loss", "policy/grad_norm"):
        assert [record.metrics[name] for record in resumed.records() if record.metrics] == [
            metrics[name] for metrics in trained
        ]
    assert isinstance(resumed, RunDirectory)


def _of_turn(stored: Any, turn: int) -> float:
    """The advantage of a turn's tokens, which all have the same."""
    (segment,) = stored.trajectory.segments
    turns = np.repeat([span.turn for span in segment.spans], [len(span) for span in segment.spans])
    (value,) = set(stored.advantages[0][segment.mask & (turns == turn)].tolist())
    return float(value)
