"""Start and supervise a training job on a Ray cluster, from the process of the command line.

A job that fails for a reason other than its configuration is started again from the newest complete checkpoint: verl
itself does not survive the death of a training process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentfly.backends.engine.loading import load_config, max_positions
from agentfly.errors import AgentFlyError, ConfigError, describe
from agentfly.extras import require_extra
from agentfly.integrations.verl.config import (
    CPU_ENVIRONMENT,
    CPUS_PER_GPU,
    JOB_VARIABLE,
    SCHEDULE_VARIABLE,
    ClusterConfig,
    Device,
    JobSpec,
    build_settings,
    field_of_key,
    list_checkpoints,
    refuse_unsupported,
)
from agentfly.integrations.verl.job import TrainingJob
from agentfly.integrations.verl.recorder import Recorder
from agentfly.models import resolve
from agentfly.resources.runtimes.ray.cluster import connect
from agentfly.runs import RunDirectory, open_loggers
from agentfly.runs.loggers import RunLoggers
from agentfly.runs.report import write_curve, write_report
from agentfly.templates.codec import Codec
from agentfly.templates.tokenizer import load_tokenizer
from agentfly.training.checkpoint import refuse_changed_config
from agentfly.training.config import TrainConfig
from agentfly.training.plan import TrainPlan

_LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.5
"""Interval at which the driver asks for progress."""
RELEASE_SECONDS = 120
"""Limit for the release of GPUs by a job that has ended."""
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
    stored beside the configuration of a new run. resume: continue the run of the folder; from_step: after this step
    instead of the newest checkpoint.
    """
    require_verl()
    plan = make_plan()
    config = plan.config
    if resume:
        refuse_changed_config(config, RunDirectory(folder))
    ray = connect()
    device = check_cluster(ray, cluster)
    model = resolve(config.model)
    positions = max_positions(load_config(model).get_text_config())
    context = config.run_options.get("context_length") or min(positions, _DEFAULT_CONTEXT)
    if context > positions:
        raise ConfigError(f"run_options.context_length={context}, but {config.model!r} has {positions} positions")
    refuse_unsupported(config, cluster, device)
    folder = folder.absolute()
    settings = {**config.to_json(), **(metadata or {}), "on": "verl", "cluster": cluster.to_json()}
    local = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    recorder = (
        ray.remote(Recorder)
        .options(num_cpus=0, scheduling_strategy=local, max_concurrency=1)
        .remote(folder, settings, plan.recipe, steps=config.steps)
    )
    try:
        ray.get(recorder.poll.remote())  # raises what its constructor raised
        run = RunDirectory(folder)
        loggers = open_loggers(config.loggers, run)
        loggers.start(run.config)
        with contextlib.closing(loggers):
            supervise(
                ray, recorder, loggers, run, cluster, config=config, make_plan=make_plan, device=device, model=model,
                context=context, from_step=from_step,
            )  # fmt: skip
        write_report(run, Codec(load_tokenizer(model)).decode)
        try:
            write_curve(run)
        except ConfigError as missing:  # the plotting library is not installed; the run is complete without it
            _LOG.warning("%s", missing)
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(recorder.close.remote(), timeout=30)
        ray.kill(recorder)


