"""`agentfly view`: serves until it is told to end, or writes one page."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from agentfly.cli.app import app
from agentfly.errors import ConfigError, DataError
from tests.view.pieces import make_run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path / "cache"))


def test_it_prints_its_address_and_serves_until_a_signal(tmp_path: Path) -> None:
    make_run(tmp_path / "run").close()
    command = [sys.executable, "-m", "agentfly", "view", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[2]
            assert "AgentFly view" in httpx.get(url, trust_env=False, timeout=60).text
            assert httpx.get(f"{url}api/runs", trust_env=False, timeout=60).json()["sources"][0]["name"] == "run"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_export_prints_what_it_wrote(tmp_path: Path) -> None:
    make_run(tmp_path / "run").close()
    page = tmp_path / "page.html"
    arguments = ["view", str(tmp_path / "run"), "--export", str(page), "--filter", "step=1", "--filter", "tool=search"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "This page has 6 of the 14 chains of 1 run (filters: step=1, tool=search)." in result.output
    assert page.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["nowhere"], DataError, "there is no nowhere"),
        (["run", "--filter", "step=1"], ConfigError, "--filter selects the chains of --export"),
        (["run", "--export", "x.html", "--filter", "step"], ConfigError, "write NAME=VALUE"),
        (
            ["run", "--export", "x.html", "--filter", "color=red"],
            ConfigError,
            "no filter 'color'; there are source, step",
        ),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run").close()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["view", *arguments])
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
