"""The embedded engine as rollout server of verl: one actor per replica; weights travel as Ray objects.

It serves runs on CPUs, and those on GPUs that ask for it: verl.actor_rollout_ref.rollout.name=agentfly. On GPUs, it
runs on that of its training process and keeps weights and cache there while the policy is trained.
Importing this module enters the engine in verl's registries.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.plugin.platform import get_platform
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
        same = ("temperature", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")
        sampling = Sampling(
            **{name: params[name] for name in same if name in params},
            top_k=max(params.get("top_k", -1), 0),
            stop=tuple(params.get("stop", ())),
        )
        stop_ids = frozenset(params.get("stop_token_ids", ()))
        version = self._version
        done = await self._backend.generate(Request(prompt_ids, sampling, stop_ids, chain=request_id))
        return TokenOutput(
            token_ids=list(done.token_ids),
            log_probs=[float(logprob) for logprob in done.logprobs],
            stop_reason="aborted" if done.finish is FinishReason.ABORTED else "completed",
            num_preempted=0,
            extra_fields={"global_steps": version},
        )

    @retry_after_restart
    async def load_weights(self, weights: dict[str, Any], version: int) -> None:
        """Take new weights; running requests end with what they have sampled."""
        tensors = [(name, torch.from_numpy(array.copy())) for name, array in weights.items()]
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


async def gather_weights(weights: Iterable[tuple[str, Any]], *, keep: bool) -> dict[str, Any]:
    """The weights in host memory. Without `keep` none, but all are read: gathering a sharded one is a collective."""
    gathered = {}
    async for name, weight in ensure_async_iterator(weights):
        if keep:
            gathered[name] = weight.detach().float().cpu().numpy()
    return gathered


class EngineAdapter(BaseRollout):  # type: ignore[misc]
    """In each training process: gives the weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self._replica, rank = divmod(int(os.environ["RANK"]), size)
        self._leads = rank == 0

    async def resume(self, tags: list[str]) -> None: ...
    async def release(self) -> None: ...

    async def update_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None, **_: Any
    ) -> None:
        gathered = await gather_weights(weights, keep=self._leads)
        if gathered:  # not beside a server on another machine
            await ray.get_actor(server_name(self._replica)).load_weights.remote(gathered, global_steps or 0)


@CheckpointEngineRegistry.register(NAME)
class DirectTransfer(CheckpointEngine):  # type: ignore[misc]
    """Gives the weights of the first training process to all servers, on machines that do not train.

    verl's own engines send them with NCCL and the like, which need a GPU on both sides.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        """bucket_size: not used. is_master: whether this is the training process that sends."""
        self._sends = is_master
        self._servers = 0

    def prepare(self) -> None: ...
    def finalize(self) -> None: ...

    @classmethod
    def build_topology(cls, trainers: int, servers: int, _: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of `init_process_group`, for the training processes and for those beside the servers."""
        return {"servers": [servers] * trainers}, {"servers": [servers] * servers}

    def init_process_group(self, servers: int) -> None:
        self._servers = servers

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        gathered = await gather_weights(weights, keep=self._sends)
        if self._sends:
            shared = ray.put(gathered)
            servers = [ray.get_actor(server_name(number)) for number in range(self._servers)]
            await asyncio.gather(*(server.load_weights.remote(shared, global_steps or 0) for server in servers))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Nothing: the servers have them already."""
        no_weights: list[tuple[str, Any]] = []
        for weight in no_weights:
            yield weight


RolloutReplicaRegistry.register(NAME, lambda: EngineReplica)
rollout_base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.EngineAdapter"
