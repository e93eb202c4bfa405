"""The learner over several ranks: weights, gradients, optimizer, critic, reference and teacher are sharded with FSDP2.

Rank 0 runs the trainer; the others run `follow`. A call on rank 0 is sent to the others, and all ranks execute the
same method. Samples and segments are split over the ranks, scores and metrics are gathered from them, so that a call
returns what `LocalLearner` returns, up to the order of floating-point sums.

A rank that fails ends its process with the error, and the launcher ends the others. An error that follows from the
samples (a loss that is not finite) is raised on all ranks, before the step is taken.

Every rank has an embedded engine, which rank 0 uses as a fleet. Requests go from rank 0 to the engine of another rank
over gloo, point to point, and completions come back that way. New weights are gathered by all ranks together (NCCL on
GPUs), and every engine copies them on its own device.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial, wraps
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from agentfly.algorithms.base import SegmentArrays
from agentfly.backends import open_backend
from agentfly.backends.base import CLOSED, Backend, Request
from agentfly.backends.engine import EngineBackend
from agentfly.backends.engine.loading import LazyWeights
from agentfly.backends.fleet import FleetBackend
from agentfly.errors import AgentFlyError, BackendFault, ConfigError, describe
from agentfly.templates.template import Template
from agentfly.threads import compute, wait_for
from agentfly.training.batch import MicroBatchRunner
from agentfly.training.config_records import SHARDED_TOWER
from agentfly.training.local_learner import LocalLearner
from agentfly.training.lora import MergedWeights, has_adapters, read_weights, save_model
from agentfly.training.optimizer import gather
from agentfly.training.sharding import AGREED, Ranks, ShardedRunner
from agentfly.types import Completion

Method = TypeVar("Method", bound=Callable[..., Any])


def _on_all_ranks(method: Method) -> Method:
    """The method, executed by all ranks with the arguments of rank 0."""

    @wraps(method)
    def call(self: ShardedLearner, *args: Any, **kwargs: Any) -> Any:
        with self.ranks.command(method.__name__, args, kwargs):
            result = method(self, *args, **kwargs)
            self._reshard()
            return result

    return call  # type: ignore[return-value]


class ShardedLearner(LocalLearner):
    """One rank's part of the learner; on rank 0 also what the trainer calls."""

    def __init__(self, model: Any, *, ranks: Ranks, **settings: Any) -> None:
        """`model`: with all weights, in host memory: they are moved to the device shard by shard, and it is emptied."""
        if settings.get("train_tower"):
            raise ConfigError(SHARDED_TOWER)
        self.ranks = ranks
        self._engine: EngineBackend | None = None
        super().__init__(model, **settings)
        # Weights without data: its class and configuration are those of the checkpoint.
        self.model = model.to("meta")

    def _compute_device(self, model: Any) -> torch.device:
        return self.ranks.device

    def _build_runner(self, tokens: int, *, padded: bool, low_precision: bool) -> MicroBatchRunner:
        return ShardedRunner(self.ranks, tokens, padded=padded, low_precision=low_precision)

    def _place_models(self) -> None:
        for model in self._models():
            self.ranks.shard(model, low_precision=self.low_precision)
        # FSDP takes the data types of trainable weights from the first forward pass, which must not be one of the
        # reference: peft freezes adapters while they are disabled. Eager: passes with gradients need other kernels.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            self._policy.backbone.logits([SegmentArrays.from_tokens(np.arange(3), prompt=1)])
        self._reshard()

    def _models(self) -> list[Any]:
        parts = (self._policy, self._reference, self._teacher, self._critic)
        return [part.backbone.model for part in parts if part is not None]

    def _reshard(self) -> None:
        """Free the weights outside of the layers, which stay gathered after a forward pass without a backward pass."""
        for model in self._models():
            model.reshard()

    def follow(self) -> None:
        """On ranks other than 0: execute the commands of rank 0 until it closes."""
        while (command := self.ranks.receive()) is not None:
            name, args, kwargs = command
            with suppress(*AGREED):  # rank 0 raises it too, and decides what follows
                getattr(self, name)(*args, **kwargs)

    def close(self) -> None:
        self.ranks.close()

    # ── scoring and updating ──

    score = _on_all_ranks(LocalLearner.score)
    score_reference = _on_all_ranks(LocalLearner.score_reference)
    score_teacher = _on_all_ranks(LocalLearner.score_teacher)
    values = _on_all_ranks(LocalLearner.values)
    update = _on_all_ranks(LocalLearner.update)
    skip_update = _on_all_ranks(LocalLearner.skip_update)
    set_kl_coef = _on_all_ranks(LocalLearner.set_kl_coef)
    measure_update = _on_all_ranks(LocalLearner.measure_update)

    # ── weights and state ──

    def weights(self, *, merged: bool = False) -> Iterable[tuple[str, Tensor]]:
        """The whole weights that change, by name; each is gathered when it is requested."""
        return self._lazy_weights(self.gather_weight, merged=merged and has_adapters(self.model))

    def _lazy_weights(self, gather_weight: Callable[[str, bool], Tensor], *, merged: bool) -> LazyWeights:
        """`gather_weight`: by name and `merged`; a command to the other ranks, or part of one."""
        # A sharded tensor has the shape of the whole one: to validate the weights, none has to be gathered.
        weights = {name: weight.shape for name, weight in self.trainable_weights.items()}
        return LazyWeights(self._merged_weights.shapes if merged else weights, lambda name: gather_weight(name, merged))

    @cached_property
    def _merged_weights(self) -> MergedWeights:
        """The sharded matrices with adapters. Collected once: a walk over all modules costs more than merging one."""
        return MergedWeights(self._policy.backbone.model)

    def _gather_weight(self, name: str, merged: bool) -> Tensor:
        """A weight that changes, whole. merged: the matrix `name` with its adapters."""
        if merged:
            return gather(self._merged_weights.merge(name))
        return gather(self.trainable_weights[name].detach())

    gather_weight = _on_all_ranks(_gather_weight)

    def open_engines(self, settings: Mapping[str, Any]) -> RankFleet:
        """Open an embedded engine on every rank, as one backend of rank 0. settings: those of EngineBackend."""
        return RankFleet(self.open_engine(settings), self.ranks, self.update_engine)

    @_on_all_ranks
    def open_engine(self, settings: Mapping[str, Any]) -> EngineBackend:
        """Open this rank's engine; those of ranks other than 0 answer rank 0's requests."""
        with self.ranks.raise_together():
            engine = open_backend("transformers", **settings)
        assert isinstance(engine, EngineBackend)
        self._engine = engine
        if not self.ranks.leads:
            RankEngineServer(self.ranks, engine)
        return engine

    @_on_all_ranks
    def update_engine(self, version: int) -> None:
        """Copy the weights into every rank's engine, as `version`. Each is gathered by all ranks at the same time."""
        assert self._engine is not None
        weights = self._lazy_weights(self._gather_weight, merged=has_adapters(self.model))
        wait_for(self._engine.update_weights(weights, version))

    @_on_all_ranks
    def save(self, folder: Path | None) -> None:
        """Write what transformers (or peft) loads, on rank 0."""
        named = self._policy.backbone.model.named_parameters()
        weights = self.ranks.collect(self.trainable_weights if has_adapters(self.model) else dict(named))
        if self.ranks.leads:
            assert folder is not None
            save_model(self.model, folder, weights)

    @torch.no_grad()
    def load(self, folder: Path | None) -> None:
        """Load the weights that `save` of any layout wrote, on rank 0."""
        saved = {} if folder is None else read_weights(self.model, folder, self.trainable_weights)
        with self.ranks.command("load", (None,), {}):
            for name, shard in self.ranks.distribute(saved).items():
                self.trainable_weights[name].copy_(shard)

    @_on_all_ranks
    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state beside the model's weights, whole, on rank 0."""
        tensors, values = super().state_dict()
        return self.ranks.collect(tensors), values

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the state of any layout. The precision is that of this machine: the weights are gathered in it."""
        values = {**values, "low_precision": self.low_precision}
        with self.ranks.command("load_state_dict", ({}, values), {}):
            super().load_state_dict(self.ranks.distribute(tensors), values)


def _send_messages(ranks: Ranks, outbox: SimpleQueue[Any], rank: int) -> None:
    """In a thread: send what is put into the queue to a rank, up to None."""
    with suppress(RuntimeError):  # that rank is gone: the receiving side reports it, or the launcher ends this process
        while True:
            message = outbox.get()
            ranks.send(message, rank)
            if message is None:
                return


class RankFleet(FleetBackend):
    """The engines of all ranks, on rank 0."""

    def __init__(self, local_engine: EngineBackend, ranks: Ranks, update: Callable[[int], None]) -> None:
        """The other ranks' engines have the settings of rank 0's. update: gives all engines weights of a version."""
        super().__init__([local_engine, *(RemoteEngine(ranks, rank, local_engine) for rank in range(1, ranks.size))])
        self._update = update

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Let every rank's engine take the learner's weights; `weights` is not read."""
        await compute(self._update, version)
        self._failures = [0] * len(self.members)
        for member in self.members[1:]:
            assert isinstance(member, RemoteEngine)
            member.version = version


