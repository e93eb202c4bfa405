"""A prepared model is complete or absent, however the process that builds it ends."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfly.errors import ConfigError
from agentfly.models.cache import PreparedModel, cache_root, find_fault, prepare_model
from agentfly.models.manifest import MANIFEST

CONTENTS = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 400}
PREPARATION = """
import sys, time
from pathlib import Path
from agentfly.models.cache import PreparedModel, prepare_model

def build(folder, scratch):
    (scratch / "download").write_bytes(b"x" * 100_000)
    (folder / "config.json").write_bytes(b"{}")
    with (folder / "model.safetensors").open("wb") as file:
        for _ in range(400):
            file.write(bytes(range(256)))
            file.flush()
            time.sleep(float(sys.argv[1]))
    print("built", flush=True)

print("started", flush=True)
print(prepare_model(PreparedModel("slow", "1", "a test", "none", 1, 1, build)), flush=True)
"""
"""Prepares a model slowly, in a process of its own."""


def build(folder: Path, scratch: Path) -> None:
    (scratch / "download").write_bytes(b"x")
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)


def model(build: Callable[[Path, Path], None] = build, name: str = "slow") -> PreparedModel:
    return PreparedModel(name, "1", "a test", "none", 1, 1, build)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path / "cache"))
    return cache_root()


def preparation(pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PREPARATION, str(pause)], stdout=subprocess.PIPE, text=True)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


def list_leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name not in ("slow-1", ".slow-1.lock")]


def test_model_is_built_once_without_leftovers(cache: Path) -> None:
    folder = prepare_model(model())
    assert read_files(folder) == CONTENTS
    assert not list_leftovers(cache)

    def never(folder: Path, scratch: Path) -> None:
        raise AssertionError("it is prepared already")

    assert prepare_model(model(never)) == prepare_model(model(never), thorough=True) == folder


def test_killed_build_leaves_no_model(cache: Path) -> None:
    chance = random.Random(1)
    half_made = 0
    for _ in range(4):
        with preparation(0.002) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chance.uniform(0, 1.0))
            process.kill()
        half_made += bool(list_leftovers(cache))
        assert find_fault(model()) in ("", "it is not prepared")
        if not find_fault(model()):
            assert read_files(model().folder) == CONTENTS
    assert half_made  # else nothing was interrupted, and nothing shown
    assert read_files(prepare_model(model())) == CONTENTS
    assert not list_leftovers(cache)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_next_process_builds_after_a_kill(cache: Path, how: signal.Signals) -> None:
    with preparation(0.05) as process:
        while not list(cache.glob(".slow-1.part-*/model/model.safetensors")):
            time.sleep(0.01)
        process.send_signal(how)
    assert bool(list_leftovers(cache)) == (how is signal.SIGKILL)
    assert find_fault(model()) == "it is not prepared"
    assert read_files(prepare_model(model())) == CONTENTS
    assert not list_leftovers(cache)


def test_two_processes_build_once() -> None:
    with preparation(0.001) as one, preparation(0.001) as other:
        outputs = [process.communicate()[0].splitlines() for process in (one, other)]
    assert [lines[-1] for lines in outputs] == [str(model().folder)] * 2
    assert sum("built" in lines for lines in outputs) == 1


def test_threads_build_once() -> None:
    builds: list[Path] = []

    def slow(folder: Path, scratch: Path) -> None:
        builds.append(folder)
        time.sleep(0.1)
        build(folder, scratch)

    threads = [threading.Thread(target=prepare_model, args=(model(slow),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert read_files(model().folder) == CONTENTS


def test_failed_build_raises_and_leaves_nothing(cache: Path) -> None:
    def failing(folder: Path, scratch: Path) -> None:
        build(folder, scratch)
        raise ConfigError("no network")

    with pytest.raises(ConfigError, match="no network"):
        prepare_model(model(failing))
    assert not list_leftovers(cache)
    assert find_fault(model()) == "it is not prepared"
    assert read_files(prepare_model(model())) == CONTENTS


def truncate_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 7)


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def odd_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"files": ["config.json"]}))


def half_a_manifest(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 20)


@pytest.mark.parametrize("damage", [truncate_weights, remove_config, no_manifest, odd_manifest, half_a_manifest])
def test_damaged_model_is_reported_and_rebuilt(
    damage: Callable[[Path], None], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(prepare_model(model()))
    fault = find_fault(model())
    assert fault
    caplog.clear()
    assert read_files(prepare_model(model())) == CONTENTS
    assert fault in caplog.text
    assert not find_fault(model(), thorough=True)
    assert not list_leftovers(cache)


def test_thorough_check_finds_a_changed_byte() -> None:
    weights = prepare_model(model()) / "model.safetensors"
    weights.write_bytes(b"\xff" + weights.read_bytes()[1:])
    assert not find_fault(model())
    assert "model.safetensors" in find_fault(model(), thorough=True)
    assert read_files(prepare_model(model(), thorough=True)) == CONTENTS


def test_unwritable_cache_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"slow cannot be prepared in .*AGENTFLY_CACHE"):
        prepare_model(model())


def test_environment_variables_set_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AGENTFLY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "agentfly" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_root() == Path("/home/somebody/.cache/agentfly/models")
