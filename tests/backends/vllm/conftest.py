"""Ignore the ResourceWarnings of vLLM itself."""

import importlib.util

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("vllm") is not None:
        config.addinivalue_line("filterwarnings", "ignore:Unclosed context:ResourceWarning")
