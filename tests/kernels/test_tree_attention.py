"""Tree attention equals a loop over rows, nodes, heads and slots in float64."""

import math

import pytest
import torch
from torch import Tensor

from spectrain.kernels.tree_attention import Visibility, tree_attention_reference
from spectrain.trees.token_tree import TokenTree

WIDTH = 4
Inputs = tuple[Tensor, Tensor, Tensor, Visibility]


def make_case(lengths: list[int], num_appended: int, num_new: int, group: int = 1) -> Inputs:
    """Queries, keys, values and visibility of the last `num_new` of `num_appended` nodes of
    random trees.
    """
    batch = len(lengths)
    kv_heads = 2
    num_slots = max(lengths) + num_appended
    parents = (torch.rand(batch, num_appended) * torch.arange(num_appended)).long()
    parents[:, 0] = -1
    tree = TokenTree.from_parents(torch.zeros_like(parents), parents)
    rows = torch.tensor(lengths)
    positions = rows[:, None] + tree.depths
    new = slice(num_appended - num_new, None)
    visibility = Visibility(
        rows, max(lengths), tree.ancestors[:, new], positions[:, new], positions
    )
    query = torch.randn(batch, kv_heads * group, num_new, WIDTH) * 2
    keys, values = torch.randn(2, batch, kv_heads, num_slots, WIDTH).unbind()
    return query, keys, values, visibility


def attend_by_loop(
    inputs: Inputs,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int = 1000,
) -> Tensor:
    """The reference's answer, one slot at a time in float64."""
    query, keys, values, visibility = inputs
    assert visibility.key_positions is not None
    output = torch.zeros_like(query, dtype=torch.float64)
    for b, h, n in torch.cartesian_prod(*(torch.arange(size) for size in query.shape[:3])).tolist():
        length = int(visibility.lengths[b])
        kv_head = h // (query.shape[1] // keys.shape[1])
        slots = [(slot, slot) for slot in range(length)]  # (slot, position)
        for m in range(visibility.tree.shape[2]):
            if visibility.tree[b, n, m]:
                slots.append((length + m, int(visibility.key_positions[b, m])))
        here = int(visibility.query_positions[b, n])
        visible = [slot for slot, position in slots if window is None or here - position < window]
        near = {slot for slot, position in slots if here // chunk == position // chunk}
        visible = [slot for slot in visible if slot in near]
        scores = [
            float(query[b, h, n].double() @ keys[b, kv_head, slot].double()) * 0.3
            for slot in visible
        ]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        away = [] if sinks is None else [float(sinks[h])]  # what looks at no key
        weights = torch.tensor(scores + away, dtype=torch.float64).softmax(0)[: len(scores)]
        output[b, h, n] = weights @ values[b, kv_head, visible].double()
    return output


def assert_agrees(inputs: Inputs, window: int | None = None, softcap: float | None = None) -> None:
    expected = attend_by_loop(inputs, window, softcap)
    assert expected.isfinite().all()
    actual = tree_attention_reference(*inputs, scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    wide = tree_attention_reference(
        *(part.double() for part in inputs[:3]), inputs[3], 0.3, window, softcap
    )
    torch.testing.assert_close(wide, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("prefix", [0, 1, 5, 64, 65])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("num_nodes", [1, 2, 9])
def test_single_row_equals_the_loop(prefix: int, group: int, num_nodes: int) -> None:
    """Each node sees the full prefix and its own ancestors, for every ratio of query to
    key-value heads.
    """
    assert_agrees(make_case([prefix], num_nodes, num_nodes, group))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("num_new", [1, 4, 9])
@pytest.mark.parametrize("lengths", [[7], [3, 0, 12]])
def test_ragged_rows_windows_softcaps_and_stages_equal_the_loop(
    lengths: list[int], num_new: int, window: int | None, softcap: float | None
) -> None:
    """Rows of unlike length and trees that came in two stages agree too, under a sliding window
    and a softcap.
    """
    assert_agrees(make_case(lengths, 9, num_new, group=2), window, softcap)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_nodes", [1, 5])
def test_invisible_slots_do_not_leak(
    num_nodes: int, window: int | None, softcap: float | None
) -> None:
    """The slots of a short row after its own nodes hold leftovers: even huge ones change
    nothing.
    """
    inputs = make_case([3, 0, 12], num_nodes, num_nodes, group=2)
    for row, length in enumerate([3, 0, 12]):
        inputs[1][row, :, length + num_nodes :] = 1e30
        inputs[2][row, :, length + num_nodes :] = 1e30
    assert_agrees(inputs, window, softcap)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_reduce_the_output(window: int | None) -> None:
    """A head's sink weighs as one more key would, whose value is 0."""
    inputs = make_case([3, 0, 12], 9, 4, group=2)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0])
    actual = tree_attention_reference(*inputs, scale=0.3, window=window, sinks=sinks)
    torch.testing.assert_close(
        actual.double(), attend_by_loop(inputs, window, sinks=sinks), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("lengths", [[7], [3, 0, 12]])
def test_chunks_equal_the_loop(lengths: list[int]) -> None:
    """A node sees the positions of its own chunk only, committed or not."""
    inputs = make_case(lengths, 9, 4, group=2)
    actual = tree_attention_reference(*inputs[:3], inputs[3].in_chunks(4), scale=0.3)
    torch.testing.assert_close(
        actual.double(), attend_by_loop(inputs, chunk=4), atol=1e-5, rtol=1e-5
    )
