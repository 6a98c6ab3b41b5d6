"""Select nodes of a growing tree by their scores: the next frontier, and the nodes that are
verified, in one launch each.

Shapes: B batch, M nodes so far, L nodes of the newest level, F frontier nodes, N selected nodes. Of
equal scores the earlier node is better. The references in torch come first; they take sorts and
gathers, a dozen launches. In the kernels a program owns a tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .append_children import Nodes
from .dispatch import jit, runs_on, tl, triton
from .sampling_cuts import float_order

MAX_FRONTIER = 32
"""Nodes of a frontier that the kernel picks, one after another."""
MAX_NODES = 1024
"""Nodes of a tree that the kernel ranks, each against all others."""
CHUNK = 32
"""Nodes that all others are compared with at a time, at most."""


class Frontier(NamedTuple):
    """The nodes that a drafter runs next."""

    nodes: Tensor  # [B, F] their indices in the tree
    tokens: Tensor  # [B, F] their tokens
    parents: Tensor  # [B, F] their parents, by the order in which the drafter ran these


class SelectedNodes(NamedTuple):
    """The nodes that are verified, ascending."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, renumbered, -1 at the root
    scores: Tensor  # [B, N]
    valid: Tensor  # [B, N] bool, False where the score is -inf


def select_frontier_reference(
    tokens: Tensor, scores: Tensor, level_start: int, width: int, first_parent: int, count: int
) -> Frontier:
    """Return the `count` best nodes of a level, which begins at node `level_start` of `tokens` and
    `scores` [B, M]. Its nodes are `width` children of each node of the frontier before; the drafter
    ran those from its node `first_parent` on.
    """
    level = scores[:, level_start:]
    if level.shape[1] == 1:
        keep = torch.zeros_like(tokens[:, :1])
        return Frontier(keep + level_start, tokens[:, level_start:], keep + first_parent)
    keep = level.sort(dim=1, descending=True, stable=True).indices[:, :count]
    nodes = level_start + keep
    return Frontier(nodes, tokens.gather(1, nodes), first_parent + keep // width)


def select_best_reference(nodes: Nodes, budget: int) -> SelectedNodes:
    """Return the `budget` best nodes. They must be closed under parents, as where no score exceeds
    that of the parent.
    """
    order = nodes.scores.sort(dim=1, descending=True, stable=True).indices
    keep = order[:, :budget].sort(dim=1).values
    renumber = torch.full_like(nodes.tokens, -1)
    renumber.scatter_(1, keep, torch.arange(keep.shape[1], device=keep.device).expand_as(keep))
    old = nodes.parents.gather(1, keep)
    parents = torch.where(old < 0, -1, renumber.gather(1, old.clamp(min=0)))
    scores = nodes.scores.gather(1, keep)
    return SelectedNodes(nodes.tokens.gather(1, keep), parents, scores, scores > float("-inf"))


@jit
def _frontier_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    scores_ptr,
    nodes_ptr,
    new_tokens_ptr,
    new_parents_ptr,
    num_nodes,
    level_start,
    num_children,
    first_parent,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pick the best nodes of one tree's level; grid [B]."""
    batch = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < num_nodes - level_start
    score_ptrs = scores_ptr + batch * num_nodes + level_start + index
    score = tl.load(score_ptrs, mask=inside, other=0.0)
    # A key orders by score, then by lowest index.
    key = (float_order(score, 0).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    nothing = -0x7FFFFFFFFFFFFFFF
    key = tl.where(inside, key, nothing)
    for pick in tl.static_range(COUNT):
        best = tl.max(key, 0)
        key = tl.where(key == best, nothing, key)
        chosen = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        node = level_start + chosen
        slot = batch * COUNT + pick
        tl.store(nodes_ptr + slot, node)
        tl.store(new_tokens_ptr + slot, tl.load(tokens_ptr + batch * num_nodes + node))
        tl.store(new_parents_ptr + slot, first_parent + chosen // num_children)


@jit
def _select_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    parents_ptr,
    scores_ptr,
    number_ptr,
    new_tokens_ptr,
    new_parents_ptr,
    new_scores_ptr,
    valid_ptr,
    num_nodes,
    num_selected,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Rank the nodes of one tree and store the best; grid [B]."""
    # 1. A node's rank is the number of better nodes.
    batch = tl.program_id(0).to(tl.int64)
    first = batch * num_nodes
    node = tl.arange(0, BLOCK)
    inside = node < num_nodes
    score = tl.load(scores_ptr + first + node, mask=inside, other=float("-inf"))
    order = float_order(score, 0)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_nodes, CHUNK):
        other = start + tl.arange(0, CHUNK)
        is_other = other < num_nodes
        other_score = tl.load(scores_ptr + first + other, mask=is_other, other=float("-inf"))
        other_order = float_order(other_score, 0)[None, :]
        ties = (other_order == order[:, None]) & (other[None, :] < node[:, None])
        better = ((other_order > order[:, None]) | ties) & is_other[None, :]
        rank += tl.sum(better.to(tl.int32), 1)
    # 2. Selected nodes are numbered in their order; another thread reads a parent's number.
    selected = inside & (rank < num_selected)
    number = tl.cumsum(selected.to(tl.int32), 0) - 1
    tl.store(number_ptr + first + node, number, mask=inside)
    tl.debug_barrier()
    parent = tl.load(parents_ptr + first + node, mask=inside, other=-1)
    has_parent = selected & (parent >= 0)
    new_parent = tl.load(number_ptr + first + parent, mask=has_parent, other=-1)
    # 3. Store them.
    slot = batch * num_selected + number
    token = tl.load(tokens_ptr + first + node, mask=inside, other=0)
    tl.store(new_tokens_ptr + slot, token, mask=selected)
    tl.store(new_parents_ptr + slot, new_parent.to(tl.int64), mask=selected)
    tl.store(new_scores_ptr + slot, score, mask=selected)
    tl.store(valid_ptr + slot, score > float("-inf"), mask=selected)


@torch.library.custom_op("spectrain::select_frontier", mutates_args=())
def _launch_frontier(
    tokens: Tensor, scores: Tensor, level_start: int, width: int, first_parent: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel."""
    batch, num_nodes = tokens.shape
    outputs = _empty_frontier(tokens, scores, level_start, width, first_parent, count)
    with torch.cuda.device_of(tokens):
        _frontier_kernel[(batch,)](
            tokens,
            scores,
            *outputs,
            num_nodes,
            level_start,
            width,
            first_parent,
            COUNT=outputs[0].shape[1],
            BLOCK=triton.next_power_of_2(num_nodes - level_start),
            num_warps=4,
        )
    return outputs


@_launch_frontier.register_fake
def _empty_frontier(
    tokens: Tensor, scores: Tensor, level_start: int, width: int, first_parent: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    size = len(tokens), min(count, tokens.shape[1] - level_start)
    return tokens.new_empty(size), tokens.new_empty(size), tokens.new_empty(size)


@torch.library.custom_op("spectrain::select_best", mutates_args=())
def _launch_select(
    tokens: Tensor, parents: Tensor, scores: Tensor, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel."""
    batch, num_nodes = tokens.shape
    outputs = _empty_selection(tokens, parents, scores, budget)
    numbers = tokens.new_empty(tokens.shape, dtype=torch.int32)
    block = max(32, triton.next_power_of_2(num_nodes))
    with torch.cuda.device_of(tokens):
        _select_kernel[(batch,)](
            tokens,
            parents,
            scores,
            numbers,
            *outputs,
            num_nodes,
            outputs[0].shape[1],
            BLOCK=block,
            # 32 comparisons a thread at most; with 128 registers spill.
            CHUNK=min(CHUNK, 8192 // block),
            num_warps=8,
        )
    return outputs


@_launch_select.register_fake
def _empty_selection(
    tokens: Tensor, parents: Tensor, scores: Tensor, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = len(tokens), min(budget, tokens.shape[1])
    valid = tokens.new_empty(size, dtype=torch.bool)
    return tokens.new_empty(size), tokens.new_empty(size), scores.new_empty(size), valid


def can_select(device: torch.device, num_nodes: int, num_frontier: int = 1) -> bool:
    """Tell whether the kernels run on a device for trees of so many nodes, and frontiers."""
    return runs_on(device) and num_nodes <= MAX_NODES and num_frontier <= MAX_FRONTIER


def select_frontier(
    tokens: Tensor, scores: Tensor, level_start: int, width: int, first_parent: int, count: int
) -> Frontier:
    """Do what `select_frontier_reference` does, in one launch where the kernel runs."""
    rest: tuple[Any, ...] = level_start, width, first_parent, count
    if not can_select(tokens.device, tokens.shape[1], count):
        return select_frontier_reference(tokens, scores, *rest)
    return Frontier(*_launch_frontier(tokens.contiguous(), scores.contiguous(), *rest))


def select_best(nodes: Nodes, budget: int) -> SelectedNodes:
    """Do what `select_best_reference` does, in one launch where the kernel runs."""
    if not can_select(nodes.tokens.device, nodes.tokens.shape[1]):
        return select_best_reference(nodes, budget)
    return SelectedNodes(*_launch_select(*(part.contiguous() for part in nodes), budget))
