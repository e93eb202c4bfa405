"""`pytest --quick`: the tests that start no process and no model and need only the core.

A test is quick unless it is marked `integration`. Folders and files that are integration tests as a whole are listed
here; single tests are marked where they are defined, such as those that load a real tokenizer. With `--quick`, torch
and transformers cannot be imported and a test that starts a process fails: a missing mark is found by the first run.
"""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

INTEGRATION: tuple[str, ...] = (
    "algorithms",
    "backends/engine",
    "backends/vllm",
    "backends/test_openai_responses.py",
    "backends/test_client.py",
    "backends/test_weight_files.py",
    "cli",
    "conformance",
    "environments",
    "gateway",
    "integrations",
    "models",
    "resources/runtimes",
    "resources/test_chaos.py",
    "resources/test_rpc.py",
    "resources/test_supervisor.py",
    "rollout/test_growth.py",
    "sandbox",
    "templates/parsers/test_any_text.py",  # fuzzing
    # These load and audit the real tokenizers of many families, which takes minutes.
    "templates/parsers/test_string_arguments.py",
    "templates/test_audit.py",
    "templates/test_audit_exact.py",
    "templates/test_call_syntax.py",
    "templates/test_guard.py",
    "templates/test_loading.py",
    "templates/test_roundtrip.py",
    "templates/test_template.py",
    "templates/test_vision.py",
    "test_api_reference.py",
    "test_benchmarks.py",
    "test_docs.py",
    "test_examples.py",
    "test_linear_time.py",  # measures times
    "test_plugins.py",
    "test_recipes.py",
    "test_wheel.py",
    "training",
    "verl",
)

_PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run only tests that start no process and no model")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        for name in ("torch", "transformers"):
            if name in sys.modules:
                raise pytest.UsageError(f"--quick: {name} was imported before the tests were collected")
            sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed, also for find_spec
        sys.addaudithook(_refuse_process)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # None leaves the decision to pytest.
    return True if config.getoption("--quick") and _is_listed(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_listed(item.path):
            item.add_marker(pytest.mark.integration)
    if config.getoption("--quick"):
        excluded = [item for item in items if item.get_closest_marker("integration")]
        config.hook.pytest_deselected(items=excluded)
        items[:] = [item for item in items if not item.get_closest_marker("integration")]


@cache
def _is_listed(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / listed) for listed in INTEGRATION)


def _refuse_process(event: str, args: tuple[Any, ...]) -> None:
    # Outside of a test, pytest-xdist starts its workers.
    if event in _PROCESS_EVENTS and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.fail(f"a quick test starts a process ({event}): mark it with @pytest.mark.integration")
