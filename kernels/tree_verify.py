"""Verify token trees on the device: which path is accepted, and which token follows it.

Shapes: B batch, N nodes, V vocabulary, U draft vocabulary, S parts of a row. First the references in torch, which are also
the path on a CPU; then the Triton kernels:
- greedy and match: every node's argmax is found at once, a part of a row a program, because one program that walked from row
  to row would read at a 132nd of an H200's bandwidth; Gumbel noise is made once for nodes in a row at the same position;
- one program for each tree then visits the kept nodes;
- where top-k or top-p cut, two launches before that find candidates at all nodes, a part of a row a program: the largest logit
  and the mass of every part, then the tokens above the k-th largest of these maxima, of which there are at least k and few
  more. The program that visits a node sorts its candidates; where they are too many, or a flat distribution reaches beyond
  them, it bisects the row instead;
- recursive: one program for each tree visits, normalises and rejects; the residual is written where a child was rejected. The
  token that follows is drawn by Gumbel-max, a part of a row a program.
The size of the vocabulary is compiled in as far as 16 divides it: only then are loads of a row vectors.
Nothing waits for the host and every shape is fixed beforehand. SPECTRAIN_KERNELS=reference or =triton overrides the path.
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
except ImportError:  # not on Linux: the references are all there is
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
    """Recursive rejection sampling (SpecInfer, Miao et al., 2023; RSD, Jeon et al., 2024): keep child x, in the order drawn,
    with probability min(1, P(x) / Q(x)), else P becomes the normalised max(P - Q, 0) and, drawn without replacement, Q loses x.

    logits [B, N, V]; q [B, N, U] is what children were drawn from, over the target tokens `draft_ids` [U], each chance 0 or at
    least 1e-30, so that float32 holds what is left of it. Coin i of a node is
    number i of its key, the token after the last one Gumbel-max under that key folded with 1. Where rounding leaves nothing of
    the residual, P is Q and the child is kept.
    """
    batch, num_nodes = nodes.tokens.shape
    here = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    walking = torch.ones_like(here, dtype=torch.bool)
    last_scores = logits.new_zeros(batch, logits.shape[-1], dtype=torch.float32)
    path = [here]
    for _ in range(nodes.height + 1):
        scores, q_here = draws.shape_logits(_select_row(logits, here)), _select_row(q, here).float()
        if draft_ids is not None:
            q_here = torch.zeros_like(scores).scatter(1, draft_ids.expand(batch, -1), q_here)
        kept, scores = _try_children(nodes, here, scores, q_here, without_replacement, draws.node_keys(here))
        last_scores = torch.where(walking[:, None], scores, last_scores)
        walking = walking & (kept < num_nodes)
        here = torch.where(walking, kept, here)
        path.append(here)
        if _none_left(walking):
            break
    path = (path + [here] * nodes.height)[: nodes.height + 1]
    counts = torch.stack(path, 1).diff(dim=1).sign().sum(1) + 1
    noise = gumbel_noise(fold_key(draws.node_keys(here), 1), logits.shape[-1])
    return Verdict(torch.stack(path, 1), counts, (last_scores + noise).argmax(-1))


def _try_children(
    nodes: TreeNodes, here: Tensor, scores: Tensor, q: Tensor, without_replacement: bool, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the accepted child [B] of nodes `here` [B], N where there is none, and the log of the residual of P [B, V]."""
    num_nodes = nodes.tokens.shape[1]
    index = torch.arange(num_nodes, device=here.device)
    children = (nodes.parents == here[:, None]) & nodes.can_accept
    kept, p = torch.full_like(here, num_nodes), scores.softmax(-1)
    for order in range(nodes.max_children):
        child = torch.where(children, index, num_nodes).amin(1)
        token = nodes.tokens.gather(1, child.clamp(max=num_nodes - 1)[:, None])
        p_x, q_x = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        asked = (child < num_nodes) & (kept == num_nodes)
        if _none_left(asked):
            break
        rejected = asked & (p_x < q_x) & (uniform_noise(key, torch.full_like(key, order)) * q_x >= p_x)
        if not _none_left(rejected):
            residual = (p - q).clamp(min=0)
            total = residual.sum(-1)
            rejected = rejected & (total > 0)
            p = torch.where(rejected[:, None], residual / total[:, None], p)
            scores = torch.where(rejected[:, None], residual.log(), scores)
            if without_replacement:
                left = q.scatter(1, token, 0)
                q = torch.where(rejected[:, None], left / left.sum(-1, keepdim=True).clamp(min=1e-30), q)
        kept = torch.where(asked & ~rejected, child, kept)
        children = children & (index != child[:, None])
    return kept, scores


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
    depth = pending.long() - 1  # -1 where a node isn't kept
    wanted = torch.zeros_like(nodes.tokens)
    for _ in range(num_nodes):
        here = torch.where(pending, index, num_nodes - 1).amin(1, keepdim=True)
        active = pending.any(1, keepdim=True)
        choice = choose(here[:, 0])[:, None]
        wanted = torch.where((index == here) & active, choice, wanted)
        kept = (nodes.parents == here) & (nodes.tokens == choice) & nodes.can_accept & active
        depth = torch.where(kept, depth.gather(1, here) + 1, depth)
        pending = (pending & (index != here)) | kept
        if _none_left(pending):
            break
    counts = depth.amax(1) + 1
    node = last = (depth * num_nodes - index).argmax(1)
    path = []
    for level in range(nodes.height, -1, -1):
        path.append(node)
        up = nodes.parents.gather(1, node[:, None])[:, 0]
        node = torch.where(level < counts, up, node).clamp(min=0)
    return Verdict(torch.stack(path[::-1], 1), counts, wanted.gather(1, last[:, None])[:, 0])


