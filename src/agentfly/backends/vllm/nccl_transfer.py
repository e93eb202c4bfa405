"""Weights from the learner's GPU to the workers of a vLLM server over NCCL, with vLLM's own transfer engine.

Needs vLLM 0.26 or later here and in the server, which is started with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'

Not tested: it needs two GPUs. NCCL itself has no timeout: `ClientBackend` waits `NCCL_SECONDS` at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import torch

from agentfly.errors import BackendFault, describe


class NCCLWeightSender:
    """Broadcasts to one server; this process is rank 0 of the group, the server's workers are the others."""

    def __init__(self, base_url: str) -> None:
        """`base_url`: of the server, without /v1. Waits until its workers have joined the group."""
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        try:
            answer = httpx.get(f"{base_url}/get_world_size", timeout=60.0).raise_for_status()
            workers = int(answer.json()["world_size"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise BackendFault(f"{base_url} does not say how many workers it has: {describe(error)}") from error
        self._weights: Iterable[tuple[str, torch.Tensor]] = ()
        self._engine = WeightTransferTrainerFactory.trainer_init(
            init_info=NCCLTrainerInitInfo(
                master_address=get_ip(), master_port=get_open_port(), world_size=workers + 1, rank=0, packed=True
            ),
            client=HTTPVLLMWeightSyncClient(base_url),
            source=self,
        )

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send weights by their names in the checkpoint. They are read twice: for their shapes, and to send."""
        self._weights = list(weights) if isinstance(weights, Iterator) else weights
        self._engine.send_weights()
        self._weights = ()

    # ── vLLM's WeightSource ──

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, torch.bfloat16, tuple(each.shape)) for name, each in self._weights]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, each.detach().to(torch.bfloat16)) for name, each in self._weights)
