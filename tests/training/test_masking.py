"""Tokens that the model did not sample carry no loss: checked by gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'agentfly-rl[train]'")

from torch import Tensor  # noqa: E402

from agentfly.algorithms.loss import Loss  # noqa: E402
from agentfly.training.batch import Sample  # noqa: E402
from agentfly.training.local_learner import LocalLearner  # noqa: E402
from tests.backends.engine.test_architectures import PLAIN, built  # noqa: E402
from tests.backends.engine.tiny import model_of  # noqa: E402
from tests.training.pieces import make_learner, samples  # noqa: E402

LENGTHS = (30, 5, 17)


@pytest.fixture(params=["packed", "padded"])
def model(request: pytest.FixtureRequest) -> Any:
    return model_of() if request.param == "packed" else built("gpt_neo", PLAIN["gpt_neo"])


def learner_of(model: Any) -> LocalLearner:
    return make_learner(model, loss=Loss(entropy_coef=0.1), learning_rate=1e-3)


def pulled(model: Any, given: list[Sample]) -> Tensor:
    """The norm of the gradient that each place of the batch gets from the head: [row, place]."""
    caught: list[Tensor] = []

    def watch(_: Any, __: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: caught.append(grad.norm(dim=-1)))

    last = model.model.norm if hasattr(model, "model") else model.transformer.ln_f
    last.register_forward_hook(watch)
    learner_of(model).update(given)
    return caught[0]


def test_head_gets_gradient_only_before_sampled_tokens(model: Any) -> None:
    given = sorted(samples(*LENGTHS), key=lambda each: -len(each.segment.tokens))  # as they lie in the batch
    got = pulled(model, given)
    asked = [each.segment.mask[1 : np.flatnonzero(each.segment.mask)[-1] + 1] for each in given]
    if len(got) == 1:
        expected = np.concatenate(asked)[None]
    else:
        expected = np.stack([np.pad(each, (0, got.shape[1] - len(each))) for each in asked])
    np.testing.assert_array_equal((got > 0).numpy(), expected)


def test_tokens_after_the_last_sampled_one_change_nothing(model: Any) -> None:
    given = samples(*LENGTHS)
    changed = [
        replace(
            each, segment=replace(each.segment, tokens=np.where(after(each), 7, each.segment.tokens).astype(np.int32))
        )
        for each in given
    ]
    assert any((one.segment.tokens != other.segment.tokens).any() for one, other in zip(given, changed, strict=True))
    assert updated(model, given) == updated(model, changed)


def after(each: Sample) -> np.ndarray[Any, Any]:
    return np.arange(len(each.segment.tokens)) > np.flatnonzero(each.segment.mask)[-1]


def updated(model: Any, given: list[Sample]) -> dict[str, float]:
    before = [each.detach().clone() for each in model.parameters()]
    figures = learner_of(model).update(given)
    moved = sum(
        float((each.detach() - was).double().abs().sum()) for each, was in zip(model.parameters(), before, strict=True)
    )
    with torch.no_grad():
        for each, was in zip(model.parameters(), before, strict=True):
            each.copy_(was)
    return {"moved": moved, **{name: each for name, each in figures.items() if "seconds" not in name}}


def test_values_at_unsampled_tokens_change_nothing(model: Any) -> None:
    """Even where somebody forgot to put 0 there."""
    given = samples(*LENGTHS)
    dirty = [
        replace(
            each,
            advantages=np.where(each.segment.mask, each.advantages, np.nan).astype(np.float32),
            segment=replace(
                each.segment, logprobs=np.where(each.segment.mask, each.segment.logprobs, -99).astype(np.float32)
            ),
        )
        for each in given
    ]
    assert updated(model, given) == updated(model, dirty)


def test_no_sequence_sees_another(model: Any) -> None:
    given = samples(*LENGTHS)
    alone = learner_of(model).score([given[1].segment], 1.0)[0]
    other = replace(given[0].segment, tokens=np.full(30, 9, np.int32))
    for company in ([given[0].segment, given[2].segment], [other, other]):
        got = learner_of(model).score([company[0], given[1].segment, company[1]], 1.0)[1]
        np.testing.assert_allclose(got, alone, atol=1e-5)
