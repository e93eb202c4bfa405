"""One Java process for all tests of a file, since starting one takes seconds; skips where Java is missing."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest

from agentfly.environments.scienceworld import jvm


@pytest.fixture(scope="session")
def java() -> None:
    if importlib.util.find_spec("scienceworld") is None:
        pytest.skip("the simulator is in the extra 'scienceworld', which is not installed")
    if shutil.which("java") is None:
        pytest.skip("no Java: apt-get install default-jre-headless")


@pytest.fixture(scope="module")
def shared_java(java: None) -> Iterator[None]:
    held = jvm.reserve()
    yield
    jvm.release(held)
