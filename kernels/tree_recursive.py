"""Recursive rejection sampling of token trees on the device. Shapes: B batch, N nodes, V
vocabulary, U draft vocabulary.

One program per tree visits, normalises and rejects; the residual is written where a child was
rejected. The bonus token is drawn by Gumbel-max, one part of a row per program. The reference is in
tree_walks.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .counter import fold_in_kernel, gumbel_in_kernel, uniform_in_kernel
from .dispatch import jit, tl, triton
from .sampling_cuts import (
    CUT_TILES,
    EMPTY_BITS,
    MAX_CANDIDATES,
    PART_TILES,
    SAMPLE_TILES,
    cut_chances,
    cut_from_candidates,
    cut_mass,
    find_cut,
    float_order,
    load_logits,
)
from .tree_verify import (
    can_run_kernel,
    empty_verdict,
    find_candidates,
    node_block,
    sampling_arguments,
    tree_arguments,
)
from .tree_walks import SamplingSpec, TreeNodes, Verdict, tree_recursive_reference


@jit
def _subtract_q(  # type: ignore[no-untyped-def]
    row_ptr,
    q_ptr,
    draft_index_ptr,
    residual_ptr,
    vocabulary,
    token,
    following,
    reduced,
    top,
    cut,
    temperature,
    scale,
    odds,
    WITHOUT: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write max(P - Q, 0) of a row; return its sum, its value at the token `following`, and the sum
    of q without `token`.

    P is the stored residual where the row is `reduced` already, otherwise the row's unnormalised
    probabilities, each times `scale`; Q is q times `odds`. A token that was removed from q is
    stored as -1: it was rejected, so its residual is 0.
    """
    total, left, ahead = (tl.zeros([BLOCK], tl.float32),) * 3
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        if reduced != 0:
            p = tl.load(residual_ptr + columns, mask=inside, other=0.0)
        else:
            x, _ = load_logits(row_ptr, start, vocabulary, BLOCK)
            p = cut_chances(x, top, cut, temperature, SHIFT)
        q = _load_q(q_ptr, draft_index_ptr, columns, inside)
        residual = tl.maximum(p * scale - q * odds, 0.0)
        if WITHOUT:
            is_removed = (p < 0) | (columns == token)
            residual = tl.where(is_removed, 0.0, residual)
            q = tl.where(is_removed, 0.0, q)
            tl.store(residual_ptr + columns, tl.where(is_removed, -1.0, residual), mask=inside)
            left += q
        else:
            tl.store(residual_ptr + columns, residual, mask=inside)
        total += residual
        ahead += tl.where(columns == following, residual, 0.0)
    tl.debug_barrier()  # the next pass may read another thread's writes
    return tl.sum(total, 0), tl.sum(ahead, 0), tl.sum(left, 0)


@jit
def _load_q(q_ptr, draft_index_ptr, tokens, inside):  # type: ignore[no-untyped-def]
    """Load q of target tokens, 0 where the draft vocabulary lacks them."""
    if draft_index_ptr is not None:
        tokens = tl.load(draft_index_ptr + tokens, mask=inside, other=-1)
        inside = inside & (tokens >= 0)
    return tl.load(q_ptr + tokens, mask=inside, other=0.0).to(tl.float32)


