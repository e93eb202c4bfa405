"""TrainConfig → keys of verl: every field is mapped, honored by our own code, or refused by name."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ConfigError
from agentfly.integrations.verl.config import (
    _FIELDS,
    ClusterConfig,
    build_settings,
    select_mode,
)
from agentfly.training.config import TrainConfig
from agentfly.types import Sampling

HONORED_BY_US = {
    "advantages": ["algorithm", "segment_reward", "zero_variance", "kl.placement", "kl.target"],
    "loss": ["loss.clip", "loss.ratio", "loss.correction", "loss.correction_cap", "mini_batches"],
    "chains": [
        "template",
        "max_turns",
        *(f"sampling.{field_.name}" for field_ in fields(Sampling)),
        "run_options",
        "seed",
        "backend",
        "precision",
    ],
    "run": ["checkpoint.every", "checkpoint.keep", "loggers"],
    "evaluation": ["evaluation.every", "evaluation.chains", "evaluation.tasks"],
    "training processes": ["optimizer.schedule", "optimizer.warmup_steps"],
    "refused": [
        "loss.observation_coef",
        "optimizer.critic_warmup_steps",
        "teacher.model",
        "teacher.base_url",
        "teacher.divergence",
        "teacher.coef",
        "teacher.reward_coef",
    ],
    "refused where they differ": ["optimizer.weight_decay", "async_training.on_stale", "vision.train_tower"],
}
"""The fields without a key of verl, by the part of our code that honors them."""


def settings(cluster: dict[str, Any] | None = None, device: Any = "cuda", **fields: Any) -> dict[str, Any]:
    config = TrainConfig(**fields)
    return build_settings(
        config, ClusterConfig(**(cluster or {})), device=device, model="/m", run=Path("/run"), context_length=1000
    )


STALE = {"async_training": {"max_staleness": 2, "on_stale": "drop"}, "loss": {"correction": "token-truncate"}}


def test_fields_reach_the_keys_of_verl() -> None:
    out = settings(
        {"nodes": 2, "gpus": 4},
        tasks_per_step=16,
        num_chains=4,
        steps=7,
        epochs=2,
        optimizer={"learning_rate": 3e-6, "max_grad_norm": 0.5},
        loss={"clip": (0.2, 0.3), "entropy_coef": 0.01, "aggregation": "sequence"},
        kl={"coef": 0.1, "estimator": "k2"},
        sampling={"temperature": 0.7, "max_tokens": 100},
    )
    assert out["trainer.nnodes"] == 2
    assert out["trainer.n_gpus_per_node"] == 4
    assert out["trainer.total_training_steps"] == 7
    assert out["data.train_batch_size"] == 16
    assert out["actor_rollout_ref.rollout.n"] == 4
    assert out["actor_rollout_ref.rollout.temperature"] == 0.7
    assert out["actor_rollout_ref.rollout.response_length"] == 100
    assert out["actor_rollout_ref.rollout.prompt_length"] == 900
    assert out["actor_rollout_ref.actor.optim.lr"] == 3e-6
    assert out["actor_rollout_ref.actor.optim.clip_grad"] == 0.5
    assert out["actor_rollout_ref.actor.ppo_epochs"] == 2
    assert out["actor_rollout_ref.actor.clip_ratio_high"] == 0.3
    assert out["actor_rollout_ref.actor.entropy_coeff"] == 0.01
    assert out["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-mean"
    assert out["actor_rollout_ref.actor.policy_loss.loss_mode"] == "agentfly-clip-token"
    assert out["actor_rollout_ref.actor.use_kl_loss"] is True
    assert out["actor_rollout_ref.actor.kl_loss_type"] == "k2"
    assert out["actor_rollout_ref.rollout.name"] == "vllm"
    assert out["trainer.v1.trainer_mode"] == "sync"
    assert "critic.model.path" not in out


def test_critic_and_kl_in_the_reward() -> None:
    out = settings(algorithm="ppo", kl={"coef": 0.1, "placement": "reward"}, optimizer={"critic_learning_rate": 1e-5})
    assert out["critic.optim.lr"] == 1e-5
    assert out["algorithm.adv_estimator"] == "gae"
    assert out["algorithm.use_kl_in_reward"] is True
    assert out["actor_rollout_ref.actor.use_kl_loss"] is False


def test_cpus_are_served_by_the_embedded_engine() -> None:
    out = settings(device="cpu")
    assert out["actor_rollout_ref.rollout.name"] == "agentfly"
    assert out["actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"] == "fp32"


def test_gpus_are_served_by_the_embedded_engine_where_it_is_asked_for() -> None:
    cluster = {"rollout_nodes": 1, "verl": {"actor_rollout_ref.rollout.name": "agentfly"}}
    for overrides, name, weights in ((cluster, "agentfly", "agentfly"), ({"rollout_nodes": 1}, "vllm", "nccl")):
        out = settings(overrides, **STALE)
        assert out["actor_rollout_ref.rollout.name"] == name
        assert out["actor_rollout_ref.rollout.checkpoint_engine.backend"] == weights
    with pytest.raises(ConfigError, match=r"^lora_rank=8 has no effect on verl"):
        settings(cluster, lora_rank=8, **STALE)


@pytest.mark.parametrize(
    ("cluster", "fields", "mode"),
    [({}, {}, "sync"), ({}, STALE, "colocate_async"), ({"rollout_nodes": 1}, STALE, "separate_async")],
)
def test_staleness_selects_the_mode(cluster: dict[str, Any], fields: dict[str, Any], mode: str) -> None:
    out = settings(cluster, **fields)
    assert out["trainer.v1.trainer_mode"] == mode == select_mode(TrainConfig(**fields), ClusterConfig(**cluster))
    if mode != "sync":
        assert out["trainer.v1.sampler.max_off_policy_threshold"] == 3


@pytest.mark.parametrize(
    ("name", "fields", "cluster", "device"),
    [
        ("backend='client'", {"backend": "client"}, {}, "cuda"),
        ("loss.ratio='turn'", {"loss": {"ratio": "turn"}}, {}, "cuda"),
        ("loss.observation_coef=0.1", {"loss": {"observation_coef": 0.1}}, {}, "cuda"),
        ("backend='vllm'", {"backend": "vllm"}, {}, "cpu"),
        ("backend.kv_memory", {"backend": {"backend": "transformers", "kv_memory": 5}}, {}, "cuda"),
        ("backend.device='cpu'", {"backend": {"backend": "transformers", "device": "cpu"}}, {}, "cuda"),
        ("precision='bfloat16'", {"precision": "bfloat16"}, {}, "cpu"),
        ("gpus=4", {"gpus": 4}, {}, "cuda"),
        ("lora_rank=8", {"lora_rank": 8}, {}, "cpu"),
        ("kl.coef=0.1", {"kl": {"coef": 0.1}}, {}, "cpu"),
        ("teacher.model='tiny'", {"teacher": {"model": "tiny"}}, {}, "cuda"),
        ("zero_variance='avoid'", {"zero_variance": "avoid"}, {}, "cuda"),
        ("optimizer.critic_warmup_steps", {"algorithm": "ppo", "optimizer": {"critic_warmup_steps": 2}}, {}, "cuda"),
        ("run_options.branching", {"run_options": {"branching": {"turn": 1, "branches": 2}}}, {}, "cuda"),
        ("zero_variance='resample'", {"zero_variance": "resample"}, {}, "cuda"),
        ("kl.target=0.1", {"kl": {"coef": 0.1, "target": 0.1}}, {}, "cuda"),
        ("optimizer.weight_decay=0.1", {"optimizer": {"weight_decay": 0.1}}, {}, "cuda"),
        ("run_options.max_concurrent_chains", {"run_options": {"max_concurrent_chains": 4}}, {}, "cuda"),
        (
            "async_training.on_stale='recompute'",
            {"async_training": {"max_staleness": 1}, "loss": {"correction": "token-mask"}},
            {},
            "cuda",
        ),
        ("rollout_nodes=1", {}, {"rollout_nodes": 1}, "cuda"),
    ],
)
def test_a_field_that_verl_cannot_honor_is_refused(
    name: str, fields: dict[str, Any], cluster: dict[str, Any], device: str
) -> None:
    with pytest.raises(ConfigError) as error:
        settings(cluster, device, **fields)
    assert str(error.value).startswith(f"{name} has no effect on verl")


def test_batches_are_padded_without_flash_attention() -> None:
    keys = ("actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.model.override_config.attn_implementation")
    common: dict[str, Any] = {"device": "cuda", "model": "m", "run": Path("run"), "context_length": 2048}
    out = build_settings(TrainConfig(), ClusterConfig(), **common)
    assert [out.get(key) for key in keys] == [True, None]
    out = build_settings(TrainConfig(), ClusterConfig(), **common, flash_attention=False)
    assert [out.get(key) for key in keys] == [False, "sdpa"]
    with pytest.raises(ConfigError, match="verl loads critics with flash-attn, which is not installed"):
        build_settings(TrainConfig(algorithm="ppo"), ClusterConfig(), **common, flash_attention=False)


def test_every_field_is_accounted_for() -> None:
    mapped = {*_FIELDS.values(), *(name for names in HONORED_BY_US.values() for name in names)}
    assert set(TrainConfig().flat()) <= mapped
    assert ClusterConfig.split({"verl.trainer.project_name": "mine"})[0].verl == {"trainer.project_name": "mine"}


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("actor_rollout_ref.actor.optim.lr", "this key is set by a field; write optimizer.learning_rate=…"),
        ("+actor_rollout_ref.rollout.n", "this key is set by a field; write num_chains=…"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "this key is set by a field; write micro_batch_tokens=…"),
        ("trainer.nnodes", "this key is set by a field; write nodes=…"),
        ("algorithm.adv_estimator", "this key is set by a field; write algorithm=…"),
        ("algorithm.gamma", "training with --on verl sets this key itself; leave it out"),
        ("trainer.default_local_dir", "training with --on verl sets this key itself; leave it out"),
    ],
)
def test_raw_key_that_a_field_sets_is_refused(key: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        ClusterConfig.split({f"verl.{key}": 5})
    assert str(error.value) == f"verl.{key}=5: {problem}"


def test_overrides_of_the_cluster_are_split_off() -> None:
    overrides = {"nodes": 2, "gpus": 4, "steps": 3, "verl.trainer.balance_batch": False, "loss.type": "cispo"}
    cluster, remaining = ClusterConfig.split(overrides)
    assert (cluster.nodes, cluster.gpus) == (2, 4)
    assert cluster.verl == {"trainer.balance_batch": False}
    assert remaining == {"steps": 3, "loss.type": "cispo"}
    assert ClusterConfig.split(cluster.to_json())[0] == cluster


@pytest.mark.parametrize(("name", "value"), [("nodes", 0), ("gpus", "many"), ("restarts", -1), ("workers", True)])
def test_sizes_of_the_cluster_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be a (whole )?number"):
        ClusterConfig.split({name: value})
