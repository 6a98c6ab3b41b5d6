"""Kernels of token trees on a CPU, compiled by Numba: what a round does besides its forwards, in
place of small operations.

Shapes: B batch, N nodes, F frontier nodes, K children of each, V vocabulary, P nodes of a path, T
slots of a text, S stop tokens. Tensors are passed by address; numbers are int64, masks are bytes,
log-probabilities and logits are float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from .floats import find_largest, select_best
from .vectors import advance, compile_cached, compile_inline, to_bytes, to_floats, to_longs

ARGMAX_BLOCK = 1024  # numbers whose largest is compared with the largest before
MAX_CHILDREN = 64
"""Children of a node that kernels select at most."""


@compile_inline
def _longs(address: int, count: int) -> Any:
    return carray(to_longs(address), (count,))


@compile_cached
def _append_children_kernel(
    log_q: int,
    batch: int,
    num_frontier: int,
    vocabulary: int,
    width: int,
    draft_ids: int,
    frontier: int,
    num_old: int,
    old_tokens: int,
    old_parents: int,
    old_scores: int,
    tokens: int,
    parents: int,
    scores: int,
    values: int,
    indices: int,
) -> None:
    """Append the `width` likeliest children by log q [B, F, V] of frontier nodes [B, F] to trees
    [B, N], which are stored with them; `values` and `indices` hold [K] each. `draft_ids` [V] are
    target ids, or 0 where ids are the same."""
    num_new = num_frontier * width
    total = num_old + num_frontier * width
    best = carray(to_floats(values), (width,))
    ids = _longs(indices, width)
    for b in range(batch):
        old = 8 * b * num_old
        new = 8 * b * total
        nodes = _longs(frontier + 8 * b * num_frontier, num_frontier)
        before = _longs(old_tokens + old, num_old)
        after = _longs(tokens + new, total)
        above_before = _longs(old_parents + old, num_old)
        above = _longs(parents + new, total)
        score_before = carray(to_floats(old_scores + old // 2), (num_old,))
        score = carray(to_floats(scores + new // 2), (total,))
        for n in range(num_old):
            after[n], above[n], score[n] = before[n], above_before[n], score_before[n]
        for f in range(num_frontier):
            row = to_floats(log_q + 4 * (b * num_frontier + f) * vocabulary)
            select_best(row, vocabulary, width, to_floats(values), to_longs(indices))
            for k in range(width):
                n = total - num_new + f * width + k
                after[n] = (
                    ids[k] if draft_ids == 0 else carray(to_longs(draft_ids), (vocabulary,))[ids[k]]
                )
                above[n], score[n] = nodes[f], score_before[nodes[f]] + best[k]


@compile_cached
def _select_nodes_kernel(
    keep: int,
    count: int,
    batch: int,
    num_nodes: int,
    old_tokens: int,
    old_parents: int,
    old_scores: int,
    tokens: int,
    parents: int,
    scores: int,
    valid: int,
    numbers: int,
) -> None:
    """Store the trees of nodes `keep` [B, count], which ascend; `numbers` holds [N]. Nodes of
    score -inf are not valid.
    """
    renumbered = _longs(numbers, num_nodes)
    for b in range(batch):
        old = b * num_nodes
        new = b * count
        kept = _longs(keep + 8 * b * count, count)
        for i in range(count):
            renumbered[kept[i]] = i
        for i in range(count):
            parent = _longs(old_parents + 8 * old, num_nodes)[kept[i]]
            score = carray(to_floats(old_scores + 4 * old), (num_nodes,))[kept[i]]
            _longs(tokens + 8 * new, count)[i] = _longs(old_tokens + 8 * old, num_nodes)[kept[i]]
            _longs(parents + 8 * new, count)[i] = -1 if parent < 0 else renumbered[parent]
            carray(to_floats(scores + 4 * new), (count,))[i] = score
            carray(to_bytes(valid + new), (count,))[i] = score > -np.inf


@compile_inline
def _find_argmax(x: Any, width: int) -> int:
    """Return the index of the largest number, the first of equal ones."""
    best_start = 0
    best = np.float32(-np.inf)
    for first in range(0, width, ARGMAX_BLOCK):
        largest = find_largest(advance(x, first), min(ARGMAX_BLOCK, width - first))
        if largest > best:
            best_start = first
            best = largest
    numbers = carray(x, (width,))
    for i in range(best_start, min(best_start + ARGMAX_BLOCK, width)):
        if numbers[i] == best:
            return i
    return best_start


@compile_cached
def _accept_greedy_kernel(
    tokens: int,
    parents: int,
    can_accept: int,
    logits: int,
    batch: int,
    num_nodes: int,
    vocabulary: int,
    height: int,
    path: int,
    counts: int,
    bonus: int,
    numbers: int,
) -> None:
    """Accept the nodes [B, N] that have the most likely token of logits [B, N, V] after their
    parent; store the paths [B, height + 1], the counts [B] and the tokens that follow [B].
    `numbers` holds [2, N]."""
    depths = _longs(numbers, num_nodes)
    choices = _longs(numbers + 8 * num_nodes, num_nodes)
    for b in range(batch):
        shift = b * num_nodes
        ids = _longs(tokens + 8 * shift, num_nodes)
        above = _longs(parents + 8 * shift, num_nodes)
        allowed = carray(to_bytes(can_accept + shift), (num_nodes,))
        depths[:], depths[0], last = -1, 0, 0
        for node in range(num_nodes):
            if depths[node] < 0:
                continue
            choices[node] = _find_argmax(
                to_floats(logits + 4 * (shift + node) * vocabulary), vocabulary
            )
            last = node if depths[node] > depths[last] else last
            for child in range(node + 1, num_nodes):
                if above[child] == node and ids[child] == choices[node] and allowed[child] != 0:
                    depths[child] = depths[node] + 1
        steps = _longs(path + 8 * b * (height + 1), height + 1)
        node = last
        _longs(counts, batch)[b], _longs(bonus, batch)[b] = depths[last] + 1, choices[last]
        for level in range(height, -1, -1):
            steps[level] = node
            if level <= depths[last] and node > 0:
                node = above[node]


@compile_cached
def _commit_tokens_kernel(
    nodes: int,
    path: int,
    counts: int,
    bonus: int,
    tokens: int,
    lengths: int,
    active: int,
    tokens_left: int,
    stop_ids: int,
    batch: int,
    num_nodes: int,
    num_steps: int,
    num_slots: int,
    num_stops: int,
    emitted: int,
    num_emitted: int,
) -> None:
    """Compute `token_commit_reference`, in place."""
    stops = _longs(stop_ids, num_stops)
    goes_on = carray(to_bytes(active), (batch,))
    for b in range(batch):
        ids = _longs(nodes + 8 * b * num_nodes, num_nodes)
        steps = _longs(path + 8 * b * num_steps, num_steps)
        count = _longs(counts, batch)[b]
        results = _longs(emitted + 8 * b * num_steps, num_steps)
        text = _longs(tokens + 8 * b * num_slots, num_slots)
        length = _longs(lengths, batch)[b]
        num_real = count if goes_on[b] != 0 else 0
        is_stopped = False
        for step in range(num_steps):
            results[step] = (
                _longs(bonus, batch)[b]
                if step == count - 1
                else ids[steps[min(step + 1, num_steps - 1)]]
            )
            if step < num_real:
                text[min(length + 1 + step, num_slots - 1)] = results[step]
                for s in range(num_stops):
                    is_stopped = is_stopped or results[step] == stops[s]
        left = _longs(tokens_left, batch)
        left[b] -= num_real
        _longs(num_emitted, batch)[b] = num_real
        goes_on[b] = goes_on[b] != 0 and not is_stopped and left[b] > 0


@compile_cached
def _find_ancestors_kernel(
    parents: int, batch: int, num_nodes: int, ancestors: int, depths: int
) -> None:
    """Store which nodes [B, N, N] are a node's ancestors or itself, and the depths [B, N]."""
    for b in range(batch):
        above = _longs(parents + 8 * b * num_nodes, num_nodes)
        levels = _longs(depths + 8 * b * num_nodes, num_nodes)
        mask = carray(to_bytes(ancestors + b * num_nodes * num_nodes), (num_nodes * num_nodes,))
        for n in range(num_nodes):
            levels[n] = 0 if above[n] < 0 else levels[above[n]] + 1
            for m in range(num_nodes):
                mask[n * num_nodes + m] = m == n or (
                    above[n] >= 0 and mask[above[n] * num_nodes + m] != 0
                )


