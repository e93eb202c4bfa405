"""Environments, rewards, tools, recipes and commands are found by entry point, and imported when they are used."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agentfly.rewards
import agentfly.tools
from agentfly import environments, plugins
from agentfly.cli.env import write_files
from agentfly.environment import Environment
from agentfly.errors import ConfigError
from agentfly.scoring import REWARDS
from agentfly.tooling import TOOLS, Toolbox
from tests.commands import run_command

THIRD_PARTY = Path(__file__).parent / "thirdparty" / "treasure_hunt"


def run_python(code: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, with the packages in `path` installed."""
    variables = {**os.environ, "PYTHONPATH": str(path)} if path else None
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, env=variables)


def environment_modules(code: str) -> set[str]:
    """The environment modules that a new interpreter has imported after running `code`."""
    report = "import sys; print('\\n' + ' '.join(name for name in sys.modules if name.startswith('agentfly.env')))"
    run = run_python(f"{code}\n{report}")
    assert run.returncode == 0, run.stderr
    return set(run.stdout.rpartition("\n\n")[2].split()) - {"agentfly.environment"}


# ── what is imported when ──


@pytest.mark.parametrize(
    "module", ["agentfly", "agentfly.agents", "agentfly.rewards", "agentfly.tools", "agentfly.cli"]
)
def test_import_loads_no_environment_module(module: str) -> None:
    assert environment_modules(f"import {module}") == set()


def test_importing_environments_loads_none() -> None:
    assert environment_modules("import agentfly.environments") == {"agentfly.environments"}


def test_recipe_imports_no_environment_that_it_does_not_name() -> None:
    main = "import sys; from agentfly.cli.app import main; sys.argv[1:] = ['run', 'counter']"
    run = f"{main}\ntry: main()\nexcept SystemExit: pass"
    assert environment_modules(run) == set()
    load = "from agentfly.cli.recipes import find_recipe; from agentfly.cli.resolve import load_module"
    loaded = environment_modules(f"{load}; load_module(find_recipe('lookup').path, 'recipe')")
    suffixes = ("", ".data", ".lookup", ".lookup.environment")  # data: what environments share
    assert loaded == {f"agentfly.environments{suffix}" for suffix in suffixes}
    loaded = environment_modules(f"{load}; load_module(find_recipe('frozen_lake').path, 'recipe')")
    assert {name for name in loaded if ".games." in name} == {
        f"agentfly.environments.games.{module}" for module in ("frozen_lake", "game")
    }


def test_reward_and_tool_are_found_by_name_before_their_module_is_imported() -> None:
    code = """
import sys, agentfly.agents
from agentfly.scoring import REWARDS
from agentfly.tooling import TOOLS
assert not any(name.startswith("agentfly.environments") for name in sys.modules)
print(REWARDS.find("alfworld_won").reference, agentfly.rewards.alfworld_won is REWARDS.find("alfworld_won"))
print(TOOLS.find("sql_schema").reference, TOOLS.find("FrozenLake.move").reference)
"""
    first, second = run_python(code).stdout.splitlines()
    assert first == "agentfly.environments.alfworld.environment:alfworld_won True"
    assert second == (
        "agentfly.environments.sql.environment:SQL.sql_schema agentfly.environments.games.frozen_lake:FrozenLake.move"
    )


# ── the entry points of this package ──


