"""The environment, through agents, its tools, its reward and the manager."""

import asyncio
import sys
from typing import Any

import pytest

from agentfly import Pool, Task
from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.cli.env_list import resolve_task
from agentfly.cli.env_play import PlaySession
from agentfly.environments import WebShop
from agentfly.environments.webshop import product
from agentfly.errors import ConfigError, DataError
from agentfly.rewards import webshop_reward
from agentfly.rollout import RunResult
from agentfly.sft.demonstrations import demonstrate
from agentfly.trajectory import StopReason
from agentfly.types import ToolCall
from tests.fakes import call

ROWS = WebShop.draw_tasks("train", 64, products=200)


def agent(*turns: str, kind: type[WebShop] = WebShop) -> HFAgent:
    return HFAgent(tools=[kind], reward=webshop_reward, template="chatml", backend=ScriptedBackend([*turns, "Done."]))


async def play(*calls: str, row: dict[str, Any] = ROWS[0], kind: type[WebShop] = WebShop) -> RunResult:
    return await agent(*calls, kind=kind).run(row, max_turns=len(calls) + 1)


def answers(result: RunResult) -> list[str]:
    return [message.text for message in result[0].messages if message.role == "tool"]


async def test_buying_ends_the_chain_with_a_score():
    goal = ROWS[0]["goal"]
    result = await play(
        call("search", keywords=goal["name"]), call("click", label=goal["asin"]), call("click", label="Buy Now")
    )
    assert result[0].stop is StopReason.TOOL_END
    conditions = len(goal["attributes"]) + len(goal["options"]) + 1
    assert result.rewards == [pytest.approx((len(goal["attributes"]) + 1) / conditions)]
    assert answers(result)[-1].startswith("Thank you for shopping with us!")


async def test_without_a_purchase_there_is_no_reward():
    result = await play(call("search", keywords="anything at all"))
    assert result.rewards == [0.0]


async def test_model_mistakes_are_answered_with_the_alternatives():
    observations = answers(
        await play(
            call("click", label="Buy Now"),
            call("search", keywords=""),
            call("search", keywords=ROWS[0]["goal"]["name"]),
            call("click", label=7),
            call("click", label=["Buy", "Now"]),
            call("search", words="shoes"),
        )
    )
    assert observations[0].startswith(
        "There is no 'Buy Now' to click here. There is: nothing; search instead.\n\nWebShop"
    )
    assert observations[1].startswith("Give some words to search for.")
    assert observations[3].startswith("There is no '7' to click here. There is: Back to Search, Next >, G"), (
        "a size may be 7"
    )
    assert "label" in observations[4]
    assert "keywords" in observations[5]


async def test_huge_input_is_answered_briefly():
    env = WebShop()
    await env.reset(Task.of(ROWS[0]))
    for act in (env.search, env.click):
        assert len((await act("shoes " * 200_000))["observation"]) < 5000


async def test_reset_clears_the_previous_session():
    class OneAtATime(WebShop):
        pool = Pool(max_instances=1)

    goal = ROWS[0]["goal"]
    turns = [call("search", keywords=goal["name"]), call("click", label=goal["asin"])]
    turns += [call("click", label=value) for value in goal["options"]]
    one = agent(*turns, call("click", label="Buy Now"), kind=OneAtATime)
    first = await one.run(ROWS[0], max_turns=9, num_chains=3)
    assert first.rewards == [1.0, 1.0, 1.0]
    other = HFAgent(
        tools=[OneAtATime],
        reward=webshop_reward,
        template="chatml",
        backend=ScriptedBackend([call("click", label="Buy Now"), "Done."]),
        manager=one.manager,
    )
    second = await other.run(ROWS[1], max_turns=2)
    assert second.rewards == [0.0]
    assert ROWS[1]["question"] in answers(second)[0]
    assert ROWS[0]["question"] not in answers(second)[0]


