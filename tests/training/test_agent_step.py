"""The benchmark of whole training steps, with untrained models."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import agent_step
from benchmarks.thread_profile import ThreadProfile, find_cause


def test_steps_of_a_recipe_are_split_by_phase(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = {"model": str(small_model), "tasks_per_step": 2, "num_chains": 2, "sampling.max_tokens": 8}
    profile = ThreadProfile()
    figures = agent_step.measure("lookup", overrides, steps=1, warmup=1, profile=profile)
    phases = [figures[f"{name} s"] for name in ("sampling", "tools", "waiting", "update", "sync", "other")]
    assert sum(phases) == pytest.approx(figures["step s"], rel=0.05)
    assert figures["chains"] == 4
    assert figures["tokens/s"] > 0
    assert profile.cpu["engine"] > 0
    assert "CPU seconds by thread and cause" in capsys.readouterr().out


def test_random_weights_play_the_experts_calls_for_all_turns(small_model: Path) -> None:
    overrides = {"tasks_per_step": 2, "num_chains": 2, "max_turns": 3, "sampling.max_tokens": 4}
    figures = agent_step.measure("lookup", overrides, steps=1, warmup=0, shape="test", tokenizer=str(small_model))
    assert figures["turns"] == 3
    assert figures["read/turn"] > 0  # observations of real calls


def test_innermost_known_file_is_the_cause() -> None:
    assert find_cause(["run (asyncio/base_events.py:1)", "act (agentfly/resources/lease.py:2)"]) == "lease"
    assert find_cause(["work (agentfly/backends/engine/engine.py:1)", "add (numpy/x.py:2)"]) == "engine loop, requests"
