"""The configuration of a training run: a frozen record of at most forty fields, related ones in nested records.

Everything that can be checked is checked here, before anything is loaded: unknown fields, values of the wrong type,
sizes that do not fit together, and fields without effect. Nested fields have dotted names on the command line:
`optimizer.learning_rate=1e-5`, `kl.coef=0.01`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from agentfly.algorithms import build_algorithm
from agentfly.algorithms.base import Algorithm, SegmentReward
from agentfly.errors import ConfigError
from agentfly.rollout.config import ChainSettings, RunOptions, parse_sampling, parse_settings
from agentfly.runs.loggers import validate_loggers
from agentfly.training.config_records import (
    FOREIGN_FIELDS,
    NESTED,
    AsyncTrainingConfig,
    CheckpointConfig,
    EvaluationConfig,
    KLConfig,
    LossConfig,
    OptimizerConfig,
    TeacherConfig,
    VisionConfig,
    to_json,
)
from agentfly.types import Sampling
from agentfly.validation import record


class CombinationError(ConfigError):
    """Fields that are valid alone and do not go together."""


@record(kw_only=True)
class TrainConfig:
    """How an agent is trained. A nested record may be given as a mapping of its fields."""

    # ── model ──
    model: str = "tiny"
    """A name of `agentfly models`, a local folder, or a hub name."""
    backend: str | Mapping[str, Any] = "transformers"
    """Sampling backend: a name, or `{"backend": name, setting: …}`."""
    template: str | None = None
    """Chat template by name; None follows the tokenizer."""
    lora_rank: int | None = Field(default=None, ge=1)
    """Rank of LoRA adapters; None trains all weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, with much less memory."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the learner's matrix products; weights are float32. auto: bfloat16 where that is fast."""
    gpus: int = Field(default=1, ge=1)
    """GPUs of this machine that the learner is sharded over, one process each; with several machines use torchrun."""

    # ── rollout ──
    tasks_per_step: int = Field(default=8, ge=1)
    """Tasks per training step."""
    num_chains: int = Field(default=8, ge=1)
    """Chains per task."""
    max_turns: int = Field(default=10, ge=1)
    """Maximum turns per chain."""
    sampling: Sampling = field(default_factory=Sampling)
    run_options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `agent.run`: max_chain_tokens, failures, strategy, folding, …"""

    # ── algorithm and update ──
    algorithm: Algorithm = field(default_factory=lambda: build_algorithm("grpo"))
    """A name, or an algorithm object with its hyperparameters, such as `PPO(lam=0.95)`."""
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    segment_reward: SegmentReward = "broadcast"
    """How the reward of a chain of several segments is credited to them."""
    zero_variance: Literal["skip", "keep", "resample", "avoid"] | None = None
    """Groups whose chains all have the same reward: skipped, kept, replaced by other tasks, or avoided by preferring
    tasks of medium success. None skips them where the algorithm compares within groups, unless a teacher or
    `loss.observation_coef` gives them another signal."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Maximum tokens in one forward pass of the learner."""
    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)

    # ── run ──
    steps: int = Field(default=100, ge=1)
    """Training steps."""
    seed: int = Field(default=0, ge=0)
    """Seed of task order, sampling and initialization."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    loggers: tuple[str, ...] = ("console",)
    """Loggers beside the JSON lines: console, tensorboard, wandb, mlflow."""

    def __new__(cls, **values: Any) -> Self:
        for name in values:
            if name not in cls.__dataclass_fields__:
                raise ConfigError(_unknown_field(name))
        return super().__new__(cls)

    @field_validator("algorithm", "sampling", "loggers", mode="plain")
    @classmethod
    def _parse(cls, value: Any, info: ValidationInfo) -> Any:
        return _PARSERS[str(info.field_name)](value)

    @field_validator(*NESTED, mode="before")
    @classmethod
    def _parse_nested(cls, value: Any, info: ValidationInfo) -> Any:
        return _parse_record(str(info.field_name), value)

    def __post_init__(self) -> None:
        allowed = sorted(set(RunOptions.__annotations__) - {"observer", "seed", "sampling"})  # those the trainer sets
        for name in self.run_options:
            if name not in allowed:
                raise ConfigError(f"run_options has {name!r}; it may have {', '.join(allowed)}")
        try:
            self.chain_settings()  # raises where the options do not fit together
            self._validate_combinations()
            self._refuse_fields_without_effect()
        except ConfigError as error:
            raise CombinationError(str(error)) from error

    @property
    def chains_per_step(self) -> int:
        return self.tasks_per_step * self.num_chains

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards enter the loss: always, but for distillation from a teacher alone."""
        return self.teacher.model is None or self.teacher.reward_coef > 0

    @property
    def has_surrogate(self) -> bool:
        """Whether any token has an advantage: not where the exact divergence to a teacher is all that is trained."""
        return self.learns_from_rewards or not self.teacher.is_exact

    @property
    def min_chains(self) -> int:
        """Chains that a group needs to be trained."""
        return 2 if self.learns_from_rewards and self.algorithm.needs_groups else 1

    @property
    def zero_variance_rule(self) -> Literal["skip", "keep", "resample"]:
        """What happens to groups whose chains all have the same reward, once they are sampled."""
        if self.zero_variance == "avoid":
            return "skip"
        # Groups without an advantage still teach by a teacher, or by their observations.
        has_other_signal = self.teacher.model is not None or self.loss.observation_coef > 0
        compares_sums = self.algorithm.needs_groups and not self.algorithm.needs_components
        return self.zero_variance or ("skip" if compares_sums and not has_other_signal else "keep")

    @property
    def longest_chain(self) -> int | None:
        """Maximum sampled tokens of a chain; None without a limit."""
        per_turn = self.sampling.max_tokens
        limits = [self.run_options.get("max_chain_tokens"), None if per_turn is None else per_turn * self.max_turns]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def backend_settings(self) -> dict[str, Any]:
        """A new mapping of the backend's settings; `backend` is its name."""
        settings = {"backend": self.backend} if isinstance(self.backend, str) else self.backend
        return {"backend": "transformers", **settings}

    @property
    def embeds_engine(self) -> bool:
        """Whether the embedded engine samples, in the learner's process and on its device."""
        return bool(self.backend_settings["backend"] == "transformers")

    @property
    def agent_settings(self) -> dict[str, Any]:
        """Arguments of the agent's constructor, where it runs without a learner."""
        named = {"backend": self.backend} if isinstance(self.backend, str) else {"backend_config": self.backend}
        return {"model_name_or_path": self.model, **named, **({"template": self.template} if self.template else {})}

    def agent_options(self, *, branching: bool = False, **changes: Any) -> dict[str, Any]:
        """Options of `agent.run`, with `changes` to them, such as a seed. branching: those of training, if set."""
        options = self.run_options if branching else {n: v for n, v in self.run_options.items() if n != "branching"}
        return {**options, "max_turns": self.max_turns, "sampling": self.sampling, **changes}

    def chain_settings(self, **changes: Any) -> ChainSettings:
        """Settings of a chain: the options of `agent.run`, validated."""
        options: Any = self.agent_options(branching=True, **changes)
        return parse_settings(options.pop("max_turns"), options)

    def override(self, changes: Mapping[str, Any]) -> TrainConfig:
        """A copy with some fields changed; a dotted name reaches into a field.

        Fewer `steps` than a warm-up are the first ones of a longer run. A changed warm-up must end within the run.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in changes.items():
            head, dot, inner = name.partition(".")
            if head not in values:
                raise ConfigError(_unknown_field(name))
            values[head] = _override_inner(head, values[head], inner, value) if dot else value
        config = TrainConfig(**values)
        for name, missed in (("warmup_steps", "at the full rate"), ("critic_warmup_steps", "to the policy")):
            warmup = getattr(config.optimizer, name)
            if warmup >= config.steps and changes.keys() & {"optimizer", f"optimizer.{name}"}:
                raise CombinationError(
                    f"optimizer.{name}={warmup} leaves none of steps={config.steps} {missed}: raise steps, or lower "
                    f"optimizer.{name} (0: none)"
                )
        return config

    def to_json(self) -> dict[str, Any]:
        """The effective configuration as JSON."""
        return {field.name: to_json(getattr(self, field.name)) for field in fields(self)}

    def flat(self) -> dict[str, Any]:
        """The effective configuration as JSON, with the fields of nested records under their dotted names."""
        out: dict[str, Any] = {}
        for name, value in self.to_json().items():
            nested = name in NESTED or name == "sampling"
            out |= {f"{name}.{inner}": setting for inner, setting in value.items()} if nested else {name: value}
        return out

    def _validate_combinations(self) -> None:
        if self.chains_per_step % self.mini_batches:
            raise ConfigError(
                f"{self.tasks_per_step} tasks × {self.num_chains} chains are {self.chains_per_step} chains a step, "
                f"which do not divide into mini_batches={self.mini_batches}"
            )
        if self.num_chains < self.min_chains:
            raise ConfigError(f"{self.algorithm} compares the chains of a task: num_chains must be at least 2")
        if self.loss.aggregation == "constant" and self.longest_chain is None:
            raise ConfigError("loss.aggregation='constant' divides by the longest chain: give sampling.max_tokens")
        staleness = self.async_training.max_staleness
        if staleness and self.loss.correction is None and self.has_surrogate:
            raise ConfigError(
                f"async_training.max_staleness={staleness} trains tokens that older weights sampled, and "
                "loss.correction=None would ignore that: write loss.correction=token-truncate"
            )
        if staleness and self.zero_variance == "avoid":
            raise ConfigError("zero_variance='avoid' needs finished steps, and async_training samples ahead of them")
        if staleness and self.backend_settings.get("on_update") == "abort":
            raise ConfigError(
                "backend.on_update='abort' ends running chains at every update, which async_training.max_staleness="
                f"{staleness} lets run on: write backend.on_update=continue"
            )
        if self.teacher.base_url is not None and self.teacher.divergence == "exact":
            raise ConfigError(
                "teacher.divergence='exact' compares all logits, and a server returns log-probabilities of sampled "
                "tokens only: write teacher.divergence=sampled, or load the teacher here, without teacher.base_url"
            )
        if self.teacher.base_url is not None and self.sampling.temperature != 1:
            raise ConfigError(
                f"teacher.base_url={self.teacher.base_url!r}: a server scores prompts at temperature 1, and chains are "
                f"sampled at {self.sampling.temperature}: write sampling.temperature=1, or load the teacher here"
            )
        if self.run_options.get("branching") is not None:
            unsupported = [
                (not self.algorithm.takes_branches, f"algorithm={self.algorithm}"),
                (self.teacher.model is not None, f"teacher.model={self.teacher.model!r}"),
                (self.async_training.max_staleness > 0, f"async_training.max_staleness={staleness}"),
            ]
            if conflicts := [name for is_set, name in unsupported if is_set]:
                raise ConfigError(f"run_options.branching does not work with {conflicts[0]}")
        if self.algorithm.needs_components:
            sums = [
                (self.zero_variance not in (None, "keep"), f"zero_variance={self.zero_variance!r}"),
                (self.kl.placement == "reward", "kl.placement='reward'"),
                (self.segment_reward != "broadcast", f"segment_reward={self.segment_reward!r}"),
            ]
            if conflicts := [name for is_set, name in sums if is_set]:
                raise ConfigError(
                    f"{conflicts[0]} is about the sum of rewards in each turn, and {self.algorithm} compares the "
                    "values of a chain's several rewards"
                )
        if self.sampling.seed is not None:
            raise ConfigError("sampling.seed and seed are two names for one thing; write seed=…")
        if self.sampling.temperature <= 0:
            raise ConfigError("training samples: sampling.temperature must be above 0 (evaluation can be greedy)")

    def _refuse_fields_without_effect(self) -> None:
        """A field that was set and does nothing is a misunderstanding."""
        unused: list[tuple[str, Any, str, str]] = []  # group, its record, field, reason
        if not self.kl.coef:
            unused += [("kl", self.kl, name, "kl.coef is 0") for name in ("estimator", "placement", "target")]
        if self.teacher.model is None:
            unused += [("teacher", self.teacher, name, "there is no teacher.model") for name in _TEACHER_FIELDS]
        if not self.learns_from_rewards:
            reason = "teacher.reward_coef is 0, so rewards are not trained on"
            unused.append(("kl", self.kl, "placement", reason))
            for name, default in (
                ("algorithm", build_algorithm("grpo")),
                ("segment_reward", "broadcast"),
                ("zero_variance", None),
            ):
                if (value := getattr(self, name)) != default:
                    raise ConfigError(f"{name}={value!r} would have no effect: {reason}")
        if not self.has_surrogate:
            reason = (
                "the exact divergence to the teacher is the loss, without advantages: leave the field out, or write "
                "teacher.divergence=sampled"
            )
            unused += [("loss", self.loss, name, reason) for name in ("type", "clip", "ratio", "correction")]
        if self.loss.type == "plain":
            unused.append(("loss", self.loss, "clip", "loss.type='plain' clips nothing"))
            unused.append(("loss", self.loss, "ratio", "loss.type='plain' has no ratio"))
        if self.loss.correction is None:
            unused.append(("loss", self.loss, "correction_cap", "there is no correction"))
        if not self.algorithm.needs_values:
            for name in ("critic_learning_rate", "critic_warmup_steps"):
                unused.append(("optimizer", self.optimizer, name, f"{self.algorithm} has no critic"))
        if not self.async_training.max_staleness:
            reason = "async_training.max_staleness is 0"
            unused.append(("async_training", self.async_training, "on_stale", reason))
        for head, group, name, reason in unused:
            if getattr(group, name) != getattr(type(group)(), name):
                raise ConfigError(f"{head}.{name}={getattr(group, name)!r} would have no effect: {reason}")
        if len(self.loss.clip) == 3 and self.loss.type != "clip":
            raise ConfigError(
                f"the third number of loss.clip would have no effect: loss.type={self.loss.type!r} has no dual clip"
            )


_TEACHER_FIELDS = [field.name for field in fields(TeacherConfig) if field.name != "model"]
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "algorithm": build_algorithm,
    "sampling": parse_sampling,
    "loggers": validate_loggers,
}


_GROUPS = {**NESTED, "sampling": Sampling}
_SHARED = Counter(field.name for cls in (TrainConfig, *_GROUPS.values()) for field in fields(cls))
NESTED_NAMES = {
    flat_name: f"{group}.{field.name}"
    for group, cls in _GROUPS.items()
    for field in fields(cls)
    for flat_name in (f"{group}_{field.name}", *([field.name] if _SHARED[field.name] == 1 else []))
}
"""Flat names that users try, such as kl_target and learning_rate → the fields they mean, for error messages."""


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `name=value` arguments of the command line: a value is JSON or a Python literal in brackets where it can be
    read as such, else text.

    none, true and false may be written in any case.
    """
    out: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} changes nothing; write field=value, such as optimizer.learning_rate=3e-4")
        try:
            out[name.strip()] = json.loads(text)
        except ValueError:
            value: Any = {"none": None, "true": True, "false": False}.get(text.strip().lower(), text)
            if text.lstrip().startswith(("(", "[", "{")):  # as in a recipe: ("console", "wandb")
                with contextlib.suppress(ValueError, SyntaxError):
                    value = ast.literal_eval(text.strip())
            out[name.strip()] = value
    return out


