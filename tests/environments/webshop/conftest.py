"""A shop of three products, and the official data where it is available."""

import os
from pathlib import Path

import pytest

from agentfly.environments.webshop.product import ShopGoal, ShopProduct, make_option_goal
from agentfly.environments.webshop.session import ShopSession
from agentfly.environments.webshop.shop import Shop

LAMP = ShopProduct(
    asin="LAMP000001",
    title="Orrin Desk Lamp",
    description="A lamp for people who read at night.",
    features=("Dimmable light.", "Easy to clean."),
    category="garden",
    query="desk lamps",
    product_category="Home › Lighting › Desk Lamps",
    attributes=("dimmable light", "easy clean"),
    options={"color": ("black", "blue | white"), "size": ("small", "large")},
    prices=(19.99,),
)
SHIRT = ShopProduct(
    asin="SHIRT00001",
    title="Velt T-Shirt",
    description="",
    features=("Cotton.",),
    category="fashion",
    query="shirts",
    product_category="Clothing › Men › Shirts",
    attributes=("machine wash",),
    options={},
    prices=(10.0, 20.0),
)
BULB = ShopProduct(
    asin="BULB000001",
    title="Orrin Lamp Bulb",
    description="",
    features=(),
    category="garden",
    query="bulbs",
    product_category="Home › Lighting › Bulbs",
    attributes=(),
    options={"watts": ("5", "9")},
    prices=(200.0,),
)


@pytest.fixture(scope="session")
def shop() -> Shop:
    return Shop("corner", [LAMP, SHIRT, BULB])


@pytest.fixture
def goal() -> ShopGoal:
    return make_option_goal(
        LAMP, "Find me dimmable light desk lamps", ["dimmable light"], chosen={"color": "black", "size": "large"}
    )


@pytest.fixture
def session(shop: Shop, goal: ShopGoal) -> ShopSession:
    return ShopSession(shop, goal)


@pytest.fixture(scope="session")
def official() -> None:
    """Skips the test where WebShop's data is not there."""
    folder = os.environ.get("AGENTFLY_DATA")
    if not folder or not (Path(folder) / "webshop").is_dir():
        pytest.skip("no WebShop data: set AGENTFLY_DATA to a folder that has it in `webshop`")
