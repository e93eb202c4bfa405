"""Observation texts of the household.

They equal those of the official games word for word, so that an agent trained here can play there;
`docs/alfworld.md` describes how this is tested.
"""

from __future__ import annotations

from collections.abc import Sequence

NOTHING_HAPPENS = "Nothing happens."
HELP_LINES = (
    ("look", "look around your current location"),
    ("inventory", "check your current inventory"),
    ("go to (receptacle)", "move to a receptacle"),
    ("open (receptacle)", "open a receptacle"),
    ("close (receptacle)", "close a receptacle"),
    ("take (object) from (receptacle)", "take an object from a receptacle"),
    ("move (object) to (receptacle)", "place an object in or on a receptacle"),
    ("examine (something)", "examine a receptacle or an object"),
    ("use (object)", "use an object"),
    ("heat (object) with (receptacle)", "heat an object using a receptacle"),
    ("clean (object) with (receptacle)", "clean an object using a receptacle"),
    ("cool (object) with (receptacle)", "cool an object using a receptacle"),
    ("slice (object) with (object)", "slice an object using a sharp object"),
)
_MISALIGNED = "move (object) to (receptacle)"
"""The official help text has this line two columns to the left."""


def help_text() -> str:
    """The list of commands."""
    lines = [f"  {what + ':':{32 if what == _MISALIGNED else 34}}{does}\n" for what, does in HELP_LINES]
    return "Available commands:\n" + "".join(lines)


def join_names(names: Sequence[str]) -> str:
    """Names joined by commas and "and"; `nothing` for none."""
    if len(names) < 2:
        return names[0] if names else "nothing"
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def join_with_article(names: Sequence[str]) -> str:
    """`join_names` with the article "a", which the games put before every name."""
    return join_names([f"a {name}" for name in names])


def introduction(view: str, task: str) -> str:
    """Observation before the first command."""
    return f"-= Welcome to TextWorld, ALFRED! =-\n\n{view}\n\nYour task is to: {task}"


def middle_of_room(receptacles: Sequence[str]) -> str:
    """View from a place without receptacles."""
    return f"You are in the middle of a room. Looking quickly around you, you see {join_with_article(receptacles)}."


def facing(receptacles: Sequence[str], beside: Sequence[str]) -> str:
    """View from a place with receptacles; `beside` are things next to them."""
    return f"You are facing the {join_names(receptacles)}. Next to it, you see {join_with_article(beside)}."


def receptacle_view(name: str, inside: Sequence[str], *, openable: bool, opened: bool) -> str:
    """Description of a receptacle and its contents."""
    if openable and not opened:
        return f"The {name} is closed."
    place = f"The {name} is open. In it" if openable else f"On the {name}"
    return f"{place}, you see {join_with_article(inside)}."


def thing_view(name: str, traits: frozenset[str] | set[str], inside: Sequence[str]) -> str:
    """Description of a thing and its state."""
    if "isReceptacleObject" in traits:
        return f"This is a normal {name}. In it, you see {join_with_article(inside)}."
    clean, hot, cool, sliced = (trait in traits for trait in ("isClean", "isHot", "isCool", "isSliced"))
    if hot or cool or clean:
        # The official grammar says "cold" for a thing that is only cool, else "cool".
        warmth = "hot" if hot else "cool" if cool and (clean or sliced) else "cold" if cool else ""
        state = " and ".join(filter(None, (warmth, "clean" if clean else "")))
        return f"This is a {state} {'sliced ' if sliced else ''}{name}."
    if "toggleable" in traits and "isToggled" in traits:
        return f"This {name} is on."
    if "sliceable" in traits and sliced:
        return f"This is a sliced {name}."
    return f"There's nothing special about {name}."


def inventory(held: str | None) -> str:
    """Description of what the player holds."""
    return "You are not carrying anything." if held is None else f"You are carrying: a {held}."
