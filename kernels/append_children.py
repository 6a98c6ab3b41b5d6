"""Append the most likely children of every frontier node to a growing tree: the end of a draft
level.

Shapes: B batch, F frontier nodes, K children of a node, M nodes so far, V draft vocabulary, P parts
of a row. The reference in torch comes first: the normalisation of the logits, a top-k, and the
operations that map, score and append, some twenty launches on a GPU. The kernels are two launches:
parts of a row find their own log-sum-exp and most likely tokens, then a program for each frontier
node merges them. Of equal logits the token with the lowest id comes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton
from .sampling_cuts import float_order

BLOCK = 2048
"""Tokens of a part: 8 bytes of a key for each fit the registers of eight warps."""
MAX_WIDTH = 32
"""Children of a node that the kernels find; for more, a sort of the row is as fast."""


class Nodes(NamedTuple):
    """The nodes of a growing tree; those of a level stand in the order of their parents."""

    tokens: Tensor  # [B, M] int64, as target ids
    parents: Tensor  # [B, M] int64, -1 at the root
    scores: Tensor  # [B, M] float32, sums of log q along the paths


def append_children_reference(
    logits: Tensor, width: int, draft_ids: Tensor | None, frontier: Tensor, nodes: Nodes
) -> Nodes:
    """Append the `width` most likely children of the nodes `frontier` [B, F], by logits [B, F, V]
    that need no normalisation; `draft_ids` [V] maps draft ids to target ids.
    """
    best = logits.float().sort(dim=-1, descending=True, stable=True).indices[..., :width]
    log_q = logits.float().log_softmax(-1).gather(-1, best)
    ids = best.flatten(1)
    scores = nodes.scores.gather(1, frontier)[..., None] + log_q
    return Nodes(
        torch.cat([nodes.tokens, ids if draft_ids is None else draft_ids[ids]], dim=1),
        torch.cat([nodes.parents, frontier.repeat_interleave(width, dim=1)], dim=1),
        torch.cat([nodes.scores, scores.flatten(1)], dim=1),
    )


@jit
def _likeliest_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    maxima_ptr,
    masses_ptr,
    keys_ptr,
    vocabulary,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the maximum, the sum of exponentials and the WIDTH most likely tokens of one part; grid
    [B F, P].
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(logits_ptr + row * vocabulary + token, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    largest = tl.max(x, 0)
    # Where all of a part is -inf, its mass is 0, not NaN.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    slot = row * tl.num_programs(1) + part
    tl.store(maxima_ptr + slot, largest)
    tl.store(masses_ptr + slot, tl.sum(tl.exp(x - shift), 0))
    # A key orders by logit, then by lowest token: an integer that ascends with the logit, above the
    # token counted down.
    key = (float_order(x, 0).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    nothing = -0x7FFFFFFFFFFFFFFF
    key = tl.where(inside, key, nothing)
    for child in tl.static_range(WIDTH):
        best = tl.max(key, 0)
        tl.store(keys_ptr + slot * WIDTH + child, best)
        key = tl.where(key == best, nothing, key)


@jit
def _append_children_kernel(  # type: ignore[no-untyped-def]
    maxima_ptr,
    masses_ptr,
    keys_ptr,
    draft_ids_ptr,
    frontier_ptr,
    tokens_ptr,
    parents_ptr,
    scores_ptr,
    new_tokens_ptr,
    new_parents_ptr,
    new_scores_ptr,
    num_parts,
    num_nodes,
    num_frontier,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Append the children of one frontier node, and copy the nodes so far; grid [B F]."""
    row = tl.cast(tl.program_id(0), tl.int64)
    batch = row // num_frontier
    place = row % num_frontier
    num_new = num_nodes + num_frontier * WIDTH
    # 1. The log-sum-exp of the whole row.
    part = tl.arange(0, BLOCK_P)
    is_part = part < num_parts
    slots = row * num_parts + part
    maxima = tl.load(maxima_ptr + slots, mask=is_part, other=float("-inf"))
    masses = tl.load(masses_ptr + slots, mask=is_part, other=0.0)
    largest = tl.max(maxima, 0)
    log_z = largest + tl.log(tl.sum(masses * tl.exp(maxima - largest), 0))
    # 2. The most likely tokens of all parts, one after another.
    candidate = tl.arange(0, BLOCK_C)
    nothing = -0x7FFFFFFFFFFFFFFF
    keys = tl.load(
        keys_ptr + row * num_parts * WIDTH + candidate,
        mask=candidate < num_parts * WIDTH,
        other=nothing,
    )
    node = tl.load(frontier_ptr + row)
    score = tl.load(scores_ptr + batch * num_nodes + node)
    for child in tl.static_range(WIDTH):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, nothing, keys)
        token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        bits = (best >> 32).to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        log_q = bits.to(tl.float32, bitcast=True) - log_z
        if draft_ids_ptr is not None:
            token = tl.load(draft_ids_ptr + token)
        slot = batch * num_new + num_nodes + place * WIDTH + child
        tl.store(new_tokens_ptr + slot, token)
        tl.store(new_parents_ptr + slot, node)
        tl.store(new_scores_ptr + slot, score + log_q)
    # 3. The nodes so far, by the first program of a text.
    old = tl.arange(0, BLOCK_M)
    copies = old < tl.where(place == 0, num_nodes, 0)
    source = batch * num_nodes + old
    target = batch * num_new + old
    tl.store(new_tokens_ptr + target, tl.load(tokens_ptr + source, mask=copies), mask=copies)
    tl.store(new_parents_ptr + target, tl.load(parents_ptr + source, mask=copies), mask=copies)
    tl.store(new_scores_ptr + target, tl.load(scores_ptr + source, mask=copies), mask=copies)