def supervise(
    ray: Any,
    recorder: Any,
    loggers: RunLoggers,
    run: RunDirectory,
    cluster: ClusterConfig,
    *,
    config: TrainConfig,
    make_plan: Callable[[], TrainPlan],
    device: Device,
    model: str,
    context: int,
    from_step: int | None,
) -> None:
    """Run the job to its end, and start it again where a process of it died.

    Raises AgentFlyError when it has failed `cluster.restarts` + 1 times without a step that no earlier start completed.
    """
    failures = 0
    furthest = 0
    while True:
        steps = list_checkpoints(run.checkpoints)
        if from_step is not None and from_step not in steps:
            raise ConfigError(f"there is no checkpoint of step {from_step}; there are {steps or 'none'}")
        step = from_step if from_step is not None else (steps[-1] if steps else None)
        from_step = None
        wait_until_free(ray, cluster)
        ray.get(recorder.restart.remote(-1 if step is None else step))
        for later in steps[steps.index(step) + 1 :] if step is not None else ():  # else the next start would take them
            shutil.rmtree(run.checkpoints / f"global_step_{later}")
        verl_config = compose_config(
            build_settings(
                config,
                cluster,
                device=device,
                model=model,
                run=run.path,
                context_length=context,
                resume_from=None if step is None else run.checkpoints / f"global_step_{step}",
            ),
            cluster.verl,
        )
        spec = JobSpec(
            make_plan=make_plan,
            recorder=recorder,
            run_name=f"agentfly-{run.path.name}",
            model=model,
            context_length=context,
            workers=cluster.workers * cluster.nodes,
        )
        optimizer = config.optimizer
        schedule = {"warmup": optimizer.warmup_steps, "schedule": optimizer.schedule, "total": config.steps}
        environment = {
            "TRANSFER_QUEUE_ENABLE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            SCHEDULE_VARIABLE: json.dumps(schedule),
            JOB_VARIABLE: uuid.uuid4().hex[:8],
        }
        if device == "cpu":
            environment |= CPU_ENVIRONMENT
        job = ray.remote(TrainingJob).options(num_cpus=1, runtime_env={"env_vars": environment}).remote()
        finished = job.run.remote(verl_config, spec)
        completed = 0
        try:
            for record in follow(ray, finished, recorder, loggers):
                completed = max(completed, record.step)
            ray.get(finished)
            return
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, AgentFlyError):
                raise cause from error
            # Steps since an old checkpoint are no progress: a job that always fails at one step would never end.
            failures = 0 if completed > furthest else failures + 1
            furthest = max(furthest, completed)
            if failures > cluster.restarts:
                raise AgentFlyError(f"the job failed {failures} times without a new step: {describe(cause)}") from error
            newest = list_checkpoints(run.checkpoints)
            _LOG.warning(
                "the job failed and starts again from %s: %s",
                f"the checkpoint of step {newest[-1]}" if newest else "the beginning",
                describe(cause).splitlines()[0],
            )
        finally:
            ray.kill(job)  # with it, Ray ends all actors that it started


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
            raise ConfigError(f"the cluster is in use: {queue}. Wait for the other job to end, or stop it")
        time.sleep(POLL_SECONDS)


def follow(ray: Any, finished: Any, recorder: Any, loggers: RunLoggers) -> Iterator[Any]:
    """Show progress and steps until the job has ended; yields the records of the steps."""
    ended = False
    while not ended:
        done, _ = ray.wait([finished], timeout=POLL_SECONDS)
        ended = bool(done)
        records, progress = ray.get(recorder.poll.remote())
        for record in records:
            loggers.step(record)
            yield record
        if not ended:
            loggers.progress(progress)


def check_cluster(ray: Any, cluster: ClusterConfig) -> Device:
    """Raise ConfigError where the cluster lacks GPUs or CPUs, which verl would wait for without a message.

    Returns the device: Ray reports the type of real GPUs, logical ones have none.
    """
    nodes = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    needs = {"GPU": cluster.gpus, "CPU": cluster.gpus * CPUS_PER_GPU + cluster.workers}
    wanted = cluster.nodes + cluster.rollout_nodes
    fitting = sum(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes)
    if fitting < wanted:
        has = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in needs) for node in nodes)
        asked = ", ".join(f"{amount} {name}" for name, amount in needs.items())
        raise ConfigError(
            f"the run asks for {wanted} nodes with {asked} each; the cluster has {fitting} of them "
            f"({has or 'no node'}). Write nodes=… gpus=…, or start more with ray start --address=HEAD; without "
            "GPUs, ray start --num-gpus=1 --num-cpus=16 counts logical ones"
        )
    real = any(name.startswith("accelerator_type:") for node in nodes for name in node)
    return "cuda" if real else "cpu"


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
        if field := field_of_key(key):
            _LOG.warning("verl.%s=%s replaces %s", key, json.dumps(value), field)
        OmegaConf.update(config, key.removeprefix("+"), value, force_add=True)
    return config
