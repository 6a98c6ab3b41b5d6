"""Cuts of a row of logits by temperature, top-k and top-p inside kernels. Shapes: B batch, N nodes,
V vocabulary, S parts.

Two launches collect candidates at all nodes, one part of a row per program: the largest logit and
the mass of every part, then the tokens above the k-th largest of these maxima, of which there are
at least k and few more. A program that visits a node sorts its candidates; where they are too many,
or a flat distribution extends past them, it bisects the row instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .counter import gumbel_in_kernel
from .dispatch import jit, tl


@dataclass(frozen=True)
class VerifyTiles:
    """Tile sizes of a pass over a row: tokens per block and warps per program."""

    block: int
    num_warps: int


# None of these spills for sm_90 with Triton 3.6 and 3.9; tests/kernels/test_verify_compiled.py
# holds them to it. Not yet timed. 2048 programs for 64 nodes and 128k tokens, 64 bytes in flight a
# thread
ARGMAX_TILES = VerifyTiles(4096, 4)
SAMPLE_TILES = VerifyTiles(1024, 4)  # 8 numbers a thread
# Nodes of a program that draws: trees are stored level by level, so its noise is made two or three
# times, not sixteen.
NODES_PER_PROGRAM = 16
# reads no row; a tree's nodes lie in one warp, whose reductions need no barrier
WALK_TILES = VerifyTiles(16, 1)
# a row on one multiprocessor: 8 tokens a thread, and 4 counts of each
CUT_TILES = VerifyTiles(4096, 16)
# parts that are searched for candidates: 126 of 128k tokens, more than any usual top-k
PART_TILES = VerifyTiles(1024, 4)
MAX_CANDIDATES = 256  # candidates of a node, sorted by one program; a power of two
# without top-k, the parts with the largest maxima: they hold most of a usual nucleus
CANDIDATE_PARTS = 64

# of a number once it is float32
EMPTY_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@jit
def locate_row(logits_ptr, batch, node, stride_b, stride_n):  # type: ignore[no-untyped-def]
    """Return where the logits of a node begin: more than 2^31 may lie before them."""
    return logits_ptr + tl.cast(batch, tl.int64) * stride_b + tl.cast(node, tl.int64) * stride_n


@jit
def load_logits(row_ptr, start, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a block of logits, -inf past the end; return them and their tokens."""
    columns = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + columns, mask=columns < vocabulary, other=float("-inf")).to(
        tl.float32
    ), columns


