"""What vLLM itself leaves to the garbage collector is not held against a test."""

import importlib.util

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("vllm") is not None:
        config.addinivalue_line("filterwarnings", "ignore:Unclosed context:ResourceWarning")
