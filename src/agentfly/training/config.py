"""The configuration of a training run: one frozen record of at most forty fields.

Everything that can be found wrong is found here, before anything is loaded: an unknown field, a value of the wrong
kind, sizes that do not go together, and a field that would have no effect.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from agentfly.algorithm import Algorithm, Needs, SegmentReward
from agentfly.algorithms import algorithm_of
from agentfly.errors import ConfigError
from agentfly.rollout.options import RunOptions, sampling_of, settings_of
from agentfly.runs.sinks import checked_sinks
from agentfly.types import Sampling


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How an agent is trained."""

    # ── the model ──
    model: str = "tiny"
    """A name of `agentfly models`, a local folder, or a hub name."""
    backend: str | Mapping[str, Any] = "transformers"
    """What samples: a name, or `{"backend": name, setting: …}`."""
    template: str | None = None
    """A chat template by name; None follows the tokenizer."""
    lora_rank: int | None = None
    """Train adapters of this rank; None trains all weights."""
    recompute: bool = False
    """Compute activations anew in the backward pass (gradient checkpointing): slower, and much less memory."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the learner's matrix products; its weights are float32. auto: bfloat16 where the hardware is quick in it."""

    # ── the rollout ──
    tasks_per_step: int = 8
    num_chains: int = 8
    """Chains of each task."""
    max_turns: int = 10
    sampling: Sampling = field(default_factory=Sampling)
    run_options: Mapping[str, Any] = field(default_factory=dict)
    """What else `agent.run` may be told: max_chain_tokens, failures, strategy, folding, …"""

    # ── the algorithm ──
    algorithm: Algorithm = field(default_factory=lambda: algorithm_of("grpo"))
    """A name, or an algorithm with settings of its own, such as `PPO(lam=0.95)`."""
    loss: Literal["clip", "gspo", "cispo", "plain"] = "clip"
    clip: tuple[float, ...] = (0.2, 0.2)
    """How far below and above 1 the ratio may go; a third number bounds the loss of bad tokens (dual clip)."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Each token counts the same; each sequence does; or each token is divided by a constant length."""
    kl: float = 0.0
    """The price of straying from the model as it was at the start; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: float | None = None
    """The divergence that `kl` is steered towards; None keeps `kl` as it is."""
    entropy: float = 0.0
    """The reward for being undecided."""
    correction: str | None = None
    """Of what the sampler's numbers differ from the learner's: token, sequence or geometric, -truncate or -mask."""
    correction_cap: float = 2.0
    segment_reward: SegmentReward = "broadcast"
    """Which segments of a folded chain its reward goes to."""
    zero_variance: Literal["skip", "keep", "resample"] | None = None
    """Groups whose chains all earned the same. None: skip them where the algorithm compares within groups."""

    # ── the update ──
    learning_rate: float = 1e-6
    critic_learning_rate: float | None = None
    """None: the learning rate. Without a critic it has no effect and is refused."""
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes, after the warm-up, until the last step."""
    max_grad_norm: float = 1.0
    epochs: int = 1
    """How often a batch is gone through."""
    mini_batches: int = 1
    """Optimizer steps in one pass over a batch."""
    micro_batch_tokens: int = 16384
    """Most tokens in one forward pass of the learner."""

    # ── the run ──
    steps: int = 100
    seed: int = 0
    save_every: int = 10
    """Steps between checkpoints; the last step always has one."""
    keep: int = 2
    """Newest checkpoints that stay; the one with the best evaluation stays besides."""
    eval_every: int | None = None
    """Steps between evaluations; None: before the first step and after the last."""
    eval_chains: int = 1
    """Chains of each held-out task; one more of each is greedy."""
    sinks: tuple[str, ...] = ("console",)
    """Who is told beside the JSON lines: console, tensorboard, wandb."""

    def __post_init__(self) -> None:
        for name, value in _checked({each.name: getattr(self, each.name) for each in fields(self)}).items():
            object.__setattr__(self, name, value)
        self._refuse_impossible_sizes()
        self._refuse_what_has_no_effect()

    @property
    def chains_per_step(self) -> int:
        return self.tasks_per_step * self.num_chains

    @property
    def skips(self) -> str:
        """What becomes of groups whose chains all earned the same."""
        return self.zero_variance or ("skip" if Needs.GROUPS in self.algorithm.needs else "keep")

    @property
    def longest_chain(self) -> int | None:
        """Most tokens that a chain can sample; None: no limit was given."""
        most = self.sampling.max_tokens
        limits = [self.run_options.get("max_chain_tokens"), None if most is None else most * self.max_turns]
        return min((each for each in limits if each is not None), default=None)

    @property
    def agent_settings(self) -> dict[str, Any]:
        """What the agent is told about its model, where it runs without a learner."""
        named = {"backend": self.backend} if isinstance(self.backend, str) else {"backend_config": self.backend}
        return {"model_name_or_path": self.model, **named, **({"template": self.template} if self.template else {})}

    @property
    def agent_options(self) -> dict[str, Any]:
        """How the agent is run: options of `agent.run`."""
        return {**self.run_options, "max_turns": self.max_turns, "sampling": self.sampling}

    def overridden(self, changes: Mapping[str, Any]) -> TrainConfig:
        """The same with some fields changed; `sampling.temperature` reaches into a field."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in changes.items():
            head, dot, inner = name.partition(".")
            if head not in values:
                raise ConfigError(_no_such_field(head))
            values[head] = _reached(head, values[head], inner, value) if dot else value
        return TrainConfig(**values)

    def to_json(self) -> dict[str, Any]:
        """The effective configuration as JSON keeps it."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    def _refuse_impossible_sizes(self) -> None:
        for name in _WHOLE:
            least = 0 if name in ("warmup_steps", "seed") else 1
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        for name in ("learning_rate", "critic_learning_rate", "max_grad_norm", "kl_target"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, not {value}")
        for name in ("kl", "weight_decay", "entropy"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number from 0, not {getattr(self, name)}")
        if self.chains_per_step % self.mini_batches:
            raise ConfigError(
                f"{self.tasks_per_step} tasks × {self.num_chains} chains are {self.chains_per_step} chains a step, "
                f"which do not divide into mini_batches={self.mini_batches}"
            )
        if Needs.GROUPS in self.algorithm.needs and self.num_chains < 2:
            raise ConfigError(f"{self.algorithm} compares the chains of a task: num_chains must be 2+")
        if self.warmup_steps >= self.steps:
            raise ConfigError(f"warmup_steps={self.warmup_steps} leaves none of steps={self.steps} at full rate")
        if not 1 < self.correction_cap < math.inf:
            raise ConfigError(f"correction_cap is a ratio above 1, not {self.correction_cap}")
        if self.correction not in (None, *CORRECTIONS):
            raise ConfigError(f"there is no correction {self.correction!r}; there are {', '.join(CORRECTIONS)}")
        if not _is_clip(*self.clip):
            raise ConfigError(
                f"clip is [low, high], or [low, high, dual] with dual above 1 + high, such as [0.2, 0.28]; "
                f"not {list(self.clip)}"
            )
        if self.aggregation == "constant" and self.longest_chain is None:
            raise ConfigError("aggregation='constant' divides by the longest chain: give sampling.max_tokens")
        if self.sampling.seed is not None:
            raise ConfigError("sampling.seed and seed are two names for one thing; write seed=…")
        if self.sampling.temperature <= 0:
            raise ConfigError("training samples: sampling.temperature must be above 0 (evaluation can be greedy)")

    def _refuse_what_has_no_effect(self) -> None:
        """A field that was set and does nothing is a misunderstanding."""
        default = {each.name: _default(each) for each in fields(self)}
        idle: dict[str, str] = {}
        if not self.kl:
            idle |= dict.fromkeys(("kl_estimator", "kl_in", "kl_target"), "kl is 0")
        if self.loss == "plain":
            idle["clip"] = "loss='plain' clips nothing"
        if self.correction is None:
            idle["correction_cap"] = "there is no correction"
        if Needs.VALUES not in self.algorithm.needs:
            idle["critic_learning_rate"] = f"{self.algorithm} has no critic"
        for name, reason in idle.items():
            if getattr(self, name) != default[name]:
                raise ConfigError(f"{name}={getattr(self, name)!r} would have no effect: {reason}")
        if len(self.clip) == 3 and self.loss != "clip":
            raise ConfigError(f"clip's third number would have no effect: loss={self.loss!r} knows no dual clip")


_WHOLE = (
    "lora_rank", "tasks_per_step", "num_chains", "max_turns", "warmup_steps", "epochs", "mini_batches",
    "micro_batch_tokens", "steps", "seed", "save_every", "keep", "eval_every", "eval_chains",
)  # fmt: skip
CORRECTIONS = [f"{level}-{mode}" for level in ("token", "sequence", "geometric") for mode in ("truncate", "mask")]
_OURS = {"observer", "seed", "sampling"}
"""What a run may be told and the trainer says itself."""


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`name=value` as typed on the command line: a value is JSON where it can be read as such, else text."""
    out: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} changes nothing; write field=value, such as learning_rate=3e-4")
        try:
            out[name.strip()] = json.loads(text)
        except ValueError:
            out[name.strip()] = {"None": None, "True": True, "False": False}.get(text, text)
    return out


_READERS: dict[str, Callable[[Any], Any]] = {
    "algorithm": algorithm_of,
    "sampling": sampling_of,
    "sinks": checked_sinks,
}


def refuse_wrong_fields(overrides: Mapping[str, Any]) -> None:
    """Refuse overrides that are wrong for any configuration: unknown fields, and values of a wrong type."""
    hints = typing.get_type_hints(TrainConfig)
    known = {each.name for each in fields(TrainConfig)}
    for name, value in overrides.items():
        head, dot, inner = name.partition(".")
        if head not in known:
            raise ConfigError(_no_such_field(head))
        if not dot:
            _checked_field(head, value, hints[head])
        elif head == "sampling":
            sampling_of({inner: value})


def _checked_field(name: str, value: Any, hint: Any) -> Any:
    """A value in the type that its field declares."""
    if name in _READERS:
        return _READERS[name](value)
    if isinstance(value, bool) and hint is not bool:
        raise ConfigError(f"{name}={value!r}: it takes no truth value")
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        said = "; ".join(dict.fromkeys(each["msg"] for each in error.errors()))
        raise ConfigError(f"{name}={value!r:.60}: {said}") from None


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values in the types that the fields declare; a wrong one is refused by name."""
    hints = typing.get_type_hints(TrainConfig)
    out = {name: _checked_field(name, value, hints[name]) for name, value in values.items()}
    for name in out["run_options"]:
        if name not in RunOptions.__annotations__ or name in _OURS:
            there = ", ".join(sorted(set(RunOptions.__annotations__) - _OURS))
            raise ConfigError(f"run_options has {name!r}; it may have {there}")
    options: Any = {**out["run_options"], "sampling": out["sampling"]}
    settings_of(out["max_turns"], options)  # says what is wrong with them
    return out


def _is_clip(low: float = math.nan, high: float = math.nan, dual: float = math.inf, *more: float) -> bool:
    return not more and 0 <= low <= 1 and 0 <= high < math.inf and dual > 1 + high


def _no_such_field(name: str) -> str:
    known = [each.name for each in fields(TrainConfig)]
    close = difflib.get_close_matches(name, known, 3)
    return f"there is no field {name!r}; " + f"{'close ones' if close else 'there are'}: {', '.join(close or known)}"


def _reached(head: str, held: Any, inner: str, value: Any) -> Any:
    """A field with something inside of it changed."""
    if isinstance(held, str) and head in ("algorithm", "backend"):
        held = {"backend": held} if head == "backend" else algorithm_of(held)
    if isinstance(held, Mapping):
        return {**held, inner: value}
    if not dataclasses.is_dataclass(held) or isinstance(held, type):
        raise ConfigError(f"{head}={held!r} has nothing inside that could be changed")
    known = [each.name for each in fields(held)]
    if inner not in known:
        close = difflib.get_close_matches(inner, known, 1)
        what = type(held).__name__ if head == "algorithm" else head
        there = f"it has {', '.join(known)}" if known else "it has no settings"
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{what} has no {inner!r}; {there}{hint}")
    return dataclasses.replace(held, **{inner: value})


def _default(each: dataclasses.Field[Any]) -> Any:
    return each.default_factory() if callable(each.default_factory) else each.default


def _plain(value: Any) -> Any:
    if isinstance(value, Algorithm):
        return {"name": type(value).__name__, **{each.name: getattr(value, each.name) for each in fields(value)}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | types.NoneType) else repr(value)
