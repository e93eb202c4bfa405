"""The wheel, installed with its pinned dependencies into a new virtual environment, without the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from agentfly.models.cache import cache_root

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow_smoke, pytest.mark.timeout(900)]


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command without the variables that would let it see the source tree; return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, cwd=folder, env={**inherited, **variables}, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment with `agentfly-rl[train]` from the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)], folder)
    (wheel,) = folder.glob("agentfly_rl-*.whl")
    venv.create(folder / "venv")  # without pip: the pip of this interpreter installs into it
    python = folder / "venv" / "bin" / "python"
    requirement = f"agentfly-rl[train] @ {wheel.as_uri()}"
    # Python compiles the modules that the commands below import; pip would compile all of them.
    options = ["--no-compile", "--constraint", str(ROOT / "constraints.txt")]
    run([*pip, "--python", str(python), "install", *options, requirement], folder)
    return python.parent


def test_demo_and_recipes_work_without_the_source_tree(bin_folder: Path, tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    # The demo's model is built once per machine: it is read from the usual cache.
    variables = {"HOME": str(home), "AGENTFLY_CACHE": str(cache_root().parent)}
    module = run([str(bin_folder / "python"), "-c", "import agentfly; print(agentfly.__file__)"], here, **variables)
    assert module.startswith(str(bin_folder.parent))

    agentfly = str(bin_folder / "agentfly")
    recipes = run([agentfly, "recipes"], here, **variables)
    assert "lookup" in recipes
    assert "agentfly-rl[train,webshop]" in recipes
    assert "WebShop" in run([agentfly, "env", "list"], here, **variables)
    assert list(here.iterdir()) == []

    run([agentfly, "demo", "steps=2"], here, **variables)
    assert [path.name for path in here.iterdir()] == ["runs"]
    assert [path.name for path in (here / "runs").iterdir()] == ["lookup-1"]
    assert {"config.json", "recipe.py", "report.html"} <= {path.name for path in (here / "runs" / "lookup-1").iterdir()}

    run([agentfly, "recipes", "copy", "counter"], here, **variables)
    run([agentfly, "run", "counter.py", "-n", "1"], here, **variables)
    assert sorted(path.name for path in here.iterdir()) == ["counter.py", "runs"]
    files = [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()]
    assert [path for path in files if not path.startswith(".cache/matplotlib/")] == []
