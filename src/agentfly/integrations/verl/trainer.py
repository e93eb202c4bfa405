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

from agentfly.algorithms.base import Episode
from agentfly.algorithms.kl import KLController
from agentfly.errors import WeightSyncError
from agentfly.evaluation.summary import ChainResult, summarize
from agentfly.integrations.verl.advantages import compute_row_advantages
from agentfly.integrations.verl.backend import ResilientAsyncClient, ResilientClient
from agentfly.integrations.verl.config import STATE_FILE, JobSpec, list_checkpoints
from agentfly.integrations.verl.manager import RolloutManager
from agentfly.integrations.verl.recorder import FinishedGroup
from agentfly.integrations.verl.rows import nest
from agentfly.integrations.verl.training_workers import ColocatedWorker, ScheduledWorker, SeparateWorker
from agentfly.runs import EvalFigures, Progress
from agentfly.runs.files import write_atomic
from agentfly.segment import Floats
from agentfly.training.batch import Sample
from agentfly.training.optimizer import LRSchedule
from agentfly.training.rollout_batch import (
    RolloutBatch,
    Selection,
    require_trainable,
    select_chains,
    select_greedy,
    split_seconds,
)
from agentfly.trajectory import Trajectory

_LOG = logging.getLogger(__name__)
MAX_PROBABILITY_GAP = 0.05
"""Mean difference of a sampled token's probability between server and learner from which weights are missing."""
SERVER_SECONDS = 10.0
"""Limit for the answer of a rollout server that was restarted."""
POLL_SECONDS = 0.25
"""Interval at which the queue is asked for finished groups; verl's is 2 s."""
_UPDATE_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
_METRIC_NAMES = {
    "actor/pg_loss": "policy/loss_policy", "actor/grad_norm": "policy/grad_norm", "actor/entropy": "policy/entropy",
    "actor/ratio": "policy/ratio", "actor/approx_kl": "policy/approx_kl", "actor/clip_low": "policy/clip_low",
    "actor/clip_high": "policy/clip_high", "actor/clip_dual": "policy/clip_dual", "critic/vf_loss": "critic/loss",
    "critic/grad_norm": "critic/grad_norm",
}  # fmt: skip
"""Names of verl's metrics → those of a local run. All others are written as `verl/NAME`."""


