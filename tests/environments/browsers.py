"""Marks of tests that start a browser."""

import pytest

from agentfly.environments.browser import find_chromium
from agentfly.errors import ConfigError


def _explain_missing() -> str:
    try:
        find_chromium()
    except ConfigError as missing:
        return str(missing)
    return ""


_MISSING = _explain_missing()
needs_browser = [
    pytest.mark.slow_smoke,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING),
]
browser_full = [*needs_browser, pytest.mark.full]
"""For the longer ones, which are not part of `make slow-smoke`."""
