"""verifiers 0.4, the genuine package: its environments in our rollout and behind our gateway, and ours in its eval."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents import ExternalAgent, HFAgent
from agentfly.backends.scripted import ScriptedBackend, ScriptedTurn
from agentfly.conformance import check_environment
from agentfly.errors import ConfigError, DataError
from agentfly.gateway import Gateway
from agentfly.integrations.verifiers import load_environment, load_episodes
from agentfly.threads import wait_for
from agentfly.trajectory import StopReason
from agentfly.types import Task
from tests.fakes import call

pytest.importorskip("verifiers", reason="verifiers has an environment of its own: make verifiers")


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the tasksets of this folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("tasksets")))


def make_agent(env_class: Any, script: Any) -> HFAgent:
    return HFAgent(tools=env_class.tools, reward=env_class.reward, template="chatml", backend=ScriptedBackend(script))


async def test_tasks_of_one_turn_are_scored_by_their_weighted_rewards() -> None:
    words = load_environment("words-v1", count=200)
    assert words.tools == []
    splits = {split: words.draw_tasks(split, 10) for split in ("train", "validation", "test")}
    ids = [row["id"] for rows in splits.values() for row in rows]
    assert len(set(ids)) == 30
    assert splits["train"] != words.draw_tasks("train", 10, seed=1)
    row = splits["train"][0]
    assert [message["role"] for message in row["messages"]] == ["system", "user"]

    agent = make_agent(words, row["verifiers"]["answer"])
    wrong_agent = make_agent(words, "a long reply that is not the word")
    try:
        chains = (await agent.run(row, num_chains=3)).trajectories
        assert [chain.reward for chain in chains] == [1.5] * 3
        assert chains[0].score is not None
        assert chains[0].score.metrics == {"turns": 1.0, "exact": 1.0, "short": 1.0}
        assert all(segment.exact for chain in chains for segment in chain.segments)
        assert (await wrong_agent.run(row)).rewards == [0.0]
    finally:
        await agent.close()
        await wrong_agent.close()


def test_environment_of_a_taskset_keeps_the_contract() -> None:
    from agentfly.environments.lookup.recipes.verifiers_lookup import VerifiersLookup

    report = check_environment(VerifiersLookup, instances=2)
    assert report.ok, report
    assert len(report.results) == sum(result.status.value == "pass" for result in report.results)


async def test_tools_of_a_taskset_are_called_in_the_instance_of_the_chain() -> None:
    from agentfly.environments.lookup.recipes.verifiers_lookup import VerifiersLookup

    rows = VerifiersLookup.draw_tasks("train", 2)
    facts = [row["verifiers"] for row in rows]
    agent = HFAgent(
        tools=[VerifiersLookup],
        reward=VerifiersLookup.reward,
        template="chatml",
        backend=ScriptedBackend(
            [
                call("lookup", who=facts[0]["who"], what=facts[0]["relation"]),
                call("lookup", who=7),
                call("nothing"),
                facts[0]["answer"],
            ]
        ),
    )
    try:
        first, second = await agent.run(rows)
    finally:
        await agent.close()
    observations = [message.text for message in first.messages if message.role == "tool"]
    assert observations[0] == facts[0]["facts"][facts[0]["who"]][facts[0]["relation"]]
    assert "'what' is missing" in observations[1]
    assert "there is no tool 'nothing'" in observations[2]
    assert (first.reward, first.score.metrics) == (1.0, {"lookups": 3.0, "exact_answer": 1.0})
    assert second.messages[2].text == "unknown"  # the other chain has facts about other people
    assert len(first.segments) == 1


async def test_episodes_of_several_turns_are_recorded_token_by_token() -> None:
    guesses = load_episodes("guess-v1")
    row = next(row for row in guesses.draw_tasks("train", 70) if row["verifiers"]["number"] == 42)
    backend = ScriptedBackend(["7", "8", "42"])
    agent = ExternalAgent(program=guesses.program, reward=guesses.reward, template="chatml", backend=backend)
    try:
        chains = (await agent.run(row, num_chains=3)).trajectories
        assert [chain.reward for chain in chains] == [1.0] * 3
        assert chains[0].score.metrics == {"completed": 1.0, "guessed": 1.0}
        assert [(len(chain.turns), len(chain.segments)) for chain in chains] == [(3, 1)] * 3
        assert all(segment.exact for chain in chains for segment in chain.segments)
        assert agent.gateway.metrics()["continued"] == 1.0
        (limited,) = await agent.run(row, max_turns=2)
        assert (limited.stop, limited.reward) == (StopReason.MAX_TURNS, 0.0)
        assert limited.score.metrics == {"completed": 0.0}
        assert "the episode failed" in limited.failures[0].message
    finally:
        await agent.close()


async def test_our_environment_runs_in_the_evaluation_of_verifiers(tmp_path: Path) -> None:
    from verifiers.v1.cli.eval.runner import run_eval
    from verifiers.v1.configs.cli.eval import EvalConfig

    def reply(turn: ScriptedTurn) -> str:
        return "green" if "unknown" in turn.prompt else call("lookup", who="Nobody", what="friend")

    scripted = HFAgent(template="chatml", backend=ScriptedBackend(reply))
    gateway = await Gateway(scripted.backend, scripted.load_template, model="tiny", api_key="", record=False).start()
    config = EvalConfig.model_validate(
        {
            "env": {
                "taskset": {
                    "id": "agentfly-verifiers", "environment": "Lookup", "split": "validation", "count": 20,
                    "reward": "qa_em",
                }
            },
            "model": "tiny", "client": {"base_url": gateway.base_url, "api_key_var": "NO_KEY"},
            "output_dir": str(tmp_path), "rich": None, "push": False, "num_rollouts": 2,
        }
    )  # fmt: skip
    try:
        episodes = await run_eval(config)
    finally:
        await gateway.close()
        await scripted.close()
    assert len(episodes) == 40
    assert all(episode.ok for episode in episodes), episodes[0].traces[0].errors
    for episode in episodes:
        (trace,) = episode.traces
        assert trace.reward == float(trace.task.data.row["answer"] == "green")
        assert [message.role for message in trace.messages] == ["user", "assistant", "tool", "assistant"]
        assert trace.messages[2].content == "unknown"
    assert 0 < sum(episode.traces[0].reward for episode in episodes) < 40
    (saved,) = tmp_path.rglob("traces.jsonl")  # noqa: ASYNC240
    assert len(saved.read_text().splitlines()) == 40


async def test_wrong_tasksets_and_tasks_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"taskset 'word-v1'.*Did you mean words_v1"):
        load_environment("word-v1")
    with pytest.raises(ConfigError, match=r"configuration of the taskset 'words-v1'.*counts"):
        load_environment("words-v1", counts=3)
    with pytest.raises(ConfigError, match=r"guess-v1 has hooks between turns \(gave_up\).*load_episodes"):
        load_environment("guess-v1")
    with pytest.raises(ConfigError, match="has no agent 'player'; it has agent"):
        load_episodes("guess-v1", agent="player")
    with pytest.raises(ConfigError, match="agents user would be sampled from the model in training"):
        load_episodes("words-v1", agent="assistant", config={"id": "user-sim"})
    words = load_environment("words-v1")
    with pytest.raises(DataError, match="tasks of the split test, not 1000"):
        words.draw_tasks("test", 1000)
    with pytest.raises(DataError, match="column 'verifiers'"):
        await words().reset(Task.of("What?"))
    with pytest.raises(DataError, match="is no task of WordsTaskset"):
        await words().reset(Task.of({"question": "What?", "verifiers": {"prompt": 7}}))


def test_rows_of_a_taskset_are_json() -> None:
    rows = load_environment("words-v1").draw_tasks("train", 5)
    assert json.loads(json.dumps(rows)) == rows


def test_blocks_of_the_guide_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    blocks = [
        block for block in re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "verifiers" in block
    ]
    namespaces: list[dict[str, Any]] = [{"__name__": "guide"} for _ in blocks]
    for block, namespace in zip(blocks, namespaces, strict=True):
        exec(block, namespace)
        wait_for(namespace["agent"].close())
    assert [len(namespace["result"].trajectories) for namespace in namespaces] == [8, 4]
    assert all(chain.score is not None for namespace in namespaces for chain in namespace["result"].trajectories)
