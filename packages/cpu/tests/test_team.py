"""The threads that share the work of compiled kernels: whatever their number, and whichever
computes a part, bits are those of one thread."""

import os
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from spectrain.kernels.tree_attention import Visibility
from spectrain_cpu import available, linear
from spectrain_cpu.attention import attend_cached
from spectrain_cpu.linear import WeightPanels
from spectrain_cpu.packed_product import MAX_PLANNED_OUTPUTS, count_panel_bytes, pack_panels
from spectrain_cpu.team import CAN_SHARE, current_team

pytestmark = pytest.mark.skipif(
    not available.has_panel_kernels(torch.float32), reason="the kernels need AVX-512"
)
DTYPES = [
    torch.float32,
    *([torch.bfloat16] if available.has_panel_kernels(torch.bfloat16) else []),
]


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_products(panels: list[WeightPanels], x: Tensor, pause: float = 0.0) -> list[Tensor]:
    products = []
    for number, weights in enumerate(panels):
        if pause and number % 5 == 0:
            time.sleep(pause)
        products.append(weights.product(x))
    return products


def make_panels(dtype: torch.dtype) -> list[WeightPanels]:
    torch.manual_seed(0)
    return [
        WeightPanels(torch.randn(32 * count, 64).to(dtype), 64)
        for count in (1, 2, 8, 9, 31, 64) * 3
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_several_threads_have_the_bits_of_a_single_thread(dtype: torch.dtype) -> None:
    """Bits are equal for few and many panels, for several passes, and where helpers have fallen
    asleep.
    """
    panels = make_panels(dtype)
    for rows in (1, 5, 33):
        x = torch.randn(1, rows, 64).to(dtype)
        torch.set_num_threads(1)
        alone = run_products(panels, x)
        for threads, pause in ((2, 0.0), (3, 0.002), (2, 0.002)):
            torch.set_num_threads(threads)
            shared = run_products(panels, x, pause)
            assert all(torch.equal(a, b) for a, b in zip(alone, shared))
    assert len(current_team().helpers) == (2 if CAN_SHARE else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_nodes", [1, 2, 12])
def test_attention_of_several_threads_has_the_bits_of_a_single_thread(
    dtype: torch.dtype, num_nodes: int
) -> None:
    """Bits are equal for few queries per head and for many."""
    torch.manual_seed(0)
    length = torch.tensor([40])
    tree = torch.ones(1, num_nodes, num_nodes).tril().bool()
    visibility = Visibility(length, 40, tree, 40 + torch.arange(num_nodes)[None], None)
    queries = torch.randn(1, 9, num_nodes, 64).to(dtype)
    keys, values = torch.randn(2, 1, 40 + num_nodes, 3, 64).to(dtype)
    outputs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs.append(attend_cached(queries, keys, values, visibility, 0.125))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_node_has_the_bits_of_its_token_in_either_way_of_attention(dtype: torch.dtype) -> None:
    """A chain is attended with a lane per query, and its nodes alone with a lane per key."""
    torch.manual_seed(0)
    queries = torch.randn(1, 9, 12, 64).to(dtype)
    keys, values = torch.randn(2, 1, 52, 3, 64).to(dtype)

    def attend_nodes(first: int, count: int) -> Tensor:
        length = torch.tensor([40 + first])
        tree = torch.ones(1, count, count).tril().bool()
        visibility = Visibility(length, 40 + first, tree, 40 + torch.arange(count)[None], None)
        end = 40 + first + count
        nodes = slice(first, first + count)
        return attend_cached(
            queries[:, :, nodes], keys[:, :end], values[:, :end], visibility, 0.125
        )

    chain = attend_nodes(0, 12)
    for first in range(12):
        assert torch.equal(attend_nodes(first, 1), chain[:, :, first : first + 1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_helpers_of_its_own() -> None:
    panels = make_panels(torch.float32)
    x = torch.randn(1, 3, 64)
    torch.set_num_threads(2)
    expected = run_products(panels, x)
    child = os.fork()
    if child == 0:
        is_equal = all(torch.equal(a, b) for a, b in zip(expected, run_products(panels, x)))
        os._exit(0 if is_equal and len(current_team().helpers) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 32), (640, 512), (33, 32)])
def test_planned_panels_have_the_bytes_of_those_that_are_made(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """A plan counts panels without making them, and none where none are made."""
    panels = pack_panels(torch.zeros(shape, dtype=dtype))
    expected = None if panels is None else panels.panels.nbytes
    assert count_panel_bytes(dtype, *shape) == expected


@pytest.mark.skipif(
    not available.has_panel_kernels(torch.bfloat16), reason="the processor has no AVX512-BF16"
)
def test_a_plan_tries_few_outputs_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its panels have the bytes of all outputs."""
    tried = []

    def record_trial(outputs: int, width: int) -> int:
        tried.append((outputs, width))
        return 1024

    monkeypatch.setattr(linear, "find_chunk", record_trial)
    assert count_panel_bytes(torch.bfloat16, 151_936, 4096) == 2 * 151_936 * 4096
    assert tried == [(MAX_PLANNED_OUTPUTS, 4096)]
