"""`agentfly doctor` reports which sandboxes work, what each does not limit, and a conflicting installation."""

import importlib.metadata

import pytest
from typer.testing import CliRunner

from agentfly.cli.app import app


def test_unenforced_limits_are_listed() -> None:
    said = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["doctor"])
    assert said.exit_code == 0, said.output
    assert "not limited" in said.output
    rows = {line.split("│")[1].strip(): line for line in said.output.splitlines() if line.startswith("│")}
    assert "disk, inodes" in rows["unsafe"]
    for strong in ("zygote", "namespaces"):
        assert "disk" not in rows[strong]
    if "works" not in rows["landlock"]:
        pytest.skip(f"landlock does not work here: {rows['landlock']}")
    assert "disk, inodes" in rows["landlock"]


def test_unrelated_distribution_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"agentfly": "0.7.2"}[name])
    said = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["doctor"])
    assert said.exit_code == 1
    assert "The distribution `agentfly` 0.7.2 is installed." in said.output
