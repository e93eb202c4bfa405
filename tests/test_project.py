"""The files of the project that are not code: versions, the changelog, workflows."""

import re
import tomllib
from pathlib import Path

import yaml

import agentfly

ROOT = Path(__file__).parent.parent


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == agentfly.__version__


def test_each_version_in_the_changelog_is_dated_and_short() -> None:
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert sections[0].startswith("[Unreleased]")
    for section in sections[1:]:
        assert re.match(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d\n", section)
        assert len(section.split()) <= 400


def test_workflows_run_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    commands = [
        step["run"]
        for workflow in workflows
        for job in yaml.safe_load(workflow.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    targets = {target for command in commands for target in re.findall(r"\bmake ([a-z-]+)", command)}
    assert {"matrix", "docs", "coverage"} <= targets
    assert not {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)}


def test_workflows_test_the_supported_versions_of_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    supported = [name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(f"{prefix}3.")]
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert tests["jobs"]["quick"]["strategy"]["matrix"]["python"] == supported


def test_contributing_names_every_module_of_the_root() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().partition("## The tree")[2].partition("## Where")[0]
    paths = [path for path in (ROOT / "src" / "agentfly").iterdir() if not path.name.startswith("__")]
    names = [path.name if path.suffix else f"{path.name}/" for path in paths if path.suffix in ("", ".py")]
    assert "training/" in names
    assert not [name for name in names if not re.search(rf"(^|\s){re.escape(name)}", tree)]
