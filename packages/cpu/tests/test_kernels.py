"""Compiled kernels of a CPU equal torch's operations in bfloat16 to the last bit, and attention
but for rounding.
"""

import platform

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.drafters.layers.unrolled_attention import unrolled_attention
from spectrain.kernels.counter import gumbel_noise, make_key
from spectrain.kernels.onednn import onednn_linear
from spectrain.kernels.tree_attention import Visibility, tree_attention_reference
from spectrain.kernels.tree_walks import draw_tokens
from spectrain.trees.token_tree import TokenTree
from spectrain_cpu import attention, available, linear, rows
from spectrain_cpu.causal import has_text_kernels
from spectrain_cpu.sampling import can_choose_by_noise
from spectrain_cpu.team import current_team

NUM_HEADS = 6
NUM_KEY_HEADS = 2
SIZE = 32

pytestmark = pytest.mark.skipif(
    not available.has_cpu_kernels(torch.bfloat16, torch.device("cpu")),
    reason="Numba is not installed or switched off",
)


def make_tree(num_nodes: int, length: int, chunk_size: int | None = None) -> Visibility:
    parents = torch.tensor(
        [[-1, *(int(torch.randint(max(0, node - 5), node, ())) for node in range(1, num_nodes))]]
    )
    tree = TokenTree.from_parents(torch.zeros_like(parents), parents)
    positions = length + tree.depths
    return Visibility(
        torch.tensor([length]), length, tree.ancestors, positions, positions, True, chunk_size
    )


