"""Finding tools and rewards by name."""

import gc
from typing import Any

import pytest

from agentfly import Environment, reward, tool
from agentfly.errors import ConfigError
from agentfly.scoring import REWARDS, Scorer
from agentfly.tooling import TOOLS, Tool, Toolbox


@tool
def registry_first() -> str:
    """First."""
    return "first"


@tool(name="registry_shared")
def one() -> str:
    """One."""
    return "one"


@tool(name="registry_shared")
def other() -> str:
    """Other."""
    return "other"


class RegistryWorld(Environment):
    @tool
    def act(self) -> str:
        """Act."""
        return "done"


@reward(name="registry_reward")
def registered() -> float:
    return 1.0


def test_a_tool_is_found_by_its_name_or_its_reference() -> None:
    for name in ("registry_first", "registry_first", registry_first.reference):
        assert TOOLS.find(name) is registry_first
        assert list(Toolbox([name])) == [registry_first]
    assert TOOLS.find("RegistryWorld.act") is RegistryWorld.act
    assert TOOLS.find("RegistryWorld.act").owner is RegistryWorld


def test_a_reward_is_found_by_its_name() -> None:
    assert REWARDS.find("registry_reward") is registered
    assert Scorer("registry_reward").rewards == [(registered, 1.0)]


def test_unknown_name_lists_known_and_close_names() -> None:
    with pytest.raises(ConfigError, match=r"no tool is named 'registry_frist'.*Did you mean registry_first or"):
        TOOLS.find("registry_frist")
    with pytest.raises(ConfigError, match=r"no reward is named 'zzz'; there are: .*registry_reward"):
        REWARDS.find("zzz")


def test_two_different_tools_of_one_name_are_an_error_naming_both() -> None:
    with pytest.raises(ConfigError, match=r"2 different tools are named 'registry_shared'.*:one.*:other"):
        TOOLS.find("registry_shared")
    assert TOOLS.find(one.reference) is one
    with pytest.raises(ConfigError, match=r"two tools are named 'registry_shared'.*:one and .*:other"):
        Toolbox([one, other])


def define(answer: str) -> Tool:
    @tool(name="registry_again")
    def again() -> str:
        """Again."""
        return answer

    return again


def test_defining_a_tool_again_at_the_same_place_replaces_it() -> None:
    old = define("old")
    new = define("new")
    assert TOOLS.find("registry_again") is new
    assert old() == "old"


def test_unreferenced_tool_is_removed() -> None:
    unreferenced = define("x")
    assert TOOLS.find("registry_again") is unreferenced
    del unreferenced
    gc.collect()
    with pytest.raises(ConfigError, match="no tool is named"):
        TOOLS.find("registry_again")


async def test_passed_tool_is_the_one_that_runs() -> None:
    passed = define("passed")
    box = Toolbox([passed])
    later: Any = define("later")
    assert TOOLS.find("registry_again") is later
    assert list(box) == [passed]
    assert next(iter(box))() == "passed"


def test_two_tools_defined_at_one_place_are_distinct() -> None:
    first, second = define("1"), define("2")
    with pytest.raises(ConfigError, match="two tools are named 'registry_again'"):
        Toolbox([first, second])
    assert len(Toolbox([first, first])) == 1