def typed_environments() -> set[str]:
    """The classes that type checkers see in `agentfly.environments`."""
    tree = ast.parse(Path(environments.__file__).read_text())
    imports = (node for block in tree.body if isinstance(block, ast.If) for node in block.body)
    return {alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_entry_points_are_the_public_environments() -> None:
    prebuilt = [
        plugin
        for plugin in plugins.list_plugins(plugins.ENVIRONMENTS)
        if plugin.distribution.startswith("agentfly-rl ")
    ]
    assert {plugin.name for plugin in prebuilt} == typed_environments()
    for plugin in prebuilt:
        env_class = plugin.load()
        assert issubclass(env_class, Environment)
        assert getattr(environments, plugin.name) is env_class


@pytest.mark.parametrize("module", [agentfly.rewards, agentfly.tools])
def test_every_name_is_importable(module: object) -> None:
    for name in dir(module):
        assert callable(getattr(module, name)), name


def test_every_tool_of_an_environment_is_found_by_its_name_or_as_class_and_method() -> None:
    shared = {"act", "answer", "look", "move", "search"}
    for name in typed_environments():
        env_class: type[Environment] = getattr(environments, name)
        for tool in Toolbox([env_class]) if env_class.pool.scope.value != "global" else ():
            assert TOOLS.find(tool.reference.partition(":")[2]).owner is env_class
            assert tool.name in shared or plugins.find_plugin(plugins.TOOLS, tool.name), tool.name


def test_recipes_and_commands_have_a_file_with_a_description() -> None:
    for plugin in (*plugins.list_plugins(plugins.RECIPES), *plugins.list_plugins(plugins.COMMANDS)):
        assert plugin.locate().suffix == ".py"
        assert plugin.documentation().partition("\n")[0].endswith((".", "?"))


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'alfworld_wun'.* Did you mean alfworld_won"):
        _ = agentfly.rewards.alfworld_wun
    with pytest.raises(AttributeError, match=r"no attribute 'SQLl'.* Did you mean SQL"):
        _ = environments.SQLl
    with pytest.raises(ConfigError, match="Did you mean alfworld_won"):
        REWARDS.find("alfworld_wun")


# ── another package ──


@pytest.fixture(scope="module")
def package_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a real package was built and installed."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(THIRD_PARTY, tmp_path_factory.mktemp("source") / "package")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(folder)]
    pip = subprocess.run([sys.executable, "-m", "pip", "install", *options, source], capture_output=True, text=True)
    assert pip.returncode == 0, pip.stderr
    return folder


def command(folder: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, typed=typed, packages=folder)


def test_environment_of_another_package_is_listed_played_and_checked(package_folder: Path) -> None:
    listed = command(package_folder, "env", "list")
    assert listed.returncode == 0, listed.stderr
    assert "TreasureHunt" in listed.stdout
    assert "WebShop" in listed.stdout
    played = command(package_folder, "env", "play", "treasure_hunt", "-q", "Dig.", typed=":quit\n")
    assert "KeyError: 'treasure'" in played.stderr  # --question has no columns; without it, a task is drawn
    played = command(package_folder, "env", "play", "treasure-hunt", typed="dig 3\n")
    assert played.returncode == 0, played.stderr
    assert "← The treasure is further up." in played.stdout
    checked = command(package_folder, "env", "check", "TreasureHunt", "-n", "2")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "expert" in checked.stdout


@pytest.mark.slow_smoke
def test_scaffolded_environment_and_recipe_are_listed_after_an_editable_install(tmp_path: Path) -> None:
    write_files("gold_rush", tmp_path / "gold")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--prefix", str(tmp_path / "prefix")]
    pip = [sys.executable, "-m", "pip", "install", *options, "--editable", str(tmp_path / "gold")]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (metadata,) = (tmp_path / "prefix").rglob("gold_rush-*.dist-info")
    code = f"import site; site.addsitedir({str(metadata.parent)!r})\nfrom agentfly.cli.app import main; main()"
    listed = run_python(code, "env", "list")
    assert "GoldRush" in listed.stdout, listed.stderr
    assert "cannot be loaded" not in listed.stdout
    recipes = run_python(code, "recipes")
    assert "Gold rush: an agent that learns to find a treasure." in recipes.stdout, recipes.stderr


def test_recipe_reward_tool_and_command_of_another_package(package_folder: Path, tmp_path: Path) -> None:
    recipes = command(package_folder, "recipes").stdout
    assert "treasure_hunt" in recipes
    assert "A treasure hunt, played by a script." in recipes
    assert "agentfly-rl[train]" in recipes
    run = command(package_folder, "run", "treasure_hunt")
    assert run.returncode == 0, run.stderr
    assert "reward 1" in run.stdout
    assert command(package_folder, "treasure").stdout == "X marks the spot\n"
    assert "Print a map." in command(package_folder, "--help").stdout
    code = """
import agentfly.agents, agentfly.rewards, agentfly.tools
from agentfly.environments import TreasureHunt
assert agentfly.tools.dig.reference == TreasureHunt.dig.reference
assert agentfly.rewards.treasure_found.name == "treasure_found"
script = {"script": ["Done."]}
agent = agentfly.agents.HFAgent(
    tools=["dig"], reward="treasure_found", template="chatml", backend="scripted", backend_config=script
)
print(agent.toolbox.names)
"""
    result = run_python(code, path=package_folder)
    assert result.stdout == "['dig']\n", result.stderr


def declare(folder: Path, distribution: str, entries: str) -> Path:
    """Write the metadata of an installed distribution."""
    metadata = folder / f"{distribution.replace('-', '_')}-0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(entries)
    return folder


BROKEN = """\
[agentfly.environments]
Missing = no_such_module:Missing
Wrong = json:dumps
Exits = exiting_module:Exits
[agentfly.rewards]
missing_reward = json:no_such_reward
[agentfly.recipes]
missing_recipe = no_such_module.recipe
"""


def test_broken_package_is_named_and_does_not_break_the_others(tmp_path: Path) -> None:
    folder = declare(tmp_path, "broken-pack", BROKEN)
    (folder / "exiting_module.py").write_text("raise SystemExit(3)")
    listed = command(folder, "env", "list")
    assert listed.returncode == 0, listed.stderr
    assert "WebShop" in listed.stdout
    missing = "the environment 'Missing' of the package broken-pack 0.1 (no_such_module:Missing) cannot be loaded: "
    assert f"{missing}ModuleNotFoundError: No module named 'no_such_module'" in listed.stdout
    assert "(exiting_module:Exits) cannot be loaded: SystemExit: 3" in listed.stdout
    assert "'Wrong' of the package broken-pack 0.1 (json:dumps) is not a subclass of Environment" in listed.stdout
    played = command(folder, "env", "play", "missing")
    assert (played.returncode, "Traceback" in played.stderr) == (2, False)
    assert missing in played.stderr
    recipes = command(folder, "recipes").stdout
    assert "lookup" in recipes
    assert "the recipe 'missing_recipe' of the package broken-pack 0.1" in recipes
    code = """
from agentfly.errors import ConfigError
from agentfly.scoring import REWARDS
import agentfly.rewards
assert REWARDS.find("sql_match")
try:
    REWARDS.find("missing_reward")
except ConfigError as error:
    print(error)
"""
    assert "the reward 'missing_reward' of the package broken-pack 0.1" in run_python(code, path=folder).stdout


def test_name_of_two_packages_is_an_error_that_names_both(tmp_path: Path) -> None:
    entries = "[agentfly.environments]\nSQL = mine:SQL\n[agentfly.recipes]\nsql = mine.recipe\n"
    folder = declare(tmp_path, "my-sql", entries)
    played = command(folder, "env", "play", "sql")
    assert played.returncode == 2
    assert "2 packages declare the environment 'SQL': agentfly-rl 0" in played.stderr
    assert "my-sql 0.1 (mine:SQL); uninstall one, or give it as module:name" in played.stderr
    trained = command(folder, "train", "sql")
    assert "2 packages declare the recipe 'sql'" in trained.stderr
    listed = command(folder, "env", "list")
    assert "WebShop" in listed.stdout
    assert "2 packages declare the environment 'SQL'" in listed.stdout
