"""The small kernels of a draft step: each equals its reference, on adversarial shapes, and each
passes opcheck: its schema says what it changes, and its fake stands in for it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.kernels import (
    add_norm,
    draft_input,
    gated_unit,
    rotate_append,
    tree_masks,
    tree_selection,
)
from spectrain.kernels.append_children import Nodes
from spectrain.kernels.draft_input import DraftedRows, InputLayers

pytest.importorskip("triton", reason="triton is not installed, so there is no kernel to interpret")


@pytest.fixture(autouse=True)
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels through Triton's interpreter."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")


def assert_equal(results: Any, others: Any) -> None:
    """Integers are equal and floats within the rounding of their type."""
    if isinstance(results, Tensor):
        results, others = [results], [others]
    for result, other in zip(results, others, strict=True):
        torch.testing.assert_close(result, other, equal_nan=True)


def make_layers(width: int, dtype: torch.dtype, vocab: int = 30, normed: bool = False) -> Any:
    embedding = torch.randn(vocab, width).to(dtype)
    norms = (torch.rand(width).to(dtype) + 0.5 for _ in range(2))
    return InputLayers(embedding, *norms, 1e-5, normed)


def make_rows(batch: int, capacity: int, width: int, dtype: torch.dtype) -> DraftedRows:
    """Make rows that nothing has written, except for the root's state."""
    words = -(-(capacity - 1) // 64)
    rows = DraftedRows(
        torch.full((batch, capacity, width), float("nan"), dtype=dtype),
        torch.full((batch, capacity, words), -7),
        torch.full((batch, capacity), -7),
    )
    rows.states[:, 0] = torch.randn(batch, width).to(dtype)
    return rows


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("batch", "levels", "width"), [(1, (1, 1, 1), 8), (3, (4, 4, 2), 24), (2, (60, 9, 70), 5)]
)
def test_inputs_of_nodes(
    batch: int, levels: tuple[int, ...], width: int, dtype: torch.dtype
) -> None:
    """Level after level, below random earlier nodes, up to more than two words of them; what a
    node sees is what a mask of its ancestors says."""
    torch.manual_seed(width)
    capacity = 1 + sum(levels)
    layers = make_layers(width, dtype, normed=width == 24)
    rows = make_rows(batch, capacity, width, dtype)
    other_rows = DraftedRows(*(part.clone() for part in rows))
    lengths = torch.randint(1, 50, (batch,))
    visible = torch.zeros(batch, capacity, capacity, dtype=torch.bool)
    count = 1
    for size in levels:
        tokens = torch.randint(0, 30, (batch, size))
        parents = torch.randint(0, count, (batch, size))
        arguments = tokens, parents, lengths
        result = draft_input.node_input(*arguments, rows, count, layers)
        other = draft_input.node_input_reference(*arguments, other_rows, count, layers)
        assert_equal(result, other)
        for row in range(batch):
            for node, parent in enumerate(parents[row].tolist()):
                visible[row, count + node] = visible[row, parent]
                visible[row, count + node, count + node] = True
        new = slice(count, count + size)
        masks = visible[:, new, 1 : count + size]
        assert torch.equal(result.words, tree_masks.pack_words_reference(masks))
        states = torch.randn(batch, size, width).to(dtype)
        rows.states[:, new] = states
        other_rows.states[:, new] = states
        count += size
    assert_equal(rows, other_rows)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch", "count", "width"), [(1, 1, 8), (3, 5, 24), (1, 130, 3)])
