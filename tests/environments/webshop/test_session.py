"""Pages and actions, in a small shop."""

import pytest

from agentfly.environments.webshop import pages
from agentfly.environments.webshop.session import ShopSession

INSTRUCTION = "Find me dimmable light desk lamps with color: black, and size: large, and price lower than "


def page_parts(session: ShopSession) -> list[str]:
    return pages.render_text(session.page).split(" [SEP] ")


def test_a_session_begins_at_the_search_page(session):
    page = page_parts(session)
    assert page[:2] == ["WebShop", "Instruction:"]
    assert page[2].startswith(INSTRUCTION)
    assert page[3:] == ["Search"]
    assert not session.clickable, "the search button needs words, not a click"


def test_results_name_number_title_and_price(session):
    assert session.act("search[Lamp]")
    assert page_parts(session)[2:] == [
        "Back to Search",
        "Page 1 (Total results: 2)",
        "Next >",
        *("LAMP000001", "Orrin Desk Lamp", "$19.99"),
        *("BULB000001", "Orrin Lamp Bulb", "$200.0"),
    ]
    assert list(session.clickable) == ["back to search", "next >", "lamp000001", "bulb000001"]


def test_an_item_page_lists_options_before_the_title(session):
    session.act("search[lamp]")
    assert session.act("click[lamp000001]")
    assert page_parts(session)[2:] == [
        *("Back to Search", "< Prev", "color", "black", "blue | white", "size", "small", "large"),
        *("Orrin Desk Lamp", "Price: $19.99", "Rating: N.A.", "Description", "Features", "Reviews", "Buy Now"),
    ]
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert list(session.clickable) == [*buttons, "black", "blue | white", "small", "large"]


def test_a_price_range_is_shown_as_one(session):
    session.act("search[velt]")
    assert "$10.0 to $20.0" in page_parts(session)


@pytest.mark.parametrize(
    ("button", "content"),
    [
        ("Description", ["A lamp for people who read at night."]),
        ("features", ["Dimmable light.", "Easy to clean."]),
        ("REVIEWS", ["No Reviews"]),
    ],
)
def test_sub_pages_and_back(session, button, content):
    session.act("search[lamp]")
    session.act("click[LAMP000001]")
    session.act("click[black]")
    assert session.act(f"click[{button}]")
    assert page_parts(session)[2:] == ["Back to Search", "< Prev", *content]
    assert session.act("click[< prev]")
    assert session.options == {"color": "black"}, "what was chosen stays"
    assert session.act("click[< Prev]")
    assert (session.product, session.options, session.keywords) == (None, {}, "lamp")


def test_pages_of_results_turn_both_ways(session):
    session.act("search[lamp]")
    assert session.act("click[next >]")
    assert page_parts(session)[3:] == ["Page 2 (Total results: 2)", "< Prev", "Next >"]
    assert session.act("click[< prev]")
    assert "LAMP000001" in page_parts(session)


def test_back_to_search_resets_the_page(session):
    for action in ("search[lamp]", "click[lamp000001]", "click[black]", "click[back to search]"):
        assert session.act(action)
    assert (session.keywords, session.product, session.options, session.seen) == (None, None, {}, set())


@pytest.mark.parametrize(
    "action",
    ["", "buy", "click[]", "click[nothing]", "search[]", "click[search]", "think[lamp]", "click[BULB000001]", "search"],
)
def test_impossible_action_changes_nothing(session, action):
    session.act("search[velt]")
    page_before = pages.render_rich(session.page)
    assert not session.act(action)
    assert pages.render_rich(session.page) == page_before


def test_searching_is_possible_everywhere_but_after_buying(session):
    session.act("search[lamp]")
    session.act("click[lamp000001]")
    assert session.act("search[velt]")
    session.act("click[shirt00001]")
    assert session.act("click[buy now]")
    bought = session.score
    assert not session.act("search[lamp]")
    assert not session.clickable
    assert session.score is bought
    assert page_parts(session)[0] == "Thank you for shopping with us!"


def test_unknown_words_find_nothing(session):
    assert session.act("search[zyzzyva]")
    assert page_parts(session)[3:] == ["Page 1 (Total results: 0)", "Next >"]


def test_rich_text_marks_buttons_and_what_was_clicked(session):
    session.act("search[lamp]")
    session.act("click[lamp000001]")
    session.act("click[black]")
    text = pages.render_rich(session.page)
    assert text.startswith("You have clicked black.\nInstruction:\n")
    assert "\n[button] Buy Now [button_]\n" in text
    assert "\n  [clicked button] black [clicked button_]\n  [button] blue | white [button_]\n" in text
    session.act("click[< prev]")
    assert "\n\n[clicked button] LAMP000001 [clicked button_]\nOrrin Desk Lamp\n" in pages.render_rich(session.page)


def test_html_has_the_same_text_escaped(session):
    session.act("search[lamp]")
    session.act("click[lamp000001]")
    html = pages.render_html(session.page)
    assert "<button>&lt; Prev</button>" in html
    assert "<label>blue | white</label>" in html
    session.act("click[black]")
    assert '<label class="clicked">black</label>' in pages.render_html(session.page)
    assert pages.render_html([pages.text("<script>")]).count("<script>") == 0
