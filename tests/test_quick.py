"""`make quick`: the list of integration tests is current, and the guard works."""

import os

import pytest

from tests import quick


def test_listed_integration_tests_exist() -> None:
    assert not [path for path in quick.INTEGRATION if not (quick.TESTS / path).exists()]


def test_guard_fails_a_test_that_starts_a_process() -> None:
    assert "PYTEST_CURRENT_TEST" in os.environ
    quick._refuse_process("open", ("file",))
    with pytest.raises(pytest.fail.Exception, match=r"os\.fork.*mark it with @pytest.mark.integration"):
        quick._refuse_process("os.fork", ())


def test_guard_hides_torch(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--quick"):
        pytest.skip("torch is hidden with --quick only")
    with pytest.raises(ModuleNotFoundError):
        import torch  # noqa: F401
