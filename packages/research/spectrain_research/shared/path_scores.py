"""Log-probabilities of the nodes and paths of trees, by other distributions than the drafter's.
Shapes: B batch, N nodes, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.trees.token_tree import TokenTree


def score_nodes(tree: TokenTree, log_p: Tensor) -> Tensor:
    """Return log p [B, N] of every node after its parent, and 0 of the root, from log p [B, M, V]
    after the first M nodes, which are all parents."""
    parents = tree.parents.clamp(min=0)
    rows = torch.arange(len(parents), device=parents.device)[:, None]
    return log_p[rows, parents, tree.tokens].masked_fill(tree.parents < 0, 0.0)


def score_paths(tree: TokenTree, node_scores: Tensor) -> Tensor:
    """Return the sums [B, N] of node scores [B, N] along the path to every node, itself
    included.
    """
    return torch.einsum("bij,bj->bi", tree.ancestors.to(node_scores.dtype), node_scores)
