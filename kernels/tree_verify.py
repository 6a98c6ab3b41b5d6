"""Verify token trees on the device, greedily or by sample-and-match: which path is accepted, and
which token follows it.

Shapes: B batch, N nodes, V vocabulary, S parts of a row. The references are in tree_walks.py; they
are also the path on a CPU. The kernels:
- programs compute the argmax of all nodes in parallel, one part of a row each, because a single
  program that walked from row to row would read at a 132nd of an H200's bandwidth; consecutive
  nodes at the same position share Gumbel noise;
- one program per tree then visits the accepted nodes;
- with top-k or top-p, candidates at all nodes are collected before (sampling_cuts.py).
The vocabulary size is specialised where 16 divides it: only then are the loads of a row vectorised.
No step waits for the host, and every shape is fixed in advance. SPECTRAIN_KERNELS=reference or
=triton overrides the path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .counter import fold_in_kernel, gumbel_in_kernel
from .dispatch import jit, run_on_cpu, runs_on, tl, triton
from .sampling_cuts import (
    ARGMAX_TILES,
    CANDIDATE_PARTS,
    CUT_TILES,
    EMPTY_BITS,
    MAX_CANDIDATES,
    NODES_PER_PROGRAM,
    PART_TILES,
    SAMPLE_TILES,
    WALK_TILES,
    candidates_kernel,
    cut_from_candidates,
    load_logits,
    locate_row,
    parts_kernel,
    sample_candidate,
    sample_row,
)
from .tree_walks import (
    SamplingSpec,
    TreeNodes,
    Verdict,
    tree_greedy_reference,
    tree_match_reference,
)


@jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    best_ptr,
    best_token_ptr,
    rows_ptr,
    positions_ptr,
    logits_stride_b,
    logits_stride_n,
    num_nodes,
    vocabulary,
    num_shared,
    key,
    temperature,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the best score, with or without noise, of one part of some nodes' rows, and its token.

    Grid [S, groups of nodes, B].
    """
    part = tl.program_id(0)
    batch = tl.program_id(2)
    first = tl.program_id(1) * num_shared
    columns = part * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += tl.cast(batch, tl.int64) * logits_stride_b
    if NOISE:
        row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
        positions_ptr += batch * num_nodes
        noise_position = tl.load(positions_ptr + first) - 1  # not the position of the first node
        noise = tl.zeros([BLOCK], tl.float32)
    for node in range(first, tl.minimum(first + num_shared, num_nodes)):
        x, _ = load_logits(
            logits_ptr + tl.cast(node, tl.int64) * logits_stride_n, part * BLOCK, vocabulary, BLOCK
        )
        if NOISE:
            position = tl.load(positions_ptr + node)
            if position != noise_position:
                noise = gumbel_in_kernel(fold_in_kernel(row_key, position), columns)
            noise_position = position
            x = x / temperature + noise
        best, offset = tl.max(x, 0, return_indices=True)
        slot = (batch * num_nodes + node) * tl.num_programs(0) + part
        tl.store(best_ptr + slot, best)
        tl.store(best_token_ptr + slot, part * BLOCK + offset)


