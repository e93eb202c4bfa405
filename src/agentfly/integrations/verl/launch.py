"""Start and supervise a training job on a Ray cluster, from the process of the command line.

A job that lost a process is started again from the newest complete checkpoint: verl itself does not survive the death
of a training process. A job whose configuration or code is wrong is not: see `can_restart`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from agentfly.backends.engine.loading import load_config, max_positions
from agentfly.errors import (
    AgentFlyError,
    BackendFault,
    ConfigError,
    EnvironmentFault,
    RankError,
    describe,
    require_extra,
)
from agentfly.integrations.verl.config import (
    CPU_ENVIRONMENT,
    CPUS_PER_GPU,
    JOB_VARIABLE,
    SCHEDULE_VARIABLE,
    ClusterConfig,
    Device,
    JobSpec,
    build_settings,
    list_checkpoints,
)
from agentfly.models import resolve
from agentfly.resources.runtimes.ray.runtime import connect
from agentfly.runs import Progress, RunDirectory, RunWriter, StepRecord, open_loggers
from agentfly.runs.report import write_report_files
from agentfly.templates.codec import Codec
from agentfly.templates.tokenizer import load_tokenizer
from agentfly.training.checkpoint import refuse_unsafe_changes
from agentfly.training.plan import TrainPlan

_LOG = logging.getLogger(__name__)
ANSWER_SECONDS = 600
"""Limit for an answer of the job's process."""
POLL_SECONDS = 0.5
"""Interval at which the driver asks for progress."""
RELEASE_SECONDS = 120
"""Limit for the release of GPUs by a job that has ended, and for the replacement of a node that died."""
_DEFAULT_CONTEXT = 32768
"""Longest context that is served unless run_options.context_length asks for more."""


def require_verl() -> None:
    """Raise ConfigError with the install command if verl is missing."""
    with require_extra("--on verl", "verl"):
        import verl  # noqa: F401


def train_on_verl(
    make_plan: Callable[[], TrainPlan],
    cluster: ClusterConfig,
    folder: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    resume: bool = False,
    from_step: int | None = None,
) -> None:
    """Train the plan on the cluster that RAY_ADDRESS names, or on a new local one, into a run directory.

    make_plan: loads the recipe; called in every process that runs chains, so it must be importable there. metadata:
    stored beside the configuration. resume: continue the run of the folder; from_step: after this step
    instead of the newest checkpoint.
    """
    require_verl()
    plan = make_plan()
    config = plan.config
    if resume:
        refuse_unsafe_changes(config, RunDirectory(folder))
        refuse_other_ranks(cluster, folder)
    model = resolve(config.model)
    model_config = load_config(model)
    if hasattr(model_config, "vision_config"):
        raise ConfigError(
            f"{config.model!r} is a vision model, which verl does not train here: leave --on verl out; gpus=N on the "
            "command line shards it over the GPUs of this machine"
        )
    ray = connect()
    device = check_cluster(ray, cluster)
    positions = max_positions(model_config.get_text_config())
    context = config.run_options.get("context_length") or min(positions, _DEFAULT_CONTEXT)
    if context > positions:
        raise ConfigError(f"run_options.context_length={context}, but {config.model!r} has {positions} positions")
    folder = folder.absolute()
    flash_attention = find_spec("flash_attn") is not None
    if device == "cuda" and not flash_attention:
        _LOG.warning("flash-attn is not installed: verl trains padded batches with torch's attention, which is slower")
    keys = build_settings(
        config,
        cluster,
        device=device,
        model=model,
        run=folder,
        context_length=context,
        flash_attention=flash_attention,
    )
    verl_config = compose_config(keys, cluster.verl)
    optimizer = config.optimizer
    schedule = {"warmup": optimizer.warmup_steps, "schedule": optimizer.schedule, "total": config.steps}
    environment = {
        "TRANSFER_QUEUE_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        SCHEDULE_VARIABLE: json.dumps(schedule),
        # With rollout_nodes, verl 0.9.1 raises a TypeError where it logs at INFO: logger.info(…, flush=True).
        "VERL_LOGGING_LEVEL": os.environ.get("VERL_LOGGING_LEVEL", "WARNING"),
        **(CPU_ENVIRONMENT if device == "cpu" else {}),
    }
    settings = {**config.to_json(), **(metadata or {}), "on": "verl", "cluster": cluster.to_json()}
    if not resume:
        RunWriter.create(folder, settings, plan.recipe).close()
    spec = JobSpec(
        make_plan=make_plan,
        folder=folder,
        settings=settings,
        model=model,
        context_length=context,
        workers=cluster.workers * cluster.nodes,
    )
    supervise(ray, cluster, spec, verl_config=verl_config, environment=environment, from_step=from_step)
    write_report_files(RunDirectory(folder), Codec(load_tokenizer(model)).decode)


