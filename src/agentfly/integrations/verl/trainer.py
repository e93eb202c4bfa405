"""verl's V1 trainers with our advantages, mini-batches, evaluation, metrics and checkpoints.

A step is verl's: sample groups, score them, update, send the weights. In between, `compute_samples` of a local run
turns finished groups into advantages; what the learner computes there comes from the rows that verl has scored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayActorError
from tensordict import TensorDict
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from agentfly.algorithms.kl import KLController
from agentfly.errors import WeightSyncError
from agentfly.evaluation.summary import ChainResult, summarize
from agentfly.integrations.verl.backend import ResilientAsyncClient, ResilientClient
from agentfly.integrations.verl.config import STATE_FILE, JobSpec, list_checkpoints
from agentfly.integrations.verl.manager import RolloutManager
from agentfly.integrations.verl.recorder import RunRecorder
from agentfly.integrations.verl.rows import RowAdvantages, compute_row_advantages, measure_mismatch, nest
from agentfly.integrations.verl.training_workers import ColocatedWorker, ScheduledWorker, SeparateWorker
from agentfly.runs import EvalFigures, Progress
from agentfly.runs.files import write_atomic
from agentfly.training.collector import RolloutBatch, require_trainable, split_seconds
from agentfly.training.optimizer import LRSchedule
from agentfly.training.selection import Selection, select_chains, select_greedy
from agentfly.trajectory import Trajectory

_LOG = logging.getLogger(__name__)
MAX_PROBABILITY_GAP = 0.05
"""Mean difference of a sampled token's probability between server and learner from which weights are missing."""
SERVER_SECONDS = 10.0
"""Limit for the answer of a rollout server that was restarted."""
POLL_SECONDS = 0.25
"""Interval at which the queue is asked for finished groups; verl's is 2 s."""
_UPDATE_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
_SAME_NAMES = ("loss", "grad_norm", "ratio", "approx_kl", "clip_low", "clip_high", "clip_dual")
_METRIC_NAMES = {
    **{f"actor/{name}": f"policy/{name}" for name in _SAME_NAMES},
    "actor/pg_loss": "policy/loss_policy",
    "critic/vf_loss": "critic/loss",
    "critic/grad_norm": "critic/grad_norm",
}
"""Names of verl's metrics → those of a local run. All others are written as `verl/NAME`."""


