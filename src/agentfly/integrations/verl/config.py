"""TrainConfig → keys of verl's configuration.

Every field of TrainConfig is mapped here, honored by our own code on verl (advantages, loss, correction, KL in the
reward, mini-batches, seeds, evaluation, checkpoints), or refused by name before anything starts. Raw keys of verl,
written `verl.KEY=VALUE`, replace what is set here; those that a field sets or our code depends on are refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from agentfly.errors import ConfigError
from agentfly.training.config import TrainConfig
from agentfly.training.plan import TrainPlan
from agentfly.validation import NonNegativeInt, PositiveInt, record

Mode = Literal["sync", "colocate_async", "separate_async"]
Device = Literal["cuda", "cpu"]
NAME = "agentfly"
"""Name of the embedded engine, and prefix of our policy losses, in verl's registries."""
NO_DUAL_CLIP = 1e9
"""verl always clips the ratio of negative advantages; at this bound it has no effect."""
STATE_FILE = "agentfly.json"
"""What verl does not save, in the folder of a checkpoint; written last, so a checkpoint without it is incomplete."""
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered for CUDA; it runs on CPUs as it is
    "VERL_USE_EXTERNAL_MODULES": "agentfly.integrations.verl.cpu",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of a run without GPUs."""
SCHEDULE_VARIABLE = "AGENTFLY_LR_SCHEDULE"
"""Environment variable of the training processes: the learning-rate schedule as JSON."""
JOB_VARIABLE = "AGENTFLY_JOB"
"""Environment variable of all processes of a job: a new name for each start, so that actors of two are not confused."""
CPUS_PER_GPU = 3
"""Logical CPUs that verl reserves for each training process; it waits for them without a message."""


@record(kw_only=True)
class ClusterConfig:
    """The machines of a run. Written beside the fields of TrainConfig: `nodes=2 gpus=8`."""

    nodes: PositiveInt = 1
    """Machines that train; with synchronous rollout they also serve."""
    gpus: PositiveInt = 8
    """GPUs of each machine."""
    rollout_nodes: NonNegativeInt = 0
    """Further machines that only serve: rollout and training at the same time; needs async_training.max_staleness."""
    workers: PositiveInt = 2
    """Processes that run chains, per training machine."""
    restarts: NonNegativeInt = 3
    """Restarts from the newest checkpoint without a completed step in between, before an error ends the run."""
    verl: Mapping[str, Any] = field(default_factory=dict)
    """Raw keys of verl's configuration."""

    def selects_engine(self, device: Device) -> bool:
        """Whether the embedded engine serves: on CPUs, and on GPUs where the raw key names it."""
        return device == "cpu" or self.verl.get("actor_rollout_ref.rollout.name") == NAME

    @classmethod
    def split(cls, overrides: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Split overrides of the command line into those of the cluster, and those of TrainConfig."""
        cluster: dict[str, Any] = {}
        raw: dict[str, Any] = {}
        train_overrides: dict[str, Any] = {}
        names = {setting.name for setting in fields(cls)} - {"verl"}
        for name, value in overrides.items():
            if name.startswith("verl."):
                raw[name.removeprefix("verl.")] = value
            else:
                (cluster if name in names else train_overrides)[name] = value
        for name, value in raw.items():
            key = name.removeprefix("+")
            if setter := _FIELDS.get(key.removeprefix("actor_rollout_ref.")):
                raise ConfigError(f"verl.{name}={value!r}: this key is set by a field; write {setter}=…")
            if key.startswith(_OWN_KEYS):
                raise ConfigError(f"verl.{name}={value!r}: training with --on verl sets this key itself; leave it out")
        return cls(**cluster, verl=raw), train_overrides

    def to_json(self) -> dict[str, Any]:
        """The overrides that `split` reads."""
        settings = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.name != "verl"}
        return settings | {f"verl.{name}": value for name, value in self.verl.items()}


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a training job needs besides verl's configuration."""

    make_plan: Callable[[], TrainPlan]
    """Loads the recipe, in any process."""
    folder: Path
    """The run directory."""
    settings: Mapping[str, Any]
    """What config.json contains."""
    model: str
    """Folder of the model."""
    context_length: int
    """Maximum tokens of prompt and reply together."""
    workers: int
    """Processes that run chains."""


def list_checkpoints(folder: Path) -> list[int]:
    """The steps of complete checkpoints, in order."""
    return sorted(int(file.parent.name.rpartition("_")[2]) for file in folder.glob(f"global_step_*/{STATE_FILE}"))


def select_mode(config: TrainConfig, cluster: ClusterConfig) -> Mode:
    """verl's trainer for the staleness that is allowed."""
    if not config.async_training.max_staleness:
        return "sync"
    return "separate_async" if cluster.rollout_nodes else "colocate_async"


def check_verl_support(config: TrainConfig, cluster: ClusterConfig, device: Device, *, flash_attention: bool) -> None:
    """Raise ConfigError for a field that verl cannot honor, by its name. flash_attention: see `build_settings`."""
    mode = select_mode(config, cluster)
    embedded = cluster.selects_engine(device)
    settings = config.backend_settings
    backend = settings.pop("backend")
    unsupported: list[tuple[bool, str, str]] = [
        (backend not in ("transformers", "vllm", "async_vllm"), f"backend={backend!r}",
         "verl serves the model itself: write backend=vllm, or verl.actor_rollout_ref.rollout.name=sglang"),
        (device == "cpu" and backend != "transformers", f"backend={backend!r}",
         "on CPUs the embedded engine serves: leave it out"),
        (bool(set(settings) - {"device", "dtype"}), f"backend.{min(set(settings) - {'device', 'dtype'}, default='')}",
         "write the setting of verl's server instead: verl.actor_rollout_ref.rollout.…"),
        (settings.get("device", device) != device, f"backend.device={settings.get('device')!r}",
         f"the servers use the device that is trained on, {device}: leave it out"),
        (device == "cpu" and config.precision == "bfloat16", "precision='bfloat16'",
         "on CPUs it trains in float32: leave it out"),
        (config.gpus != 1, f"gpus={config.gpus}",
         "in a recipe it is the number of ranks on one machine; write nodes=… gpus=… on the command line"),
        (embedded and config.lora_rank is not None, f"lora_rank={config.lora_rank}",
         "the embedded engine takes whole weights from verl: train adapters on GPUs with vLLM, or without --on verl"),
        (device == "cpu" and config.kl.coef > 0, f"kl.coef={config.kl.coef}",
         "verl keeps the reference model in pinned memory, which needs a GPU: train without --on verl"),
        (device == "cuda" and config.algorithm.needs_values and not flash_attention, f"algorithm={config.algorithm}",
         "verl loads critics with flash-attn, which is not installed: install it, or train without --on verl"),
        (config.teacher.model is not None, f"teacher.model={config.teacher.model!r}",
         "distillation runs in one process or with gpus=N: train without --on verl"),
        (config.zero_variance in ("resample", "avoid"), f"zero_variance={config.zero_variance!r}",
         "verl takes a fixed number of groups per step, in a fixed order: write skip or keep"),
        (config.optimizer.critic_warmup_steps > 0, "optimizer.critic_warmup_steps",
         "policy and critic are updated from the first step on: train without --on verl"),
        (config.kl.target is not None and config.kl.placement == "loss", f"kl.target={config.kl.target}",
         "verl's coefficient in the loss is constant: write kl.placement=reward, or leave the target out"),
        (config.optimizer.weight_decay > 0, f"optimizer.weight_decay={config.optimizer.weight_decay}",
         "verl decays vectors too: if that is wanted, write verl.actor_rollout_ref.actor.optim.weight_decay=…"),
        (config.loss.ratio == "turn", "loss.ratio='turn'",
         "verl's batches do not say where a turn begins: write token or segment, or train without --on verl"),
        (config.loss.observation_coef > 0, f"loss.observation_coef={config.loss.observation_coef}",
         "verl scores the sampled tokens only: train without --on verl"),
        (config.vision.train_tower, "vision.train_tower=true", "vision models are trained without --on verl"),
        (config.run_options.get("branching") is not None, "run_options.branching",
         "verl takes a fixed number of chains per task"),
        (config.run_options.get("max_concurrent_chains") is not None, "run_options.max_concurrent_chains",
         "chains run in several processes: limit the instances of the environments instead"),
        (mode != "sync" and config.async_training.on_stale == "recompute", "async_training.on_stale='recompute'",
         "verl replaces a group that became too old by another task: write async_training.on_stale=drop"),
        (mode == "sync" and cluster.rollout_nodes > 0, f"rollout_nodes={cluster.rollout_nodes}",
         "without async_training.max_staleness, they would wait while the others train"),
    ]  # fmt: skip
    for is_unsupported, name, advice in unsupported:
        if is_unsupported:
            raise ConfigError(f"{name} has no effect on verl: {advice}")


def build_settings(
    config: TrainConfig,
    cluster: ClusterConfig,
    *,
    device: Device,
    model: str,
    run: Path,
    context_length: int,
    flash_attention: bool = True,
) -> dict[str, Any]:
    """The keys of verl's configuration that a run sets, without the raw ones.

    model: folder of the model. run: run directory. context_length: tokens of prompt and reply together.
    flash_attention: whether flash-attn is installed, which verl needs for packed batches; others are padded.
    """
    check_verl_support(config, cluster, device, flash_attention=flash_attention)
    mode = select_mode(config, cluster)
    on_cpu = device == "cpu"
    packed = flash_attention and not on_cpu
    embedded = cluster.selects_engine(device)
    reply = min(config.sampling.max_tokens or context_length // 2, context_length - 1)
    reference = config.kl.coef > 0
    low_precision = config.precision != "float32" and not on_cpu
    size = cluster.nodes * cluster.gpus
    low, high, *dual = config.loss.clip
    aggregation = {
        "token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm",
    }[config.loss.aggregation]  # fmt: skip

    def engine(role: str) -> dict[str, Any]:
        """Settings of a sharded model."""
        sharding = "critic.fsdp" if role == "critic" else f"{role}.fsdp_config"
        return {
            f"{role}.strategy": "fsdp2",
            f"{sharding}.mixed_precision.param_dtype": "bf16" if low_precision else "fp32",
            f"{sharding}.mixed_precision.reduce_dtype": "fp32",
            f"{sharding}.use_torch_compile": not on_cpu,
            f"{sharding}.seed": config.seed,
        }

    def optimizer(role: str, rate: float) -> dict[str, Any]:
        return {
            f"{role}.optim.lr": rate,
            f"{role}.optim.weight_decay": 0.0,
            f"{role}.optim.clip_grad": config.optimizer.max_grad_norm,
            f"{role}.ppo_epochs": config.epochs,
            f"{role}.ppo_mini_batch_size": config.tasks_per_step,  # not read: the trainer passes `mini_batches`
            f"{role}.use_dynamic_bsz": True,
            f"{role}.shuffle": config.mini_batches > 1,
            f"{role}.data_loader_seed": config.seed,
            f"{role}.loss_agg_mode": aggregation,
            f"{role}.loss_scale_factor": config.longest_chain if config.loss.aggregation == "constant" else None,
        }

    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    out: dict[str, Any] = {
        # ── data: a position in the stream of tasks per row; workers read the tasks from the recipe ──
        "data.custom_cls.path": "pkg://agentfly.integrations.verl.rows",
        "data.custom_cls.name": "TaskPositions",
        "data.train_files": "train",
        "data.val_files": "val",
        "data.train_batch_size": config.tasks_per_step,
        "data.max_prompt_length": context_length - reply,
        "data.max_response_length": reply,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "data.seed": config.seed,
        # ── model ──
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": config.gradient_checkpointing,
        "actor_rollout_ref.model.use_remove_padding": packed,
        **engine(actor),
        **optimizer(actor, config.optimizer.learning_rate),
        # ── loss: ours, registered in verl ──
        f"{actor}.policy_loss.loss_mode": f"{NAME}-{config.loss.type}-{config.loss.ratio}",
        f"{actor}.clip_ratio_low": low,
        f"{actor}.clip_ratio_high": high,
        f"{actor}.clip_ratio_c": dual[0] if dual else NO_DUAL_CLIP,
        f"{actor}.entropy_coeff": config.loss.entropy_coef,
        f"{actor}.use_kl_loss": reference and config.kl.placement == "loss",
        f"{actor}.kl_loss_coef": config.kl.coef,
        f"{actor}.kl_loss_type": config.kl.estimator,
        f"{actor}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{actor}.checkpoint.load_contents": ["model", "optimizer", "extra"],
        "algorithm.use_kl_in_reward": reference and config.kl.placement == "reward",
        "algorithm.adv_estimator": "gae" if config.algorithm.needs_values else "grpo",  # decides about a critic only
        "algorithm.rollout_correction": None,  # ours
        # ── rollout ──
        f"{rollout}.name": NAME if embedded else "vllm",
        f"{rollout}.dtype": config.backend_settings.get("dtype") or ("float32" if on_cpu else "bfloat16"),
        f"{rollout}.n": config.num_chains,
        f"{rollout}.temperature": config.sampling.temperature,
        f"{rollout}.prompt_length": context_length - reply,
        f"{rollout}.response_length": reply,
        f"{rollout}.max_model_len": context_length,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.seed": config.seed,
        "reward.num_workers": 0,  # rewards are computed by our chains
        # ── trainer ──
        "trainer.device": device,
        "trainer.nnodes": cluster.nodes,
        "trainer.n_gpus_per_node": cluster.gpus,
        "trainer.total_training_steps": config.steps,
        "trainer.total_epochs": 1,
        "trainer.logger": [],
        "trainer.val_before_train": False,  # evaluation and checkpoints are scheduled by our subclass
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.default_local_dir": str(run / "checkpoints"),
        "trainer.resume_mode": "disable",  # the job sets the checkpoint that it continues from
        "trainer.v1.trainer_mode": mode,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": min(size, 8),
    }
    if config.lora_rank is not None:
        out |= {
            "actor_rollout_ref.model.lora_rank": config.lora_rank,
            "actor_rollout_ref.model.lora_alpha": 2 * config.lora_rank,
            "actor_rollout_ref.model.target_modules": "all-linear",
            f"{rollout}.load_format": "safetensors",
        }
    if not packed:
        attention = "eager" if on_cpu else "sdpa"
        out["actor_rollout_ref.model.override_config.attn_implementation"] = attention
    if embedded:
        out[f"{rollout}.load_format"] = "auto"
    if reference:
        role = "actor_rollout_ref.ref"
        out |= {**engine(role), f"{role}.log_prob_use_dynamic_bsz": True}
    if config.algorithm.needs_values:
        rate = config.optimizer.critic_learning_rate or config.optimizer.learning_rate
        out |= {**engine("critic"), **optimizer("critic", rate)}
        out |= {
            "critic.model.path": model,
            "critic.model.use_remove_padding": packed,
            "critic.model.enable_gradient_checkpointing": config.gradient_checkpointing,
            "critic.cliprange_value": 1e9,  # our critic's loss is not clipped
            "critic.loss_agg_mode": "token-mean",
        }
        if on_cpu:
            out["critic.model.override_config.attn_implementation"] = "eager"
    if mode != "sync":
        staleness = config.async_training.max_staleness
        # verl counts the versions that a group spans, ours the updates between sampling and training.
        out["trainer.v1.sampler.max_off_policy_threshold"] = staleness + 1
        out["trainer.v1.sampler.max_off_policy_strategy"] = "drop"
        out[f"trainer.v1.{mode}.num_warmup_batches"] = staleness
    if mode == "separate_async":
        out |= {
            "trainer.v1.separate_async.parameter_sync_step": 1,
            f"{rollout}.nnodes": cluster.rollout_nodes,
            f"{rollout}.n_gpus_per_node": cluster.gpus,
            f"{rollout}.checkpoint_engine.backend": NAME if embedded else "nccl",
            # Imported in processes beside the servers, which need the embedded engine in verl's registries.
            f"{rollout}.checkpoint_engine.custom_backend_module": f"{__package__}.engine" if embedded else None,
            "actor_rollout_ref.hybrid_engine": False,
        }
    return out


_FIELDS: dict[str, str] = tomllib.loads((resources.files(__package__) / "fields.toml").read_text(encoding="utf-8"))
"""Keys of verl, without `actor_rollout_ref.` → the fields of TrainConfig or ClusterConfig that set them."""
_OWN_KEYS = ("algorithm.", "data.", "trainer.default_local_dir", "trainer.resume_", "trainer.val_before_train",
             "actor_rollout_ref.rollout.calculate_log_probs")  # fmt: skip
"""Prefixes of the other keys that our chains, advantages and checkpoints depend on."""