class RemoteEngine(Backend):
    """The engine of another rank, seen from rank 0. It reports tokens when a turn is complete."""

    def __init__(self, ranks: Ranks, rank: int, like: EngineBackend) -> None:
        """`like`: rank 0's own engine, which has the same settings."""
        self._like = like
        self.context_length = like.context_length
        self.version = like.weight_version
        self._ranks = ranks
        self._rank = rank
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Completion]] = {}
        self._closed = False
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"agentfly-rank-{rank}", daemon=True)
            for target in (partial(_send_messages, ranks, self._outbox, rank), self._receive)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def weight_version(self) -> int:
        return self.version

    def attach(self, template: Template) -> None:
        """Called after the template was attached to rank 0's engine; the other one loads the processor it needs."""
        self.supports_images = self._like.supports_images

    async def generate(self, request: Request) -> Completion:
        number = next(self._numbers)
        future: Future[Completion] = Future()
        self._pending[number] = future
        if self._closed:  # after the line above: the receiving thread fails what is pending when it ends
            del self._pending[number]
            raise BackendFault(CLOSED)
        self._outbox.put((number, replace(request, on_tokens=None, on_text=None)))
        try:
            completion = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._outbox.put((number, None))
            raise
        finally:
            self._pending.pop(number, None)
        if request.on_tokens is not None:
            request.on_tokens(completion.token_ids)
        return completion

    async def close(self) -> None:
        """Close the connection to the other rank. Pending requests fail."""
        if not self._closed:
            self._closed = True
            self._outbox.put(None)
            for thread in self._threads:
                await asyncio.to_thread(thread.join)

    def _receive(self) -> None:
        fault: Exception = BackendFault(CLOSED)
        try:
            while (message := self._ranks.receive_from(self._rank)) is not None:
                number, result = message
                future = self._pending.get(number)
                if future is None or not future.set_running_or_notify_cancel():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
        except RuntimeError as error:
            fault = BackendFault(f"the connection to rank {self._rank} is lost: {describe(error)}")
        self._closed = True
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(fault)