class AgentFlyTrainer:
    """Our part of a trainer; `TrainingJob` puts it before one of verl's three classes."""

    config: Any
    global_steps: int
    rollout: RolloutManager
    """Set before `fit`."""

    def __init__(self, config: Any, spec: JobSpec, recorder: RunRecorder) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.replay_buffer.poll_interval = POLL_SECONDS  # type: ignore[attr-defined]
        self._recorder = recorder
        self._plan = spec.make_plan()
        self._train_config = self._plan.config
        self._kl = KLController(self._train_config.kl.coef, self._train_config.kl.target)
        self._best: tuple[float, int] | None = None
        """Mean reward of the best evaluation, and the step it followed."""
        optimizer = self._train_config.optimizer
        steps = self._train_config.steps
        self._schedule = LRSchedule(optimizer.learning_rate, optimizer.warmup_steps, optimizer.schedule, steps)
        self._uids: list[str] = []
        """verl's ids of the groups of this step, by group number."""
        self._batch = RolloutBatch((), Selection())
        """The chains of this step."""
        self._computed: RowAdvantages | None = None
        """None in a step that trains nothing."""
        self._own_metrics: dict[str, float] = {}
        self._step_ended = self._save_seconds = 0.0

    # ── verl's hooks ──

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        trainer: Any = self
        separate = self.config.trainer.v1.trainer_mode == "separate_async"
        workers = {"critic": ScheduledWorker, "actor": SeparateWorker if separate else ColocatedWorker}
        for role in trainer.role_worker_mapping:
            trainer.role_worker_mapping[role] = ray.remote(workers.get(str(role), ColocatedWorker))

    def get_llm_client(self) -> Any:
        """A client that sends the requests of a dead server to another one."""
        mode = self.config.trainer.v1.trainer_mode
        client = self._server_manager.get_client(client_cls=ResilientClient if mode == "sync" else ResilientAsyncClient)
        # The part that it reads. The whole is 95 KB: with a few more, Ray would put the arguments of a worker into its
        # object store, where they are lost with their node, and the worker could not be restarted.
        client.config = OmegaConf.create({"actor_rollout_ref": {"rollout": self.config.actor_rollout_ref.rollout}})
        return client

    @property
    def _server_manager(self) -> Any:
        """verl's manager of the servers that answer the chains."""
        trainer: Any = self
        separate = self.config.trainer.v1.trainer_mode == "separate_async"
        return trainer.standalone_server_manager if separate else trainer.llm_server_manager

    def on_init_end(self) -> None:
        super().on_init_end()  # type: ignore[misc]
        if self.config.trainer.resume_from_path:
            state = json.loads((Path(self.config.trainer.resume_from_path) / STATE_FILE).read_text(encoding="utf-8"))
            self._kl.load_state_dict(state["kl"])
            self._best = None if state["best"] is None else (state["best"][0], state["best"][1])

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        """Run groups again that were started and not trained when the checkpoint was written.

        verl would train on finished rows of them; their chains were only in the memory of this process.
        """
        listed = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        started = {key: {**tag, "status": "pending"} for key, tag in listed.items() if tag.get("is_prompt")}
        if started:
            tq.kv_batch_put(keys=list(started), partition_id=partition_id, tags=list(started.values()))
        return int(super()._reissue_inflight_prompts(partition_id))  # type: ignore[misc]

    def on_train_begin(self) -> None:
        super().on_train_begin()  # type: ignore[misc]
        if self.global_steps == 1 and self._plan.eval_tasks:
            self._recorder.write_step(0, self._batch, evaluation=self._evaluate(step=0))
        self._step_ended = time.perf_counter()

    def on_step_end(self) -> None:
        super().on_step_end()  # type: ignore[misc]
        # Servers that were restarted have the new weights, and may answer again. Those that are dead stay out.
        balancer = self._server_manager.global_load_balancer
        balanced = ray.get(balancer.get_all_servers.remote())
        servers = zip(self._server_manager.server_addresses, self._server_manager.server_handles, strict=True)
        for name, server in servers:
            if name not in balanced:
                with contextlib.suppress(RayActorError, GetTimeoutError):
                    ray.get(server.__ray_ready__.remote(), timeout=SERVER_SECONDS)
                    ray.get(balancer.add_servers.remote({name: server}))
                    _LOG.warning("the rollout server %s was restarted and answers again", name)

    # ── a step ──

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> Any:
        """Sample, score and train one batch of groups."""
        self._recorder.report_progress(Progress("generate"))
        trainer: Any = self
        with marked_timer("gen", timing_raw):
            trainer.on_sample_begin()
            try:
                batch, sample_metrics = trainer.replay_buffer.sample(
                    global_steps=self.global_steps, partition_id="train", batch_size=sample_batch_size
                )
            finally:
                self.rollout.raise_error()  # the cause, where groups failed
            metrics.update(sample_metrics)
            trainer.on_sample_end()
        self._recorder.report_progress(Progress("update"))
        self._take_groups(batch)
        if all(tag.get("is_padding") for tag in batch.tags):  # no group has reward variance: nothing to learn from
            trainer.actor_rollout_wg.skip_update()
            if trainer.use_critic:
                trainer.critic_wg.skip_update()
            return batch
        batch = trainer._balance_batch(batch, metrics=metrics)  # adds rows of padding
        # Of every pass. A longer sequence is alone in its pass, as in a local run; verl's own limit refuses it.
        longest = max(tag["seq_len"] for tag in batch.tags)
        batch.extra_info["max_token_len_per_gpu"] = max(self._train_config.micro_batch_tokens, longest)
        with marked_timer("old_log_prob", timing_raw):
            batch = trainer._compute_old_log_prob(batch, metrics=metrics)
        self._check_weights(batch, metrics)
        if trainer.use_reference_policy:
            with marked_timer("ref", timing_raw):
                batch = trainer._compute_ref_log_prob(batch, metrics=metrics)
        if trainer.use_critic:
            with marked_timer("values", timing_raw):
                batch = trainer._compute_values(batch, metrics=metrics)
        with marked_timer("adv", timing_raw):
            batch = self._compute_advantage(batch, metrics)
        if trainer.use_critic:
            with marked_timer("update_critic", timing_raw):
                batch = self._update(batch, metrics, role="critic")
        with marked_timer("update_actor", timing_raw):
            batch = self._update(batch, metrics, role="actor")
        self._own_metrics["policy/learning_rate"] = self._schedule.at(self.global_steps - 1)  # verl reports the next
        if "policy/kl" in self._own_metrics:
            self._kl.update(self._own_metrics["policy/kl"], len(self._batch.trajectories))
        return batch

    def _take_groups(self, batch: Any) -> None:
        """Get the chains of the step, numbered as in a local run, and select those to train."""
        config = self._train_config
        uids = {key.rsplit("_", 2)[0] for key in batch.keys}
        groups = self.rollout.take_groups(uids, oldest=self.global_steps - config.async_training.max_staleness)
        chains = [replace(chain, group=number) for number, group in enumerate(groups) for chain in group.chains]
        greedy = [replace(group.greedy, group=number) for number, group in enumerate(groups) if group.greedy]
        self._uids = [group.request.uid for group in groups]
        self._batch = RolloutBatch(
            tuple(chains),
            select_chains(chains, config),
            select_greedy(greedy, config) if config.algorithm.needs_greedy else None,
            leased=max(group.leased for group in groups),
            waiting=max(group.waiting for group in groups),
        )
        self._computed = None
        self._own_metrics = {}
        # In a fixed order: that of the queue depends on which group ended first, and with it the rounding of sums.
        key_fields = [key.rsplit("_", 2) for key in batch.keys]
        order = [(self._uids.index(uid), int(chain), int(index)) for uid, chain, index in key_fields]
        batch.reorder(sorted(range(len(order)), key=order.__getitem__))
        require_trainable(self.global_steps, chains)

    def _check_weights(self, batch: Any, metrics: Mapping[str, Any]) -> None:
        """Raise WeightSyncError where the servers did not sample with the weights that are being trained."""
        if self.config.trainer.v1.trainer_mode != "sync":
            return
        versions = {tag[f"{end}_global_steps"] for tag in batch.tags for end in ("min", "max")}
        gap = metrics.get("training/rollout_probs_diff_mean", 0.0)
        if versions != {self.global_steps - 1} or gap > MAX_PROBABILITY_GAP:
            raise WeightSyncError(
                f"step {self.global_steps} trains tokens of the weights {sorted(versions)}, expected "
                f"{self.global_steps - 1}; the probability of a sampled token differs by {gap:.2g} on average"
            )

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Write the advantages, returns and correction factors of all rows."""
        names = ["response_mask", "rollout_log_probs", "old_log_probs", "entropy"]
        names += ["ref_log_prob"] if self.use_reference_policy else []  # type: ignore[attr-defined]
        names += ["values"] if self.use_critic else []  # type: ignore[attr-defined]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        fields = {name: [row.float().numpy() for row in data[name].unbind()] for name in names}
        self._computed = compute_row_advantages(
            self._batch.groups, self._uids, batch.keys, fields, config=self._train_config, kl_coef=self._kl.coef
        )
        out = {"advantages": nest(self._computed.advantages), "returns": nest(self._computed.returns)}
        self._own_metrics, correction = measure_mismatch(fields, self._train_config)
        if correction is not None:
            out["rollout_is_weights"] = nest(correction)
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(out, batch_size=len(batch.keys))
        )

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows are padded so that all ranks have equally many in each of `mini_batches` steps."""
        return dp_size * self._train_config.mini_batches

    def _update(self, batch: Any, metrics: dict[str, Any], role: str) -> Any:
        """Train the policy or the critic in `epochs` times `mini_batches` optimizer steps."""
        trainer: Any = self
        config = self.config.actor_rollout_ref.actor if role == "actor" else self.config.critic
        rows = sum(not tag.get("is_padding") for tag in batch.tags)
        batch.extra_info.update(
            {
                "calculate_entropy": role == "actor" and config.entropy_coeff != 0.0,
                "distillation_use_topk": False,
                "distillation_only": False,
                "global_batch_size": rows / self._train_config.mini_batches,
                "num_mini_batch": self._train_config.mini_batches,
                "epochs": config.ppo_epochs,
                "seed": config.data_loader_seed + self.global_steps,
                "dataloader_kwargs": {"shuffle": config.shuffle},
                "temperature": self._train_config.sampling.temperature,
            }
        )
        if role == "actor":
            output = trainer.actor_rollout_wg.update_actor(batch)
        else:
            output = trainer.critic_wg.train_mini_batch(batch).get()
        metrics.update(reduce_metrics(rename_dict(output["metrics"], f"{role}/")))
        return batch

    # ── after a step ──

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], **_: Any) -> None:
        """Evaluate where due, write the record of the step, and save a checkpoint where due."""
        config = self._train_config
        step = self.global_steps
        last = step == config.steps
        every = config.evaluation.every
        start = time.perf_counter()
        due = self._plan.eval_tasks and (last or (every is not None and step % every == 0))
        evaluation = self._evaluate(step) if due else None
        seconds = {
            **split_seconds(self._batch.trajectories, timing_raw.get("gen", 0.0)),
            "update": sum(timing_raw.get(phase, 0.0) for phase in _UPDATE_PHASES),
            "publish": timing_raw.get("update_weights", 0.0),
            "evaluate": time.perf_counter() - start,
            "save": self._save_seconds,  # of the checkpoint after the last step
        }
        now = time.perf_counter()
        elapsed = now - self._step_ended
        self._step_ended = now
        seconds["other"] = elapsed - sum(seconds.values())
        figures = {
            _METRIC_NAMES.get(name, f"verl/{name}"): float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float | np.number)
        }
        rollout_seconds = elapsed if config.async_training.max_staleness else max(timing_raw.get("gen", 0.0), 1e-9)
        sampled = sum(chain.sampled_tokens for chain in self._batch.trajectories)
        figures |= {
            **self._own_metrics,
            "rollout/reruns": float(self.rollout.reruns),
            "throughput/tokens_per_second": sampled / rollout_seconds,
        }
        if "policy/clip_low" in figures:
            figures["policy/clip_fraction"] = figures["policy/clip_low"] + figures["policy/clip_high"]
        self._recorder.write_step(
            step,
            self._batch,
            self._computed,
            metrics=figures,
            seconds=seconds,
            evaluation=evaluation,
            tools=self.rollout.tools,
        )
        best = evaluation is not None and self._best is not None and self._best[1] == step
        if last or best or step % config.checkpoint.every == 0:
            self._recorder.report_progress(Progress("save"))
            self._save_checkpoint()
        self._save_seconds = time.perf_counter() - now

    def _evaluate(self, step: int) -> tuple[list[Trajectory], EvalFigures]:
        """Run the held-out tasks, and track the best step."""
        self._recorder.report_progress(Progress("evaluate"))
        tasks = self._plan.eval_tasks
        chains: list[Trajectory] = []
        results: list[ChainResult] = []
        for group in self.rollout.evaluate(len(tasks), step):
            for chain in (*group.chains, group.greedy):
                if chain is not None:
                    chains.append(chain)
                    results.append(ChainResult.from_trajectory(chain, greedy=chain is group.greedy))
        count = self._train_config.evaluation.chains
        evaluation = summarize(tasks, results, chains=count, threshold=1.0, zero=True, by=())
        if self._best is None or evaluation.reward.mean > self._best[0]:
            self._best = (evaluation.reward.mean, step)
        return chains, evaluation.figures

    def _save_checkpoint(self) -> None:
        """Save verl's checkpoint, then ours beside it, which makes it complete; remove those that are not retained."""
        super()._save_checkpoint()  # type: ignore[misc]
        folder = Path(self.config.trainer.default_local_dir)
        seed = self._train_config.seed
        state = {"step": self.global_steps, "kl": self._kl.state_dict(), "best": self._best, "seed": seed}
        write_atomic(folder / f"global_step_{self.global_steps}" / STATE_FILE, json.dumps(state).encode())
        keep = list_checkpoints(folder)[-self._train_config.checkpoint.keep :]
        for step in list_checkpoints(folder):
            if step not in keep and (self._best is None or step != self._best[1]):
                shutil.rmtree(folder / f"global_step_{step}")
