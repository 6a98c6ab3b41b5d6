"""Verify token trees on the device: which path is accepted, and which token follows it.

Shapes: B batch, N nodes, V vocabulary, U draft vocabulary, S parts of a row. First the references in torch, which are also
the path on a CPU; then the Triton kernels:
- greedy and match: programs compute the argmax of all nodes in parallel, one part of a row each, because a single program
  that walked from row to row would read at a 132nd of an H200's bandwidth; consecutive nodes at the same position share noise;
- one program per tree then visits the accepted nodes;
- with top-k or top-p, two launches before that collect candidates at all nodes, one part of a row per program: the largest
  logit and the mass of every part, then the tokens above the k-th largest of these maxima, of which there are at least k and
  few more. The program that visits a node sorts its candidates; where they are too many, or a flat distribution extends past
  them, it bisects the row instead;
- recursive: one program per tree visits, normalises and rejects; the residual is written where a child was rejected. The
  bonus token is drawn by Gumbel-max, one part of a row per program.
The vocabulary size is specialised where 16 divides it: only then are the loads of a row vectorised.
No step waits for the host, and every shape is fixed in advance. SPECTRAIN_KERNELS=reference or =triton overrides the path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .counter import fold_in_kernel, fold_key, gumbel_in_kernel, gumbel_noise, uniform_in_kernel, uniform_noise
from .dispatch import jit, runs_on

try:
    import triton
    import triton.language as tl
except ImportError:  # not on Linux: only the references exist
    triton = None


@dataclass(frozen=True)
class TreeNodes:
    """Token trees: parents before children, siblings in the order they were drawn."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, -1 at the root
    can_accept: Tensor  # [B, N] bool, False where a node is padding or never emitted
    height: int  # no path is deeper
    max_children: int  # no node has more


@dataclass(frozen=True)
class SamplingSpec:
    """How tokens are drawn: their random keys and their distribution."""

    key: int  # of purpose and seed: counter.host_key
    sequence_keys: Tensor  # [B] int64, the sequences' own keys
    positions: Tensor  # [B, N] int64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def node_keys(self, nodes: Tensor) -> Tensor:
        """Return the keys [B] at one node of each tree."""
        return fold_key(fold_key(self.key, self.sequence_keys), self.positions.gather(1, nodes[:, None])[:, 0])

    def shape_logits(self, logits: Tensor) -> Tensor:
        return shape_logits(logits, self.temperature, self.top_k, self.top_p)


