"""`agentfly serve` where there is no vLLM. With it, tests/backends/vllm serves for real."""

import importlib.util

import pytest

from agentfly.commands import serving
from agentfly.errors import ConfigError


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_without_vllm_a_line_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'agentfly\[vllm\]'") as raised:
        serving.serve(serving.Served("tiny", "127.0.0.1", 8000))
    assert "\n" not in str(raised.value)


def test_a_flag_that_is_ours_goes_before_the_dashes() -> None:
    assert serving.flags_of(["--max-num-seqs", "4"]) == ("--max-num-seqs", "4")
    for flag in ("--port", "--dtype=float16", "--logprobs-mode"):
        with pytest.raises(ConfigError, match="goes before the --"):
            serving.flags_of([flag])


def test_the_line_to_use_it_is_python() -> None:
    served = serving.Served("tiny", "0.0.0.0", 8123)
    assert served.url == "http://127.0.0.1:8123"
    compile(served.usage, "usage", "eval")