@pytest.mark.parametrize("length", [0, 1, 77])
def test_nodes_attend_as_their_paths_alone_do(length: int) -> None:
    """Of trees of 1 to 64 nodes, each node has the bits of its path by itself. They are those of
    float64 attention, rounded, except where a sum lies between two bfloat16."""
    torch.manual_seed(0)
    for num_nodes in (1, 2, 7, 16, 33, 64):
        visibility = make_tree(num_nodes, length)
        queries = torch.randn(1, NUM_HEADS, num_nodes, SIZE).bfloat16() * 2
        keys, values = torch.randn(2, 1, length + num_nodes + 3, NUM_KEY_HEADS, SIZE).bfloat16()
        actual = attention.attend_cached(queries, keys, values, visibility, 0.3)
        wide = [
            x.double()
            for x in (queries, keys[:, :-3].transpose(1, 2), values[:, :-3].transpose(1, 2))
        ]
        exact = tree_attention_reference(*wide, visibility, 0.3)
        torch.testing.assert_close(actual.double(), exact, rtol=2**-8 + 1e-5, atol=1e-6)
        assert (actual == exact.to(torch.bfloat16)).float().mean() > 0.99
        for node in {0, num_nodes // 2, num_nodes - 1}:
            path = torch.cat(
                [torch.arange(length), length + visibility.tree[0, node].nonzero()[:, 0]]
            )
            alone = Visibility(
                torch.tensor([len(path) - 1]),
                len(path) - 1,
                torch.ones(1, 1, 1).bool(),
                path[None, -1:],
                None,
            )
            query = queries[:, :, node : node + 1]
            assert torch.equal(
                attention.attend_cached(query, keys[:, path], values[:, path], alone, 0.3)[:, :, 0],
                actual[:, :, node],
            )


@pytest.mark.parametrize(
    ("num_heads", "num_key_heads", "size"), [(9, 3, 64), (5, 5, 32), (12, 2, 32), (3, 1, 48)]
)
def test_tokens_of_several_texts_attend_as_alone(
    num_heads: int, num_key_heads: int, size: int
) -> None:
    """Single tokens of texts of different lengths, with groups and heads that have a kernel of
    their own and others.
    """
    torch.manual_seed(0)
    lengths = torch.tensor([0, 1, 15, 16, 77])
    capacity = 90
    attend = attention.select_attention(torch.bfloat16)
    count = len(lengths)
    width = num_key_heads * size
    slots = torch.randn(2, count, capacity, width).bfloat16()
    heads = torch.randn(count, num_heads * size + 2 * width).bfloat16()
    cos = torch.rand(count, size).bfloat16()
    sin = torch.rand(count, size).bfloat16()
    mask = torch.ones(1, count).bool()
    single_slots = slots.clone()
    single_heads = heads.clone()
    out, single_out = torch.empty(2, count, num_heads * size).bfloat16()
    memory = available.working_memory(1 << 16).data_ptr()
    starts = torch.arange(count) * capacity
    team = current_team().address
    before = (heads.shape[1], size)
    shape = (num_heads, num_key_heads, size)

    def run_kernel(
        num_texts: int, parts: tuple[Tensor, ...], starts: Tensor, lengths: Tensor, out: Tensor
    ) -> None:
        queries, *others = (x.data_ptr() for x in parts)
        after = (
            starts.data_ptr(),
            lengths.data_ptr(),
            num_texts,
            1,
            mask.data_ptr(),
            1,
            *shape,
            out.data_ptr(),
            0.3,
        )
        attend(queries, *before, *others, width, *after, memory, 0, 0, team, 1)

    run_kernel(count, (heads, cos, sin, slots[0], slots[1]), starts, lengths, out)
    for text in range(count):
        parts = (
            single_heads[text],
            cos[text],
            sin[text],
            single_slots[0, text],
            single_slots[1, text],
        )
        run_kernel(1, parts, starts[:1], lengths[text:], single_out[text])
    assert torch.equal(out, single_out) and torch.equal(slots, single_slots)


def test_tokens_drawn_by_bounds_are_those_of_all_noise() -> None:
    """Draws are equal for flat and steep distributions, for tokens that are cut, and for sums so
    large that rounding decides."""
    torch.manual_seed(0)
    size = 9000
    temperature = 0.7
    logits = torch.randn(6, 4, size) * torch.tensor([0.0, 1.0, 5.0, 30.0, 1e5, 1e6])[:, None, None]
    logits[2, :2, 50:] = -float("inf")
    keys = make_key(3, torch.arange(6)[:, None], torch.arange(4))
    assert can_choose_by_noise(logits)
    expected = (logits / temperature + gumbel_noise(keys, size)).argmax(-1)
    assert torch.equal(draw_tokens(logits, keys, temperature), expected)


def test_windows_and_chunks_hide_what_the_reference_hides() -> None:
    """The same slots are hidden for nodes at several depths, and where a window ends among the
    appended nodes.
    """
    torch.manual_seed(0)
    for length, window, chunk in (
        (40, 12, None),
        (40, None, 16),
        (3, 2, None),
        (40, 50, 7),
        (0, 3, None),
    ):
        visibility = make_tree(9, length, chunk)
        queries = torch.randn(1, NUM_HEADS, 9, SIZE).bfloat16()
        keys, values = torch.randn(2, 1, length + 9, NUM_KEY_HEADS, SIZE).bfloat16()
        actual = attention.attend_cached(queries, keys, values, visibility, 0.3, window)
        wide = [x.double() for x in (queries, keys.transpose(1, 2), values.transpose(1, 2))]
        exact = tree_attention_reference(*wide, visibility, 0.3, window)
        torch.testing.assert_close(actual.double(), exact, rtol=2**-8 + 1e-5, atol=1e-6)


def test_norms_and_gates_have_the_bits_of_torch() -> None:
    """Bits are equal also for widths that no vector divides, and for infinite and undefined
    numbers.
    """
    torch.manual_seed(0)
    lanes = rows.norm_lanes()
    table = rows.silu_table()
    if lanes is None and platform.machine() != "x86_64":
        pytest.skip("torch sums the numbers of a row in another order here")
    assert lanes is not None
    for width in (40, 576, 1100, 2048):
        hidden, added, weight = (
            torch.randn(*shape, width).bfloat16() for shape in ((50,), (50,), ())
        )
        summed = torch.empty_like(hidden)
        normed = torch.empty_like(hidden)
        addresses = [x.data_ptr() for x in (hidden, added, weight, summed, normed)]
        rows.add_norm_half(
            *addresses, 50, width, 1e-5, lanes, available.working_memory(width + 256).data_ptr()
        )
        assert torch.equal(summed, hidden + added)
        assert torch.equal(normed, weight * F.rms_norm(summed, (width,), None, 1e-5))
    inner = torch.randn(5, 2 * 64).bfloat16() * 4
    inner[0, 0], inner[1, 70], inner[2, 1] = float("nan"), float("inf"), -float("inf")
    actual = inner.new_empty(10, 64)
    rows.gate_half(inner.data_ptr(), table.data_ptr(), actual.data_ptr(), 5, 64, 2)
    expected = F.silu(inner[:, :64]) * inner[:, 64:]
    torch.testing.assert_close(actual, expected.repeat(2, 1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(
    not available.has_panel_kernels(torch.bfloat16), reason="the processor has no AVX512-BF16"
)
@pytest.mark.parametrize("width", [96, 576, 1088])
def test_panels_have_the_bits_of_onednn(width: int) -> None:
    """Bits are oneDNN's for 2 to 32 rows, with sums that cancel, and for one row those of a
    pair.
    """
    torch.manual_seed(0)
    weight, rows = (torch.randn(count, width // 2).repeat(1, 2) for count in (64, 32))
    rows[:, width // 2 :] *= -1
    order = torch.randperm(width)
    weight = weight[:, order].bfloat16()
    rows = rows[:, order].bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    chunk = linear.find_chunk(*weight.shape)
    if chunk is None and torch.cpu._is_amx_tile_supported():
        pytest.skip(
            "oneDNN multiplies tiles here and adds in an order that no panels have; linears are "
            "then oneDNN's"
        )
    assert chunk is not None
    panels = linear.WeightPanels(weight, chunk)
    for count in range(2, 33):
        assert torch.equal(panels.product(rows[:count]), onednn_linear(rows[:count], packed))
    assert torch.equal(panels.product(rows[:1]), onednn_linear(rows[:2], packed)[:1])
    # Those that are kept beside reordered weights are counted.
    counted = 0 if linear.serve_many_rows(weight.dtype) else weight.nbytes
    stored = linear.WeightPanels.stored_bytes
    del panels
    assert linear.WeightPanels.stored_bytes == stored - counted


def test_kernels_are_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTRAIN_KERNELS", "reference")
    assert not available.has_cpu_kernels(torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("length", [1, 33, 70])
def test_attention_of_texts_has_the_gradients_of_float64(length: int) -> None:
    """Gradients are equal within bfloat16, alone and with a key of a later step that each token
    sees.
    """
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, NUM_HEADS, length, SIZE).bfloat16()
    k, v, later_keys, later_values = torch.randn(4, 2, NUM_KEY_HEADS, length, SIZE).bfloat16()
    if not has_text_kernels(q, k, v, length):
        pytest.skip("no AVX512-BF16")
    for keys, values in (([k], [v]), ([k, later_keys], [v, later_values])):
        parts = [
            [part.clone().to(dtype).requires_grad_() for part in (q, *keys, *values)]
            for dtype in (q.dtype, torch.float64)
        ]
        outputs = [
            unrolled_attention(x[0], x[1 : 1 + len(keys)], x[1 + len(keys) :], None) for x in parts
        ]
        torch.testing.assert_close(outputs[0].double(), outputs[1], atol=0.02, rtol=0.02)
        for output in outputs:
            output.backward(grad.to(output.dtype))
        for actual, expected in zip(*parts):
            error = (actual.grad.double() - expected.grad).norm() / expected.grad.norm().clamp(
                min=1
            )
            assert error < 0.01
