"""Weights for rollout servers on other machines, as Ray objects: a checkpoint engine of verl for the embedded engine.

verl's own engines send them with NCCL and the like, which need a GPU on both sides. Here the first training process
puts them into Ray's object store, and the process beside each server takes them from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from queue import SimpleQueue
from typing import Any

import numpy as np
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from agentfly.integrations.verl.config import NAME
from agentfly.integrations.verl.engine import gather_weights

Weights = Mapping[str, np.ndarray]


@CheckpointEngineRegistry.register(NAME)
class RayObjectEngine(CheckpointEngine):  # type: ignore[misc]
    """One side of the transfer: a training process, or the process beside a server."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        """bucket_size: not used. is_master: whether this is the training process that sends."""
        self._sends = is_master
        self._receivers: list[Any] = []
        self._arrived: SimpleQueue[Weights] = SimpleQueue()  # Ray delivers in another thread than the event loop's

    def prepare(self) -> Any:
        """The handle of this process, for the sender."""
        return ray.get_runtime_context().current_actor

    @classmethod
    def build_topology(cls, trainers: int, servers: int, handles: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of `init_process_group`, for the training processes and for those beside the servers."""
        return {"receivers": [handles[trainers:]] * trainers}, {"receivers": [[]] * servers}

    def init_process_group(self, receivers: list[Any]) -> None:
        self._receivers = receivers

    def finalize(self) -> None:
        self._receivers = []

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        gathered = await gather_weights(weights, keep=self._sends)
        if self._sends:
            reference = ray.put(gathered)
            await asyncio.gather(*(each.__ray_call__.remote(_deliver, reference) for each in self._receivers))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name, weight in (await asyncio.to_thread(self._arrived.get)).items():
            yield name, torch.from_numpy(weight.copy())  # objects of Ray are read-only

    def accept(self, weights: Weights) -> None:
        """Take what the sender delivers."""
        self._arrived.put(weights)


def _deliver(worker: Any, weights: Weights) -> None:
    worker.checkpoint_engine.accept(weights)