def prepare_tree_kernels() -> None:
    """Load every kernel, or compile it where this machine has not."""
    zeros = torch.zeros(1, 1, dtype=torch.int64)
    log_q = torch.zeros(1, 1, 8)
    appended = append_children(log_q, 2, None, zeros, (zeros, zeros - 1, torch.zeros(1, 1)))
    assert appended is not None
    tokens, parents, scores = appended
    select_nodes(torch.arange(2)[None], (tokens, parents, scores))
    find_ancestors(parents)
    can_accept = torch.ones_like(tokens).bool()
    accepted = accept_greedy(tokens, parents, can_accept, 1, torch.zeros(1, 3, 8))
    assert accepted is not None
    texts = torch.zeros(1, 8, dtype=torch.int64), zeros[0], torch.ones(1).bool(), zeros[0], zeros[0]
    commit_tokens(tokens, *accepted, texts)


def are_served(*tensors: Tensor) -> bool:
    """Return whether kernels take these tensors."""
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)


def append_children(
    log_q: Tensor,
    width: int,
    draft_ids: Tensor | None,
    frontier: Tensor,
    tree: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Append the `width` likeliest children by log q [B, F, V] of frontier nodes [B, F] to the
    tokens, parents and scores [B, N] of trees: [B, N + F K] each."""
    ids = [] if draft_ids is None else [draft_ids]
    if width > MAX_CHILDREN or log_q.dtype != torch.float32 or not are_served(log_q, *tree, *ids):
        return None
    frontier = frontier.contiguous()
    (batch, num_frontier, vocabulary), num_old = log_q.shape, tree[0].shape[1]
    new = [part.new_empty(batch, num_old + num_frontier * width) for part in tree]
    values = log_q.new_empty(width)
    indices = frontier.new_empty(width)
    _append_children_kernel(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return tokens, parents, scores and validity [B, K] of nodes `keep` [B, K] of trees [B, N]."""
    keep = keep.contiguous()
    if not are_served(*tree, keep):
        return None
    (batch, count), num_nodes = keep.shape, tree[0].shape[1]
    new = [part.new_empty(batch, count) for part in tree]
    valid = torch.empty(batch, count, dtype=torch.bool)
    numbers = keep.new_empty(num_nodes)
    addresses = (part.data_ptr() for part in (*tree, *new, valid, numbers))
    _select_nodes_kernel(keep.data_ptr(), count, batch, num_nodes, *addresses)
    return new[0], new[1], new[2], valid


def find_ancestors(parents: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return which nodes [B, N, N] are a node's ancestors or itself, and the depths [B, N], from
    parents [B, N].
    """
    if not are_served(parents):
        return None
    batch, num_nodes = parents.shape
    ancestors = torch.empty(batch, num_nodes, num_nodes, dtype=torch.bool)
    depths = torch.empty_like(parents)
    _find_ancestors_kernel(
        parents.data_ptr(), batch, num_nodes, ancestors.data_ptr(), depths.data_ptr()
    )
    return ancestors, depths


def accept_greedy(
    tokens: Tensor, parents: Tensor, can_accept: Tensor, height: int, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute `tree_greedy_reference` for the nodes [B, N] of trees up to this height: path,
    counts and bonus.
    """
    is_float = logits.dtype == torch.float32
    if not is_float or not are_served(logits, tokens, parents, can_accept):
        return None
    batch, num_nodes, vocabulary = logits.shape
    path = tokens.new_empty(batch, height + 1)
    numbers = tokens.new_empty(2 * num_nodes)
    counts = tokens.new_empty(batch)
    bonus = tokens.new_empty(batch)
    _accept_greedy_kernel(
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
) -> tuple[Tensor, Tensor] | None:
    """Compute `token_commit_reference`, in place."""
    if not are_served(nodes, path, counts, bonus, *texts):
        return None
    batch, num_steps = path.shape
    emitted = torch.empty_like(path)
    num_emitted = torch.empty_like(counts)
    addresses = (part.data_ptr() for part in (nodes, path, counts, bonus, *texts))
    sizes = batch, nodes.shape[1], num_steps, texts[0].shape[1], len(texts[4])
    _commit_tokens_kernel(*addresses, *sizes, emitted.data_ptr(), num_emitted.data_ptr())
    return emitted, num_emitted
