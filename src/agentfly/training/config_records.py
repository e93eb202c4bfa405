"""The nested records of a training configuration, one per group of related fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from agentfly.algorithms.base import Algorithm, validate_clip
from agentfly.errors import ConfigError
from agentfly.validation import record

MAX_LEARNING_RATE = 1.0
"""Above this, AdamW moves every weight by more than 1 per step, which destroys any model."""
CORRECTIONS = [f"{level}-{mode}" for level in ("token", "sequence", "geometric") for mode in ("truncate", "mask")]
"""Values of `loss.correction`."""


@record(kw_only=True, prefix="loss.")
class LossConfig:
    """The policy loss."""

    type: Literal["clip", "cispo", "plain"] = "clip"
    """Surrogate: PPO's clipped ratio, CISPO's clipped weight, or the plain policy gradient."""
    ratio: Literal["token", "turn", "segment"] = "token"
    """What the ratio is taken over: each token, or the geometric mean over its turn, or over its segment (GSPO)."""
    clip: tuple[float, ...] = (0.2, 0.2)
    """How far the ratio may go below and above 1; a third number bounds it where the advantage is negative."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over tokens, mean over sequences of their token means, or sum over tokens divided by a constant length."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Entropy bonus coefficient."""
    observation_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the cross-entropy of observation tokens (ECHO). 0 trains the model's own tokens alone."""
    correction: str | None = None
    """Importance-sampling correction for sampler/learner mismatch: token, sequence or geometric, -truncate or -mask."""
    correction_cap: float = Field(default=2.0, gt=1)
    """Importance ratio above which the correction truncates or masks."""

    @field_validator("clip", mode="before")
    @classmethod
    def _split_text(cls, clip: Any) -> Any:
        return clip.split(",") if isinstance(clip, str) else clip  # 0.2,0.28 on the command line

    @field_validator("type", mode="before")
    @classmethod
    def _explain_gspo(cls, name: Any) -> Any:
        if name == "gspo":
            raise ConfigError("loss.type='gspo' is loss.ratio=segment, with a tight clip such as loss.clip=[3e-4,4e-4]")
        return name

    def __post_init__(self) -> None:
        if self.correction not in (None, *CORRECTIONS):
            raise ConfigError(f"there is no correction {self.correction!r}; there are {', '.join(CORRECTIONS)}, None")
        validate_clip("loss.clip", self.clip)


@record(kw_only=True, prefix="kl.")
class KLConfig:
    """The KL penalty against the initial policy."""

    coef: float = Field(default=0.0, ge=0)
    """KL coefficient. 0 disables the reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator per token; see `agentfly.algorithms.kl`."""
    placement: Literal["loss", "reward"] = "loss"
    """Whether KL is a term of the loss or is subtracted from the reward."""
    target: float | None = Field(default=None, gt=0)
    """KL divergence per token, in nats, that the coefficient is adapted to; None keeps it constant."""


@record(kw_only=True, prefix="teacher.")
class TeacherConfig:
    """On-policy distillation: the reverse KL divergence to a teacher, per token of the student's own chains."""

    model: str | None = None
    """A name of `agentfly models`, a folder, a hub name, or the server's name of it; None trains without a teacher."""
    base_url: str | None = None
    """Address of an OpenAI-compatible server that scores prompts (vLLM), with /v1; None loads the model here."""
    divergence: Literal["exact", "sampled"] | None = None
    """exact: a loss term, summed over the vocabulary; sampled: an advantage, log π_teacher − log π of the sampled
    token. None is exact, and sampled with a server, which returns only the log-probability of that token."""
    coef: float = Field(default=1.0, gt=0)
    """Factor on the divergence."""
    reward_coef: float = Field(default=0.0, ge=0)
    """Factor on the algorithm's advantages; 0 learns from the teacher alone."""

    @property
    def is_exact(self) -> bool:
        """Whether the divergence is a loss term."""
        return self.model is not None and self.base_url is None and self.divergence != "sampled"


@record(kw_only=True, prefix="optimizer.")
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    critic_learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate of the critic; None is `learning_rate`. Refused without a critic."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Training steps at the start in which only the critic is updated. Refused without a critic."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine decay to 0 at the last step."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm that gradients are clipped to."""

    @field_validator("learning_rate", "critic_learning_rate")
    @classmethod
    def _refuse_high_rate(cls, rate: float | None, info: ValidationInfo) -> float | None:
        if rate is not None and rate > MAX_LEARNING_RATE:
            raise ConfigError(LEARNING_RATE_TOO_HIGH.format(name=f"optimizer.{info.field_name}", rate=rate))
        return rate


