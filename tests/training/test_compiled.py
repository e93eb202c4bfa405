"""What the learner compiles on a GPU, here compiled for the CPU: the gradients are those without compiling."""

import shutil
from functools import partialmethod
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from agentfly.backends.engine.model_runner import compile_layers
from agentfly.training import logprobs
from agentfly.training.lora import add_lora
from tests.backends.engine.tiny import model_of
from tests.training.pieces import make_learner, samples

pytestmark = [
    pytest.mark.slow_smoke,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: g++"),
]


def gradients(*, compiled: bool, checkpointing: bool) -> dict[str, torch.Tensor]:
    """The gradients of one update over padded rows, as on a GPU."""
    learner = make_learner(model_of(), gradient_checkpointing=checkpointing)
    backbone = learner._policy.backbone
    backbone.packed = False
    backbone.model.set_attn_implementation("sdpa")
    learner._runner._padded = True
    if compiled:
        compile_layers(backbone.model)
    captured: dict[str, torch.Tensor] = {}

    def keep_gradients(update: int) -> float:
        captured.update({name: weight.grad.clone() for name, weight in learner.trainable_weights.items()})  # type: ignore[union-attr]
        return 0.0

    learner._optimizer.step = keep_gradients  # type: ignore[method-assign]
    learner.update(samples(9, 17, 30, 12))
    return captured


def test_compiled_layers_and_head_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {flag: gradients(compiled=False, checkpointing=flag) for flag in (False, True)}
    fused: dict[Any, Any] = {}

    def fuse(function: Any, device: str) -> Any:
        return fused.setdefault(function, torch.compile(function, dynamic=True))

    monkeypatch.setattr(logprobs, "_fuse", fuse)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for checkpointing in (False, True):  # the head, which is the same in both, is compiled once
        actual = gradients(compiled=True, checkpointing=checkpointing)
        assert counters["stats"]["unique_graphs"] >= 3  # a layer, and the two functions of the head
        assert counters["frames"]["ok"] == counters["frames"]["total"]
        assert not counters["graph_break"]
        assert len(fused) == 2
        for name, gradient in expected[checkpointing].items():
            difference = (actual[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
            assert difference < 1e-5, (name, checkpointing)


def test_compiled_head_with_a_teacher_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 16), torch.randn(50, 16)
    teacher = torch.randn(30, 8), logprobs.Head(torch.randn(56, 8))
    tokens, temperatures = torch.randint(0, 50, (30,)), torch.full((30,), 0.7)

    def measure() -> list[torch.Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        scores = logprobs.score(inputs[0], logprobs.Head(inputs[1]), tokens, temperatures, teacher)
        return [*scores, *torch.autograd.grad(sum(score.square().sum() for score in scores), inputs)]

    expected = measure()
    monkeypatch.setattr(logprobs, "_fuse", lambda function, device: torch.compile(function, dynamic=True))
    torch._dynamo.reset()
    for actual, reference in zip(measure(), expected, strict=True):
        assert (actual - reference).norm() < 1e-5 * reference.norm()


@pytest.mark.parametrize("lora", [False, True])
def test_compiled_layer_takes_no_float_as_an_input(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a float that is an input becomes a tensor in host memory, for which C++ kernels are built."""
    graphs: list[torch.fx.GraphModule] = []

    def keep_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep_graph, bw_compiler=keep_graph)
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(compile_layer, backend=backend))
    torch._dynamo.reset()
    model = add_lora(model_of(), 4) if lora else model_of()
    compile_layers(model)
    model(input_ids=torch.arange(5, 20).view(3, 5), use_cache=False).logits.sum().backward()
    inputs = [node.meta["val"] for graph in graphs for node in graph.graph.nodes if node.op == "placeholder"]
    assert any(isinstance(value, torch.Tensor) for value in inputs)
    assert not [value for value in inputs if isinstance(value, torch.SymFloat)]
    assert not [value for value in inputs if isinstance(value, torch.Tensor) and value.dim() == 0]
