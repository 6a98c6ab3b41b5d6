"""End a captured round in one launch: emitted tokens, the length and state of each text, the tokens
of its path for the next draft, and the round's line in the log.

Shapes: B batch, N nodes of a tree, P steps of the longest path, K lines of the log. The reference
in torch comes first; it is also the path on a CPU. In the kernel a program owns a text.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton
from .round_log import round_log_reference
from .token_commit import TextBatch, commit_without_launch, emit_tokens, empty_emitted


class Verdicts(NamedTuple):
    """What was accepted of trees: a path, its nodes, and the token that follows it."""

    path: Tensor  # [B, P] node indices, padded with the last one
    counts: Tensor  # [B]
    bonus: Tensor  # [B]


class LoggedTrees(NamedTuple):
    """What the log has of trees."""

    depths: Tensor  # [B, N]
    valid: Tensor  # [B, N] bool
    can_emit: Tensor  # [B, N] bool


class RoundBuffers(NamedTuple):
    """What a round leaves at fixed addresses: the log, and what the next draft reads."""

    lines: Tensor  # [K, B, P + 4]
    next_lines: Tensor  # [B] the next line of each text, modulo K
    path_tokens: Tensor | None  # [B, P] tokens of the path's nodes; None where nothing drafts
    path_counts: Tensor | None  # [B] emitted tokens


def round_commit_reference(
    nodes: Tensor, verdicts: Verdicts, trees: LoggedTrees, texts: TextBatch, buffers: RoundBuffers
) -> tuple[Tensor, Tensor]:
    """Do what `token_commit_reference` does to texts by the tokens of `nodes` [B, N], add the
    emitted tokens to their lengths, and fill the buffers. Returns the emitted tokens [B, P] and
    their number [B].
    """
    emitted, counts = commit_without_launch(nodes, *verdicts, texts)
    texts.lengths.add_(counts)
    if buffers.path_tokens is not None and buffers.path_counts is not None:
        buffers.path_tokens.copy_(nodes.gather(1, verdicts.path))
        buffers.path_counts.copy_(counts)
    # All texts have written as many lines.
    round_log_reference(buffers.lines, buffers.next_lines[:1], emitted, counts, *trees)
    buffers.next_lines.add_(1)
    return emitted, counts


@jit
def _round_commit_kernel(  # type: ignore[no-untyped-def]
    nodes_ptr,
    path_ptr,
    counts_ptr,
    bonus_ptr,
    depths_ptr,
    valid_ptr,
    can_emit_ptr,
    tokens_ptr,
    lengths_ptr,
    active_ptr,
    left_ptr,
    stops_ptr,
    lines_ptr,
    next_lines_ptr,
    path_tokens_ptr,
    path_counts_ptr,
    emitted_ptr,
    emitted_counts_ptr,
    num_nodes,
    num_steps,
    num_slots,
    num_stops,
    num_lines,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """End the round of one text; grid [B]."""
    # 1. The text.
    batch = tl.cast(tl.program_id(0), tl.int64)
    length = tl.load(lengths_ptr + batch)
    token, count = emit_tokens(
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
        BLOCK_P,
        BLOCK_S,
    )
    tl.store(lengths_ptr + batch, length + count)
    # 2. What the next draft reads.
    step = tl.arange(0, BLOCK_P)
    inside = step < num_steps
    if path_tokens_ptr is not None:
        node = tl.load(path_ptr + batch * num_steps + step, mask=inside, other=0)
        path_token = tl.load(nodes_ptr + batch * num_nodes + node, mask=inside, other=0)
        tl.store(path_tokens_ptr + batch * num_steps + step, path_token, mask=inside)
        tl.store(path_counts_ptr + batch, count)
    # 3. The line in the log.
    node = tl.arange(0, BLOCK_N)
    is_node = node < num_nodes
    number = tl.load(next_lines_ptr + batch)
    tl.store(next_lines_ptr + batch, number + 1)
    lines_ptr += (number % num_lines * tl.num_programs(0) + batch) * (num_steps + 4)
    tl.store(lines_ptr + step, token, mask=inside)
    depth = tl.load(depths_ptr + batch * num_nodes + node, mask=is_node, other=0)
    runs = tl.load(valid_ptr + batch * num_nodes + node, mask=is_node, other=0) != 0
    emits = tl.load(can_emit_ptr + batch * num_nodes + node, mask=is_node, other=0) != 0
    tl.store(lines_ptr + num_steps, count)
    tl.store(lines_ptr + num_steps + 1, tl.max(tl.where(runs & emits, depth, 0), 0))
    tl.store(lines_ptr + num_steps + 2, tl.sum(runs.to(tl.int64), 0))
    tl.store(lines_ptr + num_steps + 3, tl.sum((runs & ~emits).to(tl.int64), 0))


TEXT_STATE = {"tokens", "lengths", "active", "left"}
LEFT_STATE = {"lines", "next_lines", "path_tokens", "path_counts"}


@torch.library.custom_op("spectrain::round_commit", mutates_args=TEXT_STATE | LEFT_STATE)
def _launch_round_commit(
    nodes: Tensor,
    path: Tensor,
    counts: Tensor,
    bonus: Tensor,
    depths: Tensor,
    valid: Tensor,
    can_emit: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    active: Tensor,
    left: Tensor,
    stops: Tensor,
    lines: Tensor,
    next_lines: Tensor,
    path_tokens: Tensor | None,
    path_counts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel."""
    (batch, num_steps), num_nodes = path.shape, nodes.shape[1]
    assert tokens.is_contiguous() and lines.is_contiguous()
    assert lines.shape[1:] == (batch, num_steps + 4)
    emitted, emitted_counts = empty_emitted(nodes, path, counts)
    with torch.cuda.device_of(tokens):
        _round_commit_kernel[(batch,)](
            nodes,
            path,
            counts,
            bonus,
            depths,
            valid,
            can_emit,
            tokens,
            lengths,
            active,
            left,
            stops,
            lines,
            next_lines,
            path_tokens,
            path_counts,
            emitted,
            emitted_counts,
            num_nodes,
            num_steps,
            tokens.shape[1],
            len(stops),
            len(lines),
            BLOCK_P=triton.next_power_of_2(num_steps),
            BLOCK_S=triton.next_power_of_2(max(1, len(stops))),
            BLOCK_N=triton.next_power_of_2(num_nodes),
            num_warps=1,
        )
    return emitted, emitted_counts


_launch_round_commit.register_fake(empty_emitted)


def round_commit(
    nodes: Tensor, verdicts: Verdicts, trees: LoggedTrees, texts: TextBatch, buffers: RoundBuffers
) -> tuple[Tensor, Tensor]:
    """Do what `round_commit_reference` does, in place, in one launch where the kernel runs."""
    if not runs_on(nodes.device):
        return round_commit_reference(nodes, verdicts, trees, texts, buffers)
    inputs = (x.contiguous() for x in (nodes, *verdicts, *trees))
    outputs: tuple[Tensor, Tensor] = _launch_round_commit(*inputs, *texts, *buffers)
    return outputs
