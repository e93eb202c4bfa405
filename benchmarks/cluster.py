"""CPU time of a rollout on verl with many replicas: all processes are real, except servers, which only sleep.

The rollout of one step is run with 2 to 64 replicas. Chains have the lengths of ALFWorld's expert (turns, tokens
shown), and replies take the time of the measured decode curve. Two cores carry a few dozen turns per second; where the
replicas would give more, all sleeps are multiplied by a factor, the stretch. The CPU time per turn of each process does
not depend on it: a process that exists once is saturated at 1000 / (its milliseconds per turn) turns per second.

    make verl                    # builds .venv-verl
    .venv-verl/bin/python -m benchmarks.cluster [--replicas 2 8 64] [--deaths 4] [--reply-tokens 350 --tool-seconds 2]
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.sleeping_servers import CURVES, Chain, ReplicaHandle, ServerHost, Turn, simulate_ideal
from benchmarks.table import print_table

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / ".cache" / "tokenizers" / "qwen2_5"
NUM_CHAINS = 8
"""Chains per group."""
MAX_HOSTS = 8
"""Server processes; with more replicas, each has several, as a machine has several GPUs."""
CONTEXT = 32768


def record_lengths(count: int, reply_tokens: int | None, seed: int) -> list[Chain]:
    """Turns of ALFWorld's expert in generated games, in tokens of Qwen2.5.

    reply_tokens: mean length of a reply, to which the recorded ones are scaled; None: as recorded.
    """
    from agentfly.agents import HFAgent
    from agentfly.environments.alfworld import ALFWorld
    from agentfly.rewards import alfworld_won
    from agentfly.sft.demonstrations import demonstrate

    script = {"script": "unused"}
    settings: dict[str, Any] = {"model_name_or_path": str(TOKENIZER), "backend": "scripted", "backend_config": script}
    agent = HFAgent(**settings, tools=[ALFWorld.alfworld_step], reward=alfworld_won)
    demonstrations = asyncio.run(demonstrate(agent, ALFWorld.draw_tasks("train", 256, seed=seed), max_turns=40))
    chains = []
    for trajectory in demonstrations.accepted:
        lengths = [(len(span), span.logprobs is not None) for segment in trajectory.segments for span in segment.spans]
        sampled = [length for length, is_reply in lengths if is_reply]
        observed = [*[length for length, is_reply in lengths if not is_reply][1:], 0]
        chains.append([Turn(*turn) for turn in zip(sampled, observed, strict=False)])
    factor = reply_tokens / float(np.mean([turn.sampled for chain in chains for turn in chain])) if reply_tokens else 1
    draw = random.Random(seed)
    drawn = [draw.choice(chains) for _ in range(count)]
    return [[Turn(round(turn.sampled * factor), turn.observed) for turn in chain] for chain in drawn]


def make_plan(groups: int, max_turns: int) -> Any:
    """The plan of the simulated run; made in every chain worker. Its environment is one that all chains share."""
    from agentfly import Environment, reward, tool
    from agentfly.agents import HFAgent
    from agentfly.environment import Pool
    from agentfly.rollout.config import parse_tasks
    from agentfly.training import TrainConfig
    from agentfly.training.plan import TrainPlan

    class House(Environment):
        pool = Pool(runtime="ray", scope="global", concurrent=True)

        @tool
        async def act(self, words: int, milliseconds: int) -> str:
            """Wait for some milliseconds, and answer with some words."""
            await asyncio.sleep(milliseconds / 1000)
            return "a " * words

    @reward
    async def finished(prediction: str) -> float:
        return float(prediction.strip().endswith("done"))

    def agent(**model: Any) -> HFAgent:
        return HFAgent(**model, tools=[House.act], reward=finished, system_prompt="Act.")

    config: Any = {"tasks_per_step": groups, "num_chains": NUM_CHAINS, "max_turns": max_turns, "zero_variance": "keep"}
    tasks = parse_tasks([{"question": f"Game {number}"} for number in range(groups)])
    return TrainPlan(agent, tasks, TrainConfig(model="tiny", algorithm="grpo", **config))


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """Process → its part of the system, and the CPU seconds it has used: this process, and Ray's that it started."""
    used = {}
    driver = psutil.Process()
    for process in (driver, *driver.children(recursive=True)):
        try:
            title = (process.cmdline() or [""])[0]
            times = process.cpu_times()
        except psutil.Error:  # it has ended
            continue
        if process == driver:
            part = "trainer process"
        elif title.startswith("ray::"):
            part = title[5:].partition(".")[0].partition("(")[0]
        else:
            part = f"Ray: {Path(title).name}" if title else "Ray: other"
        used[process.pid] = part, times.user + times.system
    return used