class RankEngineServer:
    """Answers rank 0's requests with this rank's engine, in threads of its own."""

    def __init__(self, ranks: Ranks, engine: Backend) -> None:
        self._ranks = ranks
        self._engine = engine
        self._running: dict[int, asyncio.Task[None]] = {}
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._loop = asyncio.new_event_loop()
        for target in (self._loop.run_forever, self._receive, partial(_send_messages, ranks, self._outbox, 0)):
            threading.Thread(target=target, name="agentfly-engine-server", daemon=True).start()

    def _receive(self) -> None:
        with suppress(RuntimeError):  # rank 0 is gone: the launcher ends this process
            while (message := self._ranks.receive_from(0)) is not None:
                self._loop.call_soon_threadsafe(self._handle, *message)
            self._outbox.put(None)

    def _handle(self, number: int, request: Request | None) -> None:
        """Start a request, or cancel it."""
        if request is not None:
            self._running[number] = self._loop.create_task(self._answer(number, request))
        elif number in self._running:
            self._running[number].cancel()

    async def _answer(self, number: int, request: Request) -> None:
        result: Completion | Exception
        try:
            result = await self._engine.generate(request)
        except AgentFlyError as error:
            result = error
        except Exception as error:
            result = BackendFault(f"the engine of rank {self._ranks.rank} failed: {describe(error)}")
        finally:
            del self._running[number]
        self._outbox.put((number, result))