@jit
def _reject_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    parents_ptr,
    allowed_ptr,
    logits_ptr,
    q_ptr,
    draft_index_ptr,
    rows_ptr,
    positions_ptr,
    residual_ptr,
    top_ptr,
    mass_ptr,
    candidate_counts_ptr,
    candidates_ptr,
    path_ptr,
    counts_ptr,
    state_ptr,
    logits_stride_b,
    logits_stride_n,
    q_stride_b,
    q_stride_n,
    num_nodes,
    num_parts,
    vocabulary,
    num_levels,
    key,
    temperature,
    top_k,
    top_p,
    WITHOUT: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Walk one tree by recursive rejection; grid [B].

    `state_ptr` receives, for the last node, whether P is stored in `residual_ptr`, and otherwise
    its cut.
    """
    # 1. Load the tree and locate its rows.
    batch = tl.program_id(0)
    index = tl.arange(0, BLOCK_N)
    tree = batch * num_nodes
    parents = tl.load(parents_ptr + tree + index, mask=index < num_nodes, other=-1)
    allowed = tl.load(allowed_ptr + tree + index, mask=index < num_nodes, other=0) != 0
    logits_ptr += tl.cast(batch, tl.int64) * logits_stride_b
    q_ptr += tl.cast(batch, tl.int64) * q_stride_b
    residual_ptr += tl.cast(batch, tl.int64) * vocabulary
    row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
    path_ptr += batch * num_levels
    node = 0
    last = 0
    depth = 0
    reduced = 0
    cut = 0
    while node < num_nodes:
        # 2. Visit an accepted node: cut its row by top-k and top-p.
        tl.store(path_ptr + depth, tl.cast(node, tl.int64))
        row_ptr = logits_ptr + tl.cast(node, tl.int64) * logits_stride_n
        q_row_ptr = q_ptr + tl.cast(node, tl.int64) * q_stride_n
        if candidates_ptr is not None:
            top, cut, _ = cut_from_candidates(
                row_ptr,
                top_ptr,
                mass_ptr,
                candidate_counts_ptr,
                candidates_ptr,
                tree + node,
                vocabulary,
                num_parts,
                temperature,
                top_k,
                top_p,
                SHIFT,
                BLOCK,
                BLOCK_S,
                CANDIDATES,
            )
        else:
            top, cut = find_cut(row_ptr, vocabulary, temperature, top_k, top_p, SHIFT, BLOCK)
        node_key = fold_in_kernel(row_key, tl.load(positions_ptr + tree + node))
        # 3. Take its first child and normalise P.
        children = (parents == node) & allowed
        child = tl.min(tl.where(children, index, num_nodes), 0)
        token = tl.load(tokens_ptr + tree + child, mask=child < num_nodes, other=0)
        last = node
        node = num_nodes
        order = 0
        reduced = 0
        odds = 1.0
        scale = 1.0
        ahead = 0.0
        if child < num_nodes:
            scale = 1 / cut_mass(row_ptr, vocabulary, top, cut, temperature, SHIFT, BLOCK)
            ahead = cut_chances(
                tl.load(row_ptr + token).to(tl.float32), top, cut, temperature, SHIFT
            )
        # 4. Try the children in the order drawn; a rejected child reduces P, an accepted one is
        #    visited next.
        while child < num_nodes:
            p = ahead * scale
            q = _load_q(q_row_ptr, draft_index_ptr, token, True) * odds
            following = tl.min(tl.where(children & (index > child), index, num_nodes), 0)
            follower = tl.load(tokens_ptr + tree + following, mask=following < num_nodes, other=-1)
            total = 0.0
            if (p < q) & (uniform_in_kernel(node_key, order) * q >= p):
                total, ahead, left = _subtract_q(
                    row_ptr,
                    q_row_ptr,
                    draft_index_ptr,
                    residual_ptr,
                    vocabulary,
                    token,
                    follower,
                    reduced,
                    top,
                    cut,
                    temperature,
                    scale,
                    odds,
                    WITHOUT,
                    SHIFT,
                    BLOCK,
                )
                if WITHOUT:
                    odds = 1 / tl.maximum(left, 1e-30)
            if total > 0:
                scale = 1 / total
                reduced = 1
                child = following
                token = follower
                order = order + 1
            else:  # accepted, or rounding has left nothing
                node = child
                child = num_nodes
        depth += 1
    # 5. Store the state of the last node and pad the path.
    tl.store(state_ptr + 2 * batch, reduced)
    tl.store(state_ptr + 2 * batch + 1, cut)
    tl.store(counts_ptr + batch, tl.cast(depth, tl.int64))
    for level in range(depth, num_levels):
        tl.store(path_ptr + level, tl.cast(last, tl.int64))


@jit
def _bonus_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    residual_ptr,
    path_ptr,
    state_ptr,
    rows_ptr,
    positions_ptr,
    best_ptr,
    best_token_ptr,
    logits_stride_b,
    logits_stride_n,
    num_nodes,
    vocabulary,
    num_levels,
    key,
    temperature,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the best score, with noise, of one part of P after a tree's last node, and its
    token; grid [S, B].
    """
    # 1. Scores: the logarithm of the residual, or the cut logits where no child was rejected.
    part = tl.program_id(0)
    batch = tl.program_id(1)
    node = tl.load(path_ptr + batch * num_levels + num_levels - 1)
    if tl.load(state_ptr + 2 * batch) != 0:
        columns = part * BLOCK + tl.arange(0, BLOCK)
        residual_ptr += tl.cast(batch, tl.int64) * vocabulary
        left = tl.load(residual_ptr + columns, mask=columns < vocabulary, other=0.0)
        scores = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)), float("-inf"))
    else:
        row_ptr = logits_ptr + tl.cast(batch, tl.int64) * logits_stride_b + node * logits_stride_n
        x, columns = load_logits(row_ptr, part * BLOCK, vocabulary, BLOCK)
        scores = tl.where(
            float_order(x, SHIFT) >= tl.load(state_ptr + 2 * batch + 1),
            x / temperature,
            float("-inf"),
        )
    # 2. Add the noise of this node and store the best.
    row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
    node_key = fold_in_kernel(row_key, tl.load(positions_ptr + batch * num_nodes + node))
    best, offset = tl.max(
        scores + gumbel_in_kernel(fold_in_kernel(node_key, 1), columns), 0, return_indices=True
    )
    slot = batch * tl.num_programs(0) + part
    tl.store(best_ptr + slot, best)
    tl.store(best_token_ptr + slot, tl.cast(part * BLOCK + offset, tl.int64))