@jit
def _walk_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    parents_ptr,
    allowed_ptr,
    best_ptr,
    best_token_ptr,
    candidate_counts_ptr,
    candidates_ptr,
    path_ptr,
    counts_ptr,
    bonus_ptr,
    logits_ptr,
    rows_ptr,
    positions_ptr,
    logits_stride_b,
    logits_stride_n,
    num_nodes,
    num_parts,
    num_levels,
    vocabulary,
    key,
    temperature,
    top_k,
    top_p,
    CUT: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Visit the accepted nodes of one tree; grid [B].

    `best_ptr` and `best_token_ptr` have the best score of each part and its token or, where tokens
    are cut, the largest logit and the mass.
    """
    # 1. Load the tree. Its root is pending.
    batch = tl.program_id(0)
    index = tl.arange(0, BLOCK_N)
    parts = tl.arange(0, BLOCK_S)
    inside = index < num_nodes
    tokens = tl.load(tokens_ptr + batch * num_nodes + index, mask=inside, other=-1)
    parents = tl.load(parents_ptr + batch * num_nodes + index, mask=inside, other=-1)
    allowed = tl.load(allowed_ptr + batch * num_nodes + index, mask=inside, other=0) != 0
    depth = tl.where(index == 0, 0, -1)
    choices = tl.zeros([BLOCK_N], tl.int32)
    pending = index == 0
    node = 0
    while node < num_nodes:
        # 2. Choose the target's token after this node.
        if CUT:
            row_ptr = locate_row(logits_ptr, batch, node, logits_stride_b, logits_stride_n)
            row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
            node_key = fold_in_kernel(row_key, tl.load(positions_ptr + batch * num_nodes + node))
            _, cut, suffices = cut_from_candidates(
                row_ptr,
                best_ptr,
                best_token_ptr,
                candidate_counts_ptr,
                candidates_ptr,
                batch * num_nodes + node,
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
            if suffices:
                choice = sample_candidate(
                    row_ptr,
                    candidate_counts_ptr,
                    candidates_ptr,
                    batch * num_nodes + node,
                    cut,
                    node_key,
                    temperature,
                    CANDIDATES,
                )
            else:
                choice = sample_row(row_ptr, vocabulary, cut, node_key, temperature, SHIFT, BLOCK)
        else:
            slot = tl.cast(batch * num_nodes + node, tl.int64) * num_parts
            best = tl.load(best_ptr + slot + parts, mask=parts < num_parts, other=float("-inf"))
            _, part = tl.max(best, 0, return_indices=True)
            choice = tl.load(best_token_ptr + slot + part)
        # 3. Accept the children that carry it, and continue with the first pending node.
        choices = tl.where(index == node, choice, choices)
        accepted = (parents == node) & (tokens == choice) & allowed
        depth = tl.where(accepted, tl.sum(tl.where(index == node, depth, 0), 0) + 1, depth)
        pending = (pending & (index != node)) | accepted
        node = tl.min(tl.where(pending, index, num_nodes), 0)
    # 4. Store the deepest path, from its last node up, and the bonus token.
    deepest, last = tl.max(depth, 0, return_indices=True)
    tl.store(counts_ptr + batch, tl.cast(deepest + 1, tl.int64))
    tl.store(bonus_ptr + batch, tl.sum(tl.where(index == last, choices, 0), 0).to(tl.int64))
    node = tl.cast(last, tl.int64)
    for back in range(num_levels):
        level = num_levels - 1 - back
        tl.store(path_ptr + batch * num_levels + level, node)
        if (level <= deepest) & (node > 0):
            node = tl.load(parents_ptr + batch * num_nodes + node)


def node_block(num_nodes: int) -> int:
    """Return the nodes of a program: at least one per thread of a warp; with fewer the assembler
    spills.
    """
    return max(32, triton.next_power_of_2(num_nodes))


@torch.library.custom_op("spectrain::tree_match", mutates_args=())
def _launch_match(
    tokens: Tensor,
    parents: Tensor,
    allowed: Tensor,
    logits: Tensor,
    height: int,
    rows: Tensor | None,
    positions: Tensor | None,
    key: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels; greedy without `rows`."""
    (batch, num_nodes), vocabulary = tokens.shape, logits.shape[-1]
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    cut = top_k is not None or top_p is not None
    if cut:
        parts = find_candidates(logits, temperature, top_k)
        walk = CUT_TILES
    else:
        parts = _find_argmax(logits, rows, positions, key, temperature)
        walk = WALK_TILES
    path, counts, bonus = empty_verdict(tokens, parents, allowed, logits, height)
    with torch.cuda.device_of(logits):
        _walk_kernel[(batch,)](
            tokens,
            parents,
            allowed,
            *parts,
            path,
            counts,
            bonus,
            logits,
            rows,
            positions,
            logits.stride(0),
            logits.stride(1),
            num_nodes,
            parts.num_parts,
            height + 1,
            vocabulary,
            key,
            temperature,
            top_k,
            top_p,
            CUT=cut,
            SHIFT=EMPTY_BITS[logits.dtype],
            BLOCK_N=node_block(num_nodes),
            BLOCK_S=triton.next_power_of_2(parts.num_parts),
            BLOCK=walk.block,
            CANDIDATES=MAX_CANDIDATES,
            num_warps=walk.num_warps,
        )
    return path, counts, bonus


class _RowParts(NamedTuple):
    """Results of every node's row by parts: best scores and their tokens or, with candidates,
    largest logits and masses.
    """

    best: Tensor  # [B, N, S]
    tokens_or_mass: Tensor  # [B, N, S]
    num_candidates: Tensor | None = None  # [B, N]
    candidates: Tensor | None = None  # [B, N, CANDIDATES] int64

    @property
    def num_parts(self) -> int:
        return self.best.shape[-1]


