"""The critic: the value before each token, and its training."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'agentfly-rl[train]'")

from agentfly.errors import NonFiniteError, RecordError  # noqa: E402
from agentfly.training.local_learner import LocalLearner  # noqa: E402
from agentfly.training.lora import add_lora  # noqa: E402
from tests.backends.engine.test_architectures import PACKED, PLAIN, build_model  # noqa: E402
from tests.backends.engine.tiny import model_of  # noqa: E402
from tests.training.pieces import make_learner, piece, sample, samples  # noqa: E402

LENGTHS = (30, 5, 17)
UNMOVED = 1e-45
"""A learning rate that changes no weight."""


def learner_of(model: Any, **settings: Any) -> LocalLearner:
    return make_learner(model, **{"critic": True, "learning_rate": UNMOVED, "critic_learning_rate": 1e-2, **settings})


def test_values_are_initially_zero_and_defined_before_sampled_tokens() -> None:
    learner, batch = learner_of(model_of()), samples(*LENGTHS)
    assert all((values == 0).all() for values in learner.values([sample.segment for sample in batch]))
    learner.update(batch)
    segments = [member.segment for member in batch]
    for segment, values in zip(segments, learner.values(segments), strict=True):
        np.testing.assert_array_equal(values != 0, segment.mask)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "gpt2", "opt", "gpt_neo", "bloom", "llama4_text"])
def test_critic_learns_returns_with_any_model(family: str) -> None:
    learner, batch = learner_of(build_model(family, {**PACKED, **PLAIN}[family])), samples(*LENGTHS)
    losses = [learner.update(batch)["critic/loss"] for _ in range(25)]
    assert losses[-1] < losses[0] / 4
    expected = np.concatenate([sample.returns[sample.segment.mask] for sample in batch if sample.returns is not None])
    assert losses[0] == pytest.approx(float((expected**2).mean() / 2), rel=1e-5)


def test_a_value_is_of_the_state_before_the_token() -> None:
    learner, of = learner_of(model_of()), piece(20)
    learner.update(samples(*LENGTHS))
    at = int(np.flatnonzero(of.mask)[1])
    before = learner.values([of])[0]
    for changed, same in ((at, True), (at - 1, False)):
        tokens = of.tokens.copy()
        tokens[changed] = (tokens[changed] + 1) % 300
        after = learner.values([replace(of, tokens=tokens)])[0]
        assert (abs(after[at] - before[at]) < 1e-6) == same


def test_critic_warmup_updates_the_critic_alone() -> None:
    model, batch = model_of(), samples(*LENGTHS)
    learner = learner_of(model, learning_rate=1e-2, critic_warmup_steps=2)
    segments = [sample.segment for sample in batch]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        metrics = learner.update(batch)
        assert metrics["critic/grad_norm"] > 0
        assert "policy/grad_norm" not in metrics
    assert all(map(torch.equal, before, model.parameters()))
    assert any(values.any() for values in learner.values(segments))
    resumed = learner_of(model, learning_rate=1e-2, critic_warmup_steps=2)
    resumed.load_state_dict(*learner.state_dict())
    for trained in (learner, resumed):
        assert trained.update(batch)["policy/grad_norm"] > 0
    assert not all(map(torch.equal, before, model.parameters()))


def test_the_policy_is_not_moved_by_the_critic_nor_the_critic_by_the_policy() -> None:
    model = model_of()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    learner = learner_of(model)
    learner.update(samples(*LENGTHS))
    assert all(torch.equal(parameter, was) for parameter, was in zip(model.parameters(), before, strict=True))
    other = learner_of(model, learning_rate=1e-2, critic_learning_rate=UNMOVED)
    other.update(samples(*LENGTHS))
    assert not any(values.any() for values in other.values([piece(20)]))
    assert not torch.equal(next(model.parameters()), before[0])


@pytest.mark.parametrize("budget", [1, 40])
def test_micro_batches_add_up(budget: int) -> None:
    whole, parts = learner_of(model_of()), learner_of(model_of(), micro_batch_tokens=budget)
    for _ in range(2):
        one, other = whole.update(samples(*LENGTHS)), parts.update(samples(*LENGTHS))
        assert one["critic/loss"] == pytest.approx(other["critic/loss"], rel=1e-5)
        assert one["critic/grad_norm"] == pytest.approx(other["critic/grad_norm"], rel=1e-4)


def test_critic_shares_the_frozen_weights_of_a_model_with_adapters() -> None:
    pytest.importorskip("peft", reason="LoRA needs peft: pip install 'agentfly-rl[train]'")
    model = add_lora(model_of(), 4)
    learner = learner_of(model)
    assert learner._critic is not None
    critic_weights = {id(parameter) for parameter in learner._critic.backbone.model.parameters()}
    assert all(
        (id(parameter) in critic_weights) != parameter.requires_grad
        for name, parameter in model.named_parameters()
        if "lm_head" not in name
    )
    losses = [learner.update(samples(*LENGTHS))["critic/loss"] for _ in range(25)]
    assert losses[-1] < losses[0] / 2


def test_missing_or_non_finite_returns_are_reported() -> None:
    learner = learner_of(model_of())
    with pytest.raises(RecordError, match="sample 0/0#0 has no returns"):
        learner.update(samples(5, returns=None))
    bad = sample(9, 4, returns=np.full(9, np.inf, np.float32))
    with pytest.raises(NonFiniteError, match=r"the critic's loss is inf: look at the samples 4/0#0"):
        learner.update([bad])
    assert not learner.values([piece(20)])[0].any()
