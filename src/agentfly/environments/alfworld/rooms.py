"""What the generated households are made of: rooms, what stands in them, what lies there, and what goes where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})

_TRAITS = {
    "cleanable": "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Kettle Knife Ladle Lettuce Mug Pan Plate Pot "
    "Potato SoapBar Spatula Spoon Tomato",
    "heatable": "Apple Bread Cup Egg Mug Plate Potato Tomato",
    "coolable": "Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato WineBottle",
    "sliceable": "Apple Bread Lettuce Potato Tomato",
    "toggleable": "DeskLamp FloorLamp",
    "isReceptacleObject": "Bowl Box Cup Mug Pan Plate Pot",
}
_FIXED = frozenset({"DeskLamp", "FloorLamp", "HousePlant", "Television"})
"""What nobody can pick up."""
LAMPS = frozenset({"DeskLamp", "FloorLamp"})

_SMALL = "CD CellPhone CreditCard KeyChain Pen Pencil Watch"
_TABLEWARE = "Bowl ButterKnife Cup Fork Knife Mug Plate Spoon"
_FOOD = "Apple Bread Egg Lettuce Potato Tomato"
_SURFACE = (
    f"{_SMALL} {_TABLEWARE} {_FOOD} AlarmClock Book Box Candle Cloth DeskLamp DishSponge HousePlant Kettle Ladle "
    "Laptop Newspaper Pan PepperShaker Pot RemoteControl SaltShaker SoapBar SoapBottle Spatula SprayBottle Statue "
    "TissueBox ToiletPaper Vase WineBottle"
)
_FITS = {
    "ArmChair": "Book Box CellPhone Laptop Newspaper Pillow RemoteControl",
    "BathtubBasin": "Cloth DishSponge SoapBar",
    "Bed": "Book CellPhone Laptop Newspaper Pillow TeddyBear",
    "Cabinet": f"{_TABLEWARE} Candle Cloth Kettle Pan PepperShaker Pot SaltShaker SoapBar SoapBottle SprayBottle "
    "ToiletPaper Vase WineBottle",
    "CoffeeMachine": "Cup Mug",
    "CoffeeTable": _SURFACE,
    "CounterTop": _SURFACE,
    "Desk": _SURFACE,
    "DiningTable": _SURFACE,
    "Drawer": f"{_SMALL} Book ButterKnife Candle Cloth Fork Knife Ladle Newspaper PepperShaker RemoteControl "
    "SaltShaker SoapBar Spatula Spoon TissueBox ToiletPaper",
    "Dresser": f"{_SURFACE} Television",
    "Fridge": f"{_FOOD} Bowl Cup Mug Pan Plate Pot WineBottle",
    "GarbageCan": f"{_FOOD} CD Cloth DishSponge Newspaper Pen Pencil SoapBar SprayBottle TissueBox ToiletPaper",
    "Microwave": "Apple Bowl Bread Cup Egg Mug Plate Potato Tomato",
    "Safe": "CD CellPhone CreditCard KeyChain Statue Watch",
    "Shelf": f"{_SMALL} AlarmClock Book Bowl Box Candle Cup DeskLamp Mug PepperShaker Plate Pot SaltShaker SoapBottle "
    "SprayBottle Statue TissueBox ToiletPaper Vase WineBottle",
    "SideTable": _SURFACE,
    "SinkBasin": f"{_TABLEWARE} {_FOOD} Cloth DishSponge Kettle Ladle Pan Pot SoapBar Spatula",
    "Sofa": "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
    "StoveBurner": "Kettle Pan Pot",
    "TVStand": f"{_SMALL} Book Box RemoteControl Statue Television TissueBox Vase",
    "Toilet": "Candle Cloth SoapBar SoapBottle SprayBottle TissueBox ToiletPaper",
}
FITS: Mapping[str, frozenset[str]] = {name: frozenset(things.split()) for name, things in _FITS.items()}
"""By the type of a receptacle: what may be put there."""


def traits_of(type: str) -> frozenset[str]:
    """What a thing of that type can be."""
    traits = {trait for trait, types in _TRAITS.items() if type in types.split()}
    return frozenset(traits if type in _FIXED else traits | {"pickupable"})


@dataclass(frozen=True, slots=True)
class Room:
    """A kind of room."""

    receptacles: Mapping[str, tuple[int, int]]
    """By type: fewest and most of them."""
    things: tuple[str, ...]


def _room(things: str, **receptacles: tuple[int, int]) -> Room:
    return Room(receptacles, tuple(things.split()))


ROOMS = {
    "kitchen": _room(
        f"{_TABLEWARE} {_FOOD} DishSponge HousePlant Kettle Ladle Pan PepperShaker Pot SaltShaker SoapBottle Spatula "
        "Vase WineBottle",
        Cabinet=(3, 9), CoffeeMachine=(0, 1), CounterTop=(1, 3), DiningTable=(0, 1), Drawer=(2, 6), Fridge=(1, 1),
        GarbageCan=(1, 1), Microwave=(1, 1), Shelf=(0, 3), SideTable=(0, 1), SinkBasin=(1, 1), StoveBurner=(2, 4),
    ),
    "bedroom": _room(
        f"{_SMALL} AlarmClock Book Bowl Box DeskLamp HousePlant Laptop Mug Pillow Statue TeddyBear TissueBox Vase",
        Bed=(1, 1), Desk=(1, 2), Drawer=(2, 6), Dresser=(0, 1), GarbageCan=(1, 1), Safe=(0, 1), Shelf=(1, 6),
        SideTable=(0, 2), ArmChair=(0, 1),
    ),
    "living room": _room(
        f"{_SMALL} Book Box Candle DeskLamp HousePlant Laptop Newspaper Pillow RemoteControl Statue Television "
        "TissueBox Vase",
        ArmChair=(1, 2), CoffeeTable=(1, 1), Drawer=(1, 4), Dresser=(0, 1), GarbageCan=(1, 1), Shelf=(0, 3),
        SideTable=(1, 2), Sofa=(1, 1), TVStand=(0, 1), Safe=(0, 1),
    ),
    "bathroom": _room(
        "Candle Cloth DishSponge SoapBar SoapBottle SprayBottle TissueBox ToiletPaper",
        BathtubBasin=(0, 1), Cabinet=(1, 4), CounterTop=(1, 1), Drawer=(0, 4), GarbageCan=(1, 1), Shelf=(0, 2),
        SideTable=(0, 1), SinkBasin=(1, 2), Toilet=(1, 1),
    ),
}  # fmt: skip
