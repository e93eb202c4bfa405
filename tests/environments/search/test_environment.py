"""The search environment: observations, task columns, and the expert."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("bm25s", reason="searching by words needs bm25s: pip install 'agentfly-rl[search]'")

from agentfly.agents import HFAgent
from agentfly.environments import Search
from agentfly.environments.search import Hit, Passage
from agentfly.environments.search.engines import SearchFailed
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.rewards import qa_em
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task, ToolCall
from tests.fakes import random_from


def make_agent(kind: type[Search] = Search) -> HFAgent:
    settings: Any = {"template": "chatml", "backend": "scripted", "backend_config": {"script": "-"}}
    return HFAgent(tools=[kind], reward=qa_em, **settings)


async def make_env(columns: dict[str, Any], kind: type[Search] = Search) -> Search:
    env = kind()
    await env.start()
    await env.reset(Task.of({"question": "Q", **columns}))
    return env


async def search(env: Search, query: str) -> str:
    return str((await env.search(query=query))["observation"])


@pytest.mark.parametrize("split", ["train", "validation", "test"])
async def test_expert_answers_every_question(split: str) -> None:
    agent = make_agent()
    demonstrations = await demonstrate(agent, Search.draw_tasks(split, 100))
    await agent.close()
    assert len(demonstrations.accepted) == 100
    for chain in demonstrations.accepted:
        searches = sum(len(turn.calls) for turn in chain.turns)
        assert 1 <= searches <= chain.task.columns["hops"]


async def test_expert_uses_only_seen_articles() -> None:
    row = Search.draw_tasks("train", 1, hops=[2])[0]
    env = await make_env(row)
    first = env.expert()
    assert first == ToolCall("search", {"query": row["start"]})
    assert env.expert() == first  # nothing was searched, so nothing is known
    await search(env, "a town that is not there")
    assert env.expert() == first
    await search(env, row["start"])
    assert env.expert() != first


async def test_only_articles_with_the_answer_show_it() -> None:
    for row in Search.draw_tasks("test", 20, hops=[3]):
        env = await make_env(row)
        titles = (await env.search(query=row["question"]))["titles"]
        text = await search(env, row["question"])
        holders = {p.title for p in env._encyclopedia.passages if row["answer"] in p.text}  # type: ignore[union-attr]
        assert (row["answer"] in text) == bool(holders & set(titles))


async def test_instances_share_only_the_index() -> None:
    rows = Search.draw_tasks("train", 8, articles=60)
    worlds = await asyncio.gather(*(make_env(row) for row in rows for _ in range(4)))
    assert len({id(env._retriever) for env in worlds}) == 1  # one encyclopedia, drawn and indexed once
    await search(worlds[0], rows[0]["start"])
    assert worlds[0].seen
    assert not worlds[1].seen
    await worlds[0].reset(Task.of(rows[1]))
    assert worlds[0].seen == []


async def test_passages_of_the_task_are_searched() -> None:
    texts = [{"title": "Ed Wood", "text": "A director."}, {"title": "Doctor Strange", "text": "A film of 2016."}]
    env = await make_env({"passages": texts})
    assert await search(env, "who was Ed Wood?") == "[1] Ed Wood\nA director."
    assert await search(env, "Zanzibar") == "Nothing was found. Try other words."
    with pytest.raises(ConfigError, match="no column `path`"):
        env.expert()


async def test_unusual_queries_are_answered() -> None:
    env = await make_env(Search.draw_tasks("train", 1)[0])
    for query in ("", "   ", "\0", "?!", "the of and", "x" * 1_000_000, "Ŋ漢字 \ud800", "name " * 200_000):
        assert (await search(env, query)).startswith(("Error: the query is empty", "Nothing was found"))
    title = next(iter(env._encyclopedia.facts))  # type: ignore[union-attr]
    assert (await search(env, title.upper() + "?")).startswith(f"[1] {title}\n")


async def test_long_passages_are_truncated() -> None:
    class Brief(Search):
        longest = 10

    env = await make_env({"passages": [{"title": "T", "text": "abcdefgh ijklmnop"}]}, Brief)
    assert await search(env, "T") == "[1] T\nabcdefgh i …"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"encyclopedia": 3}, "must have split, seed and articles, not 3"),
        ({"encyclopedia": {"split": "train", "seed": "x", "articles": 30}}, "a whole seed"),
        ({"passages": []}, "at least one passage"),
        ({"passages": ["text"]}, "passage 0 must be an object"),
        ({"passages": [{"titel": "x"}]}, "passage 0 must have the texts title and text.*it has 'titel'"),
    ],
)
async def test_invalid_columns_are_rejected(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await make_env(columns)


async def test_class_source_is_searched_and_its_failure_is_an_environment_fault() -> None:
    class Broken:
        def search(self, queries: Any, k: int) -> list[list[Hit]]:
            if "fail" in queries[0]:
                raise SearchFailed("the server is gone")
            return [[Hit(Passage("T", f"{k}"), 1.0)]]

    class Sourced(Search):
        source = Broken()
        top_k = 5

    env = await make_env({}, Sourced)
    assert await search(env, "x") == "[1] T\n5"
    with pytest.raises(EnvironmentFault, match="the server is gone"):
        await search(env, "fail")


async def test_policy_without_search_gets_no_reward() -> None:
    rows, random = Search.draw_tasks("train", 100), random_from("guess")
    answers = [row["answer"] for row in Search.draw_tasks("train", 100, seed=9)]
    assert sum(qa_em(random.choice(answers), row["answer"])["reward"] for row in rows) == 0
    assert sum(qa_em(row["start"], row["answer"])["reward"] for row in rows) == 0
    everything = " ".join(answers + [row["answer"] for row in rows])
    assert qa_em(everything, rows[0]["answer"])["reward"] == 0