def shape_logits(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Apply temperature, top-k and top-p to logits [..., V]: -inf where a token is cut. Tokens that tie are cut together."""
    scores = logits.float() / temperature
    if top_k > 0:
        kth = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if top_p < 1:
        ordered = scores.sort(dim=-1, descending=True).values
        chances = ordered.softmax(-1)
        least = ordered.masked_fill(chances.cumsum(-1) - chances >= top_p, float("inf")).amin(-1, keepdim=True)
        scores = scores.masked_fill(scores < least, float("-inf"))
    return scores


class Verdict(NamedTuple):
    """The accepted path of each tree."""

    path: Tensor  # [B, height + 1] int64 nodes, ascending, the root first, padded with the last one
    counts: Tensor  # [B] int64 accepted nodes, the root included
    bonus: Tensor  # [B] int64, the token that follows


def tree_greedy_reference(nodes: TreeNodes, logits: Tensor) -> Verdict:
    """Accept the nodes that carry the most likely token of logits [B, N, V] after their parent, the first of equal ones."""
    return _walk_tree(nodes, lambda visited: _select_row(logits, visited).argmax(-1))


def tree_match_reference(nodes: TreeNodes, logits: Tensor, draws: SamplingSpec) -> Verdict:
    """Accept the nodes that carry the token drawn by Gumbel-max from logits [B, N, V], shaped, at their parent."""

    def choose(visited: Tensor) -> Tensor:
        scores = draws.shape_logits(_select_row(logits, visited))
        return (scores + gumbel_noise(draws.node_keys(visited), scores.shape[-1])).argmax(-1)

    return _walk_tree(nodes, choose)


def tree_recursive_reference(
    nodes: TreeNodes, logits: Tensor, q: Tensor, draft_ids: Tensor | None, without_replacement: bool, draws: SamplingSpec
) -> Verdict:
    """Verify by recursive rejection sampling (SpecInfer, Miao et al., 2023; RSD, Jeon et al., 2024).

    A child x, in the order drawn, is accepted with probability min(1, P(x) / Q(x)); otherwise P becomes the normalised
    max(P - Q, 0) and, drawn without replacement, Q loses x. logits [B, N, V]; q [B, N, U] is the distribution that children
    were drawn from, over the target tokens `draft_ids` [U], each probability 0 or at least 1e-30, so that float32 holds the
    rest. Coin i of a node is number i of its key; the bonus token is drawn by Gumbel-max under that key folded with 1. Where
    rounding leaves nothing of the residual, P is Q and the child is accepted.
    """
    batch, num_nodes = nodes.tokens.shape
    node = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    active = torch.ones_like(node, dtype=torch.bool)
    last_scores = logits.new_zeros(batch, logits.shape[-1], dtype=torch.float32)
    path = [node]
    for _ in range(nodes.height + 1):
        scores, q_node = draws.shape_logits(_select_row(logits, node)), _select_row(q, node).float()
        if draft_ids is not None:
            q_node = torch.zeros_like(scores).scatter(1, draft_ids.expand(batch, -1), q_node)
        accepted, scores = _try_children(nodes, node, scores, q_node, without_replacement, draws.node_keys(node))
        last_scores = torch.where(active[:, None], scores, last_scores)
        active = active & (accepted < num_nodes)
        node = torch.where(active, accepted, node)
        path.append(node)
        if _none_left(active):
            break
    path = (path + [node] * nodes.height)[: nodes.height + 1]
    counts = torch.stack(path, 1).diff(dim=1).sign().sum(1) + 1
    noise = gumbel_noise(fold_key(draws.node_keys(node), 1), logits.shape[-1])
    return Verdict(torch.stack(path, 1), counts, (last_scores + noise).argmax(-1))


def _try_children(
    nodes: TreeNodes, node: Tensor, scores: Tensor, q: Tensor, without_replacement: bool, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the accepted child [B] of nodes `here` [B], N where there is none, and the log of the residual of P [B, V]."""
    num_nodes = nodes.tokens.shape[1]
    index = torch.arange(num_nodes, device=node.device)
    children = (nodes.parents == node[:, None]) & nodes.can_accept
    accepted, p = torch.full_like(node, num_nodes), scores.softmax(-1)
    for order in range(nodes.max_children):
        child = torch.where(children, index, num_nodes).amin(1)
        token = nodes.tokens.gather(1, child.clamp(max=num_nodes - 1)[:, None])
        p_x, q_x = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        undecided = (child < num_nodes) & (accepted == num_nodes)
        if _none_left(undecided):
            break
        rejected = undecided & (p_x < q_x) & (uniform_noise(key, torch.full_like(key, order)) * q_x >= p_x)
        if not _none_left(rejected):
            residual = (p - q).clamp(min=0)
            total = residual.sum(-1)
            rejected = rejected & (total > 0)
            p = torch.where(rejected[:, None], residual / total[:, None], p)
            scores = torch.where(rejected[:, None], residual.log(), scores)
            if without_replacement:
                left = q.scatter(1, token, 0)
                q = torch.where(rejected[:, None], left / left.sum(-1, keepdim=True).clamp(min=1e-30), q)
        accepted = torch.where(undecided & ~rejected, child, accepted)
        children = children & (index != child[:, None])
    return accepted, scores


def _none_left(rows: Tensor) -> bool:
    """Tell whether no row is left; always False on a GPU, where reading it would synchronise."""
    return rows.device.type == "cpu" and not rows.any()


def _select_row(x: Tensor, nodes: Tensor) -> Tensor:
    """Select x [B, N, V] at one node [B] of each tree: [B, V]."""
    return x[torch.arange(len(x), device=x.device), nodes]


def _walk_tree(nodes: TreeNodes, choose: Callable[[Tensor], Tensor]) -> Verdict:
    """Visit accepted nodes from the root on, parents first; `choose` returns the target's token [B] after nodes [B].

    Siblings with equal tokens, drawn with replacement, are all accepted: the deepest path counts, of equal ones the first.
    """
    batch, num_nodes = nodes.tokens.shape
    index = torch.arange(num_nodes, device=nodes.tokens.device)
    pending = (index == 0).expand(batch, -1)
    depth = pending.long() - 1  # -1 where a node is not accepted
    choices = torch.zeros_like(nodes.tokens)
    for _ in range(num_nodes):
        node_column = torch.where(pending, index, num_nodes - 1).amin(1, keepdim=True)
        active = pending.any(1, keepdim=True)
        choice = choose(node_column[:, 0])[:, None]
        choices = torch.where((index == node_column) & active, choice, choices)
        accepted = (nodes.parents == node_column) & (nodes.tokens == choice) & nodes.can_accept & active
        depth = torch.where(accepted, depth.gather(1, node_column) + 1, depth)
        pending = (pending & (index != node_column)) | accepted
        if _none_left(pending):
            break
    counts = depth.amax(1) + 1
    node = last = (depth * num_nodes - index).argmax(1)
    path = []
    for level in range(nodes.height, -1, -1):
        path.append(node)
        up = nodes.parents.gather(1, node[:, None])[:, 0]
        node = torch.where(level < counts, up, node).clamp(min=0)
    return Verdict(torch.stack(path[::-1], 1), counts, choices.gather(1, last[:, None])[:, 0])


@dataclass(frozen=True)
class VerifyTiles:
    """Tile sizes of a pass over a row: tokens per block and warps per program."""

    block: int
    num_warps: int


# None of these spills for sm_90 with Triton 3.6 and 3.9; tests/kernels/test_verify_compiled.py holds them to it. Not yet timed.
ARGMAX_TILES = VerifyTiles(4096, 4)  # 2048 programs for 64 nodes and 128k tokens, 64 bytes in flight a thread
SAMPLE_TILES = VerifyTiles(1024, 4)  # 8 numbers a thread
# Nodes of a program that draws: trees are stored level by level, so its noise is made two or three times, not sixteen.
NODES_PER_PROGRAM = 16
WALK_TILES = VerifyTiles(16, 1)  # reads no row; a tree's nodes lie in one warp, whose reductions need no barrier
CUT_TILES = VerifyTiles(4096, 16)  # a row on one multiprocessor: 8 tokens a thread, and 4 counts of each
PART_TILES = VerifyTiles(1024, 4)  # parts that are searched for candidates: 126 of 128k tokens, more than any usual top-k
MAX_CANDIDATES = 256  # candidates of a node, sorted by one program; a power of two
CANDIDATE_PARTS = 64  # without top-k, the parts with the largest maxima: they hold most of a usual nucleus


@jit
def _load_logits(row_ptr, start, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a block of logits, -inf past the end; return them and their tokens."""
    columns = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32), columns


@jit
def _float_order(x, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Map floats to integers in the same order, without the low bits that half precision leaves empty."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@jit
def _cut_chances(x, top, cut, temperature, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return exp((x - top) / temperature), 0 below the cut."""
    return tl.where(_float_order(x, SHIFT) >= cut, tl.exp((x - top) / temperature), 0.0)


@jit
def _cut_mass(row_ptr, vocabulary, top, cut, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum a row's unnormalised probabilities."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x, _ = _load_logits(row_ptr, start, vocabulary, BLOCK)
        total += _cut_chances(x, top, cut, temperature, SHIFT)
    return tl.sum(total, 0)


@jit
def _bisect_cut(  # type: ignore[no-untyped-def]
    row_ptr, vocabulary, low, high, limit, top, temperature, WEIGHTED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the smallest order in [low, high] above which less than `limit` lies: a number of tokens or, WEIGHTED, a mass.

    A pass has three pivots, so bfloat16 takes 8 passes and float32 16: with fewer pivots the arithmetic units would wait for
    memory, with more the memory for them.
    """
    base = low
    while low < high:
        gap = tl.cast(high, tl.int64) - low
        pivot_1, pivot_2, pivot_3 = (
            low + (gap // 4).to(tl.int32),
            low + (gap // 2).to(tl.int32),
            low + (gap * 3 // 4).to(tl.int32),
        )
        above_1, above_2, above_3 = (tl.zeros([BLOCK], tl.float32),) * 3
        for start in range(0, vocabulary, BLOCK):
            x, _ = _load_logits(row_ptr, start, vocabulary, BLOCK)
            weight = _cut_chances(x, top, base, temperature, SHIFT) if WEIGHTED else tl.full([BLOCK], 1.0, tl.float32)
            order = _float_order(x, SHIFT)
            above_1 += tl.where(order > pivot_1, weight, 0.0)
            above_2 += tl.where(order > pivot_2, weight, 0.0)
            above_3 += tl.where(order > pivot_3, weight, 0.0)
        if tl.sum(above_1, 0) < limit:
            high = pivot_1
        elif tl.sum(above_2, 0) < limit:
            low, high = pivot_1 + 1, pivot_2
        elif tl.sum(above_3, 0) < limit:
            low, high = pivot_2 + 1, pivot_3
        else:
            low = pivot_3 + 1
    return low


@jit
def _find_cut(row_ptr, vocabulary, temperature, top_k, top_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a row's largest logit and the order of the smallest one that top-k and top-p retain."""
    # 1. The largest logit.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x, _ = _load_logits(row_ptr, start, vocabulary, BLOCK)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    high = _float_order(top, SHIFT)
    cut = high * 0 + (-2139095041 >> SHIFT)  # the order of -inf
    # 2. Top-k by counts, then top-p by mass.
    if top_k is not None:
        cut = _bisect_cut(row_ptr, vocabulary, cut, high, top_k, top, temperature, False, SHIFT, BLOCK)
    if top_p is not None:
        limit = top_p * _cut_mass(row_ptr, vocabulary, top, cut, temperature, SHIFT, BLOCK)
        cut = _bisect_cut(row_ptr, vocabulary, cut, high, limit, top, temperature, True, SHIFT, BLOCK)
    return top, cut


@jit
def _parts_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, top_ptr, mass_ptr, candidate_counts_ptr, logits_stride_b, logits_stride_n, num_nodes, vocabulary, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the largest logit of one part of a node's row and its mass relative to that; grid [S, N, B]."""
    part, node, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_ptr = logits_ptr + tl.cast(batch, tl.int64) * logits_stride_b + tl.cast(node, tl.int64) * logits_stride_n
    x, _ = _load_logits(row_ptr, part * BLOCK, vocabulary, BLOCK)
    top = tl.max(x, 0)
    slot = (batch * num_nodes + node) * tl.num_programs(0) + part
    tl.store(top_ptr + slot, top)
    tl.store(mass_ptr + slot, tl.sum(tl.exp((x - tl.maximum(top, -3e38)) / temperature), 0))  # of -inf alone it is 0
    if part == 0:
        tl.store(candidate_counts_ptr + batch * num_nodes + node, 0)  # the next launch counts candidates


@jit
def _candidates_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, top_ptr, candidate_counts_ptr, candidates_ptr, logits_stride_b, logits_stride_n, num_nodes, vocabulary,
    num_top_parts,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Store the tokens of one part of a node's row from the `num_top_parts`-th largest maximum of all parts on.

    A candidate packs its order and its token, so that sorting puts the first of equal ones on top. More than CANDIDATES are
    counted but not stored. Grid [S, N, B].
    """
    # 1. The threshold: the `num_top_parts`-th largest maximum.
    part, node, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    node_slot = batch * num_nodes + node
    parts = tl.arange(0, BLOCK_S)
    tops = tl.load(top_ptr + node_slot * tl.num_programs(0) + parts, mask=parts < tl.num_programs(0), other=float("-inf"))
    tops = tl.sort(tops, descending=True)
    least = tl.max(tl.where(parts >= num_top_parts - 1, tops, float("-inf")), 0)
    part_top = tl.load(top_ptr + node_slot * tl.num_programs(0) + part)
    # 2. Append this part's tokens above it, behind those that other programs have appended.
    if part_top >= least:
        row_ptr = logits_ptr + tl.cast(batch, tl.int64) * logits_stride_b + tl.cast(node, tl.int64) * logits_stride_n
        x, columns = _load_logits(row_ptr, part * BLOCK, vocabulary, BLOCK)
        is_candidate = (x >= least) & (columns < vocabulary)
        before = tl.atomic_add(candidate_counts_ptr + node_slot, tl.sum(is_candidate.to(tl.int32), 0))
        slot = before + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        candidate = (_float_order(x, SHIFT).to(tl.int64) << 32) + (0x7FFFFFFF - columns)
        candidates_ptr += tl.cast(node_slot, tl.int64) * CANDIDATES
        tl.store(candidates_ptr + slot, candidate, mask=is_candidate & (slot < CANDIDATES))


@jit
def _cut_from_candidates(  # type: ignore[no-untyped-def]
    row_ptr, top_ptr, mass_ptr, candidate_counts_ptr, candidates_ptr, node_slot, vocabulary, num_parts, temperature, top_k,
    top_p,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return what `_find_cut` returns, from a node's candidates where they suffice, and whether they did."""
    # 1. The row's largest logit, from its parts.
    parts, rank = tl.arange(0, BLOCK_S), tl.arange(0, CANDIDATES)
    tops = tl.load(top_ptr + tl.cast(node_slot, tl.int64) * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    top = tl.max(tops, 0)
    count = tl.load(candidate_counts_ptr + node_slot)
    suffices = count <= CANDIDATES
    cut = _float_order(top, SHIFT)
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
                masses = tl.load(mass_ptr + tl.cast(node_slot, tl.int64) * num_parts + parts, mask=parts < num_parts, other=0.0)
                limit = top_p * tl.sum(masses * tl.exp((tl.maximum(tops, -3e38) - top) / temperature), 0)
                suffices = tl.sum(chance, 0) >= limit
            real = real & (above < limit)
        cut = tl.min(tl.where(real, order, 0x7FFFFFFF), 0)
    # 4. Otherwise bisect the row.
    if suffices == 0:
        top, cut = _find_cut(row_ptr, vocabulary, temperature, top_k, top_p, SHIFT, BLOCK)
    return top, cut, suffices


@jit
def _sample_candidate(  # type: ignore[no-untyped-def]
    row_ptr, candidate_counts_ptr, candidates_ptr, node_slot, cut, key, temperature, CANDIDATES: tl.constexpr
):  # fmt: skip
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
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, best_ptr, best_token_ptr, rows_ptr, positions_ptr, logits_stride_b, logits_stride_n,
    num_nodes, vocabulary, num_shared, key, temperature,
    NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the best score, with or without noise, of one part of some nodes' rows, and its token.

    Grid [S, groups of nodes, B].
    """
    part, batch = tl.program_id(0), tl.program_id(2)
    first = tl.program_id(1) * num_shared
    columns = part * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += tl.cast(batch, tl.int64) * logits_stride_b
    if NOISE:
        row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
        positions_ptr += batch * num_nodes
        noise_position = tl.load(positions_ptr + first) - 1  # not the position of the first node
        noise = tl.zeros([BLOCK], tl.float32)
    for node in range(first, tl.minimum(first + num_shared, num_nodes)):
        x, _ = _load_logits(logits_ptr + tl.cast(node, tl.int64) * logits_stride_n, part * BLOCK, vocabulary, BLOCK)
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
def _sample_row(  # type: ignore[no-untyped-def]
    row_ptr, vocabulary, cut, key, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Draw a token from a row's tokens that are not cut, reading the full row."""
    best = tl.cast(float("-inf"), tl.float32)
    choice = 0
    for start in range(0, vocabulary, BLOCK):
        x, columns = _load_logits(row_ptr, start, vocabulary, BLOCK)
        is_candidate = (_float_order(x, SHIFT) >= cut) & (columns < vocabulary)
        if tl.max(is_candidate.to(tl.int32), 0) > 0:  # few blocks have one, and noise is the largest cost
            scores = tl.where(is_candidate, x / temperature + gumbel_in_kernel(key, columns), float("-inf"))
            score, offset = tl.max(scores, 0, return_indices=True)
            choice = tl.where(score > best, start + offset, choice)
            best = tl.maximum(best, score)
    return choice


@jit
def _walk_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, parents_ptr, allowed_ptr, best_ptr, best_token_ptr, candidate_counts_ptr, candidates_ptr, path_ptr,
    counts_ptr, bonus_ptr,
    logits_ptr, rows_ptr, positions_ptr, logits_stride_b, logits_stride_n,
    num_nodes, num_parts, num_levels, vocabulary, key, temperature, top_k, top_p,
    CUT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Visit the accepted nodes of one tree; grid [B].

    `best_ptr` and `best_token_ptr` have the best score of each part and its token or, where tokens are cut, the largest logit
    and the mass.
    """
    # 1. Load the tree. Its root is pending.
    batch = tl.program_id(0)
    index, parts = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
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
            row_ptr = logits_ptr + tl.cast(batch, tl.int64) * logits_stride_b + tl.cast(node, tl.int64) * logits_stride_n
            row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
            node_key = fold_in_kernel(row_key, tl.load(positions_ptr + batch * num_nodes + node))
            _, cut, suffices = _cut_from_candidates(
                row_ptr, best_ptr, best_token_ptr, candidate_counts_ptr, candidates_ptr, batch * num_nodes + node, vocabulary,
                num_parts,
                temperature, top_k, top_p, SHIFT, BLOCK, BLOCK_S, CANDIDATES,
            )  # fmt: skip
            if suffices:
                choice = _sample_candidate(
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
                choice = _sample_row(row_ptr, vocabulary, cut, node_key, temperature, SHIFT, BLOCK)
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


def _node_block(num_nodes: int) -> int:
    """Return the nodes of a program: at least one per thread of a warp; with fewer the assembler spills."""
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
        parts, walk = _find_candidates(logits, temperature, top_k), CUT_TILES
    else:
        parts, walk = _find_argmax(logits, rows, positions, key, temperature), WALK_TILES
    path, counts, bonus = _empty_verdict(tokens, parents, allowed, logits, height)
    with torch.cuda.device_of(logits):
        _walk_kernel[(batch,)](
            tokens, parents, allowed, *parts, path, counts, bonus,
            logits, rows, positions, logits.stride(0), logits.stride(1),
            num_nodes, parts.num_parts, height + 1, vocabulary, key, temperature, top_k, top_p,
            CUT=cut, SHIFT=EMPTY_BITS[logits.dtype], BLOCK_N=_node_block(num_nodes),
            BLOCK_S=triton.next_power_of_2(parts.num_parts), BLOCK=walk.block, CANDIDATES=MAX_CANDIDATES,
                num_warps=walk.num_warps,
        )  # fmt: skip
    return path, counts, bonus


class _RowParts(NamedTuple):
    """Results of every node's row by parts: best scores and their tokens or, with candidates, largest logits and masses."""

    best: Tensor  # [B, N, S]
    tokens_or_mass: Tensor  # [B, N, S]
    num_candidates: Tensor | None = None  # [B, N]
    candidates: Tensor | None = None  # [B, N, CANDIDATES] int64

    @property
    def num_parts(self) -> int:
        return self.best.shape[-1]


def _find_argmax(logits: Tensor, rows: Tensor | None, positions: Tensor | None, key: int, temperature: float) -> _RowParts:
    """Compute the best scores of all nodes and their tokens; without `rows` there is no noise."""
    batch, num_nodes, vocabulary = logits.shape
    config, shared = (ARGMAX_TILES, 1) if rows is None else (SAMPLE_TILES, NODES_PER_PROGRAM)
    num_parts = triton.cdiv(vocabulary, config.block)
    best = logits.new_empty(batch, num_nodes, num_parts, dtype=torch.float32)
    best_tokens = torch.empty_like(best, dtype=torch.int32)
    with torch.cuda.device_of(logits):
        _choose_kernel[(num_parts, triton.cdiv(num_nodes, shared), batch)](
            logits, best, best_tokens, rows, positions, logits.stride(0), logits.stride(1),
            num_nodes, vocabulary, shared, key, temperature,
            NOISE=rows is not None, BLOCK=config.block, num_warps=config.num_warps,
        )  # fmt: skip
    return _RowParts(best, best_tokens)


def _find_candidates(logits: Tensor, temperature: float, top_k: int | None) -> _RowParts:
    """Collect the tokens of all nodes that top-k and top-p may retain, up to MAX_CANDIDATES of each node."""
    batch, num_nodes, vocabulary = logits.shape
    num_parts = triton.cdiv(vocabulary, PART_TILES.block)
    top = logits.new_empty(batch, num_nodes, num_parts, dtype=torch.float32)
    mass = torch.empty_like(top)
    counts = torch.empty(batch, num_nodes, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(batch, num_nodes, MAX_CANDIDATES, dtype=torch.int64, device=logits.device)
    num_top_parts = min(CANDIDATE_PARTS, -(-num_parts // 2)) if top_k is None else top_k
    strides = logits.stride(0), logits.stride(1)
    with torch.cuda.device_of(logits):
        _parts_kernel[(num_parts, num_nodes, batch)](
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
        _candidates_kernel[(num_parts, num_nodes, batch)](
            logits, top, counts, candidates, *strides, num_nodes, vocabulary, num_top_parts,
            SHIFT=EMPTY_BITS[logits.dtype], BLOCK=PART_TILES.block, BLOCK_S=triton.next_power_of_2(num_parts),
            CANDIDATES=MAX_CANDIDATES, num_warps=PART_TILES.num_warps,
        )  # fmt: skip
    return _RowParts(top, mass, counts, candidates)


@_launch_match.register_fake
def _empty_verdict(
    tokens: Tensor, parents: Tensor, allowed: Tensor, logits: Tensor, height: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the outputs."""
    batch = len(tokens)
    return tokens.new_empty(batch, height + 1), tokens.new_empty(batch), tokens.new_empty(batch)


@jit
def _subtract_q(  # type: ignore[no-untyped-def]
    row_ptr, q_ptr, draft_index_ptr, residual_ptr, vocabulary, token, following, reduced, top, cut, temperature, scale, odds,
    WITHOUT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write max(P - Q, 0) of a row; return its sum, its value at the token `following`, and the sum of q without `token`.

    P is the stored residual where the row is `reduced` already, otherwise the row's unnormalised probabilities, each times
    `scale`; Q is q times `odds`. A token that was removed from q is stored as -1: it was rejected, so its residual is 0.
    """
    total, left, ahead = (tl.zeros([BLOCK], tl.float32),) * 3
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        if reduced != 0:
            p = tl.load(residual_ptr + columns, mask=inside, other=0.0)
        else:
            x, _ = _load_logits(row_ptr, start, vocabulary, BLOCK)
            p = _cut_chances(x, top, cut, temperature, SHIFT)
        q = _load_q(q_ptr, draft_index_ptr, columns, inside)
        residual = tl.maximum(p * scale - q * odds, 0.0)
        if WITHOUT:
            is_removed = (p < 0) | (columns == token)
            residual, q = tl.where(is_removed, 0.0, residual), tl.where(is_removed, 0.0, q)
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
    tokens_ptr, parents_ptr, allowed_ptr, logits_ptr, q_ptr, draft_index_ptr, rows_ptr, positions_ptr, residual_ptr,
    top_ptr, mass_ptr, candidate_counts_ptr, candidates_ptr, path_ptr, counts_ptr, state_ptr,
    logits_stride_b, logits_stride_n, q_stride_b, q_stride_n,
    num_nodes, num_parts, vocabulary, num_levels, key, temperature, top_k, top_p,
    WITHOUT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Walk one tree by recursive rejection; grid [B].

    `state_ptr` receives, for the last node, whether P is stored in `residual_ptr`, and otherwise its cut.
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
    node, last, depth, reduced, cut = 0, 0, 0, 0, 0
    while node < num_nodes:
        # 2. Visit an accepted node: cut its row by top-k and top-p.
        tl.store(path_ptr + depth, tl.cast(node, tl.int64))
        row_ptr = logits_ptr + tl.cast(node, tl.int64) * logits_stride_n
        q_row_ptr = q_ptr + tl.cast(node, tl.int64) * q_stride_n
        if candidates_ptr is not None:
            top, cut, _ = _cut_from_candidates(
                row_ptr, top_ptr, mass_ptr, candidate_counts_ptr, candidates_ptr, tree + node, vocabulary, num_parts,
                temperature, top_k,
                top_p, SHIFT, BLOCK, BLOCK_S, CANDIDATES,
            )  # fmt: skip
        else:
            top, cut = _find_cut(row_ptr, vocabulary, temperature, top_k, top_p, SHIFT, BLOCK)
        node_key = fold_in_kernel(row_key, tl.load(positions_ptr + tree + node))
        # 3. Take its first child and normalise P.
        children = (parents == node) & allowed
        child = tl.min(tl.where(children, index, num_nodes), 0)
        token = tl.load(tokens_ptr + tree + child, mask=child < num_nodes, other=0)
        last, node, order, reduced, odds = node, num_nodes, 0, 0, 1.0
        scale, ahead = 1.0, 0.0
        if child < num_nodes:
            scale = 1 / _cut_mass(row_ptr, vocabulary, top, cut, temperature, SHIFT, BLOCK)
            ahead = _cut_chances(tl.load(row_ptr + token).to(tl.float32), top, cut, temperature, SHIFT)
        # 4. Try the children in the order drawn; a rejected child reduces P, an accepted one is visited next.
        while child < num_nodes:
            p, q = ahead * scale, _load_q(q_row_ptr, draft_index_ptr, token, True) * odds
            following = tl.min(tl.where(children & (index > child), index, num_nodes), 0)
            follower = tl.load(tokens_ptr + tree + following, mask=following < num_nodes, other=-1)
            total = 0.0
            if (p < q) & (uniform_in_kernel(node_key, order) * q >= p):
                total, ahead, left = _subtract_q(
                    row_ptr, q_row_ptr, draft_index_ptr, residual_ptr, vocabulary, token, follower, reduced, top, cut,
                    temperature,
                    scale, odds, WITHOUT, SHIFT, BLOCK,
                )  # fmt: skip
                if WITHOUT:
                    odds = 1 / tl.maximum(left, 1e-30)
            if total > 0:
                scale, reduced = 1 / total, 1
                child, token, order = following, follower, order + 1
            else:  # accepted, or rounding has left nothing
                node, child = child, num_nodes
        depth += 1
    # 5. Store the state of the last node and pad the path.
    tl.store(state_ptr + 2 * batch, reduced)
    tl.store(state_ptr + 2 * batch + 1, cut)
    tl.store(counts_ptr + batch, tl.cast(depth, tl.int64))
    for level in range(depth, num_levels):
        tl.store(path_ptr + level, tl.cast(last, tl.int64))


@jit
def _bonus_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, residual_ptr, path_ptr, state_ptr, rows_ptr, positions_ptr, best_ptr, best_token_ptr,
    logits_stride_b, logits_stride_n, num_nodes, vocabulary, num_levels, key, temperature,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the best score, with noise, of one part of P after a tree's last node, and its token; grid [S, B]."""
    # 1. Scores: the logarithm of the residual, or the cut logits where no child was rejected.
    part, batch = tl.program_id(0), tl.program_id(1)
    node = tl.load(path_ptr + batch * num_levels + num_levels - 1)
    if tl.load(state_ptr + 2 * batch) != 0:
        columns = part * BLOCK + tl.arange(0, BLOCK)
        residual_ptr += tl.cast(batch, tl.int64) * vocabulary
        left = tl.load(residual_ptr + columns, mask=columns < vocabulary, other=0.0)
        scores = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)), float("-inf"))
    else:
        row_ptr = logits_ptr + tl.cast(batch, tl.int64) * logits_stride_b + node * logits_stride_n
        x, columns = _load_logits(row_ptr, part * BLOCK, vocabulary, BLOCK)
        scores = tl.where(_float_order(x, SHIFT) >= tl.load(state_ptr + 2 * batch + 1), x / temperature, float("-inf"))
    # 2. Add the noise of this node and store the best.
    row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
    node_key = fold_in_kernel(row_key, tl.load(positions_ptr + batch * num_nodes + node))
    best, offset = tl.max(scores + gumbel_in_kernel(fold_in_kernel(node_key, 1), columns), 0, return_indices=True)
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
        draft_index[draft_ids] = torch.arange(len(draft_ids), dtype=torch.int32, device=logits.device)
    parts: tuple[Tensor | None, ...] = (None,) * 4
    if top_k is not None or top_p is not None:
        parts = _find_candidates(logits, temperature, top_k)
    num_parts, num_drawn = triton.cdiv(vocabulary, PART_TILES.block), triton.cdiv(vocabulary, SAMPLE_TILES.block)
    residual = logits.new_empty(batch, vocabulary, dtype=torch.float32)
    state = tokens.new_empty(batch, 2, dtype=torch.int32)
    best, best_tokens = residual.new_empty(batch, num_drawn), tokens.new_empty(batch, num_drawn)
    path, counts, _ = _empty_verdict(tokens, parents, allowed, logits, height)
    shift = EMPTY_BITS[logits.dtype]
    with torch.cuda.device_of(logits):
        _reject_kernel[(batch,)](
            tokens, parents, allowed, logits, q, draft_index, rows, positions, residual,
            *parts, path, counts, state, logits.stride(0), logits.stride(1), q.stride(0), q.stride(1),
            num_nodes, num_parts, vocabulary, height + 1, key, temperature, top_k, top_p,
            WITHOUT=without_replacement, SHIFT=shift, BLOCK_N=_node_block(num_nodes),
            BLOCK_S=triton.next_power_of_2(num_parts), BLOCK=CUT_TILES.block, CANDIDATES=MAX_CANDIDATES,
                num_warps=CUT_TILES.num_warps,
        )  # fmt: skip
        _bonus_kernel[(num_drawn, batch)](
            logits, residual, path, state, rows, positions, best, best_tokens,
            logits.stride(0), logits.stride(1), num_nodes, vocabulary, height + 1, key, temperature,
            SHIFT=shift, BLOCK=SAMPLE_TILES.block, num_warps=SAMPLE_TILES.num_warps,
        )  # fmt: skip
    return path, counts, best_tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]


_launch_recursive.register_fake(_empty_verdict)


EMPTY_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # of a number once it is float32


def _can_run_kernel(logits: Tensor) -> bool:
    """Tell whether the kernels are enabled and can run here, also on interpreted bfloat16, which is only read."""
    return runs_on(logits.device) and logits.dtype in EMPTY_BITS


def _tree_arguments(nodes: TreeNodes, logits: Tensor) -> tuple[Any, ...]:
    """Return the first arguments of every launch; a verdict has no gradient."""
    trees = (x.contiguous() for x in (nodes.tokens, nodes.parents, nodes.can_accept))
    return *trees, logits.detach(), nodes.height


def _sampling_arguments(draws: SamplingSpec, logits: Tensor) -> tuple[Any, ...]:
    """Return the last arguments of a launch that draws; None for cuts without effect."""
    top_k = draws.top_k if 0 < draws.top_k < logits.shape[-1] else None
    top_p = draws.top_p if draws.top_p < 1 else None
    return draws.sequence_keys.contiguous(), draws.positions.contiguous(), draws.key, draws.temperature, top_k, top_p


def tree_greedy(nodes: TreeNodes, logits: Tensor) -> Verdict:
    """Compute `tree_greedy_reference` by the kernels where they run: on a GPU, or interpreted for tests."""
    if not _can_run_kernel(logits):
        return tree_greedy_reference(nodes, logits)
    return Verdict(*_launch_match(*_tree_arguments(nodes, logits), None, None, 0, 1.0, None, None))


def tree_match(nodes: TreeNodes, logits: Tensor, draws: SamplingSpec) -> Verdict:
    """Compute `tree_match_reference` by the kernels where they run: on a GPU, or interpreted for tests."""
    if not _can_run_kernel(logits):
        return tree_match_reference(nodes, logits, draws)
    return Verdict(*_launch_match(*_tree_arguments(nodes, logits), *_sampling_arguments(draws, logits)))


def tree_recursive(
    nodes: TreeNodes, logits: Tensor, q: Tensor, draft_ids: Tensor | None, without_replacement: bool, draws: SamplingSpec
) -> Verdict:
    """Compute `tree_recursive_reference` by the kernels where they run: on a GPU, or interpreted for tests."""
    if not _can_run_kernel(logits):
        return tree_recursive_reference(nodes, logits, q, draft_ids, without_replacement, draws)
    return Verdict(
        *_launch_recursive(
            *_tree_arguments(nodes, logits), q, draft_ids, without_replacement, *_sampling_arguments(draws, logits)
        )
    )
