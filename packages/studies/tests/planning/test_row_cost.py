"""The values that a row stores in a module, by the plan and by torch's record of allocations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from spectrain.drafters.lilicorr import CorrectionLayer
from spectrain_studies.planning.row_cost import row_cost

ROWS = 512
WIDTH = 128


def count_held_values(run: Callable[[], object]) -> float:
    """Return the float32 values that are allocated while `run` computes, and held after it."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = run()
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del output
    return held / 4


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_cells_store_their_gates(kind: Any, num_layers: int) -> None:
    """An LSTM keeps oneDNN's workspace, a GRU the results of its operations; a row is multiplied
    with all matrices.
    """
    if kind is nn.LSTM and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("oneDNN's workspace was measured on processors with AVX-512 alone")
    cells = kind(WIDTH, WIDTH, num_layers, batch_first=True)
    x = torch.randn(1, ROWS, WIDTH, requires_grad=True)
    cost = row_cost(cells)
    assert cost.products * ROWS == pytest.approx(count_held_values(lambda: cells(x)), rel=0.1)
    gates = 4 if kind is nn.LSTM else 3
    assert cost.weights == num_layers * 2 * gates * WIDTH * WIDTH


def test_an_attention_with_a_trained_bias_stores_its_weights() -> None:
    """A layer of LiLiCorr stores its products, its norms and one weight for every pair of nodes
    and head.
    """
    heads = 4
    nodes = 32
    layer = CorrectionLayer(WIDTH, heads, 2, 1e-6)
    x = torch.randn(ROWS // nodes, nodes, WIDTH, requires_grad=True)
    bias: Tensor = torch.zeros(heads, nodes, nodes, requires_grad=True)
    cost = row_cost(layer)
    planned = ROWS * (cost.products + cost.states + heads * nodes)
    assert planned == pytest.approx(count_held_values(lambda: layer(x, bias)), rel=0.1)
    assert cost.weights == sum(p.numel() for p in layer.parameters() if p.dim() == 2)
