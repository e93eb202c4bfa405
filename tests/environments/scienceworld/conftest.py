"""One Java process for all tests of a file, since starting one takes seconds; skips where Java is missing."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest

from agentfly.environments.scienceworld import jvm


@pytest.fixture(scope="session")
def java() -> Iterator[None]:
    """Java processes with the quick compiler only: the other one takes 40 % of the CPU time of so short a life."""
    if importlib.util.find_spec("scienceworld") is None:
        pytest.skip("the simulator is in the extra 'scienceworld', which is not installed")
    if shutil.which("java") is None:
        pytest.skip("no Java: apt-get install default-jre-headless")
    from agentfly.environments.scienceworld import java_process  # needs py4j

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(java_process, "OPTIONS", (*java_process.OPTIONS, "-XX:TieredStopAtLevel=1"))
        yield


@pytest.fixture(scope="module")
def shared_java(java: None) -> Iterator[None]:
    held = jvm.reserve()
    yield
    jvm.release(held)