def find_field(name: str) -> str | None:
    """The dotted name of the field that a user calls `name`, such as kl.target for kl_target; None if there is none."""
    names = {field.name for field in fields(TrainConfig)} | TrainConfig().flat().keys()
    meant = NESTED_NAMES.get(name) or FOREIGN_FIELDS.get(name, name)
    return meant if meant in names else None


def validate_overrides(overrides: Mapping[str, Any]) -> None:
    """Refuse overrides that are wrong for any configuration: unknown fields, and values of a wrong type."""
    settings = {}
    for name, value in overrides.items():
        head, dot, _ = name.partition(".")
        if head not in TrainConfig.__dataclass_fields__:
            raise ConfigError(_unknown_field(name))
        if not dot or head in NESTED or head == "sampling":  # what else has inner fields depends on the recipe
            settings[name] = value
    with contextlib.suppress(CombinationError):  # the recipe may set the fields that these depend on
        TrainConfig().override(settings)


def _parse_record(name: str, value: Any) -> Any:
    """A nested record, from itself or from a mapping of its fields."""
    if isinstance(value, Mapping):
        changed = NESTED[name]()
        for inner, setting in value.items():
            changed = _override_inner(name, changed, inner, setting)
        return changed
    if not isinstance(value, NESTED[name]):
        first = fields(NESTED[name])[0].name
        inner = "…" if isinstance(value, bool) else f"{value!r:.60}"
        raise ConfigError(f"{name}={value!r:.60}: {name} is a group of fields; write {name}.{first}={inner}")
    return value


