"""The embedded engine as rollout server of verl: one actor per replica; weights travel as Ray objects.

It serves runs on CPUs, and those on GPUs that ask for it: verl.actor_rollout_ref.rollout.name=agentfly. On GPUs, it
runs on that of its training process and keeps weights and cache there while the policy is trained.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayClassWithInitArgs
from verl.utils.device import get_device_name, get_resource_name, get_visible_devices_keyword
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from agentfly.backends import open_backend
from agentfly.backends.base import Request
from agentfly.integrations.verl.config import JOB_VARIABLE, NAME
from agentfly.types import FinishReason, Sampling

retry_after_restart = ray.method(max_task_retries=-1)
"""A call that waits for a server that is being restarted; `generate` fails at once, and another server answers."""


class EngineServer:
    """Serves one replica; a Ray actor. It answers only while it has the weights of the last sync."""

    def __init__(self, model: str, dtype: str, device: str, memory_share: float) -> None:
        """memory_share: of the GPU's free memory, for the cache."""
        settings: dict[str, Any] = {"device": device, "dtype": dtype, "on_update": "abort"}
        if device == "cpu":
            torch.set_num_threads(1)
        else:
            settings["kv_memory"] = int(torch.cuda.mem_get_info()[0] * memory_share)
        self._backend = open_backend("transformers", model=model, **settings)
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
        device = get_device_name()
        options = {"name": name, "max_concurrency": self.max_concurrency, "num_cpus": 0.01, "max_restarts": -1}
        if device != "cpu":
            options |= await find_gpu(self.workers[0])
        settings = self.model_config.path, self.config.dtype, device, self.config.gpu_memory_utilization
        server = ray.remote(EngineServer).options(**options).remote(*settings)
        self.servers = [server]
        self._server_handle = server
        self._server_address = name
        await server.pid.remote()

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """The class of the process that receives the weights, on a machine that does not train."""
        settings = {"rollout_config": self.config, "model_config": self.model_config, "replica_rank": self.replica_rank}
        return RayClassWithInitArgs(cls=ray.remote(ServerSideWorker), **settings)


class ServerSideWorker(CheckpointEngineWorker):  # type: ignore[misc]
    """The process beside a server on a machine that does not train, with our engine in verl's registries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register()
        super().__init__(*args, **kwargs)


async def find_gpu(worker: Any) -> dict[str, Any]:
    """Options of an actor that uses the GPU of a training process, which Ray has reserved for that one."""
    node, gpu = await worker.__ray_call__.remote(
        lambda _: (
            ray.get_runtime_context().get_node_id(),
            ray.get_runtime_context().get_accelerator_ids()[get_resource_name()][0],
        )
    )
    kept = dict.fromkeys(get_platform().ray_noset_envvars(), "1")  # Ray leaves the variable as it is
    return {
        "scheduling_strategy": ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        "runtime_env": {"env_vars": {get_visible_devices_keyword(): gpu, **kept}},
    }


async def gather_weights(
    weights: Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]], *, keep: bool
) -> dict[str, Any]:
    """The weights in host memory. Without `keep` none, but all are read: gathering a sharded one is a collective."""
    gathered = {}
    async for name, weight in ensure_async_iterator(weights):
        if keep:
            gathered[name] = weight.detach().float().cpu().numpy()
    return gathered


class EngineAdapter(BaseRollout):  # type: ignore[misc]
    """In each training process, or in the one beside a server: gives the weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self._server = server_name(rank // size if replica_rank < 0 else replica_rank)
        self._leads = rank % size == 0

    async def resume(self, tags: list[str]) -> None: ...
    async def release(self) -> None: ...

    async def update_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None, **_: Any
    ) -> None:
        gathered = await gather_weights(weights, keep=self._leads)
        if self._leads:
            await ray.get_actor(self._server).load_weights.remote(gathered, global_steps or 0)


def register() -> None:
    """Enter the engine in verl's registries of replicas and of adapters in the training processes."""
    RolloutReplicaRegistry.register(NAME, lambda: EngineReplica)
    rollout_base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.EngineAdapter"
