"""WebShop's own data: its goals in its order, and search results and scores of published runs."""

import json
from pathlib import Path

import pytest

from agentfly.environments.webshop import official_tasks, pages
from agentfly.environments.webshop.environment import next_informed_action
from agentfly.environments.webshop.product import ShopGoal, score_purchase
from agentfly.environments.webshop.session import ShopSession
from agentfly.environments.webshop.shop import open_shop
from agentfly.environments.webshop.tasks import SPLITS
from agentfly.errors import DataError

FIRST = ["B0743JKHBV", "B09QCP4579", "B099WH1RTM", "B09LSKQF8C", "B09M63B87V"]
"""The products of WebShop's first goals."""
TOP = {
    "double sided machine washable": "B096MM7XM4",
    "butt lifting light weight": "B09QCP4579",
    "ready hang wall art": "B099WH1RTM",
    "dual band streaming media": "B09LSKQF8C",
    "hand wash women sweaters": "B08G8DXR5N",
    "men shorts elastic waist": "B09Q5ZHRVM",
    "wash cold machine wash": "B09M63B87V",
    "machine wash blue red xx large color size": "B01HQTWL6S",
    "home office furniture sets": "B09688C4XM",
    "slim fit straight leg": "B01MSP2B0I",
    "women pumps closed toe": "B09QPX97VW",
    "women black 7 color size": "B09PJ5ZXGH",
}
"""What Lucene ranks first."""
JUMPSUITS = [
    "B09NDS8F4V", "B09PVNLVRW", "B09RV4TXKJ", "B099WX3CV5", "B09Q37JQZ6",
    "B09QPX97VW", "B09NSC5VDG", "B09QGK5XHZ", "B09S632DT3", "B09QXF3V3X",
]  # fmt: skip
"""Lucene's first page for `women jumpsuits`."""
SCORES = [
    (0, "B096MM7XM4", 0.0), (1, "B09QCP4579", 5 / 7), (2, "B099WH1RTM", 4 / 6), (3, "B09LSKQF8C", 1.0),
    (4, "B08G8DXR5N", 1 / 45), (5, "B09ND8P2QR", 2 / 7), (6, "B09Q5ZHRVM", 4 / 7), (7, "B09KP78G37", 1 / 30),
    (8, "B09M63B87V", 1 / 22), (9, "B01HQTWL6S", 0.0), (10, "B099231V35", 0.6), (11, "B09QQP3356", 0.6),
    (12, "B07WMMYB6G", 1 / 6), (13, "B09688C4XM", 0.0), (14, "B08W568RSB", 1 / 3), (15, "B09ND8P2QR", 0.0),
    (16, "B09NNMV9LN", 5 / 9), (16, "B01MSP2B0I", 0.0), (17, "B09M63B87V", 0.0), (18, "B09ND8P2QR", 0.0),
    (19, "B09PJ5ZXGH", 0.02), (19, "B09QPX97VW", 0.0), (5457, "B09QGK5XHZ", 1 / 30),
]  # fmt: skip
"""The number of a goal, what was bought without choosing options, and WebShop's score."""


@pytest.fixture(scope="module")
def rows(official: None) -> dict[str, list[dict]]:
    return {split: official_tasks(split) for split in SPLITS}


def test_the_goals_are_those_of_webshop(rows):
    assert [row["goal"]["asin"] for row in rows["test"][:5]] == FIRST
    assert rows["train"][-1]["id"] == "official/goal/6909"
    assert {name: len(split_rows) for name, split_rows in rows.items()} == {
        "test": 500,
        "validation": 999,
        "train": 5402,
    }


def test_no_goal_is_in_two_splits(rows):
    wishes = [(row["question"], row["goal"]["asin"]) for split_rows in rows.values() for row in split_rows]
    assert len(set(wishes)) == len(wishes)
    assert json.loads(json.dumps(rows["test"][0])) == rows["test"][0]


def test_search_ranks_as_lucene_does(official):
    shop = open_shop("official")
    assert {words: shop.search(words)[0].asin for words in TOP} == TOP
    assert [product.asin for product in shop.search("women jumpsuits")[:10]] == JUMPSUITS


def test_scores_are_those_of_webshop(rows):
    shop = open_shop("official")
    goals = {row["id"]: ShopGoal.from_json(row["goal"]) for split_rows in rows.values() for row in split_rows}
    scores = [
        score_purchase(shop.products[asin], goals[f"official/goal/{number}"], {}).reward for number, asin, _ in SCORES
    ]
    assert scores == pytest.approx([official_score for *_, official_score in SCORES])