@record(kw_only=True, prefix="evaluation.")
class EvaluationConfig:
    """Evaluation on held-out tasks during training."""

    every: int | None = Field(default=None, ge=1)
    """Training steps between evaluations; None evaluates before the first step and after the last."""
    chains: int = Field(default=1, ge=1)
    """Sampled chains per held-out task; one greedy chain is added."""
    tasks: int | None = Field(default=None, ge=1)
    """Number of held-out tasks, from the first on; None evaluates all."""


@record(kw_only=True, prefix="checkpoint.")
class CheckpointConfig:
    """When checkpoints are written, and how many are retained."""

    every: int = Field(default=10, ge=1)
    """Training steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints to retain; the one with the best evaluation is retained as well."""


@record(kw_only=True, prefix="async_training.")
class AsyncTrainingConfig:
    """Rollout and update at the same time, with bounded staleness."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum age of a trained token in updates since the weights that sampled it; 0 samples and updates in turn."""
    on_stale: Literal["drop", "recompute"] = "recompute"
    """What happens to a group that becomes too old: its task is skipped, or its chains run again from the start."""


@record(kw_only=True, prefix="vision.")
class VisionConfig:
    """Training of a vision model."""

    train_tower: bool = False
    """Whether the vision tower and its connector are trained; otherwise their features are computed once per image."""


@record(kw_only=True)
class UpdateConfig:
    """How a learner passes over the samples of an update: the top-level fields of a configuration that it needs."""

    aggregation: Literal["token", "sequence", "constant"] = "token"
    constant: int | None = Field(default=None, ge=1)
    """Length that the aggregation "constant" divides by."""
    total_steps: int = Field(default=1, ge=1)
    """Updates of the whole run, after which a decaying learning rate is 0."""
    epochs: int = Field(default=1, ge=1)
    mini_batches: int = Field(default=1, ge=1)
    micro_batch_tokens: int = Field(default=16384, ge=1)
    gradient_checkpointing: bool = False
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = Field(default=0, ge=0)


@record(kw_only=True, prefix="warm_start.")
class WarmStart:
    """SFT on demonstrations of the environment's expert, which a recipe's model needs before it is trained."""

    expert: int = Field(ge=1)
    """Number of tasks that the expert demonstrates."""
    threshold: float = Field(default=1.0, allow_inf_nan=False)
    """Minimum reward of an expert's chain to be used."""
    steps: int = Field(ge=1)
    """Optimizer steps of SFT."""
    train_from: int | None = Field(default=None, ge=1)
    """Step of SFT whose model is trained; None is the last."""
    learning_rate: float = Field(default=1e-3, gt=0, le=MAX_LEARNING_RATE)
    """Peak learning rate of SFT."""
    batch_size: int = Field(default=8, ge=1)
    """Demonstrations per step."""
    model: str = "new"
    """The model that imitates; `new` is an untrained tiny one."""
    template: str | None = None
    """Chat template of the model; None: its tokenizer's own."""
    train_tower: bool = False
    """Whether the vision tower and its connector are trained."""

    def __post_init__(self) -> None:
        if self.train_from is not None and self.train_from >= self.steps:
            raise ConfigError(
                f"warm_start.train_from={self.train_from} is a step before the last of steps={self.steps}; "
                "leave it out to train the last one"
            )

    @property
    def trained_model(self) -> str:
        """Folder of the model that training begins with."""
        return WARM_FOLDER if self.train_from is None else f"{WARM_FOLDER}-{self.train_from}"

    def sft_arguments(self, recipe: str) -> list[str]:
        """The arguments of `agentfly` that train the model."""
        options = {
            "model": self.model,
            "template": self.template,
            "expert": self.expert,
            "threshold": None if self.threshold == 1 else f"{self.threshold:g}",
            "steps": self.steps,
            "save-every": self.train_from,
            "batch-size": self.batch_size,
            "learning-rate": f"{self.learning_rate:g}",
            "out": WARM_FOLDER,
        }
        arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return ["sft", recipe, *(["--train-tower"] if self.train_tower else []), *arguments]


