"""The parts of the score."""

from dataclasses import replace

import pytest

from agentfly.environments.webshop.product import ShopGoal, extract_nouns, make_goal, make_option_goal, score_purchase
from agentfly.errors import DataError
from tests.environments.webshop.conftest import BULB, LAMP, SHIRT


def test_full_match_scores_one(goal):
    assert score_purchase(LAMP, goal, {"color": "black", "size": "large"}).reward == 1.0


def test_conditions_have_equal_weight(goal):
    assert score_purchase(LAMP, goal, {"color": "black"}).reward == 3 / 4
    assert score_purchase(LAMP, goal, {}).reward == 2 / 4
    assert score_purchase(replace(LAMP, prices=(999.0,)), goal, {}).reward == 1 / 4
    plain = replace(LAMP, attributes=(), features=())
    assert score_purchase(plain, goal, {}).reward == 1 / 4
    assert score_purchase(replace(plain, description="Has a DIMMABLE LIGHT."), goal, {}).reward == 2 / 4


def test_sizes_must_be_equal_and_other_options_nearly_so(goal):
    goal_with_two_options = replace(goal, options=("large", "two pack"))
    assert score_purchase(LAMP, goal_with_two_options, {"size": "large x"}).options == 0
    assert score_purchase(LAMP, goal_with_two_options, {"count": "pack two"}).options == 1 / 2


def test_color_is_normalized_to_its_first_color_word(goal):
    assert score_purchase(LAMP, replace(goal, options=("light navy",)), {"color": "pale light"}).options == 1


def test_unwanted_options_do_not_raise_the_score_above_one(goal):
    free = replace(goal, options=())
    assert score_purchase(LAMP, free, {"a": "lamp", "b": "desk"}).reward == 1.0


def test_unrelated_product_scores_zero(goal):
    assert score_purchase(SHIRT, goal, {}).type == 0
    assert score_purchase(SHIRT, goal, {}).reward == 0


def test_kinds_by_shared_nouns_and_categories(goal):
    assert score_purchase(BULB, goal, {}).type == 1, "two nouns of three"
    far = replace(BULB, product_category="Garden", query="seeds")
    long = replace(goal, name="Desk Lamp Orrin Alpha Beta Gamma Delta Epsilon Zeta Table")
    assert score_purchase(replace(far, title="Table"), long, {}).type == 0.5
    assert score_purchase(replace(BULB, title="Table"), long, {}).type == 1, "two categories in common"
    longer = replace(long, name=f"{long.name} Theta Iota Kappa")
    assert score_purchase(replace(BULB, title="Table"), longer, {}).type == 0.1


def test_nouns_are_split_at_hyphens_and_exclude_numbers():
    assert extract_nouns("adidas Unisex-Adult Issue 2 Basketball Shoe") == (
        *("adidas", "unisex", "adult", "issue"),
        *("basketball", "shoe"),
    )
    assert "4k" not in extract_nouns("Bar 4K Ultra")


def test_price_limit_is_above_the_price_and_deterministic():
    for price in (5.0, 10.0, 333.3, 960.0):
        goal = make_goal(replace(LAMP, prices=(price,)), "w", ["a"], options=[])
        assert price < goal.price_upper <= price + 40
        assert f", and price lower than {goal.price_upper:.2f} dollars" in goal.instruction
    dear = make_goal(replace(LAMP, prices=(985.0,)), "w", ["a"], options=[])
    assert (dear.instruction, dear.price_upper) == ("w", 1_000_000)
    assert 10 <= SHIRT.price == replace(SHIRT).price <= 20


def test_goal_json_round_trip_and_validation(goal):
    assert ShopGoal.from_json(goal.to_json()) == goal
    row = goal.to_json()
    for bad_goal in (None, {}, "x", {**row, "more": 1}, {**row, "attributes": []}, {**row, "options": "black"}):
        with pytest.raises(DataError, match="a goal"):
            ShopGoal.from_json(bad_goal)
    with pytest.raises(DataError, match="price_upper: Input should be a valid number"):
        ShopGoal.from_json({**row, "price_upper": "cheap"})


def test_instruction_names_options_in_alphabetical_order():
    goal = make_option_goal(LAMP, "Find me lamps", ["x"], chosen={"color": "black", "size": "small"})
    assert goal.instruction.startswith("Find me lamps with color: black, and size: small, and price lower than")
    assert goal.options == ("black", "small")
