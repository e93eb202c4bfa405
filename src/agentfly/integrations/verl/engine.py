"""The embedded engine as rollout server of verl: one actor per replica; weights travel as Ray objects. CPU only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from agentfly.backends import open_backend
from agentfly.backends.base import Request
from agentfly.integrations.verl.config import JOB_VARIABLE, NAME
from agentfly.types import FinishReason, Sampling

retry_after_restart = ray.method(max_task_retries=-1)
"""A call that waits for a server that is being restarted; `generate` fails at once, and another server answers."""


class EngineServer:
    """Serves one replica; a Ray actor. It answers only while it has the weights of the last sync."""

    def __init__(self, model: str, dtype: str) -> None:
        torch.set_num_threads(1)
        self._backend = open_backend("transformers", model=model, device="cpu", dtype=dtype, on_update="abort")
        self._version: int | None = None
        """Of the weights; None until the first sync, which precedes all requests unless the server was restarted."""
        self._open = asyncio.Event()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        if self._version is None:
            raise RayActorError(error_msg="the server was restarted and has no weights before the next sync")
        await self._open.wait()
        params = sampling_params
        sampling = Sampling(
            temperature=params["temperature"],
            top_p=params.get("top_p", 1.0),
            top_k=max(params.get("top_k", -1), 0),
            min_p=params.get("min_p", 0.0),
            repetition_penalty=params.get("repetition_penalty", 1.0),
            max_tokens=params.get("max_tokens"),
            stop=tuple(params.get("stop", ())),
            seed=params.get("seed"),
        )
        stop_ids = frozenset(params.get("stop_token_ids", ()))
        version = self._version
        done = await self._backend.generate(Request(prompt_ids, sampling, stop_ids, chain=request_id))
        return TokenOutput(
            token_ids=list(done.token_ids),
            log_probs=[float(each) for each in done.logprobs],
            stop_reason="aborted" if done.finish is FinishReason.ABORTED else "completed",
            num_preempted=0,
            extra_fields={"global_steps": version},
        )

    @retry_after_restart
    async def load_weights(self, weights: dict[str, Any], version: int) -> None:
        """Take new weights; running requests end with what they have sampled."""
        tensors = [(name, torch.from_numpy(each.copy())) for name, each in weights.items()]
        await self._backend.update_weights(tensors, version)
        self._version = version
        self._open.set()

    @retry_after_restart
    async def pid(self) -> int:
        return os.getpid()

    # verl's control of a server. Weights and cache stay in memory; only the admission of requests changes.

    @retry_after_restart
    async def sleep(self, reject_request: bool = False) -> None:
        self._open.clear()

    abort_all_requests = sleep

    @retry_after_restart
    async def wake_up(self, **_: Any) -> None: ...

    resume_generation = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = wake_up


def server_name(replica: int) -> str:
    """Name of a replica's actor."""
    return f"agentfly_rollout_server_{os.environ[JOB_VARIABLE]}_{replica}"


class EngineReplica(RolloutReplica):  # type: ignore[misc]
    """Starts the server of a replica. Ray restarts one that died; it answers again after the next weight sync."""

    async def launch_servers(self) -> None:
        name = server_name(self.replica_rank)
        options = {"name": name, "max_concurrency": self.max_concurrency, "num_cpus": 0.01, "max_restarts": -1}
        server = ray.remote(EngineServer).options(**options).remote(self.model_config.path, self.config.dtype)
        self.servers = [server]
        self._server_handle = server
        self._server_address = name
        await server.pid.remote()


class EngineAdapter(BaseRollout):  # type: ignore[misc]
    """In each training process: gives the gathered weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self._server = server_name(rank // size)
        self._leads = rank % size == 0

    async def resume(self, tags: list[str]) -> None: ...
    async def release(self) -> None: ...

    async def update_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None, **_: Any
    ) -> None:
        gathered = {}
        for name, weight in weights:  # on all ranks: gathering a sharded weight is a collective
            if self._leads:
                gathered[name] = weight.detach().float().cpu().numpy()
        if self._leads:
            await ray.get_actor(self._server).load_weights.remote(gathered, global_steps or 0)


def register() -> None:
    """Enter the engine in verl's registries of replicas and of adapters in the training processes."""
    RolloutReplicaRegistry.register(NAME, lambda: EngineReplica)
    rollout_base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.EngineAdapter"
