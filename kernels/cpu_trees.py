"""The interface to the compiled kernels of token trees on a CPU: calls that take tensors.

They serve a process after `prepare_tree_kernels`, so that nothing is compiled in a round. Shapes: B
batch, N nodes, F frontier nodes, K children of each, V vocabulary, P nodes of a path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_kernels: list[Any] = []
MAX_CHILDREN = 64
"""Children of a node that kernels select at most."""


def prepare_tree_kernels() -> None:
    """Load every kernel, or compile it where this machine has not, and use it from now on."""
    if _kernels:
        return
    from . import cpu_tree_kernels

    _kernels.append(cpu_tree_kernels)
    zeros = torch.zeros(1, 1, dtype=torch.int64)
    tokens, parents, scores = append_children(
        torch.zeros(1, 1, 8), 2, None, zeros, (zeros, zeros - 1, torch.zeros(1, 1))
    )
    select_nodes(torch.arange(2)[None], (tokens, parents, scores))
    find_ancestors(parents)
    path, counts, bonus = accept_greedy(
        tokens, parents, torch.ones_like(tokens).bool(), 1, torch.zeros(1, 3, 8)
    )
    texts = torch.zeros(1, 8, dtype=torch.int64), zeros[0], torch.ones(1).bool(), zeros[0], zeros[0]
    commit_tokens(tokens, path, counts, bonus, texts)


def are_served(*tensors: Tensor) -> bool:
    """Return whether kernels take these tensors."""
    return bool(_kernels) and all(
        tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
    )


def append_children(
    log_q: Tensor,
    width: int,
    draft_ids: Tensor | None,
    frontier: Tensor,
    tree: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Append the `width` likeliest children by log q [B, F, V] of frontier nodes [B, F] to the
    tokens, parents and scores [B, N] of trees: [B, N + F K] each."""
    (batch, num_frontier, vocabulary), num_old = log_q.shape, tree[0].shape[1]
    new = [part.new_empty(batch, num_old + num_frontier * width) for part in tree]
    values = log_q.new_empty(width)
    indices = frontier.new_empty(width)
    _kernels[0].append_children(
        log_q.data_ptr(),
        batch,
        num_frontier,
        vocabulary,
        width,
        0 if draft_ids is None else draft_ids.data_ptr(),
        frontier.data_ptr(),
        num_old,
        *(part.data_ptr() for part in (*tree, *new)),
        values.data_ptr(),
        indices.data_ptr(),
    )
    return new[0], new[1], new[2]


def select_nodes(
    keep: Tensor, tree: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, parents, scores and validity [B, K] of nodes `keep` [B, K] of trees [B, N]."""
    (batch, count), num_nodes = keep.shape, tree[0].shape[1]
    new = [part.new_empty(batch, count) for part in tree]
    valid = torch.empty(batch, count, dtype=torch.bool)
    numbers = keep.new_empty(num_nodes)
    addresses = (part.data_ptr() for part in (*tree, *new, valid, numbers))
    _kernels[0].select_nodes(keep.data_ptr(), count, batch, num_nodes, *addresses)
    return new[0], new[1], new[2], valid


def find_ancestors(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return which nodes [B, N, N] are a node's ancestors or itself, and the depths [B, N], from
    parents [B, N].
    """
    batch, num_nodes = parents.shape
    ancestors = torch.empty(batch, num_nodes, num_nodes, dtype=torch.bool)
    depths = torch.empty_like(parents)
    _kernels[0].find_ancestors(
        parents.data_ptr(), batch, num_nodes, ancestors.data_ptr(), depths.data_ptr()
    )
    return ancestors, depths


def accept_greedy(
    tokens: Tensor, parents: Tensor, can_accept: Tensor, height: int, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `tree_greedy_reference` for the nodes [B, N] of trees up to this height: path,
    counts and bonus.
    """
    batch, num_nodes, vocabulary = logits.shape
    path = tokens.new_empty(batch, height + 1)
    numbers = tokens.new_empty(2 * num_nodes)
    counts = tokens.new_empty(batch)
    bonus = tokens.new_empty(batch)
    _kernels[0].accept_greedy(
        tokens.data_ptr(),
        parents.data_ptr(),
        can_accept.data_ptr(),
        logits.data_ptr(),
        batch,
        num_nodes,
        vocabulary,
        height,
        path.data_ptr(),
        counts.data_ptr(),
        bonus.data_ptr(),
        numbers.data_ptr(),
    )
    return path, counts, bonus


def commit_tokens(
    nodes: Tensor,
    path: Tensor,
    counts: Tensor,
    bonus: Tensor,
    texts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute `token_commit_reference`, in place."""
    (batch, num_steps), emitted, num_emitted = (
        path.shape,
        torch.empty_like(path),
        torch.empty_like(counts),
    )
    addresses = (part.data_ptr() for part in (nodes, path, counts, bonus, *texts))
    sizes = batch, nodes.shape[1], num_steps, texts[0].shape[1], len(texts[4])
    _kernels[0].commit_tokens(*addresses, *sizes, emitted.data_ptr(), num_emitted.data_ptr())
    return emitted, num_emitted
