"""vLLM in processes beside this one: tokens in, tokens and log-probabilities out, weights by a folder both can read."""

import os

# Its words go to stdout, where a run is shown live; and whether its makers are told of it is not ours to decide.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from agentfly.backends.vllm.backend import VLLMBackend

__all__ = ["VLLMBackend"]
