"""Resolution of model names, with and without the hub."""

import http.server
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly import models
from agentfly.errors import ConfigError
from agentfly.models import cache, huggingface


def build(folder: Path, scratch: Path) -> None:
    (folder / "config.json").write_text("{}")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    huggingface._connect.cache_clear()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub address where no server listens."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def local_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server at the hub's address that records the requested paths."""
    requests: list[str] = []

    class HubHandler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            requests.append(self.path)
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), HubHandler) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield requests
        server.shutdown()
        thread.join()


def test_prepared_model_resolves_to_its_folder(monkeypatch: pytest.MonkeyPatch, no_hub: None) -> None:
    monkeypatch.setitem(models.PREPARED, "tiny", cache.PreparedModel("tiny", "1", "a test", "none", 1, 1, build))
    folder = models.resolve("tiny")
    assert (Path(folder) / "config.json").is_file()
    assert Path(folder) == models.PREPARED["tiny"].folder


def test_folder_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert models.resolve(str(tmp_path / "mine")) == models.resolve("~/mine") == str(tmp_path / "mine")


def test_bytes_tokenizer_needs_no_model(no_hub: None) -> None:
    assert models.resolve("bytes") == "bytes"


def test_hub_name_is_returned_if_the_hub_answers(local_hub: list[str]) -> None:
    assert models.resolve("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert models.resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert len(local_hub) == 1  # it is asked once


def test_unreachable_hub_error_names_alternatives(no_hub: None) -> None:
    with pytest.raises(ConfigError) as raised:
        models.resolve("Qwen/Qwen2.5-0.5B")
    for part in ("'Qwen/Qwen2.5-0.5B'", "out of reach", "refused", "`agentfly models`", "folder"):
        assert part in str(raised.value)
    assert "httpx" not in "".join(traceback.format_exception(raised.value))


def test_offline_mode_counts_as_unreachable(tmp_path: Path) -> None:
    """huggingface_hub reads the setting at import, hence the new process."""
    result = subprocess.run(
        [sys.executable, "-c", "from agentfly.models import resolve; resolve('Qwen/Qwen2.5-0.5B')"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "ConfigError" in result.stderr
    assert "out of reach" in result.stderr


@pytest.mark.parametrize(("written", "meant"), [("smollm2", "smollm2-135m"), ("tinny", "tiny")])
def test_close_match_is_suggested(written: str, meant: str, no_hub: None) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        models.resolve(written)


def test_distant_name_is_not_suggested(no_hub: None) -> None:
    with pytest.raises(ConfigError, match=r"does not hold it\. `agentfly models` lists"):
        models.resolve("runs/none")


def test_unreachable_hub_falls_back_to_its_cache(tmp_path: Path, no_hub: None) -> None:
    """Uses the folder layout of the hub client's cache."""
    kept = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B"
    snapshot = kept / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    assert models.resolve("Qwen/Qwen2.5-0.5B") == str(snapshot)


def test_path_that_is_no_hub_name_is_returned_unchanged(no_hub: None) -> None:
    assert models.resolve("./no/such/folder") == "./no/such/folder"
