"""Import time and public names of `import agentfly` and the command line."""

import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import agentfly

HEAVY = {"torch", "transformers", "numpy", "pydantic", "jinja2", "tokenizers", "httpx"}
HAS_TORCH = (
    "agentfly.algorithms", "agentfly.backends.weight_files", "agentfly.backends.engine", "agentfly.backends.vllm",
    "agentfly.integrations.verl.", "agentfly.sft.training", "agentfly.training.",
)  # fmt: skip
NO_TORCH = ["agentfly.integrations.verl.config", "agentfly.training.config", "agentfly.training.plan"]
"""Modules of training that are read before a model is loaded, and where torch is not installed."""


def imported_by(code: str) -> set[str]:
    """The top-level packages that a new interpreter has imported after running `code`."""
    report = "import sys; print(' '.join({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(run.stdout.split("\n")[-2].split())


@pytest.mark.integration
def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not HEAVY & imported_by("import agentfly")


@pytest.mark.integration
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--help']\nfrom agentfly.cli.app import main\ntry: main()\nexcept SystemExit: pass"
    )
    assert not HEAVY & imported_by(code)


@pytest.mark.integration
def test_no_module_outside_training_imports_torch() -> None:
    modules = [m.name for m in pkgutil.walk_packages(agentfly.__path__, "agentfly.")]
    recipes = re.compile(r"agentfly\.environments\..*\.recipes?\b")  # programs, which draw their tasks
    light = [m for m in modules if not m.startswith(HAS_TORCH) and not recipes.match(m)]
    assert "torch" not in imported_by("; ".join(f"import {module}" for module in (*light, *NO_TORCH)))


@pytest.mark.integration
def test_training_in_one_process_imports_neither_ray_nor_verl() -> None:
    assert not {"ray", "verl"} & imported_by("import agentfly.agents, agentfly.cli.train, agentfly.training.trainer")


def test_the_root_shows_the_architecture() -> None:
    modules = [module.name for module in pkgutil.iter_modules(agentfly.__path__) if not module.ispkg]
    assert len(modules) <= 12, modules


def test_the_exports_are_the_public_names() -> None:
    assert agentfly.__all__ == sorted(agentfly.__all__)
    assert dir(agentfly) == agentfly.__all__
    for name in agentfly.__all__:
        value = getattr(agentfly, name)
        home = importlib.import_module(value.__module__)
        assert getattr(home, name) is value


def test_unknown_name_lists_public_names() -> None:
    with pytest.raises(
        AttributeError,
        match=r"has no attribute 'tol'; it has .*Environment, .*Pool, .*Task, .*reward, save_trajectories, tool",
    ):
        agentfly.tol  # noqa: B018


def test_no_module_shares_its_name_with_a_public_function() -> None:
    modules = {m.name for m in pkgutil.iter_modules(agentfly.__path__)}
    assert not modules & set(agentfly.__all__)


ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALL = re.compile(r"pip install[^\n`]*?(?<![\w./-])(agentfly[\w-]*|\.(?=\[))(?:\\?\[([\w,-]+)\\?\])?")
"""The distribution and its extras, by name or in a clone: `agentfly-rl[train]`, `.[train]`."""


def test_every_install_line_names_this_distribution_and_an_extra_it_has() -> None:
    install_lines = 0
    for path in [ROOT / "README.md", *(p for d in ("docs", "src") for p in (ROOT / d).rglob("*.*"))]:
        if path.suffix not in (".md", ".py", ".jinja"):
            continue
        for distribution, extras in INSTALL.findall(path.read_text()):
            install_lines += 1
            assert distribution in (PROJECT["name"], "."), (path, distribution)
            for extra in filter(None, extras.split(",")):
                assert extra in PROJECT["optional-dependencies"], (path, extra)
    assert install_lines > 15


def test_version_has_one_source() -> None:
    assert "version" in PROJECT["dynamic"]
    assert importlib.metadata.version(PROJECT["name"]) == agentfly.__version__


def test_unrelated_distribution_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentfly.plugins import find_package_conflict

    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"agentfly": "0.7.2"}[name])
    assert "`agentfly` 0.7.2 is installed" in find_package_conflict()
    assert "pip uninstall -y agentfly agentfly-rl" in find_package_conflict()
