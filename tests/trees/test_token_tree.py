"""A token tree's ancestors, depths and words equal a walk from every node to its root; malformed
trees are caught.
"""

import pytest
import torch
from torch import Tensor

from spectrain.kernels.tree_attention import pack_words
from spectrain.trees.token_tree import TokenTree
from tests.trees.tables import check_structure

SIZES = [1, 2, 5, 63, 64, 65, 100]
BATCH = 3


def make_parents(shape: str, num_nodes: int) -> Tensor:
    """Return parents [B, N] of chains, stars or trees that differ from row to row."""
    index = torch.arange(num_nodes).expand(BATCH, -1)
    parents = {
        "chain": index - 1,
        "star": (index > 0).long() - 1,
        "random": (torch.rand(BATCH, num_nodes) * index).long(),
    }[shape].clone()
    parents[:, 0] = -1
    return parents


def list_ancestors(parents: list[int], node: int) -> list[int]:
    """Return the node and its ancestors, the root last."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


@pytest.mark.parametrize("shape", ["chain", "star", "random"])
@pytest.mark.parametrize("num_nodes", SIZES)
def test_ancestors_and_depths_equal_a_walk_to_the_root(shape: str, num_nodes: int) -> None:
    """Every node sees its path to the root, is as deep as that path is long, and its words hold
    one bit for each step.
    """
    parents = make_parents(shape, num_nodes)
    tree = TokenTree.from_parents(torch.arange(num_nodes).expand(BATCH, -1), parents)
    check_structure(tree)
    words = pack_words(tree.ancestors)
    assert words.shape == (BATCH, num_nodes, (num_nodes + 63) // 64)
    assert words.dtype == tree.depths.dtype == torch.int64
    for row in range(BATCH):
        for node in range(num_nodes):
            path = list_ancestors(parents[row].tolist(), node)
            assert tree.ancestors[row, node].nonzero().flatten().tolist() == sorted(path)
            assert tree.depths[row, node] == len(path) - 1
            bits = sum((word % 2**64) << 64 * w for w, word in enumerate(words[row, node].tolist()))
            assert bits == sum(1 << ancestor for ancestor in path)


@pytest.mark.parametrize("num_nodes", SIZES)
def test_chain_is_a_tree_of_single_children(num_nodes: int) -> None:
    """`chain` gives every token the one before it as parent, all valid and emitted."""
    tree = TokenTree.from_chain(torch.full((BATCH, num_nodes), 7))
    check_structure(tree)
    assert torch.equal(tree.parents, make_parents("chain", num_nodes))
    assert torch.equal(tree.ancestors, torch.ones(BATCH, num_nodes, num_nodes).tril().bool())
    assert tree.valid.all() and tree.can_emit.all()


@pytest.mark.parametrize(
    ("parents", "reason"),
    [
        ([-1, 2, 0], "before"),  # node 1 hangs from node 2, which comes after it
        ([-1, 1, 0], "before"),  # node 1 hangs from itself
        ([-1, -1, 0], "before"),  # two roots
        ([0, 0, 0], "root"),
    ],
)
@pytest.mark.parametrize("row", range(BATCH))
def test_check_catches_a_child_before_its_parent(parents: list[int], reason: str, row: int) -> None:
    """One malformed row among good ones is enough."""
    batch = torch.tensor([[-1, 0, 1]] * BATCH)
    batch[row] = torch.tensor(parents)
    with pytest.raises(AssertionError, match=reason):
        check_structure(TokenTree.from_parents(torch.arange(3).expand(BATCH, -1), batch))


@pytest.mark.parametrize("children", ["deterministic", "without_replacement"])
def test_check_catches_twin_siblings(children: str) -> None:
    """Two children of one node may not carry one token, unless one is padding or they were
    sampled with replacement.
    """
    tokens = torch.tensor([[1, 2, 3, 4, 4]]).repeat(BATCH, 1)
    cousins = torch.tensor([[-1, 0, 0, 1, 2]]).repeat(BATCH, 1)
    twins = torch.tensor([[-1, 0, 0, 1, 1]]).repeat(BATCH, 1)
    all_true = torch.ones_like(tokens, dtype=torch.bool)
    check_structure(TokenTree(tokens, cousins, all_true, all_true, children))  # type: ignore[arg-type]
    check_structure(TokenTree(tokens, twins, all_true, all_true, "sampled"))
    padded = all_true.clone()
    padded[:, 4] = False
    check_structure(TokenTree(tokens, twins, padded, all_true, children))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="distinct"):
        check_structure(TokenTree(tokens, twins, all_true, all_true, children))  # type: ignore[arg-type]
