"""The generated shop: seeded, of any size, with disjoint splits."""

import json

import pytest

from agentfly.environments.webshop import WebShop
from agentfly.environments.webshop.environment import next_exploring_action, next_informed_action
from agentfly.environments.webshop.product import ShopGoal
from agentfly.environments.webshop.session import ShopSession
from agentfly.environments.webshop.shop import open_shop
from agentfly.environments.webshop.tasks import SPLIT_TENTHS, draw_product, generate_catalog
from agentfly.errors import DataError


def test_the_same_seed_draws_the_same_products_and_a_larger_shop_begins_with_them():
    first = list(generate_catalog(30, seed=5))
    draw_product.cache_clear()
    assert list(generate_catalog(60, seed=5))[:30] == first
    assert list(generate_catalog(30, seed=6)) != first


def test_product_numbers_are_unique():
    asins = [product.asin for product in generate_catalog(3000, seed=1)]
    assert len(set(asins)) == 3000
    assert all(len(asin) == 10 and asin.isalnum() and asin.isupper() for asin in asins)


def test_splits_share_neither_products_nor_wishes():
    rows = {split: WebShop.draw_tasks(split, 300, products=300) for split in SPLIT_TENTHS}
    for what in (lambda row: row["question"], lambda row: row["goal"]["asin"]):
        sets = [{what(row) for row in split_rows} for split_rows in rows.values()]
        assert sum(map(len, sets)) == len(set.union(*sets))
    assert all(len({row["question"] for row in split_rows}) == 300 for split_rows in rows.values())


def test_draws_have_stable_prefixes():
    few, many = (WebShop.draw_tasks("train", count, products=100, seed=3) for count in (5, 20))
    assert many[:5] == few
    assert json.loads(json.dumps(few)) == few


@pytest.mark.parametrize("split", SPLIT_TENTHS)
def test_expert_buys_the_requested_product(split):
    shop = open_shop("generated/300/2")
    for row in WebShop.draw_tasks(split, 40, products=300, seed=2):
        session = ShopSession(shop, ShopGoal.from_json(row["goal"]))
        while action := next_informed_action(session):
            assert session.act(f"{action[0]}[{action[1]}]"), action
        assert session.score is not None
        assert session.score.reward == 1.0, row


def test_exploring_expert_mostly_buys_the_right_product():
    shop, rewards = open_shop("generated/300/2"), []
    for row in WebShop.draw_tasks("validation", 40, products=300, seed=2):
        session, actions = ShopSession(shop, ShopGoal.from_json(row["goal"]), window=3), []
        while action := next_exploring_action(session):
            assert session.act(f"{action[0]}[{action[1]}]"), action
            actions.append(action)
        words, product = actions[0][1], actions[1][1]
        assert words in row["question"]
        assert product in [hit.asin for hit in shop.search(words.lower())[:3]]
        rewards.append(session.score.reward)
    assert 0.8 < sum(rewards) / len(rewards) < 1.0


def test_exploring_expert_continues_from_any_page():
    row = WebShop.draw_tasks("validation", 1, products=300, seed=2)[0]
    session = ShopSession(open_shop("generated/300/2"), ShopGoal.from_json(row["goal"]), window=3)
    for detour in ("search[lamp]", "click[Next >]"):
        assert session.act(detour)
    assert session.act(f"click[{next_exploring_action(session)[1]}]")
    assert session.act("click[Features]")
    while action := next_exploring_action(session):
        assert session.act(f"{action[0]}[{action[1]}]"), action
    assert session.score is not None


def test_every_attribute_is_on_the_pages():
    for product in generate_catalog(200, seed=4):
        page_text = " ".join([product.title, *product.features]).lower()
        assert all(attribute in page_text for attribute in product.attributes)


def test_impossible_draws_are_rejected():
    with pytest.raises(DataError, match="no split 'dev'"):
        WebShop.draw_tasks("dev", 1)
    with pytest.raises(DataError, match="1 to 1000000 products, not 0"):
        WebShop.draw_tasks("train", 1, products=0)
    with pytest.raises(DataError, match=r"3 products yield about \d+ test tasks, not 5000"):
        WebShop.draw_tasks("test", 5000, products=3)


@pytest.mark.parametrize("name", ["", "corner", "generated", "generated/0/1", "generated/9999999/1", "generated/x/1"])
def test_unknown_shop_is_rejected(name):
    with pytest.raises(DataError, match="there is no shop"):
        open_shop(name)
