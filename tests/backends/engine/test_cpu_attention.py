"""CPU code of the engine against plain implementations: attention, packed linear layers, retained memory."""

import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly-rl[train]'")

from agentfly.backends.engine import native_kernels, packed_linear  # noqa: E402
from agentfly.backends.engine.attention import BLOCK, DenseAttention, LayerCache, NativeAttention  # noqa: E402
from agentfly.backends.engine.kv_cache import KVCache, QuerySpan, zeros  # noqa: E402
from agentfly.backends.engine.loading import graphs  # noqa: E402
from tests.backends.engine.tiny import model_of  # noqa: E402

SHARED, HEADS, WIDTH = 2, 4, 8


def plain(rows: torch.Tensor, piece: QuerySpan, past: LayerCache) -> torch.Tensor:
    """Reference attention: token by token, head by head."""
    gathered = torch.empty(piece.count, HEADS, WIDTH)
    for at in range(piece.count):
        last = piece.past + at + 1
        first = 0 if past.window is None else max(last - past.window, 0)
        seen = range(piece.start, piece.start + last) if piece.slots is None else piece.slots.tolist()
        seen = list(seen)[first:last]
        for head in range(HEADS):
            k, v = past.keys[seen, head * SHARED // HEADS], past.values[seen, head * SHARED // HEADS]
            scores = k @ rows[at, head] * past.scaling
            if past.softcap is not None:
                scores = torch.tanh(scores / past.softcap) * past.softcap
            gathered[at, head] = scores.softmax(0) @ v
    return gathered


SINGLE = st.tuples(st.just(1), st.integers(0, 40), st.integers(0, 3))
PROMPT = st.tuples(st.integers(1, 2 * BLOCK + 40), st.integers(0, 30), st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SINGLE, max_size=5), st.lists(PROMPT, max_size=2), st.sampled_from([None, 3, 20]),
    st.sampled_from([None, 1.5]), st.randoms(use_true_random=False), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_attention_equals_the_plain_implementation(
    singles, prompts, window, softcap, random, shuffled, scattered, native
) -> None:
    """Spans with a past and a gap before each, in any order, up to the last slot; unused slots hold random values."""
    drawn = [*singles, *prompts]
    if not drawn:
        return
    start, pieces = 0, []
    for count, past, gap in drawn:
        slots = None
        if scattered and random.random() < 0.5:
            slots = torch.arange(start + gap, start + gap + past + count).flip(0)
        pieces.append(QuerySpan(count, past, start + gap, slots))
        start += gap + past + count
    if shuffled:
        random.shuffle(pieces)
    torch.manual_seed(start)
    cache = KVCache(start, torch.randn(1, 2, start, SHARED, WIDTH) * 3)
    past = LayerCache(cache.data[0, 0], cache.data[0, 1], 0.3, window, softcap)
    rows = torch.randn(sum(piece.count for piece in pieces), HEADS, WIDTH)
    kernels = native_kernels.load() if native else None  # None also where there is no compiler
    build = DenseAttention if kernels is None else partial(NativeAttention, kernels)
    got = build(cache, torch.empty(0), pieces).attend(rows.transpose(0, 1), past)
    piece_rows = rows.split([piece.count for piece in pieces])
    right = torch.cat([plain(queries, piece, past) for queries, piece in zip(piece_rows, pieces, strict=True)])
    torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_with_the_same_input_are_packed_into_one_product(bias: bool) -> None:
    parent = torch.nn.Module()
    for name, size in (("q_proj", 12), ("k_proj", 4), ("v_proj", 4), ("o_proj", 8)):
        setattr(parent, name, torch.nn.Linear(8, size, bias=bias))
    layers = list(parent.children())
    inputs = [torch.randn(1, 6, 8) for _ in range(3)]
    with torch.inference_mode():
        expected = [[layer(rows) for layer in layers] for rows in inputs]
        packed_linear.pack(parent)
        assert parent.q_proj.product is parent.v_proj.product is not parent.o_proj.product
        for rows, right in zip(inputs, expected, strict=True):
            torch.testing.assert_close([layer(rows) for layer in layers], right)
        for number, layer in ((0, 2), (1, 1), (1, 2), (1, 2), (0, 0), (2, 1), (2, 0)):
            torch.testing.assert_close(layers[layer](inputs[number]), expected[number][layer])


@pytest.mark.parametrize("bias", [False, True])
def test_product_for_gpus_computes_with_the_weights_in_place(bias: bool) -> None:
    layers = [torch.nn.Linear(8, size, bias=bias) for size in (12, 4, 4)]
    product = packed_linear.GPUProduct(layers)
    with torch.inference_mode():
        for _ in range(2):
            inputs = torch.randn(6, 8)
            outputs = [product.take(index, inputs) for index in range(3)]
            torch.testing.assert_close(outputs, [layer(inputs) for layer in layers])
            for parameter in (parameter for layer in layers for parameter in layer.parameters()):
                parameter.copy_(torch.randn_like(parameter))  # a weight update
    assert product.weight.numel() == sum(layer.weight.numel() for layer in layers)
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers} == {product.weight.data_ptr()}
    again = packed_linear.GPUProduct(layers)  # another runner of the model
    assert again.weight.data_ptr() == product.weight.data_ptr()
    assert torch.equal(again.weight, product.weight)


def test_layers_with_and_without_bias_are_not_packed_together() -> None:
    parent = torch.nn.Module()
    parent.gate_proj, parent.up_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)
    packed_linear.pack(parent)
    assert parent.gate_proj.product is not parent.up_proj.product


# Huge pages are off: with them a page fault may stand for 4 KiB or for 2 MiB. glibc's initial threshold is set
# explicitly, which keeps it from growing: then every tensor is returned at first, whatever else the heap contains.
FAULTS = """
import ctypes, resource, torch
from agentfly.backends.engine.kv_cache import QuerySpan, retain_freed_memory
PR_SET_THP_DISABLE = 41
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
torch.set_num_threads(1)
def work():
    sizes = [torch.ones(1 << 20) + 1 for _ in range(8)]
def count_page_faults():
    for _ in range(3): work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10): work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
returned = count_page_faults()
retain_freed_memory()
print(returned, count_page_faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_freed_memory_is_retained() -> None:
    printed = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    returned, retained = map(int, printed.split())
    assert retained < returned / 5


def test_zeros_take_no_memory_until_they_are_written() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    initial_bytes = resident_bytes()
    tensor = zeros((1 << 20, 64), torch.empty(0))
    assert (tensor.shape, tensor.dtype, resident_bytes() - initial_bytes < 32 << 20) == (
        (1 << 20, 64),
        torch.float32,
        True,
    )
    tensor[5] = 1
    assert (tensor[5].sum(), tensor[1 << 19].sum()) == (64, 0)
    assert zeros((0,), torch.empty(0)).shape == (0,)


def test_cuda_graphs_need_half_precision() -> None:
    model = model_of()
    assert (graphs(model), graphs(model.bfloat16())) == (False, True)