WARM_FOLDER = "warm"
"""Folder of the model that a warm start writes."""
SHARDED_TOWER = (
    "vision.train_tower=true trains in one process: write gpus=1 and start it without torchrun, or leave the tower "
    "frozen (vision.train_tower=false)"
)
"""Error of a run on several ranks."""
NESTED: dict[str, Any] = {
    "loss": LossConfig,
    "kl": KLConfig,
    "teacher": TeacherConfig,
    "optimizer": OptimizerConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "async_training": AsyncTrainingConfig,
    "vision": VisionConfig,
}
"""Nested records by the name of their field in TrainConfig."""
FOREIGN_FIELDS = {
    "lr": "optimizer.learning_rate", "beta": "kl.coef", "kl_coef": "kl.coef", "kl_loss_coef": "kl.coef",
    "init_kl_coef": "kl.coef", "kl_penalty": "kl.estimator", "kl_loss_type": "kl.estimator",
    "use_kl_loss": "kl.coef (above 0) and kl.placement=loss",
    "use_kl_in_reward": "kl.coef (above 0) and kl.placement=reward",
    "batch_size": "tasks_per_step (tasks) and num_chains", "train_batch_size": "tasks_per_step",
    "per_device_train_batch_size": "tasks_per_step, and micro_batch_tokens for memory",
    "gradient_accumulation_steps": "micro_batch_tokens", "ppo_mini_batch_size": "mini_batches",
    "ppo_micro_batch_size": "micro_batch_tokens", "ppo_micro_batch_size_per_gpu": "micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "micro_batch_tokens", "ppo_epochs": "epochs", "num_iterations": "epochs",
    "total_epochs": "steps (of tasks_per_step tasks)", "num_train_epochs": "steps (of tasks_per_step tasks)",
    "num_generations": "num_chains", "group_size": "num_chains", "n": "num_chains",
    "max_completion_length": "sampling.max_tokens", "max_new_tokens": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens", "response_length": "sampling.max_tokens",
    "max_prompt_length": "run_options.context_length", "prompt_length": "run_options.context_length",
    "max_model_len": "run_options.context_length", "epsilon": "loss.clip", "epsilon_high": "loss.clip",
    "clip_ratio": "loss.clip", "clip_ratio_low": "loss.clip", "clip_ratio_high": "loss.clip",
    "clip_ratio_c": "loss.clip", "delta": "loss.clip", "entropy_coeff": "loss.entropy_coef",
    "loss_type": "loss.type and loss.aggregation", "loss_agg_mode": "loss.aggregation", "adv_estimator": "algorithm",
    "max_steps": "steps", "total_training_steps": "steps", "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every", "save_total_limit": "checkpoint.keep", "eval_steps": "evaluation.every",
    "test_freq": "evaluation.every", "lr_scheduler_type": "optimizer.schedule",
    "lr_warmup_steps": "optimizer.warmup_steps", "warmup_ratio": "optimizer.warmup_steps",
    "grad_clip": "optimizer.max_grad_norm", "report_to": "loggers", "logger": "loggers", "bf16": "precision=bfloat16",
    "use_vllm": "backend=vllm", "model_name_or_path": "model", "lora_r": "lora_rank", "generation_config": "sampling",
    "n_gpus_per_node": "gpus", "nnodes": "nodes, with --on verl", "train_files": "tasks in the recipe",
    "val_files": "eval_tasks in the recipe", "output_dir": "--run FOLDER", "default_local_dir": "--run FOLDER",
    "experiment_name": "--run FOLDER", "run_name": "--run FOLDER", "gamma": "algorithm.gamma", "lam": "algorithm.lam",
    "reward_funcs": "reward= of the agent", "project_name": "the environment variable WANDB_PROJECT",
    "save_every": "checkpoint.every", "eval_every": "evaluation.every",
}  # fmt: skip
"""Fields of TRL, verl and nanochat, without verl's groups (`actor_rollout_ref.rollout.`) → ours, for error messages."""

LEARNING_RATE_TOO_HIGH = (
    "{name}={rate:g} destroys any model in a few steps; usual are 1e-6 to 1e-5 for a pretrained model, ten times as "
    "much with LoRA, and 1e-4 to 1e-2 for a model of a few million parameters"
)
"""Error for a learning rate above `MAX_LEARNING_RATE`."""


def to_json(value: Any) -> Any:
    """A value of a field as JSON; what has no JSON is its `repr`."""
    if isinstance(value, Algorithm):
        return {"name": type(value).__name__, **{field.name: getattr(value, field.name) for field in fields(value)}}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json(element) for name, element in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(element) for element in value]
    return value if isinstance(value, str | int | float | bool | NoneType) else repr(value)