@dataclass(frozen=True)
class VerifyTiles:
    """Tile sizes of a pass over a row: tokens per block and warps per program."""

    block: int
    num_warps: int


# None of these spills for sm_90 with Triton 3.6 and 3.9; tests/kernels/test_verify_compiled.py holds them to it. Not yet timed.
ARGMAX_TILES = VerifyTiles(4096, 4)  # 2048 programs for 64 nodes and 128k tokens, 64 bytes in flight a thread
SAMPLE_TILES = VerifyTiles(1024, 4)  # 8 numbers a thread
NODES_PER_PROGRAM = (
    16  # nodes a program of DRAWN: trees lie level by level, so its noise is made two or three times, not sixteen
)
WALK_TILES = VerifyTiles(16, 1)  # reads no row; a tree's nodes lie in one warp, whose reductions need no barrier
CUT_TILES = VerifyTiles(4096, 16)  # a row on one multiprocessor: 8 tokens a thread, and 4 counts of each
PART_TILES = VerifyTiles(1024, 4)  # what candidates are looked for in: of 128k tokens 126 parts, more than any usual top-k
MAX_CANDIDATES = 256  # a node, sorted by one program; a power of two
CANDIDATE_PARTS = 64  # parts of at least so large a maximum where there is no top-k: most of a usual nucleus is in them