@torch.library.custom_op("spectrain::tree_recursive", mutates_args=())
def _launch_recursive(
    tokens: Tensor,
    parents: Tensor,
    allowed: Tensor,
    logits: Tensor,
    height: int,
    q: Tensor,
    draft_ids: Tensor | None,
    without_replacement: bool,
    rows: Tensor,
    positions: Tensor,
    key: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels."""
    (batch, num_nodes), vocabulary = tokens.shape, logits.shape[-1]
    logits, q = (x if x.stride(-1) == 1 else x.contiguous() for x in (logits, q))
    draft_index = None
    if draft_ids is not None:
        draft_index = torch.full([vocabulary], -1, dtype=torch.int32, device=logits.device)
        draft_index[draft_ids] = torch.arange(
            len(draft_ids), dtype=torch.int32, device=logits.device
        )
    parts: tuple[Tensor | None, ...] = (None,) * 4
    if top_k is not None or top_p is not None:
        parts = find_candidates(logits, temperature, top_k)
    num_parts = triton.cdiv(vocabulary, PART_TILES.block)
    num_drawn = triton.cdiv(vocabulary, SAMPLE_TILES.block)
    residual = logits.new_empty(batch, vocabulary, dtype=torch.float32)
    state = tokens.new_empty(batch, 2, dtype=torch.int32)
    best = residual.new_empty(batch, num_drawn)
    best_tokens = tokens.new_empty(batch, num_drawn)
    path, counts, _ = empty_verdict(tokens, parents, allowed, logits, height)
    shift = EMPTY_BITS[logits.dtype]
    with torch.cuda.device_of(logits):
        _reject_kernel[(batch,)](
            tokens,
            parents,
            allowed,
            logits,
            q,
            draft_index,
            rows,
            positions,
            residual,
            *parts,
            path,
            counts,
            state,
            logits.stride(0),
            logits.stride(1),
            q.stride(0),
            q.stride(1),
            num_nodes,
            num_parts,
            vocabulary,
            height + 1,
            key,
            temperature,
            top_k,
            top_p,
            WITHOUT=without_replacement,
            SHIFT=shift,
            BLOCK_N=node_block(num_nodes),
            BLOCK_S=triton.next_power_of_2(num_parts),
            BLOCK=CUT_TILES.block,
            CANDIDATES=MAX_CANDIDATES,
            num_warps=CUT_TILES.num_warps,
        )
        _bonus_kernel[(num_drawn, batch)](
            logits,
            residual,
            path,
            state,
            rows,
            positions,
            best,
            best_tokens,
            logits.stride(0),
            logits.stride(1),
            num_nodes,
            vocabulary,
            height + 1,
            key,
            temperature,
            SHIFT=shift,
            BLOCK=SAMPLE_TILES.block,
            num_warps=SAMPLE_TILES.num_warps,
        )
    return path, counts, best_tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]


_launch_recursive.register_fake(empty_verdict)


def tree_recursive(
    nodes: TreeNodes,
    logits: Tensor,
    q: Tensor,
    draft_ids: Tensor | None,
    without_replacement: bool,
    draws: SamplingSpec,
) -> Verdict:
    """Compute `tree_recursive_reference` by the kernels where they run: on a GPU, or interpreted
    for tests.
    """
    if not can_run_kernel(logits):
        return tree_recursive_reference(nodes, logits, q, draft_ids, without_replacement, draws)
    return Verdict(
        *_launch_recursive(
            *tree_arguments(nodes, logits),
            q,
            draft_ids,
            without_replacement,
            *sampling_arguments(draws, logits),
        )
    )
