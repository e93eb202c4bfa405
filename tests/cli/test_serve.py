"""`agentfly serve` without vLLM; tests/backends/vllm runs a real server."""

import importlib.util

import pytest

from agentfly.cli import serve
from agentfly.errors import ConfigError


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_missing_vllm_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'agentfly-rl\[vllm\]'") as raised:
        serve.run_server(serve.ServeConfig("tiny", "127.0.0.1", 8000))
    assert "\n" not in str(raised.value)


def test_own_flags_after_the_dashes_are_rejected() -> None:
    assert serve.parse_extra_flags(["--max-num-seqs", "4"]) == ("--max-num-seqs", "4")
    for flag in ("--port", "--dtype=float16", "--logprobs-mode"):
        with pytest.raises(ConfigError, match="goes before the --"):
            serve.parse_extra_flags([flag])


def test_usage_line_is_valid_python() -> None:
    served = serve.ServeConfig("tiny", "0.0.0.0", 8123)
    assert served.url == "http://127.0.0.1:8123"
    compile(served.usage, "usage", "eval")
