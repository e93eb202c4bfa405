"""One real container engine for the whole run."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resources.engine import NoEngine, Podman, load_images


@pytest.fixture(scope="session")
def engine() -> Iterator[Podman]:
    """An engine with images; a test that wants it is skipped, and says why, where none can run."""
    folder = Path(tempfile.mkdtemp(prefix="engine-"))  # podman takes no long paths
    try:
        podman = Podman(folder)
    except NoEngine as error:
        pytest.skip(str(error))
    try:
        podman.start()
        load_images(podman)
    except NoEngine as error:
        pytest.skip(str(error))
    else:
        yield podman
    finally:
        podman.remove()
        shutil.rmtree(folder, ignore_errors=True)