class CpuMeter(threading.Thread):
    """Samples the CPU time of all processes, so that those that die are counted too."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._start = cpu_seconds()
        self._last = dict(self._start)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(2):
            self._last |= cpu_seconds()

    def stop(self) -> Counter[str]:
        """CPU seconds by part of the system since the start."""
        self._stopped.set()
        self._last |= cpu_seconds()
        total: Counter[str] = Counter()
        for pid, (part, seconds) in self._last.items():
            total[part] += seconds - self._start.get(pid, ("", 0.0))[1]
        return total


class Killer(threading.Thread):
    """Kills a server host or a chain worker at random times; Ray restarts both.

    A restarted server is put back into the balancer, which the trainer does at the next weight sync.
    """

    def __init__(self, hosts: dict[Any, dict[str, Any]], workers: list[Any], balancer: Any, per_minute: float) -> None:
        super().__init__(daemon=True)
        self._hosts, self._workers, self._balancer, self._per_minute = hosts, workers, balancer, per_minute
        self._stopped = threading.Event()
        self._random = random.Random(0)
        self.deaths: Counter[str] = Counter()

    def run(self) -> None:
        import ray

        while not self._stopped.wait(self._random.expovariate(self._per_minute / 60)):
            if self._random.random() < 0.5:
                self.deaths["chain worker"] += 1
                ray.kill(self._random.choice(self._workers), no_restart=False)
            else:
                host = self._random.choice(list(self._hosts))
                self.deaths["server"] += 1
                ray.kill(host, no_restart=False)
                alive = False
                while not alive:
                    time.sleep(1)  # in the meantime its clients take it out of the balancer
                    try:
                        ray.get(host.ping.remote())
                        alive = True
                    except ray.exceptions.RayActorError:  # it has not restarted yet
                        continue
                ray.get(self._balancer.add_servers.remote(self._hosts[host]))

    def stop(self) -> None:
        self._stopped.set()


def run_step(replicas: int, chains: list[Chain], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one step's rollout, and return its figures."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.workers.rollout.router import get_router_handle

    from agentfly.integrations.verl.backend import ResilientClient
    from agentfly.integrations.verl.config import JobSpec
    from agentfly.integrations.verl.manager import FinishedGroup, RolloutManager
    from agentfly.integrations.verl.recorder import RunRecorder
    from agentfly.runs import Progress, RunWriter
    from agentfly.training.collector import RolloutBatch
    from agentfly.training.selection import Selection
    from benchmarks.cluster import make_plan  # not that of `__main__`, which other processes cannot import

    curve = CURVES[options.curve]
    ideal = simulate_ideal(chains, replicas, curve, options.tool_seconds)
    stretch = max(1.0, ideal.turns / ideal.wall / options.rate)
    groups = len(chains) // NUM_CHAINS
    num_hosts = min(replicas, MAX_HOSTS)
    per_host = replicas // num_hosts
    host_class = ray.remote(ServerHost).options(
        num_cpus=0, max_concurrency=100_000, max_restarts=-1, max_task_retries=0
    )
    server_settings = {
        "curve": curve, "stretch": stretch, "tool_seconds": options.tool_seconds, "num_chains": NUM_CHAINS,
        "tokenizer": str(TOKENIZER / "tokenizer.json"),
    }  # fmt: skip
    hosts = {}
    for number in range(num_hosts):
        host = host_class.remote([*chains, *chains[:NUM_CHAINS]], per_host, **server_settings)
        hosts[host] = {f"server-{number}-{replica}": ReplicaHandle(host, replica) for replica in range(per_host)}
    ray.get([host.ping.remote() for host in hosts])
    balancer = get_router_handle(
        {name: handle for host_handles in hosts.values() for name, handle in host_handles.items()}
    )
    # The chain's id as request id: a server then knows which chain asks.
    client = ResilientClient(
        OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sleeping", "full_determinism": True}}}), balancer
    )
    plan = partial(make_plan, groups, max(map(len, chains)) + 1)
    settings = {"benchmark": "cluster"}
    RunWriter.create(folder, settings).close()
    spec = JobSpec(
        make_plan=plan,
        folder=folder,
        settings=settings,
        model=str(TOKENIZER),
        context_length=CONTEXT,
        workers=options.workers,
    )
    recorder = RunRecorder(spec)
    manager = RolloutManager(spec, client, recorder.report_progress)

    def run_groups(positions: range) -> list[FinishedGroup]:
        """Run groups to their end; as verl's trainer does, poll for finished ones."""
        started = [f"g{position}" for position in positions]
        recorder.report_progress(Progress("generate"))
        manager.generate_sequences({"global_steps": 1, "uid": started, "position": positions})
        while recorder.poll()[1].done < len(positions):
            manager.raise_error()
            time.sleep(0.2)
        return manager.take_groups(started)

    run_groups(range(groups, groups + 1))  # starts the environment
    meter = CpuMeter()
    killer = Killer(hosts, manager.workers, balancer, options.deaths) if options.deaths else None
    start = time.perf_counter()
    meter.start()
    if killer:
        killer.start()
    finished = run_groups(range(groups))
    wall = time.perf_counter() - start
    if killer:
        killer.stop()
    trajectories = [chain for group in finished for chain in group.chains]
    recorder.write_step(1, RolloutBatch(tuple(trajectories), Selection()), seconds={"generate": wall})
    recorder.close()
    cpu = meter.stop()
    scored = sum(chain.reward == 1.0 for chain in trajectories)
    if len(trajectories) != len(chains):
        raise RuntimeError(f"{len(trajectories)} chains were recorded, of {len(chains)}")
    tq.kv_clear(keys=list((tq.kv_list("train") or {}).get("train", {})), partition_id="train")
    for actor in (*hosts, *manager.workers, balancer):
        ray.kill(actor)
    return {
        "replicas": replicas, "chains": len(chains), "turns": ideal.turns, "ideal": ideal, "stretch": stretch,
        "wall": wall, "cpu": cpu, "scored": scored, "reruns": manager.reruns,
        "deaths": killer.deaths if killer else Counter(),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Rollout on verl with servers that only sleep.")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--chains", type=int, default=512, help="chains of the step, the same for all sizes")
    parser.add_argument("--workers", type=int, default=2, help="chain worker processes")
    parser.add_argument("--curve", choices=CURVES, default="3b", help="decode curve of a replica")
    parser.add_argument("--reply-tokens", type=int, help="mean tokens of a reply; default: as the expert's")
    parser.add_argument("--tool-seconds", type=float, default=0.1, help="seconds of a tool call")
    parser.add_argument(
        "--rate", type=float, default=60.0, help="most turns per second; above, everything is stretched"
    )
    parser.add_argument("--deaths", type=float, default=0.0, help="kills of servers and chain workers per minute")
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures are not meaningful")
    options = parser.parse_args(arguments)
    if options.quick:
        options.replicas, options.chains = [2], 32

    from agentfly.integrations.verl.config import CPU_ENVIRONMENT

    environment = {**CPU_ENVIRONMENT, "TOKENIZERS_PARALLELISM": "false", "TRANSFER_QUEUE_ENABLE": "1"}
    os.environ.update(environment | {"RAY_agent_register_timeout_ms": "600000", "RAY_enable_metrics_collection": "0"})
    import ray
    import transfer_queue as tq

    from agentfly.integrations.verl.launch import compose_config

    chains = record_lengths(options.chains, options.reply_tokens, seed=0)
    sampled = [turn.sampled for chain in chains for turn in chain]
    observation_lengths = [turn.observed for chain in chains for turn in chain if turn.observed]
    lengths = sorted(map(len, chains))
    print(
        f"{len(chains)} chains of {np.mean(lengths):.1f} turns (median {lengths[len(lengths) // 2]}, "
        f"most {lengths[-1]}), {np.mean(sampled):.0f} tokens sampled and "
        f"{np.mean(observation_lengths):.0f} shown per turn, tools {options.tool_seconds:g} s"
    )
    ray.init(
        address="local", num_cpus=64, include_dashboard=False, log_to_driver=False, logging_level="error",
        object_store_memory=512 << 20, runtime_env={"env_vars": environment},
    )  # fmt: skip
    try:
        tq.init(compose_config({"transfer_queue.enable": True}, {}).transfer_queue)
        with tempfile.TemporaryDirectory() as folder:
            results = []
            for size in options.replicas:
                print(f"{size} replicas …", flush=True)
                results.append(run_step(size, chains, options, Path(folder) / str(size)))
        tq.close()
    finally:
        ray.shutdown()

    print_table(
        f"one step, {options.workers} chain workers, curve {options.curve}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}",
        ["replicas", "ideal wall s", "longest chain s", "ideal turns/s", "stretch", "turns/s", "wall / ideal", "deaths",
         "groups run again", "chains that finished"],
        [
            [
                str(result["replicas"]), f"{result['ideal'].wall:.1f}", f"{result['ideal'].longest:.1f}",
                f"{result['turns'] / result['ideal'].wall:.0f}", f"{result['stretch']:.1f}",
                f"{result['turns'] / result['wall']:.1f}",
                f"{result['wall'] / result['ideal'].wall / result['stretch']:.2f}",
                ", ".join(f"{count} {what}" for what, count in result["deaths"].items()) or "0",
                str(result["reruns"]), f"{result['scored']} of {result['chains']}",
            ]
            for result in results
        ],
    )  # fmt: skip
    parts = sorted({part for result in results for part in result["cpu"]}, key=lambda part: -results[-1]["cpu"][part])
    milliseconds = {part: [1000 * result["cpu"][part] / result["turns"] for result in results] for part in parts}
    rows = [
        [part, *(f"{value:.2f}" for value in values)] for part, values in milliseconds.items() if max(values) > 0.02
    ]
    total = ["all", *(f"{1000 * sum(result['cpu'].values()) / result['turns']:.2f}" for result in results)]
    print_table(
        "CPU milliseconds per turn", ["part", *(f"{result['replicas']} replicas" for result in results)], [*rows, total]
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's processes end with this one
    main()
