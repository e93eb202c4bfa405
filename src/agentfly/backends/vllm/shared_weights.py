"""Weights passed from the learner's process to vLLM's workers by CUDA IPC: on one machine they need no file.

The sender's tensors must stay alive and unchanged until every worker has loaded them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from agentfly.errors import ConfigError

EXTENSION = f"{__name__}.SharedWeightsLoader"
"""vLLM's engine argument `worker_extension_cls`."""


@dataclass(slots=True)
class SharedWeights:
    """Tensors on a GPU, and what another process needs to open them."""

    tensors: tuple[torch.Tensor, ...]
    """Keeps the memory alive that the handles refer to."""
    handles: bytes
    """Pickled list of (name, arguments of the function that opens the tensor)."""

    @classmethod
    def share(cls, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> SharedWeights:
        """Share weights as `dtype`, which halves what is copied where the learner has float32."""
        tensors = []
        handles = []
        for name, value in weights:
            if not value.is_cuda:
                raise ConfigError(f"the weight {name!r} is on {value.device}, others are on a GPU; send all from one")
            tensor = value.detach().to(dtype).contiguous()
            tensors.append(tensor)
            handles.append((name, reduce_tensor(tensor)))
        torch.cuda.synchronize()
        return cls(tuple(tensors), pickle.dumps(handles))

    def release(self) -> None:
        """Free the memory, which no process reads any more: torch keeps what it shared until it looks."""
        self.tensors = ()
        torch.cuda.ipc_collect()


class SharedWeightsLoader:
    """Mixed into vLLM's worker class. `reload_weights` is the worker's own method."""

    def load_shared_weights(self, handles: bytes) -> None:
        """Load weights that another process of this machine has shared."""
        worker: Any = self
        weights = [(name, rebuild(*arguments)) for name, (rebuild, arguments) in pickle.loads(handles)]
        worker.reload_weights(weights_iterator=iter(weights))
        torch.cuda.synchronize()  # the sender may change its tensors as soon as this returns
        del weights
        torch.cuda.ipc_collect()
