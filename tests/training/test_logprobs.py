"""Chunked log-probabilities compared with the plain forward pass: the same values and gradients in less memory."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'agentfly-rl[train]'")

import numpy as np  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from agentfly.algorithms.base import SegmentArrays  # noqa: E402
from agentfly.segment import Floats  # noqa: E402
from agentfly.training import logprobs  # noqa: E402
from agentfly.training.logprobs import Head, score, score_logits  # noqa: E402
from agentfly.training.model import Policy  # noqa: E402
from tests.backends.engine.test_architectures import PACKED, PLAIN, build_model  # noqa: E402
from tests.backends.engine.tiny import model_of  # noqa: E402
from tests.training.pieces import piece  # noqa: E402

PIECES = [piece(length, seed=1) for length in (30, 5, 17, 2)]


def plain(model: Any, pieces: list[SegmentArrays], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of sampled tokens, sequence by sequence, by the book."""
    out, entropies = [], []
    for segment in pieces:
        logits = model(torch.tensor(segment.tokens)[None].long()).logits[0, :-1].float() / temperature
        logs = logits.log_softmax(-1)[torch.tensor(segment.mask[1:])]
        out.append(logs.gather(1, torch.tensor(segment.tokens[segment.mask]).long()[:, None])[:, 0])
        entropies.append(-(logs.exp() * logs).sum(-1))
    return torch.cat(out), torch.cat(entropies)


def per_token(pieces: list[SegmentArrays], temperatures: list[float]) -> Floats:
    """The temperature of every sampled token, for one of each segment."""
    return np.repeat(np.array(temperatures), [int(segment.mask.sum()) for segment in pieces])


def gradients(model: Any, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *((family, False) for family in (*PACKED, *PLAIN)),
        *((family, True) for family in ("gemma2", "mixtral", "bloom")),
    ],
)
def test_batched_logprobs_equal_a_plain_forward_pass(family: str, recompute: bool) -> None:
    model = build_model(family, {**PACKED, **PLAIN}[family])
    policy = Policy(model, gradient_checkpointing=recompute)
    assert policy.backbone.packed == (family in PACKED)
    expected, spread = plain(model, PIECES, 0.7)
    got, entropies = policy(PIECES, per_token(PIECES, [0.7] * 4))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, spread, atol=1e-5, rtol=1e-5)
    pull = torch.randn(2, len(expected), generator=torch.Generator().manual_seed(0))
    expected_gradients = gradients(model, (pull[0] * expected + pull[1] * spread).sum())
    actual_gradients = gradients(model, (pull[0] * got + pull[1] * entropies).sum())
    torch.testing.assert_close(
        actual_gradients, expected_gradients, rtol=1e-4, atol=1e-5 * float(expected_gradients.abs().max())
    )


@pytest.mark.parametrize(("scale", "softcap", "biased"), [(1.0, None, False), (0.5, None, True), (2.0, 3.0, True)])
def test_gradient_equals_finite_differences(scale: float, softcap: float | None, biased: bool) -> None:
    torch.manual_seed(0)
    shapes = ((5, 4), (7, 4), (7,))
    hidden, weight, bias = (torch.randn(shape, dtype=torch.double) for shape in shapes)
    teacher_hidden, teacher_weight = torch.randn(5, 3, dtype=torch.double), torch.randn(9, 3, dtype=torch.double)
    tokens, heat = torch.randint(0, 7, (5,)), torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.double)
    logprobs.LOGITS["cpu"], before = 28, logprobs.LOGITS["cpu"]  # four rows at a time, two with a teacher

    def score_inputs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = Head(weight, bias if biased else None, scale, softcap)
        return torch.stack(score(hidden, head, tokens, heat)[:2])

    def score_with_teacher(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = Head(weight, bias if biased else None, scale, softcap)
        teacher = teacher_hidden, Head(teacher_weight, None, scale, softcap)
        return torch.stack(score(hidden, head, tokens, heat, teacher))

    try:
        inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
        assert torch.autograd.gradcheck(score_inputs, inputs)
        head = Head(weight, bias if biased else None, scale, softcap)
        expected = torch.stack(score_logits(head.logits(hidden), tokens, heat))
        torch.testing.assert_close(score_inputs(*inputs), expected)
        assert torch.autograd.gradcheck(score_with_teacher, inputs)
        student_logprobs = (head.logits(hidden) / heat.where(heat > 0, 1)[:, None]).log_softmax(-1)
        # The teacher's last two rows pad its vocabulary.
        teacher_logprobs = Head(teacher_weight[:7], None, scale, softcap).logits(teacher_hidden)
        teacher_logprobs = (teacher_logprobs / heat.where(heat > 0, 1)[:, None]).log_softmax(-1)
        divergence = (student_logprobs.exp() * (student_logprobs - teacher_logprobs)).sum(-1)
        torch.testing.assert_close(score_with_teacher(*inputs), torch.cat([expected, divergence[None]]))
    finally:
        logprobs.LOGITS["cpu"] = before


def test_a_temperature_is_respected_sequence_by_sequence() -> None:
    model = model_of()
    scores = Policy(model)(PIECES, per_token(PIECES, [0.5, 1.0, 2.0, 0.0]))[0]
    scores = scores.split([int(segment.mask.sum()) for segment in PIECES])
    for segment, segment_scores, heat in zip(PIECES, scores, (0.5, 1.0, 2.0, 1.0), strict=True):
        torch.testing.assert_close(segment_scores, plain(model, [segment], heat)[0], atol=1e-5, rtol=1e-5)


def test_a_head_with_adapters_is_scored_with_them() -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft: pip install 'agentfly-rl[train]'")
    model = peft.get_peft_model(model_of(), peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    got, expected = Policy(model)(PIECES, per_token(PIECES, [1.0] * 4))[0], plain(model, PIECES, 1.0)[0]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    expected_gradients, actual_gradients = gradients(model, expected.sum()), gradients(model, got.sum())
    torch.testing.assert_close(
        actual_gradients, expected_gradients, rtol=1e-4, atol=1e-5 * float(expected_gradients.abs().max())
    )


def test_softcapped_head_in_bfloat16_is_plain() -> None:
    softcap = {"final_logit_softcapping": 3.0}  # low enough for the logits to reach it
    model = build_model("gemma2", {**PACKED["gemma2"], **softcap}).to(torch.bfloat16)
    assert Policy(model).has_plain_head


def test_head_is_tried_without_compiling_a_model_in_host_memory_that_will_compute_on_a_gpu() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    assert Policy(model_of(seed=0), torch.device("cuda")).has_plain_head
    assert not counters["frames"]


def test_custom_logits_are_scored() -> None:
    model = model_of()
    model.lm_head.register_forward_hook(lambda _, __, out: out * 0.3 + 0.1 * out.sin())
    policy = Policy(model)
    got, expected = policy(PIECES, per_token(PIECES, [1.0] * 4)), plain(model, PIECES, 1.0)
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Sees every tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_logits_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, words = 200, 8, 500
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    targets, heat = torch.from_numpy(np.arange(tokens)), torch.ones(tokens)

    def largest(teacher: tuple[Tensor, Head] | None = None) -> int:
        with Largest() as seen:
            torch.stack(score(hidden, Head(weight), targets, heat, teacher)).sum().backward()
        return seen.numbers

    assert largest() == tokens * words
    monkeypatch.setitem(logprobs.LOGITS, "cpu", 20 * words)
    assert largest() == 20 * words
    assert largest((hidden.detach(), Head(weight.detach()))) == 10 * words