async def test_the_expert_solves_many_at_once_in_one_shop():
    demonstrations = await demonstrate(agent(), ROWS, max_turns=20)
    assert (len(demonstrations.accepted), demonstrations.reasons) == (len(ROWS), {})


async def test_runs_in_another_process():
    class Elsewhere(WebShop):
        pool = Pool(runtime="process", max_instances=1)

    far = agent(kind=Elsewhere)
    demonstrations = await demonstrate(far, ROWS[:2], max_turns=20)
    await far.close()
    assert (len(demonstrations.accepted), demonstrations.reasons) == (2, {})


async def test_expert_continues_from_any_page():
    env = WebShop()
    await env.start()
    await env.reset(Task.of(ROWS[2]))
    await env.search("curtains sofas shoes teas")
    await env.click(env.session.found[0].asin)
    await env.click("Features")
    for _ in range(20):
        done = env.expert()
        if isinstance(done, str):
            break
        assert isinstance(done, ToolCall)
        await getattr(env, done.name)(**done.arguments)
    assert done == "Done."
    assert env.score is not None
    assert env.score["reward"] == 1.0


async def test_views():
    class Rich(WebShop):
        view = "rich"

    class Html(WebShop):
        view = "html"

    class Fancy(WebShop):
        view = "fancy"

    with pytest.raises(ConfigError, match=r"Fancy\.view is 'fancy'; there are text, rich, brief, html"):
        await Fancy().start()

    class Brief(WebShop):
        view, window = "brief", 3

    results, item, chosen, bought = answers(
        await play(
            call("search", keywords=ROWS[0]["goal"]["name"]),
            call("click", label=ROWS[0]["goal"]["asin"]),
            call("click", label=ROWS[0]["goal"]["options"][0]),
            call("click", label="Buy Now"),
            kind=Brief,
        )
    )
    assert results.startswith("Back to Search [SEP] Page 1")
    assert results.count("[SEP] $") == 3
    assert item.startswith("Back to Search [SEP] < Prev")
    assert chosen == f"You have clicked {ROWS[0]['goal']['options'][0]}."
    assert bought.startswith("Thank you")
    assert "[button] Back to Search [button_]" in answers(await play(call("search", keywords="tea"), kind=Rich))[0]
    assert "<button>Back to Search</button>" in answers(await play(call("search", keywords="tea"), kind=Html))[0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"shop": "generated/200/0"}, "a goal has"),
        ({"goal": ROWS[0]["goal"]}, "the column `shop`"),
        ({"goal": ROWS[0]["goal"], "shop": "nowhere"}, "there is no shop 'nowhere'"),
        ({"goal": ROWS[0]["goal"], "shop": "generated/20/9"}, "which the shop 'generated/20/9' does not have"),
    ],
)
async def test_malformed_task_is_rejected(columns, message):
    env = WebShop()
    with pytest.raises(DataError, match=message):
        await env.reset(Task.of({"question": "Q", **columns}))


@pytest.mark.parametrize("package", ["bm25s", "Stemmer", "rapidfuzz", "textblob.en"])
async def test_missing_package_is_reported(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    product._load_tagger.cache_clear()
    product.extract_nouns.cache_clear()
    with pytest.raises(ConfigError, match=rf"the web shop needs {package.removesuffix('.en')}, .*-rl\[webshop\]"):
        await WebShop().start()


async def test_play_session_works_without_a_task():
    task = resolve_task(WebShop, None, None, None)
    assert task is not None
    player = PlaySession(WebShop, task)
    await player.start()
    result = await player.act(ToolCall("search", {"keywords": "boots"}))
    assert "Boots" in str(result.observation)
    await player.close()


async def test_instances_share_one_shop():
    environments = [WebShop() for _ in range(64)]
    await asyncio.gather(*(env.reset(Task.of(row)) for env, row in zip(environments, ROWS, strict=True)))
    assert len({id(env.session.shop) for env in environments}) == 1
    assert len({id(env.session) for env in environments}) == 64