def test_expert_buys_the_requested_product(rows):
    """A sample; docs/lab/webshop.md has all."""
    shop, ones = open_shop("official"), 0
    sample = rows["test"][::5] + rows["train"][::50]
    for row in sample:
        session = ShopSession(shop, ShopGoal.from_json(row["goal"]))
        while action := next_informed_action(session):
            assert session.act(f"{action[0]}[{action[1]}]"), action
        ones += session.score is not None and session.score.reward == 1.0
    assert ones / len(sample) >= 0.93


def test_human_instructions(official):
    human = [row for split in SPLITS for row in official_tasks(split, human=True)]
    assert len(human) == 13
    assert all(row["id"].startswith("official/human/") for row in human)


def test_unknown_splits_and_shops_are_rejected(official):
    with pytest.raises(DataError, match="no split 'dev'; there are train, validation, test"):
        official_tasks("dev")
    with pytest.raises(DataError, match="no official shop 'ebay'"):
        official_tasks("test", shop="ebay")


def test_missing_data_error_names_the_source(monkeypatch, tmp_path):
    monkeypatch.delenv("AGENTFLY_DATA", raising=False)
    with pytest.raises(DataError, match=r"github.com/princeton-nlp/WebShop.*set AGENTFLY_DATA"):
        official_tasks("test")
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"no items_shuffle_1000.json .*princeton-nlp"):
        official_tasks("test")


PRODUCT = {
    "asin": "B000000001", "name": "Red Lamp", "full_description": "", "pricing": "$5.00$1,250.50", "images": ["x.jpg"],
    "product_category": "Home › Lamps", "small_description": "Bright", "category": "garden", "query": " Lamps ",
    "customization_options": {"Color": [{"value": " Red/Blue "}], "Size": None},
}  # fmt: skip


def _write_files(folder: Path, products: object, descriptions: object) -> None:
    (folder / "webshop").mkdir()
    (folder / "webshop" / "items_shuffle.json").write_text(json.dumps(products))
    (folder / "webshop" / "items_ins_v2.json").write_text(json.dumps(descriptions))


def test_files_of_any_size_are_read(monkeypatch, tmp_path):
    instruction = {"instruction": "Find me lamps", "instruction_attributes": ["bright"]}
    descriptions = {"B000000001": {"attributes": ["bright"], **instruction}}
    _write_files(
        tmp_path, [PRODUCT, PRODUCT, {**PRODUCT, "asin": "nan"}, {**PRODUCT, "asin": "B000000002"}], descriptions
    )
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    (row,) = official_tasks("test", shop="official/all")
    assert row["question"].startswith("Find me lamps with color: red | blue, and price lower than ")
    shop = open_shop("official/all")
    assert len(shop.products) == 2
    lamp = shop.products["B000000001"]
    assert (lamp.price_tag, lamp.query, lamp.options) == ("$5.0 to $1250.5", "lamps", {"color": ("red | blue",)})
    session = ShopSession(shop, ShopGoal.from_json(row["goal"]))
    session.act("search[lamp]")
    session.act("click[b000000001]")
    assert session.act("click[red | blue]")
    assert "Price: $5.0 to $1250.5" in pages.render_text(session.page)


@pytest.mark.parametrize(
    ("products", "descriptions", "message"),
    [
        ([{**PRODUCT, "name": None}], {}, "name must be text"),
        ([{"asin": "B000000001"}], {}, "product B000000001 cannot be read"),
        ([PRODUCT, 7], {}, "row 1 of items_shuffle.json"),
        ([PRODUCT], {"B000000001": []}, "row 0 of items_shuffle.json"),
        ({}, {}, "are not WebShop.s; get them from"),
    ],
)
def test_malformed_row_is_reported(monkeypatch, tmp_path, products, descriptions, message):
    _write_files(tmp_path, products, descriptions)
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    with pytest.raises(DataError, match=message):
        official_tasks("test", shop="official/all")


def test_unreadable_file_is_reported(monkeypatch, tmp_path):
    _write_files(tmp_path, [], {})
    (tmp_path / "webshop" / "items_shuffle.json").write_text("[{")
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"items_shuffle.json cannot be read"):
        official_tasks("test", shop="official/all")