@jit
def float_order(x, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Map floats to integers in the same order, without the low bits that half precision leaves
    empty.
    """
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@jit
def cut_chances(x, top, cut, temperature, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return exp((x - top) / temperature), 0 below the cut."""
    return tl.where(float_order(x, SHIFT) >= cut, tl.exp((x - top) / temperature), 0.0)


@jit
def cut_mass(row_ptr, vocabulary, top, cut, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum a row's unnormalised probabilities."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x, _ = load_logits(row_ptr, start, vocabulary, BLOCK)
        total += cut_chances(x, top, cut, temperature, SHIFT)
    return tl.sum(total, 0)


@jit
def _bisect_cut(  # type: ignore[no-untyped-def]
    row_ptr,
    vocabulary,
    low,
    high,
    limit,
    top,
    temperature,
    WEIGHTED: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the smallest order in [low, high] above which less than `limit` lies: a number of
    tokens or, WEIGHTED, a mass.

    A pass has three pivots, so bfloat16 takes 8 passes and float32 16: with fewer pivots the
    arithmetic units would wait for memory, with more the memory for them.
    """
    base = low
    while low < high:
        gap = tl.cast(high, tl.int64) - low
        pivot_1 = low + (gap // 4).to(tl.int32)
        pivot_2 = low + (gap // 2).to(tl.int32)
        pivot_3 = low + (gap * 3 // 4).to(tl.int32)
        above_1, above_2, above_3 = (tl.zeros([BLOCK], tl.float32),) * 3
        for start in range(0, vocabulary, BLOCK):
            x, _ = load_logits(row_ptr, start, vocabulary, BLOCK)
            weight = (
                cut_chances(x, top, base, temperature, SHIFT)
                if WEIGHTED
                else tl.full([BLOCK], 1.0, tl.float32)
            )
            order = float_order(x, SHIFT)
            above_1 += tl.where(order > pivot_1, weight, 0.0)
            above_2 += tl.where(order > pivot_2, weight, 0.0)
            above_3 += tl.where(order > pivot_3, weight, 0.0)
        if tl.sum(above_1, 0) < limit:
            high = pivot_1
        elif tl.sum(above_2, 0) < limit:
            low = pivot_1 + 1
            high = pivot_2
        elif tl.sum(above_3, 0) < limit:
            low = pivot_2 + 1
            high = pivot_3
        else:
            low = pivot_3 + 1
    return low


@jit
def find_cut(  # type: ignore[no-untyped-def]
    row_ptr, vocabulary, temperature, top_k, top_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a row's largest logit and the order of the smallest one that top-k and top-p
    retain.
    """
    # 1. The largest logit.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x, _ = load_logits(row_ptr, start, vocabulary, BLOCK)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    high = float_order(top, SHIFT)
    cut = high * 0 + (-2139095041 >> SHIFT)  # the order of -inf
    # 2. Top-k by counts, then top-p by mass.
    if top_k is not None:
        cut = _bisect_cut(
            row_ptr, vocabulary, cut, high, top_k, top, temperature, False, SHIFT, BLOCK
        )
    if top_p is not None:
        limit = top_p * cut_mass(row_ptr, vocabulary, top, cut, temperature, SHIFT, BLOCK)
        cut = _bisect_cut(
            row_ptr, vocabulary, cut, high, limit, top, temperature, True, SHIFT, BLOCK
        )
    return top, cut


@jit
def parts_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    top_ptr,
    mass_ptr,
    candidate_counts_ptr,
    logits_stride_b,
    logits_stride_n,
    num_nodes,
    vocabulary,
    temperature,
    BLOCK: tl.constexpr,
):
    """Store the largest logit of one part of a node's row and its mass relative to that; grid
    [S, N, B].
    """
    part = tl.program_id(0)
    node = tl.program_id(1)
    batch = tl.program_id(2)
    row_ptr = locate_row(logits_ptr, batch, node, logits_stride_b, logits_stride_n)
    x, _ = load_logits(row_ptr, part * BLOCK, vocabulary, BLOCK)
    top = tl.max(x, 0)
    slot = (batch * num_nodes + node) * tl.num_programs(0) + part
    tl.store(top_ptr + slot, top)
    # of -inf alone it is 0
    tl.store(mass_ptr + slot, tl.sum(tl.exp((x - tl.maximum(top, -3e38)) / temperature), 0))
    if part == 0:
        # the next launch counts candidates
        tl.store(candidate_counts_ptr + batch * num_nodes + node, 0)


@jit
def candidates_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    top_ptr,
    candidate_counts_ptr,
    candidates_ptr,
    logits_stride_b,
    logits_stride_n,
    num_nodes,
    vocabulary,
    num_top_parts,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Store the tokens of one part of a node's row from the `num_top_parts`-th largest maximum of
    all parts on.

    A candidate packs its order and its token, so that sorting puts the first of equal ones on top.
    More than CANDIDATES are counted but not stored. Grid [S, N, B].
    """
    # 1. The threshold: the `num_top_parts`-th largest maximum.
    part = tl.program_id(0)
    node = tl.program_id(1)
    batch = tl.program_id(2)
    node_slot = batch * num_nodes + node
    parts = tl.arange(0, BLOCK_S)
    tops = tl.load(
        top_ptr + node_slot * tl.num_programs(0) + parts,
        mask=parts < tl.num_programs(0),
        other=float("-inf"),
    )
    tops = tl.sort(tops, descending=True)
    least = tl.max(tl.where(parts >= num_top_parts - 1, tops, float("-inf")), 0)
    part_top = tl.load(top_ptr + node_slot * tl.num_programs(0) + part)
    # 2. Append this part's tokens above it, behind those that other programs have appended.
    if part_top >= least:
        row_ptr = locate_row(logits_ptr, batch, node, logits_stride_b, logits_stride_n)
        x, columns = load_logits(row_ptr, part * BLOCK, vocabulary, BLOCK)
        is_candidate = (x >= least) & (columns < vocabulary)
        before = tl.atomic_add(
            candidate_counts_ptr + node_slot, tl.sum(is_candidate.to(tl.int32), 0)
        )
        slot = before + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        candidate = (float_order(x, SHIFT).to(tl.int64) << 32) + (0x7FFFFFFF - columns)
        candidates_ptr += tl.cast(node_slot, tl.int64) * CANDIDATES
        tl.store(candidates_ptr + slot, candidate, mask=is_candidate & (slot < CANDIDATES))


@jit
def cut_from_candidates(  # type: ignore[no-untyped-def]
    row_ptr,
    top_ptr,
    mass_ptr,
    candidate_counts_ptr,
    candidates_ptr,
    node_slot,
    vocabulary,
    num_parts,
    temperature,
    top_k,
    top_p,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Return what `find_cut` returns, from a node's candidates where they suffice, and whether
    they did.
    """
    # 1. The row's largest logit, from its parts.
    parts = tl.arange(0, BLOCK_S)
    rank = tl.arange(0, CANDIDATES)
    tops = tl.load(
        top_ptr + tl.cast(node_slot, tl.int64) * num_parts + parts,
        mask=parts < num_parts,
        other=float("-inf"),
    )
    top = tl.max(tops, 0)
    count = tl.load(candidate_counts_ptr + node_slot)
    suffices = count <= CANDIDATES
    cut = float_order(top, SHIFT)
    if suffices:
        # 2. Sort the candidates and apply top-k.
        candidates_ptr += tl.cast(node_slot, tl.int64) * CANDIDATES
        candidate = tl.load(candidates_ptr + rank, mask=rank < count, other=-0x7FFFFFFF00000000)
        candidate = tl.sort(candidate, descending=True)
        order = (candidate >> 32).to(tl.int32)
        real = rank < count
        if top_k is not None:
            suffices = count >= top_k
            real = real & (order >= tl.max(tl.where(rank >= top_k - 1, order, -0x7FFFFFFF), 0))
        # 3. Apply top-p to the mass after top-k, or to that of all parts.
        if top_p is not None:
            token = tl.where(real, 0x7FFFFFFF - (candidate & 0xFFFFFFFF), 0)
            x = tl.load(row_ptr + token, mask=real, other=float("-inf")).to(tl.float32)
            chance = tl.where(real, tl.exp((x - top) / temperature), 0.0)
            above = tl.cumsum(chance, 0) - chance
            if top_k is not None:
                limit = top_p * tl.sum(chance, 0)
            else:
                masses = tl.load(
                    mass_ptr + tl.cast(node_slot, tl.int64) * num_parts + parts,
                    mask=parts < num_parts,
                    other=0.0,
                )
                limit = top_p * tl.sum(
                    masses * tl.exp((tl.maximum(tops, -3e38) - top) / temperature), 0
                )
                suffices = tl.sum(chance, 0) >= limit
            real = real & (above < limit)
        cut = tl.min(tl.where(real, order, 0x7FFFFFFF), 0)
    # 4. Otherwise bisect the row.
    if suffices == 0:
        top, cut = find_cut(row_ptr, vocabulary, temperature, top_k, top_p, SHIFT, BLOCK)
    return top, cut, suffices


@jit
def sample_candidate(  # type: ignore[no-untyped-def]
    row_ptr,
    candidate_counts_ptr,
    candidates_ptr,
    node_slot,
    cut,
    key,
    temperature,
    CANDIDATES: tl.constexpr,
):
    """Draw a token from a node's candidates that are not cut."""
    rank = tl.arange(0, CANDIDATES)
    candidates_ptr += tl.cast(node_slot, tl.int64) * CANDIDATES
    is_stored = rank < tl.load(candidate_counts_ptr + node_slot)
    candidate = tl.load(candidates_ptr + rank, mask=is_stored, other=0)
    is_candidate = is_stored & ((candidate >> 32).to(tl.int32) >= cut)
    token = tl.where(is_candidate, 0x7FFFFFFF - (candidate & 0xFFFFFFFF), 0).to(tl.int32)
    x = tl.load(row_ptr + token, mask=is_candidate, other=0.0).to(tl.float32)
    scores = tl.where(is_candidate, x / temperature + gumbel_in_kernel(key, token), float("-inf"))
    return tl.min(tl.where(scores == tl.max(scores, 0), token, 0x7FFFFFFF), 0)


@jit
def sample_row(  # type: ignore[no-untyped-def]
    row_ptr, vocabulary, cut, key, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Draw a token from a row's tokens that are not cut, reading the full row."""
    best = tl.cast(float("-inf"), tl.float32)
    choice = 0
    for start in range(0, vocabulary, BLOCK):
        x, columns = load_logits(row_ptr, start, vocabulary, BLOCK)
        is_candidate = (float_order(x, SHIFT) >= cut) & (columns < vocabulary)
        # few blocks have one, and noise is the largest cost
        if tl.max(is_candidate.to(tl.int32), 0) > 0:
            scores = tl.where(
                is_candidate, x / temperature + gumbel_in_kernel(key, columns), float("-inf")
            )
            score, offset = tl.max(scores, 0, return_indices=True)
            choice = tl.where(score > best, start + offset, choice)
            best = tl.maximum(best, score)
    return choice