def _override_inner(head: str, value: Any, inner: str, new: Any) -> Any:
    """A field's value with something inside of it changed."""
    if isinstance(value, str) and head in ("algorithm", "backend"):
        value = {"backend": value} if head == "backend" else build_algorithm(value)
    if head in NESTED and isinstance(value, Mapping):
        value = _parse_record(head, value)
    if isinstance(value, Mapping):
        return {**value, inner: new}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise ConfigError(f"{head}={value!r} has nothing inside that could be changed")
    names = [field.name for field in fields(value)]
    if inner not in names:
        close = difflib.get_close_matches(inner, names, 1)
        owner = type(value).__name__ if head == "algorithm" else head
        has = f"it has {', '.join(names)}" if names else "it has no settings"
        hint = f". Did you mean {close[0]!r}?" if close else ""
        if meant := FOREIGN_FIELDS.get(inner.rpartition(".")[2]):
            hint = f". Write {meant}"
        raise ConfigError(f"{owner} has no {inner!r}; {has}{hint}")
    return dataclasses.replace(value, **{inner: new})


def _unknown_field(name: str) -> str:
    """The error of a name, perhaps a dotted one, whose first part is no field."""
    names = [field.name for field in fields(TrainConfig)]
    head, _, _ = name.partition(".")
    _, _, last = name.rpartition(".")
    replacement = last if last in names else FOREIGN_FIELDS.get(last) or NESTED_NAMES.get(last)
    if meant := NESTED_NAMES.get(head) or replacement:
        return f"there is no field {name!r}; write {meant}"
    close = difflib.get_close_matches(head, [*names, *NESTED_NAMES], 3)
    close = list(dict.fromkeys(NESTED_NAMES.get(name, name) for name in close))
    return f"there is no field {head!r}; {'close ones' if close else 'there are'}: {', '.join(close or names)}"
