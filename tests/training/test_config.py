"""The configuration: wrong fields are rejected by name, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any, get_args, get_origin

import pytest

from agentfly.algorithms import ALGORITHMS, GRPO, PPO
from agentfly.environment import Pool
from agentfly.errors import ConfigError
from agentfly.training.config import TrainConfig, parse_overrides, validate_overrides
from agentfly.training.config_records import NESTED, UpdateConfig, WarmStart
from agentfly.types import Sampling


def test_there_are_at_most_forty_fields() -> None:
    assert len(fields(TrainConfig)) <= 40


def test_nested_records_have_at_most_eight_fields() -> None:
    assert all(len(fields(cls)) <= 8 for cls in NESTED.values())


def test_earlier_field_name_is_rejected_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"write optimizer\.learning_rate"):
        TrainConfig(learning_rate=1e-5)  # type: ignore[call-arg]


def test_records_may_be_given_as_names_and_mappings() -> None:
    config = TrainConfig(algorithm="ppo", sampling={"temperature": 0.7}, loss={"clip": [0.2, 0.3]})  # type: ignore[arg-type]
    assert config.algorithm == PPO()
    assert config.sampling == Sampling(temperature=0.7)
    assert config.loss.clip == (0.2, 0.3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rat": 1}, "close ones: optimizer.learning_rate"),
        ({"optimizer.learning_rate": "fast"}, "optimizer.learning_rate must be a number, not 'fast'"),
        ({"optimizer.learning_rate": 0}, "optimizer.learning_rate must be a number above 0, not 0"),
        ({"optimizer.learning_rate": 5}, "optimizer.learning_rate=5 destroys any model"),
        ({"algorithm": "ppo", "optimizer.critic_learning_rate": 5}, "critic_learning_rate=5 destroys any model"),
        ({"lr": 1e-6}, "write optimizer.learning_rate"),
        ({"kl_coef": 0.1}, "write kl.coef"),
        ({"beta": 0.1}, "write kl.coef"),
        ({"batch_size": 8}, "write tasks_per_step"),
        ({"max_prompt_length": 512}, "write run_options.context_length"),
        ({"num_generations": 8}, "write num_chains"),
        ({"gamma": 0.99}, "write algorithm.gamma"),
        ({"max_completion_length": 512}, "write sampling.max_tokens"),
        ({"actor_rollout_ref.rollout.n": 8}, "write num_chains"),
        ({"rollout.n": 8}, "write num_chains"),
        ({"actor_rollout_ref.actor.optim.lr": 1e-6}, "write optimizer.learning_rate"),
        ({"actor_rollout_ref.rollout.temperature": 0.7}, "write sampling.temperature"),
        ({"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4}, "write micro_batch_tokens"),
        ({"algorithm.kl_ctrl.kl_coef": 0.1}, "Write kl.coef"),
        ({"algorithm.adv_estimator": "gae"}, "Write algorithm"),
        ({"optimizer.lr": 1e-6}, "Write optimizer.learning_rate"),
        ({"trainer.total_epochs": 3}, "write steps"),
        ({"trainer.seed": 3}, "write seed"),
        ({"max_model_len": 3}, "write run_options.context_length"),
        ({"steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ({"steps": 1.5}, "steps must be a whole number, not 1.5"),
        ({"loss.type": "clipp"}, "loss.type must be 'clip', 'cispo' or 'plain', not 'clipp'"),
        ({"mini_batches": 3}, "8 tasks × 8 chains are 64 chains a step"),
        ({"num_chains": 1}, "compares the chains of a task"),
        ({"optimizer.warmup_steps": 100}, "leaves none of steps=100"),
        ({"algorithm": "ppo", "optimizer.critic_warmup_steps": 100}, "leaves none of steps=100 to the policy"),
        (
            {"async_training.max_staleness": 1, "loss.correction": "token-mask", "zero_variance": "avoid"},
            "zero_variance='avoid' needs finished steps",
        ),
        (
            {"run_options.branching": {"turn": 1, "branches": 2}, "algorithm": "gigpo"},
            "run_options.branching does not work with algorithm=GiGPO",
        ),
        (
            {"run_options.branching": {"turn": 1, "branches": 2}, "teacher.model": "tiny"},
            "run_options.branching does not work with teacher.model='tiny'",
        ),
        ({"run_options.branching": {"turn": 10, "branches": 2}}, "chains have at most 10"),
        (
            {"algorithm": "gdpo", "zero_variance": "skip"},
            "zero_variance='skip' is about the sum of rewards in each turn",
        ),
        ({"algorithm": "gdpo", "kl.coef": 0.1, "kl.placement": "reward"}, "kl.placement='reward' is about the sum"),
        ({"loss.clip": (0.2,)}, "loss.clip is [low, high]"),
        ({"loss.clip": (2.0, 0.2)}, "loss.clip is [low, high]"),
        ({"loss.clip": (0.2, 0.2, 0.5)}, "dual above 1 + high"),
        ({"loss.clip": (0.2, 0.2, 3.0, 4.0)}, "loss.clip is [low, high]"),
        ({"loss.entropy_coef": float("nan")}, "loss.entropy_coef must be a finite number, not nan"),
        ({"kl.coef": -0.1}, "kl.coef must be a number of at least 0, not -0.1"),
        ({"optimizer.weight_decay": -1.0}, "optimizer.weight_decay must be a number of at least 0"),
        ({"optimizer.learning_rate": float("inf")}, "optimizer.learning_rate must be a finite number, not inf"),
        ({"steps": True}, "steps must be a number, not True"),
        ({"learning_rate": 1e-5}, "write optimizer.learning_rate"),
        ({"teacher": "tiny"}, "write teacher.model='tiny'"),
        ({"teacher.model": "tiny", "teacher.coef": 0.0}, "teacher.coef must be a number above 0"),
        ({"teacher.model": "tiny", "teacher.reward_coef": 1.0, "num_chains": 1}, "compares the chains of a task"),
        (
            {"teacher.model": "tiny", "teacher.base_url": "http://localhost:8000/v1", "sampling.temperature": 0.7},
            "write sampling.temperature=1",
        ),
        (
            {"teacher.model": "m", "teacher.base_url": "http://localhost:8000/v1", "teacher.divergence": "exact"},
            "a server returns log-probabilities of sampled tokens only: write teacher.divergence=sampled",
        ),
        (
            {"teacher.model": "tiny", "teacher.divergence": "reverse"},
            "teacher.divergence must be 'exact' or 'sampled', not 'reverse'",
        ),
        ({"kl": 0.1}, "write kl.coef=0.1"),
        ({"loss": "cispo"}, "write loss.type='cispo'"),
        ({"loss.type": "gspo"}, "loss.type='gspo' is loss.ratio=segment"),
        ({"loss.type": "plain", "loss.ratio": "turn"}, "loss.ratio='turn' would have no effect"),
        ({"optimizer.learning_rat": 1}, "Did you mean 'learning_rate'?"),
        ({"loss.correction": "bogus"}, "there are token-truncate"),
        ({"run_options": {"strategy": "bogus"}}, "'chain' and 'step'"),
        ({"run_options": {"max_chain_tokens": -3}}, "max_chain_tokens must be"),
        ({"algorithm": "ppo", "algorithm.lam": "x"}, "PPO: lam must be a number, not 'x'"),
        ({"algorithm": "gpro"}, "grpo"),
        ({"algorithm.lam": 0.9}, "GRPO has no 'lam'"),
        ({"sampling.temprature": 0.9}, "temperature"),
        ({"sampling": {"temprature": 0.9}}, "Did you mean 'temperature'?"),
        ({"sampling.seed": 3}, "write seed="),
        ({"sampling.temperature": 0.0}, "temperature must be above 0"),
        ({"run_options": {"max_turn": 3}}, "run_options has 'max_turn'"),
        ({"run_options": {"seed": 3}}, "run_options has 'seed'"),
        ({"model.size": 3}, "model='tiny' has nothing inside"),
        ({"loss.aggregation": "constant", "sampling.max_tokens": None}, "give sampling.max_tokens"),
        ({"async_training.max_staleness": -1}, "async_training.max_staleness must be a whole number of at least 0"),
        ({"async_training": True}, "write async_training.max_staleness=…"),
        ({"async_training.max_staleness": 1}, "write loss.correction=token-truncate"),
        (
            {
                "async_training.max_staleness": 1,
                "loss.correction": "token-mask",
                "backend": {"backend": "transformers", "on_update": "abort"},
            },
            "write backend.on_update=continue",
        ),
    ],
)
def test_invalid_values_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig().override(changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl.estimator": "k1"}, "kl.coef is 0"),
        ({"async_training.on_stale": "drop"}, "async_training.max_staleness is 0"),
        ({"kl.placement": "reward"}, "kl.coef is 0"),
        ({"kl.target": 0.1}, "kl.coef is 0"),
        ({"loss.type": "plain", "loss.clip": (0.1, 0.1)}, "clips nothing"),
        ({"loss.type": "cispo", "loss.clip": (0.1, 0.1, 3.0)}, "no dual clip"),
        ({"loss.correction_cap": 3.0}, "there is no correction"),
        ({"teacher.coef": 2.0}, "there is no teacher.model"),
        ({"teacher.divergence": "sampled"}, "there is no teacher.model"),
        ({"teacher.model": "tiny", "loss.type": "cispo"}, "the exact divergence to the teacher is the loss"),
        ({"teacher.model": "tiny", "loss.clip": (0.2, 0.3)}, "the exact divergence to the teacher is the loss"),
        ({"teacher.model": "tiny", "loss.correction": "token-mask"}, "the exact divergence to the teacher is the loss"),
        ({"teacher.base_url": "http://localhost:8000/v1"}, "there is no teacher.model"),
        ({"teacher.model": "tiny", "algorithm": "rloo"}, "teacher.reward_coef is 0"),
        ({"teacher.model": "tiny", "zero_variance": "skip"}, "teacher.reward_coef is 0"),
        ({"teacher.model": "tiny", "kl.coef": 0.1, "kl.placement": "reward"}, "teacher.reward_coef is 0"),
        ({"optimizer.critic_learning_rate": 1e-4}, "has no critic"),
        ({"optimizer.critic_warmup_steps": 3}, "has no critic"),
    ],
)
def test_field_without_effect_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="would have no effect") as caught:
        TrainConfig().override(changes)
    assert message in str(caught.value)


def test_fields_with_an_effect_are_accepted() -> None:
    config = TrainConfig().override(
        {
            "kl.coef": 0.1,
            "kl.estimator": "k2",
            "kl.target": 0.1,
            "algorithm": "ppo",
            "optimizer.critic_learning_rate": 1e-4,
        }
    )
    assert config.optimizer.critic_learning_rate == 1e-4


def test_command_line_overrides_fields_and_nested_fields() -> None:
    typed = ["algorithm=ppo", "algorithm.lam=0.9", "sampling.temperature=0.8", "lora_rank=None", "loss.clip=[0.2,0.28]",
             "backend.max_rows=32", "run_options.max_chain_tokens=99"]  # fmt: skip
    config = TrainConfig().override(parse_overrides(typed))
    assert config.algorithm == PPO(lam=0.9)
    assert config.sampling.temperature == 0.8
    assert (config.lora_rank, config.loss.clip) == (None, (0.2, 0.28))
    assert config.backend == {"backend": "transformers", "max_rows": 32}
    assert config.run_options == {"max_chain_tokens": 99}


@pytest.mark.parametrize(
    "text",
    ['("console", "wandb")', '("console","wandb")', "['console', 'wandb']", '["console", "wandb"]', "console,wandb"],
)
def test_loggers_may_be_written_as_in_python(text: str) -> None:
    pytest.importorskip("wandb")
    assert TrainConfig().override(parse_overrides([f"loggers={text}"])).loggers == ("console", "wandb")


def test_text_that_is_no_literal_stays_text() -> None:
    texts = ["(draft) model", "[unclosed", "1_000"]
    assert [parse_overrides([f"model={text}"])["model"] for text in texts] == texts


RECORDS = [TrainConfig, *NESTED.values(), UpdateConfig, WarmStart, *dict.fromkeys(ALGORITHMS.values())]


@pytest.mark.parametrize("record", [cls for cls in RECORDS if fields(cls)], ids=lambda cls: cls.__name__)
def test_every_number_declares_its_bounds(record: Any) -> None:
    for name, info in record.__pydantic_fields__.items():
        types = {info.annotation} | (set() if get_origin(info.annotation) is tuple else set(get_args(info.annotation)))
        assert not types & {int, float} or info.metadata, f"{record.__name__}.{name} has no bounds"


@pytest.mark.parametrize("record", [Sampling, Pool], ids=lambda cls: cls.__name__)
def test_every_number_of_a_plain_dataclass_declares_its_bounds(record: Any) -> None:
    for field in fields(record):
        is_number = {"int", "float"} & set(str(field.type).split(" | ")) and field.name != "seed"
        assert not is_number or "fits" in field.metadata, f"{record.__name__}.{field.name} has no bounds"


def test_fields_that_the_recipe_may_complete_pass_the_first_check() -> None:
    validate_overrides({"mini_batches": 3, "optimizer.warmup_steps": 500, "algorithm.lam": 0.9, "kl.estimator": "k1"})
    with pytest.raises(ConfigError, match=r"kl\.coef must be a number of at least 0, not -1"):
        validate_overrides({"kl.coef": -1})


def test_override_without_a_value_is_rejected() -> None:
    with pytest.raises(ConfigError, match="write field=value"):
        parse_overrides(["learning_rate"])


def test_the_effective_configuration_is_json() -> None:
    kept = json.loads(json.dumps(TrainConfig(algorithm=GRPO(), sampling=Sampling(max_tokens=8)).to_json()))
    assert kept["algorithm"]["name"] == "GRPO"
    assert kept["sampling"]["max_tokens"] == 8
    assert set(kept) == {field.name for field in fields(TrainConfig)}


def test_reading_a_configuration_imports_no_torch() -> None:
    code = "import sys; from agentfly.training import TrainConfig; TrainConfig(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