def refuse_other_ranks(cluster: ClusterConfig, folder: Path) -> None:
    """Raise ConfigError where a run is resumed with another number of training processes than wrote its checkpoints."""
    ranks = cluster.nodes * cluster.gpus
    for step in list_checkpoints(folder / "checkpoints")[-1:]:
        actor = folder / "checkpoints" / f"global_step_{step}" / "actor"
        if not (actor / f"model_world_size_{ranks}_rank_0.pt").exists():
            raise ConfigError(
                f"nodes={cluster.nodes} gpus={cluster.gpus} are {ranks} training processes, and {actor} was written by "
                "another number of them, each with its part: resume the run with as many, or start another one from "
                f"its model: model={actor / 'huggingface'}"
            )


def supervise(
    ray: Any,
    cluster: ClusterConfig,
    spec: JobSpec,
    *,
    verl_config: Any,
    environment: Mapping[str, str],
    from_step: int | None,
) -> None:
    """Run the job to its end, and start it again where `can_restart` allows it.

    Raises the job's AgentFlyError, or one with the traceback of another error, where it does not or where the job has
    failed `cluster.restarts` + 1 times without a step that no earlier start completed.
    """
    # Beside the driver, which reads the run directory that it writes.
    local = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    failures = 0
    furthest = 0
    while True:
        wait_until_free(ray, cluster)
        variables = {**environment, JOB_VARIABLE: uuid.uuid4().hex[:8]}
        options = {"num_cpus": 0, "max_concurrency": 2, "scheduling_strategy": local}
        job = ray.remote(TrainingJob).options(**options, runtime_env={"env_vars": variables}).remote(spec)
        completed = 0
        try:
            ask_job(ray, job.open.remote(from_step), spec)
            for record in follow(ray, job, spec, verl_config):
                from_step = None  # later steps are removed: a restart continues from the newest checkpoint
                completed = max(completed, record.step)
            return
        except (ray.exceptions.RayError, RankError) as error:
            cause = getattr(error, "cause", None) or error
            # Steps since an old checkpoint are no progress: a job that always fails at one step would never end.
            failures = 0 if completed > furthest else failures + 1
            furthest = max(furthest, completed)
            if failures > cluster.restarts or not can_restart(cause, first_step=furthest == 0):
                if isinstance(cause, AgentFlyError):
                    raise cause from error
                # The text of Ray's error is the traceback in the job, which this process does not have.
                raise AgentFlyError(f"the job failed, in start {failures} without a new step: {error}") from error
            newest = list_checkpoints(spec.folder / "checkpoints")
            _LOG.warning(
                "the job failed and starts again from %s: %s",
                f"the checkpoint of step {newest[-1]}" if newest else "the beginning",
                describe(cause).splitlines()[0],
            )
        finally:
            end_job(ray, job)