def _find_argmax(
    logits: Tensor, rows: Tensor | None, positions: Tensor | None, key: int, temperature: float
) -> _RowParts:
    """Compute the best scores of all nodes and their tokens; without `rows` there is no noise."""
    batch, num_nodes, vocabulary = logits.shape
    config, shared = (ARGMAX_TILES, 1) if rows is None else (SAMPLE_TILES, NODES_PER_PROGRAM)
    num_parts = triton.cdiv(vocabulary, config.block)
    best = logits.new_empty(batch, num_nodes, num_parts, dtype=torch.float32)
    best_tokens = torch.empty_like(best, dtype=torch.int32)
    with torch.cuda.device_of(logits):
        _choose_kernel[(num_parts, triton.cdiv(num_nodes, shared), batch)](
            logits,
            best,
            best_tokens,
            rows,
            positions,
            logits.stride(0),
            logits.stride(1),
            num_nodes,
            vocabulary,
            shared,
            key,
            temperature,
            NOISE=rows is not None,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
    return _RowParts(best, best_tokens)


def find_candidates(logits: Tensor, temperature: float, top_k: int | None) -> _RowParts:
    """Collect the tokens of all nodes that top-k and top-p may retain, up to MAX_CANDIDATES of
    each node.
    """
    batch, num_nodes, vocabulary = logits.shape
    num_parts = triton.cdiv(vocabulary, PART_TILES.block)
    top = logits.new_empty(batch, num_nodes, num_parts, dtype=torch.float32)
    mass = torch.empty_like(top)
    counts = torch.empty(batch, num_nodes, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(
        batch, num_nodes, MAX_CANDIDATES, dtype=torch.int64, device=logits.device
    )
    num_top_parts = min(CANDIDATE_PARTS, -(-num_parts // 2)) if top_k is None else top_k
    strides = logits.stride(0), logits.stride(1)
    with torch.cuda.device_of(logits):
        parts_kernel[(num_parts, num_nodes, batch)](
            logits,
            top,
            mass,
            counts,
            *strides,
            num_nodes,
            vocabulary,
            temperature,
            BLOCK=PART_TILES.block,
            num_warps=PART_TILES.num_warps,
        )
        candidates_kernel[(num_parts, num_nodes, batch)](
            logits,
            top,
            counts,
            candidates,
            *strides,
            num_nodes,
            vocabulary,
            num_top_parts,
            SHIFT=EMPTY_BITS[logits.dtype],
            BLOCK=PART_TILES.block,
            BLOCK_S=triton.next_power_of_2(num_parts),
            CANDIDATES=MAX_CANDIDATES,
            num_warps=PART_TILES.num_warps,
        )
    return _RowParts(top, mass, counts, candidates)


@_launch_match.register_fake
def empty_verdict(
    tokens: Tensor, parents: Tensor, allowed: Tensor, logits: Tensor, height: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the outputs."""
    batch = len(tokens)
    return tokens.new_empty(batch, height + 1), tokens.new_empty(batch), tokens.new_empty(batch)


def can_run_kernel(logits: Tensor) -> bool:
    """Tell whether the kernels are enabled and can run here, also on interpreted bfloat16, which
    is only read.
    """
    return runs_on(logits.device) and logits.dtype in EMPTY_BITS


def tree_arguments(nodes: TreeNodes, logits: Tensor) -> tuple[Any, ...]:
    """Return the first arguments of every launch; a verdict has no gradient."""
    trees = (x.contiguous() for x in (nodes.tokens, nodes.parents, nodes.can_accept))
    return *trees, logits.detach(), nodes.height


def sampling_arguments(draws: SamplingSpec, logits: Tensor) -> tuple[Any, ...]:
    """Return the last arguments of a launch that draws; None for cuts without effect."""
    top_k = draws.top_k if 0 < draws.top_k < logits.shape[-1] else None
    top_p = draws.top_p if draws.top_p < 1 else None
    return (
        draws.sequence_keys.contiguous(),
        draws.positions.contiguous(),
        draws.key,
        draws.temperature,
        top_k,
        top_p,
    )


def tree_greedy(nodes: TreeNodes, logits: Tensor) -> Verdict:
    """Compute `tree_greedy_reference` by the kernels where they run: on a GPU, or interpreted
    for tests.
    """
    if not can_run_kernel(logits):
        accepted = run_on_cpu(
            "accept_greedy", nodes.tokens, nodes.parents, nodes.can_accept, nodes.height, logits
        )
        return tree_greedy_reference(nodes, logits) if accepted is None else Verdict(*accepted)
    return Verdict(*_launch_match(*tree_arguments(nodes, logits), None, None, 0, 1.0, None, None))


def tree_match(nodes: TreeNodes, logits: Tensor, draws: SamplingSpec) -> Verdict:
    """Compute `tree_match_reference` by the kernels where they run: on a GPU, or interpreted for
    tests.
    """
    if not can_run_kernel(logits):
        return tree_match_reference(nodes, logits, draws)
    return Verdict(
        *_launch_match(*tree_arguments(nodes, logits), *sampling_arguments(draws, logits))
    )
