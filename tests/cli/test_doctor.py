"""`agentfly doctor` says which sandboxes work, and what each of them does not limit."""

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