class AgentFlyTrainer:
    """Our part of a trainer; `TrainingJob` puts it before one of verl's three classes."""

    config: Any
    global_steps: int

    def __init__(self, config: Any, spec: JobSpec) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.replay_buffer.poll_interval = POLL_SECONDS  # type: ignore[attr-defined]
        self._spec = spec
        self._plan = spec.make_plan()
        self._train_config = self._plan.config
        self._kl = KLController(self._train_config.kl.coef, self._train_config.kl.target)
        self._best: tuple[float, int] | None = None
        """Mean reward of the best evaluation, and the step it followed."""
        optimizer = self._train_config.optimizer
        self._schedule = LRSchedule(
            optimizer.learning_rate, optimizer.warmup_steps, optimizer.schedule, self._train_config.steps
        )
        self._chains: list[Trajectory] = []
        """All chains of this step, including those that are not trained."""
        self._groups: list[FinishedGroup] = []
        self._samples: list[Sample] = []
        self._selection = Selection()
        self._own_metrics: dict[str, float] = {}
        self._step_ended = self._save_seconds = 0.0
        self.rollout: RolloutManager | None = None

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

        verl would train on finished rows of them; their chains were only in the memory of the recorder.
        """
        listed = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        started = {key: {**tag, "status": "pending"} for key, tag in listed.items() if tag.get("is_prompt")}
        if started:
            tq.kv_batch_put(keys=list(started), partition_id=partition_id, tags=list(started.values()))
        return int(super()._reissue_inflight_prompts(partition_id))  # type: ignore[misc]

    def on_train_begin(self) -> None:
        super().on_train_begin()  # type: ignore[misc]
        if self.global_steps == 1 and self._plan.eval_tasks:
            evaluation = self._evaluate(step=0)
            self._write_step(0, evaluation=evaluation, metrics={}, seconds={})
        self._step_ended = time.perf_counter()

    def on_step_end(self) -> None:
        super().on_step_end()  # type: ignore[misc]
        # Servers that were restarted have the new weights, and may answer again. Those that are dead stay out.
        balancer = self._server_manager.global_load_balancer
        known = ray.get(balancer.get_all_servers.remote())
        servers = zip(self._server_manager.server_addresses, self._server_manager.server_handles, strict=True)
        for name, server in servers:
            if name not in known:
                with contextlib.suppress(RayActorError, GetTimeoutError):
                    ray.get(server.__ray_ready__.remote(), timeout=SERVER_SECONDS)
                    ray.get(balancer.add_servers.remote({name: server}))
                    _LOG.warning("the rollout server %s was restarted and answers again", name)

    # ── a step ──

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> Any:
        """Sample, score and train one batch of groups."""
        self._progress("generate")
        trainer: Any = self
        with marked_timer("gen", timing_raw):
            trainer.on_sample_begin()
            assert self.rollout is not None
            try:
                batch, sample_metrics = trainer.replay_buffer.sample(
                    global_steps=self.global_steps, partition_id="train", batch_size=sample_batch_size
                )
            finally:
                self.rollout.raise_error()  # the cause, where groups failed
            metrics.update(sample_metrics)
            batch.extra_info["temperature"] = self._train_config.sampling.temperature
            trainer.on_sample_end()
        self._progress("update")
        self._take_groups(batch)
        if all(tag.get("is_padding") for tag in batch.tags):  # no group has reward variance: nothing to learn from
            trainer.actor_rollout_wg.skip_update()
            if trainer.use_critic:
                trainer.critic_wg.skip_update()
            return batch
        batch = trainer._balance_batch(batch, metrics=metrics)
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
            self._kl.update(self._own_metrics["policy/kl"], len(self._chains))
        return batch

    def _take_groups(self, batch: Any) -> None:
        """Get the chains of the step from the recorder, numbered as in a local run, and select those to train."""
        config = self._train_config
        uids = sorted({key.rsplit("_", 2)[0] for key in batch.keys})
        oldest = self.global_steps - config.async_training.max_staleness
        self._groups = ray.get(self._spec.recorder.take_groups.remote(uids, oldest))
        self._chains = [
            replace(chain, group=number) for number, group in enumerate(self._groups) for chain in group.chains
        ]
        self._selection = select_chains(self._chains, config)
        # In a fixed order: that of the queue depends on which group ended first, and with it the rounding of sums.
        numbers = {group.request.uid: number for number, group in enumerate(self._groups)}
        parts = [key.rsplit("_", 2) for key in batch.keys]
        order = [(numbers[uid], int(chain), int(index)) for uid, chain, index in parts]
        batch.reorder(sorted(range(len(order)), key=order.__getitem__))
        self._samples = []
        self._own_metrics = {}
        require_trainable(self.global_steps, self._chains)

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
        names = ["response_mask", "rollout_log_probs", "old_log_probs"]
        names += ["ref_log_prob"] if self.use_reference_policy else []  # type: ignore[attr-defined]
        names += ["values"] if self.use_critic else []  # type: ignore[attr-defined]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        fields = {name: [each.float().numpy() for each in data[name].unbind()] for name in names}
        greedy: dict[int, Episode] | None = None
        if self._train_config.algorithm.needs_greedy:
            chains = [replace(group.greedy, group=number) for number, group in enumerate(self._groups) if group.greedy]
            greedy = select_greedy(chains, self._train_config)
        groups = RolloutBatch(tuple(self._chains), self._selection, greedy).groups
        uids = [group.request.uid for group in self._groups]
        computed = compute_row_advantages(
            groups, uids, batch.keys, fields, config=self._train_config, kl_coef=self._kl.coef
        )
        self._samples = computed.samples
        self._own_metrics |= computed.metrics
        out = {"advantages": nest(computed.advantages), "returns": nest(computed.returns)}
        if computed.correction is not None:
            out["rollout_is_weights"] = nest(computed.correction)
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
            **split_seconds(self._chains, timing_raw.get("gen", 0.0)),
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
        assert self.rollout is not None
        rollout_seconds = elapsed if config.async_training.max_staleness else max(timing_raw.get("gen", 0.0), 1e-9)
        figures |= self._own_metrics
        if "policy/clip_low" in figures:
            figures["policy/clip_fraction"] = figures["policy/clip_low"] + figures["policy/clip_high"]
        figures |= self._selection.metrics
        figures |= {
            "rollout/reruns": float(self.rollout.reruns),
            "throughput/tokens_per_second": sum(each.sampled_tokens for each in self._chains) / rollout_seconds,
        }
        self._write_step(step, evaluation=evaluation, metrics=figures, seconds=seconds)
        best = evaluation is not None and self._best is not None and self._best[1] == step
        if last or best or step % config.checkpoint.every == 0:
            self._progress("save")
            self._save_checkpoint()
        self._save_seconds = time.perf_counter() - now

    def _evaluate(self, step: int) -> tuple[list[Trajectory], EvalFigures]:
        """Run the held-out tasks, and track the best step."""
        self._progress("evaluate")
        assert self.rollout is not None
        tasks = self._plan.eval_tasks
        count = self._train_config.evaluation.chains
        chains = self.rollout.evaluate(len(tasks), f"eval-{step}")
        results = [ChainResult.from_trajectory(each, greedy=each.chain >= count) for each in chains]
        evaluation = summarize(tasks, results, chains=count, threshold=1.0, zero=True, by=())
        if self._best is None or evaluation.reward.mean > self._best[0]:
            self._best = (evaluation.reward.mean, step)
        return chains, evaluation.figures

    def _write_step(
        self,
        step: int,
        *,
        evaluation: tuple[list[Trajectory], EvalFigures] | None,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> None:
        advantages: dict[str, list[Floats]] = {}
        logprobs: dict[str, Floats] = {}
        for sample in self._samples:
            assert sample.old_logprobs is not None
            logprobs[sample.name] = sample.old_logprobs[sample.segment.mask]
            advantages.setdefault(sample.name.partition("#")[0], []).append(sample.advantages)
        pools = [(group.leased, group.waiting) for group in self._groups] or [(0, 0)]
        written = self._spec.recorder.write_step.remote(
            step,
            self._chains,
            advantages,
            metrics=metrics,
            seconds=seconds,
            learner_logprobs=logprobs,
            evaluation=evaluation,
            pools=(max(each[0] for each in pools), max(each[1] for each in pools)),
        )
        ray.get(written)

    def _progress(self, phase: str) -> None:
        self._spec.recorder.report_progress.remote(Progress(phase))

    def _save_checkpoint(self) -> None:
        """Save verl's checkpoint, then ours beside it, which makes it complete; remove those that are not retained."""
        super()._save_checkpoint()  # type: ignore[misc]
        folder = Path(self.config.trainer.default_local_dir)
        state = {
            "step": self.global_steps,
            "kl": self._kl.state_dict(),
            "best": self._best,
            "seed": self._train_config.seed,
        }
        write_atomic(folder / f"global_step_{self.global_steps}" / STATE_FILE, json.dumps(state).encode())
        keep = list_checkpoints(folder)[-self._train_config.checkpoint.keep :]
        best = None if self._best is None else self._best[1]
        for step in list_checkpoints(folder):
            if step not in keep and step != best:
                shutil.rmtree(folder / f"global_step_{step}")
