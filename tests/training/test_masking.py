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
from tests.backends.engine.test_architectures import PLAIN, build_model  # noqa: E402
from tests.backends.engine.tiny import model_of  # noqa: E402
from tests.training.pieces import make_learner, samples  # noqa: E402

LENGTHS = (30, 5, 17)


@pytest.fixture(params=["packed", "padded"])
def model(request: pytest.FixtureRequest) -> Any:
    return model_of() if request.param == "packed" else build_model("gpt_neo", PLAIN["gpt_neo"])


def learner_of(model: Any) -> LocalLearner:
    return make_learner(model, loss=Loss(entropy_coef=0.1), learning_rate=1e-3)


def gradient_norms(model: Any, batch: list[Sample]) -> Tensor:
    """The norm of the gradient that each place of the batch gets from the head: [row, place]."""
    caught: list[Tensor] = []

    def watch(_: Any, __: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: caught.append(grad.norm(dim=-1)))

    last = model.model.norm if hasattr(model, "model") else model.transformer.ln_f
    last.register_forward_hook(watch)
    learner_of(model).update(batch)
    return caught[0]


def test_head_gets_gradient_only_before_sampled_tokens(model: Any) -> None:
    batch = sorted(samples(*LENGTHS), key=lambda sample: -len(sample.segment.tokens))  # as they lie in the batch
    got = gradient_norms(model, batch)
    masks = [sample.segment.mask[1 : np.flatnonzero(sample.segment.mask)[-1] + 1] for sample in batch]
    if len(got) == 1:
        expected = np.concatenate(masks)[None]
    else:
        expected = np.stack([np.pad(row, (0, got.shape[1] - len(row))) for row in masks])
    np.testing.assert_array_equal((got > 0).numpy(), expected)


def test_tokens_after_the_last_sampled_one_change_nothing(model: Any) -> None:
    batch = samples(*LENGTHS)
    changed = [
        replace(
            sample,
            segment=replace(
                sample.segment, tokens=np.where(is_after_last_sample(sample), 7, sample.segment.tokens).astype(np.int32)
            ),
        )
        for sample in batch
    ]
    assert any((one.segment.tokens != other.segment.tokens).any() for one, other in zip(batch, changed, strict=True))
    assert measure_update(model, batch) == measure_update(model, changed)


def is_after_last_sample(sample: Sample) -> np.ndarray[Any, Any]:
    return np.arange(len(sample.segment.tokens)) > np.flatnonzero(sample.segment.mask)[-1]


def measure_update(model: Any, batch: list[Sample]) -> dict[str, float]:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    figures = learner_of(model).update(batch)
    moved = sum(
        float((parameter.detach() - was).double().abs().sum())
        for parameter, was in zip(model.parameters(), before, strict=True)
    )
    with torch.no_grad():
        for parameter, was in zip(model.parameters(), before, strict=True):
            parameter.copy_(was)
    return {"moved": moved, **{name: value for name, value in figures.items() if "seconds" not in name}}


def test_values_at_unsampled_tokens_change_nothing(model: Any) -> None:
    """Even where somebody forgot to put 0 there."""
    batch = samples(*LENGTHS)
    dirty = [
        replace(
            sample,
            advantages=np.where(sample.segment.mask, sample.advantages, np.nan).astype(np.float32),
            segment=replace(
                sample.segment, logprobs=np.where(sample.segment.mask, sample.segment.logprobs, -99).astype(np.float32)
            ),
        )
        for sample in batch
    ]
    assert measure_update(model, batch) == measure_update(model, dirty)


def test_no_sequence_sees_another(model: Any) -> None:
    batch = samples(*LENGTHS)
    alone = learner_of(model).score([batch[1].segment], 1.0)[0]
    other = replace(batch[0].segment, tokens=np.full(30, 9, np.int32))
    for company in ([batch[0].segment, batch[2].segment], [other, other]):
        got = learner_of(model).score([company[0], batch[1].segment, company[1]], 1.0)[1]
        np.testing.assert_allclose(got, alone, atol=1e-5)
