"""What `import agentfly` and the command line cost, and what they offer."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import agentfly

HEAVY = {"torch", "transformers", "numpy", "pydantic", "jinja2", "tokenizers", "httpx"}
HAS_TORCH = (
    "agentfly.algorithms", "agentfly.backends.handover", "agentfly.backends.transformers", "agentfly.backends.vllm",
    "agentfly.training.",
)  # fmt: skip
NO_TORCH = [f"agentfly.training.{name}" for name in ("config", "data", "demonstrations", "evaluation", "estimate")]
"""What is asked before a model is loaded, or where there is none."""


def imported_by(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter has imported after running `code`."""
    told = "import sys; print(' '.join({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{told}"], capture_output=True, text=True, check=True)
    return set(run.stdout.split("\n")[-2].split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not HEAVY & imported_by("import agentfly")


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; sys.argv[1:] = ['--help']\nfrom agentfly.cli import main\ntry: main()\nexcept SystemExit: pass"
    assert not HEAVY & imported_by(code)


def test_no_module_outside_training_imports_torch() -> None:
    modules = [m.name for m in pkgutil.walk_packages(agentfly.__path__, "agentfly.")]
    light = [m for m in modules if not m.startswith(HAS_TORCH)]
    assert "torch" not in imported_by("; ".join(f"import {module}" for module in (*light, *NO_TORCH)))


def test_the_exports_are_the_public_names() -> None:
    assert agentfly.__all__ == sorted(agentfly.__all__)
    assert dir(agentfly) == agentfly.__all__
    for name in agentfly.__all__:
        value = getattr(agentfly, name)
        home = importlib.import_module(value.__module__)
        assert getattr(home, name) is value


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'tol'; it has Environment, Pool, Task, reward, tool"):
        agentfly.tol  # noqa: B018


def test_no_module_shares_its_name_with_a_public_function() -> None:
    modules = {m.name for m in pkgutil.iter_modules(agentfly.__path__)}
    assert not modules & set(agentfly.__all__)
