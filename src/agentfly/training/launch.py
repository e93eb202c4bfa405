"""The processes of a run: one, or one per GPU (ranks), started by `gpus=N` or by torchrun.

Rank 0 runs the trainer; the other ranks are in `launch_or_join_ranks` during the run. All end with their launcher.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from agentfly.errors import ConfigError
from agentfly.sandbox.inside import kernel
from agentfly.training.config import TrainConfig
from agentfly.training.config_records import SHARDED_TOWER


def is_torchrun_rank() -> bool:
    """Whether this process is one of the ranks that torchrun, or `start_ranks`, started."""
    return "RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ


def launch_or_join_ranks(config: TrainConfig, command: Sequence[str] = (), *, resumed: bool = False) -> bool:
    """Start the ranks of a run and wait for them, or run as one of them.

    command: arguments of `python` that start a rank. resumed: the run may continue with another number of ranks.
    Returns whether the run has ended; False in the process that runs the trainer: rank 0, or the only process.
    """
    if config.vision.train_tower and (config.gpus > 1 or is_torchrun_rank()):
        raise ConfigError(SHARDED_TOWER)
    if not is_torchrun_rank():
        if config.gpus > 1:
            start_ranks(config.gpus, command)
        return config.gpus > 1
    if sys.platform == "linux":
        # A rank that outlives a killed launcher would train on, or wait in a collective, with the run's lock.
        kernel.die_with_parent()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if config.gpus not in (1, local_ranks) and not resumed:
        raise ConfigError(f"gpus={config.gpus}, but torchrun started {local_ranks} ranks on this machine: leave it out")
    _select_gpu(int(os.environ["LOCAL_RANK"]), local_ranks)
    if os.environ["RANK"] == "0":
        return False
    # Python's signal handlers do not run while a rank waits in a collective.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from agentfly.backends.engine.loading import resolve_device
    from agentfly.training.build import build_learner
    from agentfly.training.sharded_learner import ShardedLearner
    from agentfly.training.sharding import Ranks

    device = resolve_device(config.backend_settings.get("device") if config.embeds_engine else None)
    ranks = Ranks(device)
    # Only rank 0 handles SIGTERM from here on: all ranks write its checkpoint. When it ends, `follow` ends here.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    learner = build_learner(config, device, ranks)
    assert isinstance(learner, ShardedLearner)
    learner.follow()
    learner.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return True


def start_ranks(gpus: int, command: Sequence[str]) -> None:
    """Run one process per GPU until all have ended; an error in one ends all.

    Raises SystemExit with the exit code of the first that failed, ConfigError where there are too few GPUs.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    available = torch.cuda.device_count()
    if gpus > available:
        advice = f"write gpus={available}" if available else "leave gpus out"
        raise ConfigError(
            f"gpus={gpus}, but torch {torch.__version__} sees {available} GPUs here: {advice}, or start the ranks "
            f"yourself with torchrun --nproc-per-node N -m -- agentfly train … (on a CPU, too)"
        )
    if not command:
        raise ConfigError(
            f"gpus={gpus}: start this program with torchrun --nproc-per-node {gpus}, or use agentfly train"
        )
    threads = str(max((os.cpu_count() or 1) // gpus, 1))
    os.environ["OMP_NUM_THREADS"] = min(os.environ.get("OMP_NUM_THREADS", threads), threads, key=int)
    try:
        with TemporaryDirectory(prefix="agentfly-ranks-") as logs:
            launch = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=gpus,
                run_id=str(os.getpid()),
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )
            elastic_launch(launch, sys.executable)(*command)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as error:
        sys.exit(128 + error.sigval)


@functools.cache  # once per process: afterwards, CUDA_VISIBLE_DEVICES has this GPU only
def _select_gpu(local_rank: int, local_ranks: int) -> None:
    """Show this rank its own GPU only, as device 0, before torch initializes CUDA.

    Threads start with device 0 as their current one: with another device, each of them would have to select it.
    """
    import torch

    gpus = torch.cuda.device_count()
    if gpus and local_ranks > gpus:
        raise ConfigError(
            f"torchrun started {local_ranks} ranks on this machine, which has {gpus} GPUs: write --nproc-per-node "
            f"{gpus}, or hide the GPUs (CUDA_VISIBLE_DEVICES='') to run on the CPU"
        )
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank] if visible else str(local_rank)
