"""One real container engine for the whole run."""

from collections.abc import Iterator

import pytest

from tests.resources.engine import NoEngine, Podman, load_images


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """An engine with images; a test that wants it is skipped, and says why, where none can run."""
    try:
        podman = Podman(tmp_path_factory.mktemp("engine"))
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
