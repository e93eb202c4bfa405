"""The ranks of a distributed run, and models sharded over them with FSDP2.

One process per device. Each rank holds 1/N of every weight, gradient and optimizer state; the weights of a layer are
gathered for its forward and its backward pass, and its gradients are summed over the ranks into their shards. These
operations are collectives: all ranks call them in the same order, or they wait for each other.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from agentfly.backends.engine.vision import tower_parameters
from agentfly.errors import AgentFlyError, ConfigError, NonFiniteError, RankError, RecordError, describe
from agentfly.training.batch import MicroBatchRunner, split_micro_batches
from agentfly.training.optimizer import gather

T = TypeVar("T")
R = TypeVar("R")
COMMAND_TIMEOUT = timedelta(days=30)
"""How long a rank waits for the next command: a rollout may take hours. A rank that dies closes its connections."""
AGREED = ConfigError, RecordError, NonFiniteError
"""Errors that all ranks raise: they follow from the arguments, or the ranks agreed on them (`raise_together`)."""
_FAILURE = "failure"
_NUMBERS = itertools.count()
"""Numbers the `Ranks` of this process."""


class Ranks:
    """The processes of a run that `torchrun` or `agentfly train gpus=N` started, seen from one of them.

    Rank 0 leads: it runs the trainer and sends commands over a gloo group; tensors on GPUs travel over NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.init()  # else the mesh would select the device LOCAL_RANK, and this process sees one only
        store, self.rank, self.size = next(rendezvous("env://"))
        # A program may train twice: the keys of the first run have the addresses of its closed connections.
        self._store = PrefixStore(f"agentfly/{next(_NUMBERS)}", store)
        self.device = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size)
        self._control = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
        self._messages = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
        self.mesh = init_device_mesh(device.type, (self.size,))
        self._lock = threading.RLock()
        self._in_command = False

    @property
    def leads(self) -> bool:
        return bool(self.rank == 0)

    @contextmanager
    def command(self, *command: Any) -> Iterator[None]:
        """Run the block on all ranks: rank 0 sends the command to the others first, which enter the same block.

        A command inside of another one is part of it, and is not sent. Raises RankError with another rank's failure.
        """
        with self._lock:  # two threads' collectives would interleave differently on every rank, and wait forever
            outermost = not self._in_command
            self._in_command = True
            try:
                if outermost and self.leads:
                    self.broadcast(command)
                yield
            except AGREED:
                raise
            except Exception as error:
                if outermost:
                    self._report_failure(error)
                raise
            finally:
                self._in_command = not outermost

    def receive(self) -> Any:
        """Wait for the next command of rank 0; None after `close`."""
        try:
            return self.broadcast(None)
        except RuntimeError as error:
            self._report_failure(error)
            raise

    def _report_failure(self, error: Exception) -> None:
        """Tell the other ranks why this one fails. If another one failed first, raise RankError with its reason."""
        failure = f"rank {self.rank} failed: {describe(error)}"
        # The other ranks fail too, since their connections break: only the first failure is the cause.
        first = self._store.compare_set(_FAILURE, "", failure).decode()
        if first != failure:
            raise RankError(first) from error

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raise on all ranks the AgentFlyError that the block raises on any."""
        failure = None
        try:
            yield
        except AgentFlyError as error:
            failure = error
        # A collective: a rank that raised without it would leave the others waiting in theirs.
        failures = [error for error in self.all_gather(failure) if error is not None]
        if failures:
            raise failures[0]

    def send(self, value: Any, to: int) -> None:
        """Send a value to one rank, which receives it with `receive_from`; beside commands, in another thread."""
        dist.send_object_list([value], to, group=self._messages)

    def receive_from(self, rank: int) -> Any:
        """Wait for the next value that a rank sends to this one."""
        box = [None]
        dist.recv_object_list(box, rank, group=self._messages)
        return box[0]

    def close(self) -> None:
        """End the other ranks' wait for commands, and leave the group."""
        with self._lock:
            if dist.is_initialized():
                if self.leads:
                    with suppress(RuntimeError):  # another rank is gone
                        self.broadcast(None)
                dist.destroy_process_group()

    # ── models and tensors ──

    def shard(self, model: Any, *, low_precision: bool) -> None:
        """Shard a model's weights in place: each decoder layer is a unit, and everything else one more.

        A vision tower stays whole on every rank: it is frozen, and runs outside of the model's forward pass.
        low_precision: weights are gathered and multiplied in bfloat16; gradients are summed in float32. Embeddings,
        final norm and head stay gathered between forward and backward pass, since the head is applied outside of it.
        """
        # The model's own output is never used in place: the scores are computed from the input of its head.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        policy = MixedPrecisionPolicy()
        if low_precision:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        tower = set(tower_parameters(model))
        for weight in tower:
            weight.data = weight.data.to(self.device)
        language = model.get_decoder() if tower else model
        layers = [module for module in language.modules() if isinstance(module, GradientCheckpointingLayer)]
        for module in (*layers, model):  # inner ones first: the outer unit takes the weights that are left
            fully_shard(module, mesh=self.mesh, mp_policy=policy, ignored_params=tower)
            assert isinstance(module, FSDPModule)
            # The token weights of a mini-batch add up to 1 over all ranks, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            if self.device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the CPU of rank 0, gathered one by one; empty on other ranks."""
        whole = {}
        for name, tensor in tensors.items():
            gathered = gather(tensor.detach())
            if self.leads:
                whole[name] = gathered.cpu()
        return whole

    def distribute(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shards of rank 0's tensors, on all ranks; the argument of other ranks is ignored."""
        header = {
            name: (tensor.shape, tensor.dtype, tensor if tensor.ndim == 0 else None) for name, tensor in tensors.items()
        }
        out = {}
        for name, (shape, dtype, scalar) in self.broadcast(header).items():
            if scalar is not None:  # AdamW's step counts have no dimension to be sharded along
                out[name] = scalar
                continue
            whole = tensors[name] if self.leads else torch.empty(shape, dtype=dtype)
            out[name] = distribute_tensor(whole.to(self.device), self.mesh, [Shard(0)])
        return out


class ShardedRunner(MicroBatchRunner):
    """Micro-batches on several ranks: each takes a part of the items, and gets the results of all."""

    def __init__(self, ranks: Ranks, tokens: int, *, padded: bool, low_precision: bool) -> None:
        super().__init__(ranks.device, tokens, padded=padded, low_precision=low_precision)
        self.ranks = ranks.size
        self._ranks = ranks

    def _split(self, lengths: Sequence[int]) -> list[tuple[list[int], bool]]:
        """Equally many for every rank, since each pass is a collective: repeated segments without effect fill up."""
        length = lengths.__getitem__
        shares = partition_by_length(range(len(lengths)), length, self._ranks.size)
        split = [split_micro_batches(share, self.tokens, length, padded=self._padded) for share in shares]
        batches = split[self._ranks.rank]
        filler = [min(range(len(lengths)), key=length)] if lengths else []
        # A rank with fewer passes than the others would leave them waiting in the collectives of theirs.
        missing = max(map(len, split)) - len(batches)
        return [(batch, False) for batch in batches] + [(filler, True)] * missing

    def _gather(self, results: list[R]) -> list[R]:
        return [result for rank in self._ranks.all_gather(results) for result in rank]

    def _describe_out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """Memory that runs out on one rank ends the run: the others are in the middle of the same pass."""
        raise RuntimeError(
            f"micro_batch_tokens={self.tokens} runs out of memory ({super()._describe_out_of_memory(error)}): start "
            "again with half of it, gradient_checkpointing=true, adapters (lora_rank=16), or more GPUs"
        ) from error

    def _raise_together(self) -> AbstractContextManager[None]:
        return self._ranks.raise_together() if torch.is_grad_enabled() else nullcontext()


def partition_by_length(items: Sequence[T], length: Callable[[T], int], ranks: int) -> list[list[T]]:
    """Items by rank: the longest first, each to the rank with the fewest tokens. The same on every rank."""
    shares: list[list[T]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(items, key=length, reverse=True):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += length(item)
    return shares
