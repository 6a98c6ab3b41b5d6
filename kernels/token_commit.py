"""Append the emitted tokens of a round to each text, and decide whether the text continues.

Shapes: B batch, N nodes of a tree, P steps of the longest path, T slots of a text, S stop tokens.
The reference in torch, some twenty small operations, comes first; it is also the path on a CPU. The
kernel is one launch with a program per text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dispatch import jit, run_on_cpu, runs_on, tl, triton


class TextBatch(NamedTuple):
    """The texts of a batch; a commit changes all but the lengths and the stop tokens."""

    tokens: Tensor  # [B, T] int64, the committed tokens, then the root
    lengths: Tensor  # [B] int64, without the root
    active: Tensor  # [B] bool, False where a text has finished
    tokens_left: Tensor  # [B] int64, tokens that a text may still emit
    stop_ids: Tensor  # [S] int64


def gather_emitted(nodes: Tensor, path: Tensor, counts: Tensor, bonus: Tensor) -> Tensor:
    """Gather the tokens of a round [B, P]: those of accepted nodes after the root, the bonus
    [B], then padding.
    """
    following = torch.cat([path[:, 1:], path[:, -1:]], dim=1)
    return nodes.gather(1, following).scatter(1, (counts - 1)[:, None], bonus[:, None])


def token_commit_reference(
    nodes: Tensor, path: Tensor, counts: Tensor, bonus: Tensor, texts: TextBatch
) -> tuple[Tensor, Tensor]:
    """Append the first `counts` [B] tokens along `path` [B, P] to every active text, the bonus
    included.

    Returns the emitted tokens [B, P] and their number [B], 0 for a finished text. A text that has
    emitted a stop token or its last allowed token is finished from then on.
    """
    emitted = gather_emitted(nodes, path, counts, bonus)
    emitted_counts = counts * texts.active
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    slots = (texts.lengths[:, None] + 1 + steps).clamp(max=texts.tokens.shape[1] - 1)
    real = steps < emitted_counts[:, None]
    texts.tokens.scatter_(1, slots, torch.where(real, emitted, texts.tokens.gather(1, slots)))
    stopped = ((emitted[..., None] == texts.stop_ids).any(-1) & real).any(-1)
    texts.tokens_left.sub_(emitted_counts)
    texts.active.logical_and_(~stopped & (texts.tokens_left > 0))
    return emitted, emitted_counts


@jit
def emit_tokens(  # type: ignore[no-untyped-def]
    nodes_ptr,
    path_ptr,
    counts_ptr,
    bonus_ptr,
    tokens_ptr,
    length,
    active_ptr,
    left_ptr,
    stops_ptr,
    emitted_ptr,
    emitted_counts_ptr,
    num_nodes,
    num_steps,
    num_slots,
    num_stops,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Append to the text of this program, which has `length` tokens and a root; return its emitted
    tokens [BLOCK_P] and their number.
    """
    batch = tl.cast(tl.program_id(0), tl.int64)
    step = tl.arange(0, BLOCK_P)
    stop = tl.arange(0, BLOCK_S)
    inside = step < num_steps
    following = tl.minimum(step + 1, num_steps - 1)
    node = tl.load(path_ptr + batch * num_steps + following, mask=inside, other=0)
    token = tl.load(nodes_ptr + batch * num_nodes + node, mask=inside, other=0)
    count = tl.load(counts_ptr + batch)
    token = tl.where(step == count - 1, tl.load(bonus_ptr + batch), token)
    tl.store(emitted_ptr + batch * num_steps + step, token, mask=inside)
    going = tl.load(active_ptr + batch) != 0
    emitted_count = tl.where(going, count, 0)
    tl.store(emitted_counts_ptr + batch, emitted_count)
    real = inside & (step < emitted_count)
    slot = tl.minimum(length + 1 + step, num_slots - 1)
    tl.store(tokens_ptr + batch * num_slots + slot, token, mask=real)
    ends = tl.load(stops_ptr + stop, mask=stop < num_stops, other=0)
    hits = (token[:, None] == ends[None, :]) & real[:, None] & (stop < num_stops)[None, :]
    stopped = tl.max(tl.max(hits.to(tl.int32), 1), 0)
    left = tl.load(left_ptr + batch) - emitted_count
    tl.store(left_ptr + batch, left)
    tl.store(active_ptr + batch, going & (stopped == 0) & (left > 0))
    return token, emitted_count


@jit
def _emit_kernel(  # type: ignore[no-untyped-def]
    nodes_ptr,
    path_ptr,
    counts_ptr,
    bonus_ptr,
    tokens_ptr,
    lengths_ptr,
    active_ptr,
    left_ptr,
    stops_ptr,
    emitted_ptr,
    emitted_counts_ptr,
    num_nodes,
    num_steps,
    num_slots,
    num_stops,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Append to one text; grid [B]."""
    emit_tokens(
        nodes_ptr,
        path_ptr,
        counts_ptr,
        bonus_ptr,
        tokens_ptr,
        tl.load(lengths_ptr + tl.program_id(0)),
        active_ptr,
        left_ptr,
        stops_ptr,
        emitted_ptr,
        emitted_counts_ptr,
        num_nodes,
        num_steps,
        num_slots,
        num_stops,
        BLOCK_P,
        BLOCK_S,
    )


def empty_emitted(
    nodes: Tensor, path: Tensor, counts: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    """Allocate the emitted tokens [B, P] and their number [B]."""
    return path.new_empty(path.shape), counts.new_empty(counts.shape)


@torch.library.custom_op("spectrain::token_commit", mutates_args={"tokens", "active", "left"})
def _launch_emit(
    nodes: Tensor,
    path: Tensor,
    counts: Tensor,
    bonus: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    active: Tensor,
    left: Tensor,
    stops: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel."""
    (batch, num_steps), num_stops = path.shape, len(stops)
    assert tokens.is_contiguous() and active.is_contiguous() and left.is_contiguous()
    emitted, emitted_counts = empty_emitted(nodes, path, counts)
    with torch.cuda.device_of(tokens):
        _emit_kernel[(batch,)](
            nodes,
            path,
            counts,
            bonus,
            tokens,
            lengths,
            active,
            left,
            stops,
            emitted,
            emitted_counts,
            nodes.shape[1],
            num_steps,
            tokens.shape[1],
            num_stops,
            BLOCK_P=triton.next_power_of_2(num_steps),
            BLOCK_S=triton.next_power_of_2(max(1, num_stops)),
            num_warps=1,
        )
    return emitted, emitted_counts


_launch_emit.register_fake(empty_emitted)


def commit_without_launch(
    nodes: Tensor, path: Tensor, counts: Tensor, bonus: Tensor, texts: TextBatch
) -> tuple[Tensor, Tensor]:
    """Do what `token_commit_reference` does, by an installed package's kernel where it serves the
    processor.
    """
    committed: tuple[Tensor, Tensor] | None = run_on_cpu(
        "commit_tokens", nodes, path, counts, bonus, texts
    )
    if committed is not None:
        return committed
    return token_commit_reference(nodes, path, counts, bonus, texts)


def token_commit(
    nodes: Tensor, path: Tensor, counts: Tensor, bonus: Tensor, texts: TextBatch
) -> tuple[Tensor, Tensor]:
    """Do what `token_commit_reference` does, in place, without synchronisation, in one launch
    where the kernel runs.
    """
    if not runs_on(texts.tokens.device):
        return commit_without_launch(nodes, path, counts, bonus, texts)
    outputs: tuple[Tensor, Tensor] = _launch_emit(
        *(x.contiguous() for x in (nodes, path, counts, bonus)), *texts
    )
    return outputs
