"""The docs site and its API reference: public objects are documented, and documented objects have docstrings."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import agentfly

griffe = pytest.importorskip("griffe")
pytest.importorskip("mkdocs")
hooks = importlib.import_module("docs.hooks")

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVE = re.compile(r"^::: (exports )?agentfly\.([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)
MEMBERS = re.compile(r"members: \[([^\]]*)\]")


@cache
def load_package() -> Any:
    """The package as the site reads it: parsed, not imported."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    package = loader.load("agentfly")
    loader.resolve_aliases()
    return package


def resolve(value: Any) -> Any:
    return value.final_target if value.is_alias else value


@cache
def documented_objects() -> dict[str, Any]:
    """The objects that the pages of the reference name, by the path of their definition."""
    objects = []
    for page in PAGES:
        for exports, path, options in DIRECTIVE.findall(page.read_text()):
            if exports:
                values = hooks.find_exports(f"agentfly.{path}").items()
                paths = [f"{value.__module__}.{name}".removeprefix("agentfly.") for name, value in values]
                objects += [load_package()[name] for name in paths]
                continue
            value = load_package()[path]
            if not value.is_module:
                objects.append(value)
            elif listed := MEMBERS.search(options):
                objects += [value[name] for name in listed[1].split(", ")]
            else:
                objects += [member for member in value.members.values() if member.is_public and not member.is_module]
    return {resolve(value).path: resolve(value) for value in objects}


def has_docstring(method: Any) -> bool:
    """Whether a method, or the one that it overrides, has a docstring."""
    bases = [method.parent, *method.parent.mro()]
    return any(base.members[method.name].docstring for base in bases if method.name in base.members)


def test_documented_objects_have_docstrings() -> None:
    assert len(documented_objects()) > 150
    assert not [path for path, value in documented_objects().items() if not value.docstring]


def test_methods_of_documented_classes_have_docstrings() -> None:
    classes = [value for value in documented_objects().values() if value.is_class]
    methods = [
        member
        for cls in classes
        for member in cls.members.values()
        if member.is_function and not member.name.startswith("_")
    ]
    assert len(methods) > 100
    assert not [method.path for method in methods if not has_docstring(method)]


def test_public_names_are_documented() -> None:
    homes = {name: resolve(load_package()[name]).path for name in agentfly.__all__}
    assert not {name: path for name, path in homes.items() if path not in documented_objects()}


def test_every_public_module_is_listed() -> None:
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    modules = {path.partition(".")[0] for page in PAGES for _, path, _ in DIRECTIVE.findall(page.read_text())}
    assert not {module for module in modules if not re.search(rf"`agentfly\.{module}[`.]", index)}


LOADED = re.compile(r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="(https?:[^"]+)')


@pytest.mark.slow_smoke
@pytest.mark.timeout(600)
def test_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {page.relative_to(site).as_posix(): page.read_text() for page in site.rglob("*.html")}
    assert len(pages) > 60
    assert not list(site.rglob("__pycache__"))
    assert not {(name, url) for name, text in pages.items() for url in LOADED.findall(text)}
    assert not [name for name, text in pages.items() if 'class="mermaid"' in text]  # it would be loaded from a CDN
    assert 'id="agentfly.agents.HFAgent"' in pages["reference/agents.html"]
    assert "agentfly env check" in pages["reference/command-line.html"]
    assert "agentfly.agents.HFAgent" in (site / "search" / "search_index.json").read_text()