def test_inputs_of_accepted_tokens(batch: int, count: int, width: int, dtype: torch.dtype) -> None:
    """Ragged numbers of new tokens, none included, at the end of ragged texts and of the slots."""
    torch.manual_seed(count)
    layers = make_layers(width, dtype, normed=count == 5)
    text = torch.randint(0, 30, (batch, count + 40))
    lengths = torch.randint(count, count + 40, (batch,))
    lengths[0] = count + 39
    num_new = torch.randint(0, count + 1, (batch,))
    states = torch.randn(batch, count, width).to(dtype)
    arguments = text, lengths, num_new, lengths - num_new, states, layers
    assert_equal(
        draft_input.accepted_input(*arguments), draft_input.accepted_input_reference(*arguments)
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch", "count", "width"), [(1, 1, 8), (3, 5, 24), (2, 4, 513)])
def test_sums_and_norms(batch: int, count: int, width: int, dtype: torch.dtype) -> None:
    """The sum, its norm, and what is stored of them: all rows or the last real one."""
    torch.manual_seed(width)
    x, residual = torch.randn(2, batch, count, width).to(dtype)
    weight = torch.rand(width).to(dtype)
    assert_equal(
        add_norm.add_norm(x, residual, weight, 1e-5),
        add_norm.add_norm_reference(x, residual, weight, 1e-5),
    )
    for counts in (None, torch.randint(0, count + 1, (batch,))):
        for stores_normed in (False, True):
            first = 0 if counts is not None else 2
            results = []
            for store in (add_norm.store_states, add_norm.store_states_reference):
                states = torch.full((batch, count + 3, width), 9.0, dtype=dtype)
                normed = store(states, x, residual, weight, 1e-5, first, counts, stores_normed)
                results.append((states, normed))
            assert_equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 8, 1025])
