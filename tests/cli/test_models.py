"""`agentfly models` through its typer app."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentfly import models
from agentfly.cli.models import app
from agentfly.errors import ConfigError
from agentfly.models.cache import PreparedModel


def build(folder: Path, scratch: Path) -> None:
    (folder / "weights").write_bytes(b"1234")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path))
    for name in list(models.PREPARED):
        monkeypatch.delitem(models.PREPARED, name)
    monkeypatch.setitem(models.PREPARED, "toy", PreparedModel("toy", "1", "a test", "MIT", 2_000_000, 4, build))


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.stdout


def test_list_shows_state_and_folder(tmp_path: Path) -> None:
    code, listing = invoke()
    assert code == 0
    for text in ("toy", "2 M", "MIT", "not prepared", str(tmp_path / "models" / "toy-1")):
        assert text in listing
    assert invoke("prepare", "toy") == (0, f"{tmp_path / 'models' / 'toy-1'}\n")
    assert "ready" in invoke()[1]


def test_check_finds_a_changed_byte_and_prepare_rebuilds(tmp_path: Path) -> None:
    assert invoke("check") == (0, "No model is prepared; `agentfly models` lists them.\n")
    assert invoke("check", "toy")[0] == 1
    invoke("prepare", "toy")
    assert invoke("check") == (0, "toy: good\n")
    (tmp_path / "models" / "toy-1" / "weights").write_bytes(b"1235")
    code, output = invoke("check")
    assert code == 1
    assert "weights is not what was written" in output
    assert "agentfly models prepare toy" in output
    invoke("prepare", "toy")
    assert invoke("check", "toy") == (0, "toy: good\n")


def test_unknown_name_lists_the_models() -> None:
    with pytest.raises(ConfigError, match="'toi' is not a prepared model; there are toy"):
        invoke("prepare", "toi")
