"""Rewards of environments are imported on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import agentfly.rewards
from agentfly.errors import ConfigError
from agentfly.scoring import REWARDS


def test_importing_rewards_loads_no_environment_module() -> None:
    program = "import sys, agentfly.rewards; print(*sorted(sys.modules))"
    names = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "agentfly.rewards" in names
    assert not [name for name in names if name.startswith("agentfly.environments")]


def test_reward_is_found_by_name_before_its_module_is_imported() -> None:
    program = """
import sys, agentfly.rewards
from agentfly.scoring import REWARDS
assert "agentfly.environments.alfworld.rewards" not in sys.modules
print(REWARDS.find("alfworld_won").reference, agentfly.rewards.alfworld_won is REWARDS.find("alfworld_won"))
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert printed == ["agentfly.environments.alfworld.rewards:alfworld_won", "True"]


def test_every_public_name_is_importable() -> None:
    for name in agentfly.rewards.__all__:
        assert callable(getattr(agentfly.rewards, name)), name


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(AttributeError, match="no attribute 'alfworld_wun'"):
        _ = agentfly.rewards.alfworld_wun
    with pytest.raises(ConfigError, match="Did you mean alfworld_won"):
        REWARDS.find("alfworld_wun")