def test_gated_unit(width: int, dtype: torch.dtype) -> None:
    """The halves of one product, and tensors of their own."""
    torch.manual_seed(width)
    halves = torch.randn(2, 3, 2 * width).to(dtype).mul(4).chunk(2, dim=-1)
    for gate, up in (halves, [half.contiguous() for half in halves]):
        assert_equal(gated_unit.gated_unit(gate, up), gated_unit.gated_unit_reference(gate, up))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("batch", "nodes", "heads", "kv_heads", "size"),
    [(1, 1, 1, 1, 2), (3, 5, 6, 3, 16), (2, 3, 14, 2, 80), (2, 2, 5, 5, 6)],
)
def test_rotation_and_append(
    batch: int, nodes: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    """Parts of a merged product, ragged lengths, head sizes and numbers of heads of all kinds; no
    other slot changes."""
    torch.manual_seed(size)
    product = torch.randn(batch, nodes, (heads + 2 * kv_heads) * size).to(dtype)
    q, k, v = product.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    angles = torch.rand(40, size // 2)
    table = torch.stack([angles.cos(), angles.sin()], dim=1).to(dtype)
    positions = torch.randint(0, 40, (batch, nodes))
    lengths = torch.randint(0, 20, (batch,))
    results = []
    for run in (rotate_append.rotate_append, rotate_append.rotate_append_reference):
        store = torch.full((2, batch, 40, kv_heads, size), 7.0, dtype=dtype)
        queries = run(store, q, k, v, table, positions, lengths, 4)
        results.append((queries, store))
    assert_equal(*results)
    assert results[0][0].transpose(1, 2).is_contiguous()
    # The angles of every node, with both halves of a head and of one text for all: the same.
    angles = table[positions].repeat(1, 1, 1, 2)
    for index in (slice(None), slice(1)):
        cos, sin = angles[index].unbind(2)
        by_angles = []
        for run_angles in (
            rotate_append.rotate_append_angles,
            rotate_append.rotate_append_angles_reference,
        ):
            store = torch.full((2, batch, 40, kv_heads, size), 7.0, dtype=dtype)
            by_angles.append((run_angles(store, q, k, v, cos, sin, lengths, 4), store))
        assert_equal(*by_angles)
        if len(cos) == batch:
            assert_equal(by_angles[0], results[0])


def random_parents(batch: int, count: int) -> Tensor:
    """Make random trees whose parents come before their children."""
    later = [
        torch.randint(0, node, (batch,)) if node else torch.full((batch,), -1)
        for node in range(count)
    ]
    return torch.stack(later, dim=1)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("count", [1, 2, 17, 64, 65, 129])
def test_ancestors_and_words(count: int) -> None:
    """Random trees and chains, and masks of every number of words."""
    torch.manual_seed(count)
    chain = torch.arange(-1, count - 1).expand(2, -1)
    for parents in (random_parents(2, count), chain[:1]):
        result = tree_masks.find_ancestors(parents, count)
        assert_equal(result, tree_masks.find_ancestors_reference(parents, count))
        mask = result[0]
        for part in (mask[:, : count // 4 + 1], mask[..., count // 2 :].transpose(1, 2)[:, -2:]):
            words = tree_masks.pack_words(part)
            assert torch.equal(words, tree_masks.pack_words_reference(part))


def make_nodes(batch: int, count: int) -> Nodes:
    """Make random trees with scores that fall along paths, ties and padding among them."""
    parents = random_parents(batch, count)
    scores = torch.zeros(batch, count)
    for node in range(1, count):
        # Many equal scores, and some nodes whose whole subtree is padding.
        fall = -torch.randint(0, 3, (batch,)).float()
        fall[torch.rand(batch) < 0.1] = float("-inf")
        scores[:, node] = scores.gather(1, parents[:, node : node + 1])[:, 0] + fall
    return Nodes(torch.randint(0, 99, (batch, count)), parents, scores)


@pytest.mark.parametrize(("count", "budget"), [(1, 1), (9, 4), (61, 16), (61, 99), (230, 60)])
def test_best_nodes(count: int, budget: int) -> None:
    """The best nodes are those of a stable sort, renumbered; a large budget takes all."""
    torch.manual_seed(count)
    nodes = make_nodes(3, count)
    result = tree_selection.select_best(nodes, budget)
    assert_equal(result, tree_selection.select_best_reference(nodes, budget))
    assert (result.parents[:, 1:] < torch.arange(1, result.parents.shape[1])).all()


@pytest.mark.parametrize(
    ("start", "width", "frontier", "count"),
    [(1, 1, 1, 1), (1, 4, 1, 4), (5, 3, 4, 5), (3, 2, 1, 9)],
)
def test_next_frontier(start: int, width: int, frontier: int, count: int) -> None:
    """The best nodes of a level are those of a stable sort, in its order."""
    torch.manual_seed(width)
    nodes = make_nodes(3, start + width * frontier)
    arguments = nodes.tokens, nodes.scores, start, width, 7, count
    assert_equal(
        tree_selection.select_frontier(*arguments),
        tree_selection.select_frontier_reference(*arguments),
    )


def list_launches() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """List every operator with arguments for it."""
    layers = make_layers(8, torch.float32)
    rows = make_rows(2, 5, 8, torch.float32)
    tokens = torch.randint(0, 30, (2, 2))
    lengths = torch.tensor([3, 9])
    x = torch.randn(2, 2, 8)
    nodes = make_nodes(2, 9)
    store = torch.zeros(2, 2, 20, 1, 4)
    table = torch.rand(20, 2, 2)
    return {
        "node_input": (
            draft_input._launch_node_input,
            (tokens, tokens * 0, lengths, *rows, 1, *layers),
        ),
        "accepted_input": (
            draft_input._launch_accepted_input,
            (torch.randint(0, 30, (2, 20)), lengths, lengths - 2, lengths, x, *layers),
        ),
        "add_norm": (add_norm._launch_add_norm, (x, x, torch.ones(8), 1e-5)),
        "store_states": (
            add_norm._launch_store,
            (rows.states, x, x, torch.ones(8), 1e-5, 1, None, False),
        ),
        "gated_unit": (gated_unit._launch_gated_unit, (x[0], x[1])),
        "rotate_append": (
            rotate_append._launch_rotate_append,
            (store, x, x[..., :4], x[..., 4:], *table.unbind(1), tokens % 20, lengths, 1),
        ),
        "rotate_append of angles": (
            rotate_append._launch_rotate_append,
            (
                store,
                x,
                x[..., :4],
                x[..., 4:],
                *x[:1].expand(2, -1, -1).split(4, -1),
                None,
                lengths,
                1,
            ),
        ),
        "find_ancestors": (tree_masks._launch_ancestors, (nodes.parents,)),
        "pack_words": (tree_masks._launch_pack, (torch.ones(2, 3, 70, dtype=torch.bool),)),
        "select_frontier": (
            tree_selection._launch_frontier,
            (nodes.tokens, nodes.scores, 5, 4, 1, 2),
        ),
        "select_best": (tree_selection._launch_select, (*nodes, 4)),
    }


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", list_launches())
def test_operators_pass_opcheck(name: str) -> None:
    launch, arguments = list_launches()[name]
    torch.library.opcheck(launch, arguments)