@torch.library.custom_op("spectrain::append_children", mutates_args=())
def _launch_append_children(
    logits: Tensor,
    width: int,
    draft_ids: Tensor | None,
    frontier: Tensor,
    tokens: Tensor,
    parents: Tensor,
    scores: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch both kernels."""
    batch, num_frontier, vocabulary = logits.shape
    num_parts = -(-vocabulary // BLOCK)
    rows = batch * num_frontier
    maxima, masses = (scores.new_empty(rows, num_parts) for _ in range(2))
    keys = tokens.new_empty(rows, num_parts, width)
    outputs = _empty_nodes(logits, width, draft_ids, frontier, tokens, parents, scores)
    with torch.cuda.device_of(logits):
        _likeliest_kernel[(rows, num_parts)](
            logits, maxima, masses, keys, vocabulary, WIDTH=width, BLOCK=BLOCK, num_warps=8
        )
        _append_children_kernel[(rows,)](
            maxima,
            masses,
            keys,
            draft_ids,
            frontier,
            tokens,
            parents,
            scores,
            *outputs,
            num_parts,
            tokens.shape[1],
            num_frontier,
            WIDTH=width,
            BLOCK_P=triton.next_power_of_2(num_parts),
            BLOCK_C=triton.next_power_of_2(num_parts * width),
            BLOCK_M=triton.next_power_of_2(tokens.shape[1]),
            num_warps=4,
        )
    return outputs


@_launch_append_children.register_fake
def _empty_nodes(
    logits: Tensor,
    width: int,
    draft_ids: Tensor | None,
    frontier: Tensor,
    tokens: Tensor,
    parents: Tensor,
    scores: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    size = len(tokens), tokens.shape[1] + logits.shape[1] * width
    return tokens.new_empty(size), parents.new_empty(size), scores.new_empty(size)


def can_append(device: torch.device, width: int = 1) -> bool:
    """Tell whether the kernels run on a device, and find so many children of a node."""
    return width <= MAX_WIDTH and runs_on(device)


def append_children(
    logits: Tensor, width: int, draft_ids: Tensor | None, frontier: Tensor, nodes: Nodes
) -> Nodes:
    """Do what `append_children_reference` does, in two launches where the kernels run.

    `width` is at most V. Logits may be of half precision; scores are float32.
    """
    if not can_append(logits.device, width):
        return append_children_reference(logits, width, draft_ids, frontier, nodes)
    outputs: tuple[Any, ...] = _launch_append_children(
        logits.contiguous(),
        width,
        draft_ids,
        frontier.contiguous(),
        *(part.contiguous() for part in nodes),
    )
    return Nodes(*outputs)
