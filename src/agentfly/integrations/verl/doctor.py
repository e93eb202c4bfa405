"""`agentfly doctor --on verl`: whether this machine and its Ray cluster can train on verl.

verl reports several of these late or not at all: an extension that fails to load is logged at debug level, and a job
that asks for more CPUs than there are waits forever.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from agentfly import reward
from agentfly.agents import HFAgent
from agentfly.errors import DISTRIBUTION, ConfigError, describe, install_command
from agentfly.integrations.verl.config import CPU_ENVIRONMENT, CPUS_PER_GPU, NAME, ClusterConfig, Mode
from agentfly.resources.runtimes.ray.runtime import connect
from agentfly.rollout.config import parse_tasks
from agentfly.runs import RunDirectory
from agentfly.tooling import Context
from agentfly.tools import calculate
from agentfly.training import TrainConfig
from agentfly.training.plan import TrainPlan

_SHOWN = ("verl", "transformers", "torch", "ray", "tensordict", "TransferQueue", "vllm")

Finding = tuple[str, bool, str]
"""What is checked, whether it works, and what was found."""


def check_verl(overrides: Mapping[str, Any]) -> Iterator[Finding]:
    """Check what training on verl needs, in order; ends with the first finding that makes the rest impossible.

    overrides: those of the cluster, such as `nodes=2 gpus=8`.
    """
    cluster, unknown = ClusterConfig.split(overrides)
    if unknown:
        raise ConfigError(
            f"doctor --on verl does not take {', '.join(unknown)}: write nodes, gpus, rollout_nodes or workers"
        )
    checks = {
        "versions": _check_versions,
        "resources": _check_resources,
        "plugins": _check_plugins,
        "training": _check_training,
    }
    for name, check in checks.items():
        try:
            findings = list(check(cluster))
        except Exception as error:  # verl and Ray raise many types
            findings = [(name, False, describe(error))]
        yield from findings
        if not all(ok for _, ok, _ in findings):
            return


def _check_versions(cluster: ClusterConfig) -> Iterator[Finding]:
    """Compare the installed packages with what verl and our extra ask for."""
    from packaging.requirements import Requirement

    def find_version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    if find_version("verl") is None:
        yield "versions", False, f"verl is not installed: {install_command('verl')}, in an environment of its own"
        return
    conflicts = []
    for package, extra in (("verl", ""), (DISTRIBUTION, "verl")):
        for requirement in map(Requirement, metadata.requires(package) or ()):
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            installed = find_version(requirement.name)
            if needed and (installed is None or not requirement.specifier.contains(installed, prereleases=True)):
                needs = f"{package} asks for {requirement.name}{requirement.specifier}"
                conflicts.append(f"{needs}, and {installed or 'none'} is installed")
    versions = ", ".join(f"{name} {version}" for name in _SHOWN if (version := find_version(name)))
    yield "versions", not conflicts, "; ".join(conflicts) or versions


def _check_resources(cluster: ClusterConfig) -> Iterator[Finding]:
    """Whether the cluster has the nodes, GPUs and CPUs that the run would ask for."""
    from agentfly.integrations.verl.launch import describe_cluster

    yield "resources", True, f"{describe_cluster(cluster)}; {CPUS_PER_GPU} CPUs for each training process"


def _check_plugins(cluster: ClusterConfig) -> Iterator[Finding]:
    """Whether verl finds our losses, our engine and its own trainers by name, in a process on every node."""
    from agentfly.integrations.verl.launch import check_cluster

    ray = connect()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    variables = CPU_ENVIRONMENT if check_cluster(ray, cluster) == "cpu" else {}
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    calls = [
        ray.remote(_list_plugins)
        .options(num_cpus=0, runtime_env={"env_vars": variables}, scheduling_strategy=affinity(node, soft=False))
        .remote()
        for node in nodes
    ]
    descriptions = set(ray.get(calls))
    detail = " on all nodes" if len(descriptions) == 1 else "; the nodes differ"
    yield "plugins", len(descriptions) == 1, " | ".join(sorted(descriptions)) + detail


def _list_plugins() -> str:
    """Register ours, and describe what verl's registries have then. Raises what one of verl's imports raised."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    import agentfly.integrations.verl.training_workers  # noqa: F401 (registers the losses and the engine)

    RolloutReplicaRegistry.get(NAME)
    losses = sorted(name for name in POLICY_LOSS_REGISTRY if name.startswith(NAME))
    trainers = [get_trainer_cls(mode).__name__ for mode in get_args(Mode)]
    return f"losses {', '.join(losses)}; engine {NAME}; trainers {', '.join(trainers)}"


def _check_training(cluster: ClusterConfig) -> Iterator[Finding]:
    """Train two steps of one task and two chains: rollout, update, weight sync, and a rollout with the new weights."""
    from agentfly.integrations.verl.launch import train_on_verl

    chains = max(2, cluster.nodes * cluster.gpus)
    with tempfile.TemporaryDirectory(prefix="agentfly-doctor-") as folder:
        run = Path(folder) / "run"
        train_on_verl(partial(_make_plan, chains), cluster, run)
        records = [record.flat() for record in RunDirectory(run).records() if record.step]
    turns = sum(record["chain/turns"] * chains for record in records)
    seconds = sum(record["time/generate"] + record["time/tools"] + record["time/waiting"] for record in records)
    summary = f"{len(records)} steps of {chains} chains, {turns:.0f} turns in {seconds:.1f} s"
    yield "training", len(records) == 2, summary
    gap = records[-1]["policy/mismatch_max"]
    differ = f"with the new weights, log-probabilities of server and learner differ by {gap:.1e} at most"
    yield "weight sync", gap < 0.5, f"{records[-1]['time/publish']:.1f} s; {differ}"


def _make_plan(chains: int) -> TrainPlan:
    """A run of two steps; its reward differs from chain to chain, so that the weights change."""

    @reward
    def chain_number(context: Context) -> float:
        """The number of the chain in its group."""
        return float(context.chain)

    def make_agent(**model: Any) -> HFAgent:
        return HFAgent(**model, tools=[calculate], reward=chain_number)

    settings: Any = {"algorithm": "grpo", "sampling": {"max_tokens": 16}, "loggers": []}
    config = TrainConfig(model="tiny", tasks_per_step=1, num_chains=chains, max_turns=2, steps=2, **settings)
    return TrainPlan(make_agent, parse_tasks([{"question": "What is 2 + 3?"}]), config)