@jit
def _load_logits(row_ptr, start, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of logits, -inf past the end, and which tokens they are of."""
    columns = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32), columns


@jit
def _float_order(x, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Integers in the order of the numbers, without the low bits that half precision leaves empty."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@jit
def _cut_chances(x, top, cut, temperature, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """exp((x - top) / temperature), 0 below the cut."""
    return tl.where(_float_order(x, SHIFT) >= cut, tl.exp((x - top) / temperature), 0.0)


@jit
def _cut_mass(row_ptr, vocabulary, top, cut, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of a row's chances."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x, _ = _load_logits(row_ptr, start, vocabulary, BLOCK)
        total += _cut_chances(x, top, cut, temperature, SHIFT)
    return tl.sum(total, 0)


@jit
def _bisect_cut(  # type: ignore[no-untyped-def]
    row_ptr, vocabulary, low, high, limit, top, temperature, WEIGHTED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The least order from `low` to `high` that less than `limit` lies above: of tokens, or of their chances from `low` on.

    Three pivots a pass, so 8 passes over bfloat16 and 16 over float32: fewer would leave the adders idle while they wait for
    memory, more would keep memory waiting.
    """
    base = low
    while low < high:
        gap = tl.cast(high, tl.int64) - low
        one, two, three = low + (gap // 4).to(tl.int32), low + (gap // 2).to(tl.int32), low + (gap * 3 // 4).to(tl.int32)
        over_one, over_two, over_three = (tl.zeros([BLOCK], tl.float32),) * 3
        for start in range(0, vocabulary, BLOCK):
            x, _ = _load_logits(row_ptr, start, vocabulary, BLOCK)
            weight = _cut_chances(x, top, base, temperature, SHIFT) if WEIGHTED else tl.full([BLOCK], 1.0, tl.float32)
            order = _float_order(x, SHIFT)
            over_one += tl.where(order > one, weight, 0.0)
            over_two += tl.where(order > two, weight, 0.0)
            over_three += tl.where(order > three, weight, 0.0)
        if tl.sum(over_one, 0) < limit:
            high = one
        elif tl.sum(over_two, 0) < limit:
            low, high = one + 1, two
        elif tl.sum(over_three, 0) < limit:
            low, high = two + 1, three
        else:
            low = three + 1
    return low


@jit
def _find_cut(row_ptr, vocabulary, temperature, top_k, top_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's largest logit and the order of the least one that top-k and top-p keep."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x, _ = _load_logits(row_ptr, start, vocabulary, BLOCK)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    high = _float_order(top, SHIFT)
    cut = high * 0 + (-2139095041 >> SHIFT)  # the order of -inf
    if top_k is not None:
        cut = _bisect_cut(row_ptr, vocabulary, cut, high, top_k, top, temperature, False, SHIFT, BLOCK)
    if top_p is not None:
        limit = top_p * _cut_mass(row_ptr, vocabulary, top, cut, temperature, SHIFT, BLOCK)
        cut = _bisect_cut(row_ptr, vocabulary, cut, high, limit, top, temperature, True, SHIFT, BLOCK)
    return top, cut


@jit
def _parts_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, top_ptr, mass_ptr, found_ptr, logits_stride_b, logits_stride_n, num_nodes, vocabulary, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logit of one part of a node's row, and the sum of its chances beside that; grid [S, N, B]."""
    part, node, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_ptr = logits_ptr + tl.cast(batch, tl.int64) * logits_stride_b + tl.cast(node, tl.int64) * logits_stride_n
    x, _ = _load_logits(row_ptr, part * BLOCK, vocabulary, BLOCK)
    top = tl.max(x, 0)
    slot = (batch * num_nodes + node) * tl.num_programs(0) + part
    tl.store(top_ptr + slot, top)
    tl.store(mass_ptr + slot, tl.sum(tl.exp((x - tl.maximum(top, -3e38)) / temperature), 0))  # of -inf alone it is 0
    if part == 0:
        tl.store(found_ptr + batch * num_nodes + node, 0)  # candidates, which the next launch counts


@jit
def _candidates_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, top_ptr, found_ptr, candidates_ptr, logits_stride_b, logits_stride_n, num_nodes, vocabulary, num_wanted,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Note the tokens of one part of a node's row from the `num_wanted`-th largest maximum of all parts on; grid [S, N, B].

    A candidate is its order and, the first on top, its token. More than CANDIDATES are counted but not kept.
    """
    part, node, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = batch * num_nodes + node
    parts = tl.arange(0, BLOCK_S)
    tops = tl.load(top_ptr + place * tl.num_programs(0) + parts, mask=parts < tl.num_programs(0), other=float("-inf"))
    tops = tl.sort(tops, descending=True)
    least = tl.max(tl.where(parts >= num_wanted - 1, tops, float("-inf")), 0)
    mine = tl.load(top_ptr + place * tl.num_programs(0) + part)
    if mine >= least:
        row_ptr = logits_ptr + tl.cast(batch, tl.int64) * logits_stride_b + tl.cast(node, tl.int64) * logits_stride_n
        x, columns = _load_logits(row_ptr, part * BLOCK, vocabulary, BLOCK)
        kept = (x >= least) & (columns < vocabulary)
        before = tl.atomic_add(found_ptr + place, tl.sum(kept.to(tl.int32), 0))
        slot = before + tl.cumsum(kept.to(tl.int32), 0) - 1
        candidate = (_float_order(x, SHIFT).to(tl.int64) << 32) + (0x7FFFFFFF - columns)
        candidates_ptr += tl.cast(place, tl.int64) * CANDIDATES
        tl.store(candidates_ptr + slot, candidate, mask=kept & (slot < CANDIDATES))


@jit
def _cut_from_candidates(  # type: ignore[no-untyped-def]
    row_ptr, top_ptr, mass_ptr, found_ptr, candidates_ptr, place, vocabulary, num_parts, temperature, top_k, top_p,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """What `_shape_row` gives, from a node's candidates where they suffice; and whether they did."""
    parts, rank = tl.arange(0, BLOCK_S), tl.arange(0, CANDIDATES)
    tops = tl.load(top_ptr + tl.cast(place, tl.int64) * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    top = tl.max(tops, 0)
    num_found = tl.load(found_ptr + place)
    suffices = num_found <= CANDIDATES
    cut = _float_order(top, SHIFT)
    if suffices:
        candidates_ptr += tl.cast(place, tl.int64) * CANDIDATES
        candidate = tl.load(candidates_ptr + rank, mask=rank < num_found, other=-0x7FFFFFFF00000000)
        candidate = tl.sort(candidate, descending=True)
        order = (candidate >> 32).to(tl.int32)
        real = rank < num_found
        if top_k is not None:
            suffices = num_found >= top_k
            real = real & (order >= tl.max(tl.where(rank >= top_k - 1, order, -0x7FFFFFFF), 0))
        if top_p is not None:
            token = tl.where(real, 0x7FFFFFFF - (candidate & 0xFFFFFFFF), 0)
            x = tl.load(row_ptr + token, mask=real, other=float("-inf")).to(tl.float32)
            chance = tl.where(real, tl.exp((x - top) / temperature), 0.0)
            above = tl.cumsum(chance, 0) - chance
            if top_k is not None:
                limit = top_p * tl.sum(chance, 0)
            else:
                masses = tl.load(mass_ptr + tl.cast(place, tl.int64) * num_parts + parts, mask=parts < num_parts, other=0.0)
                limit = top_p * tl.sum(masses * tl.exp((tl.maximum(tops, -3e38) - top) / temperature), 0)
                suffices = tl.sum(chance, 0) >= limit
            real = real & (above < limit)
        cut = tl.min(tl.where(real, order, 0x7FFFFFFF), 0)
    if suffices == 0:
        top, cut = _find_cut(row_ptr, vocabulary, temperature, top_k, top_p, SHIFT, BLOCK)
    return top, cut, suffices


@jit
def _sample_candidate(  # type: ignore[no-untyped-def]
    row_ptr, found_ptr, candidates_ptr, place, cut, key, temperature, CANDIDATES: tl.constexpr
):  # fmt: skip
    """The token drawn from a node's candidates that are not cut."""
    rank = tl.arange(0, CANDIDATES)
    candidates_ptr += tl.cast(place, tl.int64) * CANDIDATES
    real = rank < tl.load(found_ptr + place)
    candidate = tl.load(candidates_ptr + rank, mask=real, other=0)
    kept = real & ((candidate >> 32).to(tl.int32) >= cut)
    token = tl.where(kept, 0x7FFFFFFF - (candidate & 0xFFFFFFFF), 0).to(tl.int32)
    x = tl.load(row_ptr + token, mask=kept, other=0.0).to(tl.float32)
    scores = tl.where(kept, x / temperature + gumbel_in_kernel(key, token), float("-inf"))
    return tl.min(tl.where(scores == tl.max(scores, 0), token, 0x7FFFFFFF), 0)


@jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, best_ptr, place_ptr, rows_ptr, positions_ptr, logits_stride_b, logits_stride_n,
    num_nodes, vocabulary, num_shared, key, temperature,
    NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best score, with noise or without, of one part of the rows of some nodes; grid [S, groups of nodes, B]."""
    part, batch = tl.program_id(0), tl.program_id(2)
    first = tl.program_id(1) * num_shared
    columns = part * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += tl.cast(batch, tl.int64) * logits_stride_b
    if NOISE:
        row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
        positions_ptr += batch * num_nodes
        known = tl.load(positions_ptr + first) - 1  # not the position of the first node
        noise = tl.zeros([BLOCK], tl.float32)
    for node in range(first, tl.minimum(first + num_shared, num_nodes)):
        x, _ = _load_logits(logits_ptr + tl.cast(node, tl.int64) * logits_stride_n, part * BLOCK, vocabulary, BLOCK)
        if NOISE:
            position = tl.load(positions_ptr + node)
            if position != known:
                noise = gumbel_in_kernel(fold_in_kernel(row_key, position), columns)
            known = position
            x = x / temperature + noise
        best, place = tl.max(x, 0, return_indices=True)
        slot = (batch * num_nodes + node) * tl.num_programs(0) + part
        tl.store(best_ptr + slot, best)
        tl.store(place_ptr + slot, part * BLOCK + place)


@jit
def _sample_row(  # type: ignore[no-untyped-def]
    row_ptr, vocabulary, cut, key, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The token drawn from what a row keeps, read whole."""
    best = tl.cast(float("-inf"), tl.float32)
    choice = 0
    for start in range(0, vocabulary, BLOCK):
        x, columns = _load_logits(row_ptr, start, vocabulary, BLOCK)
        kept = (_float_order(x, SHIFT) >= cut) & (columns < vocabulary)
        if tl.max(kept.to(tl.int32), 0) > 0:  # few blocks hold one, and noise costs more than all else
            scores = tl.where(kept, x / temperature + gumbel_in_kernel(key, columns), float("-inf"))
            score, place = tl.max(scores, 0, return_indices=True)
            choice = tl.where(score > best, start + place, choice)
            best = tl.maximum(best, score)
    return choice


@jit
def _walk_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, parents_ptr, allowed_ptr, best_ptr, place_ptr, found_ptr, candidates_ptr, path_ptr, counts_ptr, bonus_ptr,
    logits_ptr, rows_ptr, positions_ptr, logits_stride_b, logits_stride_n,
    num_nodes, num_parts, num_levels, vocabulary, key, temperature, top_k, top_p,
    CUT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Visit the accepted nodes of one tree; grid [B]. `best` and `place` are of parts: the best score and its token, or, where
    tokens are cut, the largest logit and the mass."""
    batch = tl.program_id(0)
    index, parts = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
    inside = index < num_nodes
    tokens = tl.load(tokens_ptr + batch * num_nodes + index, mask=inside, other=-1)
    parents = tl.load(parents_ptr + batch * num_nodes + index, mask=inside, other=-1)
    allowed = tl.load(allowed_ptr + batch * num_nodes + index, mask=inside, other=0) != 0
    depth = tl.where(index == 0, 0, -1)
    wanted = tl.zeros([BLOCK_N], tl.int32)
    pending = index == 0
    node = 0
    while node < num_nodes:
        if CUT:
            row_ptr = logits_ptr + tl.cast(batch, tl.int64) * logits_stride_b + tl.cast(node, tl.int64) * logits_stride_n
            row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
            node_key = fold_in_kernel(row_key, tl.load(positions_ptr + batch * num_nodes + node))
            _, cut, suffices = _cut_from_candidates(
                row_ptr, best_ptr, place_ptr, found_ptr, candidates_ptr, batch * num_nodes + node, vocabulary, num_parts,
                temperature, top_k, top_p, SHIFT, BLOCK, BLOCK_S, CANDIDATES,
            )  # fmt: skip
            if suffices:
                choice = _sample_candidate(
                    row_ptr, found_ptr, candidates_ptr, batch * num_nodes + node, cut, node_key, temperature, CANDIDATES
                )
            else:
                choice = _sample_row(row_ptr, vocabulary, cut, node_key, temperature, SHIFT, BLOCK)
        else:
            slot = tl.cast(batch * num_nodes + node, tl.int64) * num_parts
            best = tl.load(best_ptr + slot + parts, mask=parts < num_parts, other=float("-inf"))
            _, part = tl.max(best, 0, return_indices=True)
            choice = tl.load(place_ptr + slot + part)
        wanted = tl.where(index == node, choice, wanted)
        kept = (parents == node) & (tokens == choice) & allowed
        depth = tl.where(kept, tl.sum(tl.where(index == node, depth, 0), 0) + 1, depth)
        pending = (pending & (index != node)) | kept
        node = tl.min(tl.where(pending, index, num_nodes), 0)
    deepest, last = tl.max(depth, 0, return_indices=True)
    tl.store(counts_ptr + batch, tl.cast(deepest + 1, tl.int64))
    tl.store(bonus_ptr + batch, tl.sum(tl.where(index == last, wanted, 0), 0).to(tl.int64))
    node = tl.cast(last, tl.int64)
    for back in range(num_levels):
        level = num_levels - 1 - back
        tl.store(path_ptr + batch * num_levels + level, node)
        if (level <= deepest) & (node > 0):
            node = tl.load(parents_ptr + batch * num_nodes + node)


def _node_block(num_nodes: int) -> int:
    """Nodes in a program: at least one for each thread of a warp, below which the assembler spills."""
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
    """What the parts of every node's row say: [B, N, S] the best score and its token, or with candidates, of which there are
    `found` [B, N], the largest logit and the mass."""

    best: Tensor
    tokens_or_mass: Tensor
    num_candidates: Tensor | None = None
    candidates: Tensor | None = None  # [B, N, CANDIDATES] int64

    @property
    def num_parts(self) -> int:
        return self.best.shape[-1]


def _find_argmax(logits: Tensor, rows: Tensor | None, positions: Tensor | None, key: int, temperature: float) -> _RowParts:
    """The best scores of all nodes; without `rows` there is no noise."""
    batch, num_nodes, vocabulary = logits.shape
    config, shared = (ARGMAX_TILES, 1) if rows is None else (SAMPLE_TILES, NODES_PER_PROGRAM)
    num_parts = triton.cdiv(vocabulary, config.block)
    best = logits.new_empty(batch, num_nodes, num_parts, dtype=torch.float32)
    place = torch.empty_like(best, dtype=torch.int32)
    with torch.cuda.device_of(logits):
        _choose_kernel[(num_parts, triton.cdiv(num_nodes, shared), batch)](
            logits, best, place, rows, positions, logits.stride(0), logits.stride(1),
            num_nodes, vocabulary, shared, key, temperature,
            NOISE=rows is not None, BLOCK=config.block, num_warps=config.num_warps,
        )  # fmt: skip
    return _RowParts(best, place)


def _find_candidates(logits: Tensor, temperature: float, top_k: int | None) -> _RowParts:
    """The tokens of all nodes that top-k and top-p may keep, as far as they are few."""
    batch, num_nodes, vocabulary = logits.shape
    num_parts = triton.cdiv(vocabulary, PART_TILES.block)
    top = logits.new_empty(batch, num_nodes, num_parts, dtype=torch.float32)
    mass = torch.empty_like(top)
    found = torch.empty(batch, num_nodes, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(batch, num_nodes, MAX_CANDIDATES, dtype=torch.int64, device=logits.device)
    wanted = min(CANDIDATE_PARTS, -(-num_parts // 2)) if top_k is None else top_k
    strides = logits.stride(0), logits.stride(1)
    with torch.cuda.device_of(logits):
        _parts_kernel[(num_parts, num_nodes, batch)](
            logits,
            top,
            mass,
            found,
            *strides,
            num_nodes,
            vocabulary,
            temperature,
            BLOCK=PART_TILES.block,
            num_warps=PART_TILES.num_warps,
        )
        _candidates_kernel[(num_parts, num_nodes, batch)](
            logits, top, found, candidates, *strides, num_nodes, vocabulary, wanted,
            SHIFT=EMPTY_BITS[logits.dtype], BLOCK=PART_TILES.block, BLOCK_S=triton.next_power_of_2(num_parts),
            CANDIDATES=MAX_CANDIDATES, num_warps=PART_TILES.num_warps,
        )  # fmt: skip
    return _RowParts(top, mass, found, candidates)


@_launch_match.register_fake
def _empty_verdict(
    tokens: Tensor, parents: Tensor, allowed: Tensor, logits: Tensor, height: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the outputs."""
    batch = len(tokens)
    return tokens.new_empty(batch, height + 1), tokens.new_empty(batch), tokens.new_empty(batch)


@jit
def _subtract_q(  # type: ignore[no-untyped-def]
    row_ptr, q_ptr, places_ptr, residual_ptr, vocabulary, token, following, reduced, top, cut, temperature, scale, odds,
    WITHOUT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write max(P - Q, 0) of a row; return its sum, its value at the token `following`, and the sum of q without `token`.

    P is what was written before, where that was `reduced` already, or else the row's chances, each times `scale`; Q is q times
    `odds`. A token that q has lost reads -1: its residual is 0, for it was rejected.
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
        q = _load_q(q_ptr, places_ptr, columns, inside)
        residual = tl.maximum(p * scale - q * odds, 0.0)
        if WITHOUT:
            gone = (p < 0) | (columns == token)
            residual, q = tl.where(gone, 0.0, residual), tl.where(gone, 0.0, q)
            tl.store(residual_ptr + columns, tl.where(gone, -1.0, residual), mask=inside)
            left += q
        else:
            tl.store(residual_ptr + columns, residual, mask=inside)
        total += residual
        ahead += tl.where(columns == following, residual, 0.0)
    tl.debug_barrier()  # the next pass may read what another thread has written
    return tl.sum(total, 0), tl.sum(ahead, 0), tl.sum(left, 0)


@jit
def _load_q(q_ptr, places_ptr, tokens, inside):  # type: ignore[no-untyped-def]
    """q of target tokens, 0 where the draft vocabulary lacks them."""
    if places_ptr is not None:
        tokens = tl.load(places_ptr + tokens, mask=inside, other=-1)
        inside = inside & (tokens >= 0)
    return tl.load(q_ptr + tokens, mask=inside, other=0.0).to(tl.float32)


@jit
def _reject_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, parents_ptr, allowed_ptr, logits_ptr, q_ptr, places_ptr, rows_ptr, positions_ptr, residual_ptr,
    top_ptr, mass_ptr, found_ptr, candidates_ptr, path_ptr, counts_ptr, state_ptr,
    logits_stride_b, logits_stride_n, q_stride_b, q_stride_n,
    num_nodes, num_parts, vocabulary, num_levels, key, temperature, top_k, top_p,
    WITHOUT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Walk one tree; grid [B]. Leaves, for the last node, whether P is in `residual` and otherwise where it is cut."""
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
        tl.store(path_ptr + depth, tl.cast(node, tl.int64))
        row_ptr = logits_ptr + tl.cast(node, tl.int64) * logits_stride_n
        q_row_ptr = q_ptr + tl.cast(node, tl.int64) * q_stride_n
        if candidates_ptr is not None:
            top, cut, _ = _cut_from_candidates(
                row_ptr, top_ptr, mass_ptr, found_ptr, candidates_ptr, tree + node, vocabulary, num_parts, temperature, top_k,
                top_p, SHIFT, BLOCK, BLOCK_S, CANDIDATES,
            )  # fmt: skip
        else:
            top, cut = _find_cut(row_ptr, vocabulary, temperature, top_k, top_p, SHIFT, BLOCK)
        node_key = fold_in_kernel(row_key, tl.load(positions_ptr + tree + node))
        children = (parents == node) & allowed
        child = tl.min(tl.where(children, index, num_nodes), 0)
        token = tl.load(tokens_ptr + tree + child, mask=child < num_nodes, other=0)
        last, node, order, reduced, odds = node, num_nodes, 0, 0, 1.0
        scale, ahead = 1.0, 0.0
        if child < num_nodes:
            scale = 1 / _cut_mass(row_ptr, vocabulary, top, cut, temperature, SHIFT, BLOCK)
            ahead = _cut_chances(tl.load(row_ptr + token).to(tl.float32), top, cut, temperature, SHIFT)
        while child < num_nodes:
            p, q = ahead * scale, _load_q(q_row_ptr, places_ptr, token, True) * odds
            following = tl.min(tl.where(children & (index > child), index, num_nodes), 0)
            follower = tl.load(tokens_ptr + tree + following, mask=following < num_nodes, other=-1)
            total = 0.0
            if (p < q) & (uniform_in_kernel(node_key, order) * q >= p):
                total, ahead, left = _subtract_q(
                    row_ptr, q_row_ptr, places_ptr, residual_ptr, vocabulary, token, follower, reduced, top, cut, temperature,
                    scale, odds, WITHOUT, SHIFT, BLOCK,
                )  # fmt: skip
                if WITHOUT:
                    odds = 1 / tl.maximum(left, 1e-30)
            if total > 0:
                scale, reduced = 1 / total, 1
                child, token, order = following, follower, order + 1
            else:  # kept, or rounding has left nothing
                node, child = child, num_nodes
        depth += 1
    tl.store(state_ptr + 2 * batch, reduced)
    tl.store(state_ptr + 2 * batch + 1, cut)
    tl.store(counts_ptr + batch, tl.cast(depth, tl.int64))
    for level in range(depth, num_levels):
        tl.store(path_ptr + level, tl.cast(last, tl.int64))


@jit
def _bonus_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, residual_ptr, path_ptr, state_ptr, rows_ptr, positions_ptr, best_ptr, place_ptr,
    logits_stride_b, logits_stride_n, num_nodes, vocabulary, num_levels, key, temperature,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best score, with noise, of one part of what is left of P after a tree's last node; grid [S, B]."""
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
    row_key = fold_in_kernel(key, tl.load(rows_ptr + batch))
    node_key = fold_in_kernel(row_key, tl.load(positions_ptr + batch * num_nodes + node))
    best, place = tl.max(scores + gumbel_in_kernel(fold_in_kernel(node_key, 1), columns), 0, return_indices=True)
    slot = batch * tl.num_programs(0) + part
    tl.store(best_ptr + slot, best)
    tl.store(place_ptr + slot, tl.cast(part * BLOCK + place, tl.int64))


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
    places = None
    if draft_ids is not None:
        places = torch.full([vocabulary], -1, dtype=torch.int32, device=logits.device)
        places[draft_ids] = torch.arange(len(draft_ids), dtype=torch.int32, device=logits.device)
    parts: tuple[Tensor | None, ...] = (None,) * 4
    if top_k is not None or top_p is not None:
        parts = _find_candidates(logits, temperature, top_k)
    num_parts, num_drawn = triton.cdiv(vocabulary, PART_TILES.block), triton.cdiv(vocabulary, SAMPLE_TILES.block)
    residual = logits.new_empty(batch, vocabulary, dtype=torch.float32)
    state = tokens.new_empty(batch, 2, dtype=torch.int32)
    best, place = residual.new_empty(batch, num_drawn), tokens.new_empty(batch, num_drawn)
    path, counts, _ = _empty_verdict(tokens, parents, allowed, logits, height)
    shift = EMPTY_BITS[logits.dtype]
    with torch.cuda.device_of(logits):
        _reject_kernel[(batch,)](
            tokens, parents, allowed, logits, q, places, rows, positions, residual,
            *parts, path, counts, state, logits.stride(0), logits.stride(1), q.stride(0), q.stride(1),
            num_nodes, num_parts, vocabulary, height + 1, key, temperature, top_k, top_p,
            WITHOUT=without_replacement, SHIFT=shift, BLOCK_N=_node_block(num_nodes),
            BLOCK_S=triton.next_power_of_2(num_parts), BLOCK=CUT_TILES.block, CANDIDATES=MAX_CANDIDATES,
                num_warps=CUT_TILES.num_warps,
        )  # fmt: skip
        _bonus_kernel[(num_drawn, batch)](
            logits, residual, path, state, rows, positions, best, place,
            logits.stride(0), logits.stride(1), num_nodes, vocabulary, height + 1, key, temperature,
            SHIFT=shift, BLOCK=SAMPLE_TILES.block, num_warps=SAMPLE_TILES.num_warps,
        )  # fmt: skip
    return path, counts, place.gather(1, best.argmax(1, keepdim=True))[:, 0]


_launch_recursive.register_fake(_empty_verdict)


EMPTY_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # of a number once it is float32


def _can_run_kernel(logits: Tensor) -> bool:
    """Tell whether the kernels are enabled and can run here, also on interpreted bfloat16, which is only read."""
    return runs_on(logits.device) and logits.dtype in EMPTY_BITS


def _tree_arguments(nodes: TreeNodes, logits: Tensor) -> tuple[Any, ...]:
    """The arguments that every launch begins with; a verdict has no gradient."""
    trees = (x.contiguous() for x in (nodes.tokens, nodes.parents, nodes.can_accept))
    return *trees, logits.detach(), nodes.height


def _sampling_arguments(draws: SamplingSpec, logits: Tensor) -> tuple[Any, ...]:
    """The arguments that a launch that draws ends with; None for cuts that cut nothing."""
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
