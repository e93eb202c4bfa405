"""The score, part by part."""

from dataclasses import replace

import pytest

from agentfly.environments.webshop.goal import Goal, goal_of, limited
from agentfly.environments.webshop.nouns import nouns
from agentfly.environments.webshop.score import score
from agentfly.errors import DataError
from tests.environments.webshop.conftest import BULB, LAMP, SHIRT


def test_all_that_was_asked_for_is_one(goal):
    assert score(LAMP, goal, {"color": "black", "size": "large"}).reward == 1.0


def test_each_part_counts_the_same(goal):
    assert score(LAMP, goal, {"color": "black"}).reward == 3 / 4
    assert score(LAMP, goal, {}).reward == 2 / 4
    assert score(replace(LAMP, prices=(999.0,)), goal, {}).reward == 1 / 4
    plain = replace(LAMP, attributes=(), features=())
    assert score(plain, goal, {}).reward == 1 / 4
    assert score(replace(plain, description="Has a DIMMABLE LIGHT."), goal, {}).reward == 2 / 4


def test_sizes_must_be_equal_and_other_options_nearly_so(goal):
    wanted = replace(goal, options=("large", "two pack"))
    assert score(LAMP, wanted, {"size": "large x"}).options == 0
    assert score(LAMP, wanted, {"count": "pack two"}).options == 1 / 2


def test_a_colour_counts_by_the_first_colour_in_it(goal):
    assert score(LAMP, replace(goal, options=("light navy",)), {"color": "pale light"}).options == 1


def test_options_nobody_asked_for_bring_no_more_than_one(goal):
    free = replace(goal, options=())
    assert score(LAMP, free, {"a": "lamp", "b": "desk"}).reward == 1.0


def test_another_kind_of_product_is_worth_nothing(goal):
    assert score(SHIRT, goal, {}).type == 0
    assert score(SHIRT, goal, {}).reward == 0


def test_kinds_by_shared_nouns_and_categories(goal):
    assert score(BULB, goal, {}).type == 1, "two nouns of three"
    far = replace(BULB, product_category="Garden", query="seeds")
    long = replace(goal, name="Desk Lamp Orrin Alpha Beta Gamma Delta Epsilon Zeta Table")
    assert score(replace(far, title="Table"), long, {}).type == 0.5
    assert score(replace(BULB, title="Table"), long, {}).type == 1, "two categories in common"
    longer = replace(long, name=f"{long.name} Theta Iota Kappa")
    assert score(replace(BULB, title="Table"), longer, {}).type == 0.1


def test_nouns_come_apart_at_hyphens_and_numbers_are_none():
    assert nouns("adidas Unisex-Adult Issue 2 Basketball Shoe") == (
        *("adidas", "unisex", "adult", "issue"),
        *("basketball", "shoe"),
    )
    assert "4k" not in nouns("Bar 4K Ultra")


def test_the_limit_is_above_the_price_and_the_same_each_time():
    for price in (5.0, 10.0, 333.3, 960.0):
        made = limited(replace(LAMP, prices=(price,)), "w", ["a"], [])
        assert price < made.price_upper <= price + 40
        assert f", and price lower than {made.price_upper:.2f} dollars" in made.instruction
    dear = limited(replace(LAMP, prices=(985.0,)), "w", ["a"], [])
    assert (dear.instruction, dear.price_upper) == ("w", 1_000_000)
    assert 10 <= SHIRT.price == replace(SHIRT).price <= 20


def test_a_goal_survives_json_and_nothing_else_is_one(goal):
    assert Goal.of(goal.to_json()) == goal
    row = goal.to_json()
    for wrong in (None, {}, "x", {**row, "more": 1}, {**row, "attributes": []}, {**row, "options": "black"}):
        with pytest.raises(DataError, match="a goal"):
            Goal.of(wrong)
    with pytest.raises(DataError, match="price_upper a number"):
        Goal.of({**row, "price_upper": "cheap"})


def test_options_are_told_by_name_in_alphabetical_order():
    made = goal_of(LAMP, "Find me lamps", ["x"], {"color": "black", "size": "small"})
    assert made.instruction.startswith("Find me lamps with color: black, and size: small, and price lower than")
    assert made.options == ("black", "small")