def ask_job(ray: Any, answer: Any, spec: JobSpec) -> Any:
    """The answer of the job's process, also while it trains. Raises RankError if there is none."""
    try:
        return ray.get(answer, timeout=ANSWER_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise RankError(
            f"the process that trains and writes {spec.folder} has not answered for {ANSWER_SECONDS} s. Look for a "
            f"full disk or memory on this machine, then continue with agentfly train --resume {spec.folder}"
        ) from error


def follow(ray: Any, job: Any, spec: JobSpec, verl_config: Any) -> Iterator[StepRecord]:
    """Run a job, show its progress and its steps, and raise its error; yields the records of the steps."""
    # Opened for each start, as for a resumed run: what they have of later steps is replaced.
    run = RunDirectory(spec.folder)
    loggers = open_loggers(spec.settings["loggers"], run)
    started = False
    used: set[str] = set()
    try:
        finished = job.run.remote(verl_config)
        ended = False
        while not ended:
            ended = bool(ray.wait([finished], timeout=POLL_SECONDS)[0])
            # verl would wait for a storage unit of its queue on a dead node, for 10 minutes per request.
            placed = [group for group in list_placement_groups(ray).values() if group["state"] == "CREATED"]
            used |= {node for group in placed for node in group["bundles_to_node_id"].values()}
            if not ended and (dead := used - {node["NodeID"] for node in ray.nodes() if node["Alive"]}):
                raise RankError(f"a node with training processes died: {', '.join(sorted(dead))}")
            records, progress = ask_job(ray, job.poll.remote(), spec)
            if progress is not None and not started:  # later steps are removed from the run directory
                loggers.start(run.config)
                started = True
            for record in records:
                loggers.step(record)
                yield record
            if not ended and progress is not None:
                loggers.progress(progress)
        ray.get(finished)
    finally:
        loggers.close()


class TrainingJob:
    """Runs verl's trainer and writes the run directory; a Ray actor.

    Its environment variables are set before it imports verl. `poll` answers in a second thread while it trains.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    def open(self, from_step: int | None) -> None:
        """Open the run directory, to continue after a step: see `RunRecorder`."""
        from agentfly.integrations.verl.recorder import RunRecorder

        self._recorder = RunRecorder(self._spec, from_step)

    def run(self, config: Any) -> None:
        """Train until the last step."""
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import get_trainer_cls

        from agentfly.integrations.verl.manager import RolloutManager
        from agentfly.integrations.verl.trainer import AgentFlyTrainer

        if self._recorder.start is not None:
            config.trainer.resume_mode = "resume_path"
            config.trainer.resume_from_path = f"{self._spec.folder}/checkpoints/global_step_{self._recorder.start}"
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._recorder.close)
            tq.init(config.transfer_queue)
            cleanup.callback(tq.close)
            base = get_trainer_cls(config.trainer.v1.trainer_mode)
            trainer_class: Any = type(f"AgentFly{base.__name__}", (AgentFlyTrainer, base), {})
            trainer = trainer_class(config, self._spec, self._recorder)
            trainer.init()  # loads the checkpoint
            trainer.rollout = RolloutManager(self._spec, trainer.get_llm_client(), self._recorder.report_progress)
            self._recorder.rewind()
            trainer.fit(trainer.rollout)

    def poll(self) -> tuple[list[StepRecord], Progress | None]:
        """See `RunRecorder.poll`."""
        return self._recorder.poll()


def can_restart(cause: BaseException, *, first_step: bool) -> bool:
    """Whether a job that ended with this error may succeed when it is started again.

    A process, server or environment that was lost may be back, at any step. Our other errors (configuration, rewards,
    non-finite loss, weights out of sync) would come back. An error of another type may follow from a lost process, too;
    but before the first step of the run, a wrong value or a constructor that raised is a mistake in the recipe or in a
    raw key of verl.
    """
    if isinstance(cause, AgentFlyError):
        return isinstance(cause, BackendFault | EnvironmentFault | RankError)
    mistake = isinstance(cause, ImportError | TypeError | ValueError | LookupError | AttributeError | AssertionError)
    return not (first_step and (mistake or getattr(cause, "actor_init_failed", False)))


def end_job(ray: Any, job: Any) -> None:
    """End the training job, the actors that it started and, at once, the reservations of their GPUs.

    Ray would keep a placement group for as long as this driver lives, also after the death of the actor that made it.
    """
    from ray.util.placement_group import PlacementGroup  # `ray.util.placement_group` is a function

    ray.kill(job)
    for key in list_placement_groups(ray):
        ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(key)))


def list_placement_groups(ray: Any) -> dict[str, Any]:
    """The reservations of this driver's jobs for GPUs, by id."""
    job_id = ray.get_runtime_context().get_job_id()
    table = ray.util.placement_group_table().items()
    # An id ends with that of the Ray job.
    return {key: group for key, group in table if key.endswith(job_id) and group["state"] != "REMOVED"}


def wait_until_free(ray: Any, cluster: ClusterConfig) -> None:
    """Wait until an earlier job has released its GPUs and its queue. Raises ConfigError where they stay in use."""
    needed = (cluster.nodes + cluster.rollout_nodes) * cluster.gpus
    end = time.monotonic() + RELEASE_SECONDS
    while True:
        free = ray.available_resources().get("GPU", 0)
        try:
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
            queue = "another job of verl runs there, and both would use the same TransferQueue"
        except ValueError:
            if free >= needed:
                return
            queue = f"{free:g} of {needed} GPUs are free"
        if time.monotonic() > end:
            check_cluster(ray, cluster)  # a node may have died
            raise ConfigError(f"the cluster is in use: {queue}. Wait for the other job to end, or stop it")
        time.sleep(POLL_SECONDS)


def describe_cluster(cluster: ClusterConfig) -> str:
    """The processes and the device of a run, for its start. Raises ConfigError where the cluster lacks them."""
    count = cluster.nodes * cluster.gpus
    device = "GPUs"
    if check_cluster(connect(), cluster) == "cpu":
        device = "CPUs (Ray reports no GPU type on any node; if there are GPUs: verl.trainer.device=cuda)"
    serving = f", {cluster.rollout_nodes * cluster.gpus} GPUs that only serve" if cluster.rollout_nodes else ""
    chains = cluster.workers * cluster.nodes
    processes = f"{count} training processes on {device}{serving}, {chains} processes that run chains"
    return f"on verl: {processes}; the first step follows when all of them have loaded, often minutes later"


def check_cluster(ray: Any, cluster: ClusterConfig) -> Device:
    """Raise ConfigError where the cluster lacks GPUs or CPUs, which verl would wait for without a message.

    Returns the device: that of the raw key `trainer.device`, else GPUs if Ray reports the type of one; logical ones
    have none.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needs = {"GPU": cluster.gpus, "CPU": cluster.gpus * CPUS_PER_GPU + cluster.workers}
    num_nodes = cluster.nodes + cluster.rollout_nodes
    fitting = sum(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes)
    if fitting < num_nodes:
        has = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in needs) for node in nodes)
        needed = ", ".join(f"{amount} {name}" for name, amount in needs.items())
        raise ConfigError(
            f"the run asks for {num_nodes} nodes with {needed} each; the cluster has {fitting} of them "
            f"({has or 'no node'}). Write nodes=… gpus=…, or start more with ray start --address=HEAD; without "
            "GPUs, ray start --num-gpus=1 --num-cpus=16 counts logical ones"
        )
    real = any(name.startswith("accelerator_type:") for node in nodes for name in node)
    device: Device = cluster.verl.get("trainer.device", "cuda" if real else "cpu")
    if device not in get_args(Device):
        raise ConfigError(f"verl.trainer.device={device}: it is one of {', '.join(get_args(Device))}")
    return device


def compose_config(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> Any:
    """verl's default configuration with our settings, then the raw keys of the user."""
    import hydra
    import verl.trainer
    from omegaconf import OmegaConf

    folder = str(Path(verl.trainer.__file__).parent / "config")
    with hydra.initialize_config_dir(config_dir=folder, version_base=None):
        config = hydra.compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    for key, value in settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    missing = object()
    for key, value in raw.items():
        added = key.startswith("+")
        if not added and OmegaConf.select(config, key, default=missing, throw_on_missing=False) is missing:
            raise ConfigError(f"verl has no key {key!r}; write verl.+{key}=… to add it")
        OmegaConf.update(config, key.removeprefix("+"), value, force_add=True)
    return config
