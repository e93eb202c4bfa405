"""Without its extra, every adapter names the package to install; none is imported before it is used."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from agentfly.environments.games.chess_puzzle import ChessPuzzle
from agentfly.environments.games.gymnasium_env import GymnasiumEnvironment
from agentfly.environments.games.openenv_env import OpenEnvEnvironment
from agentfly.environments.games.reasoning_gym import ReasoningGym
from agentfly.environments.games.textarena_game import TextArenaGame
from agentfly.environments.games.textworld_game import TextWorldGame
from agentfly.errors import ConfigError
from tests.environments.games.playing import reset_env

PACKAGES = {
    "chess": (ChessPuzzle, {"fen": "8/8/8/8/8/8/8/8 w - - 0 1", "moves": ["a1a2"]}),
    "gymnasium": (GymnasiumEnvironment, {}),
    "websockets": (OpenEnvEnvironment, {}),
    "reasoning_gym": (ReasoningGym, {"dataset": "chain_sum"}),
    "textarena": (TextArenaGame, {}),
    "textworld": (TextWorldGame, {"game": {"seed": 1}}),
}


@pytest.mark.parametrize("package", PACKAGES)
async def test_missing_package_is_reported(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=package)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    kind, columns = PACKAGES[package]
    with pytest.raises(ConfigError, match=rf"needs {package}, which is not installed: pip install 'agentfly-rl\["):
        await reset_env(kind, {"question": "?", **columns})


def test_optional_packages_are_not_imported_early() -> None:
    loaded = (
        "import importlib, pkgutil, sys, agentfly.environments.games as games\n"
        "names = (module.name for module in pkgutil.iter_modules(games.__path__, games.__name__ + '.'))\n"
        "for name in names: importlib.import_module(name)\n"
        "print(*sorted(sys.modules))"
    )
    names = subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True).stdout.split()
    assert "agentfly.environments.games.chess_puzzle" in names
    assert not {name.partition(".")[0] for name in names} & set(PACKAGES)
