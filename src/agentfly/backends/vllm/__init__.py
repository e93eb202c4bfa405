"""vLLM in separate processes; weight updates go through a folder that both sides can read."""

import os

# vLLM logs to stdout, where a run is shown live. Usage statistics are the user's decision.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from agentfly.backends.vllm.backend import VLLMBackend

__all__ = ["VLLMBackend"]
