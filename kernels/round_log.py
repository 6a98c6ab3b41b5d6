"""A log of rounds that stays on the device until the host reads it.

Shapes: K lines, B batch, P tokens that a round may emit, N nodes of a tree. A line holds the
emitted tokens, their number, the depth of the tree, the nodes that the target ran, and those among
them that cannot be emitted. The reference in torch comes first; it is also the path on a CPU. The
kernel is one launch with a program per text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton


def tree_stats(depths: Tensor, valid: Tensor, emitted: Tensor) -> Tensor:
    """Return [B, 3] of trees [B, N]: the depth of emittable nodes, nodes that run, nodes that
    cannot be emitted.
    """
    return torch.stack(
        [(depths * (valid & emitted)).amax(1), valid.sum(1), (valid & ~emitted).sum(1)], dim=1
    )


def round_log_reference(
    lines: Tensor,
    slot: Tensor,
    tokens: Tensor,
    counts: Tensor,
    depths: Tensor,
    valid: Tensor,
    emitted: Tensor,
) -> None:
    """Write line `slot` [1], modulo K, of `lines` [K, B, P + 4].

    It holds `tokens` [B, P], of which `counts` [B] are real, and `tree_stats` of `depths`, `valid`
    and `emitted` [B, N].
    """
    line = torch.cat([tokens, counts[:, None], tree_stats(depths, valid, emitted)], dim=1)
    lines.index_copy_(0, slot % len(lines), line[None])


@jit
def _log_kernel(  # type: ignore[no-untyped-def]
    lines_ptr,
    slot_ptr,
    tokens_ptr,
    counts_ptr,
    depths_ptr,
    valid_ptr,
    emitted_ptr,
    num_lines,
    num_steps,
    num_nodes,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the line of one text; grid [B]."""
    batch = tl.cast(tl.program_id(0), tl.int64)
    node = tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_P)
    line = tl.load(slot_ptr) % num_lines * tl.num_programs(0) + batch
    lines_ptr += line * (num_steps + 4)
    token = tl.load(tokens_ptr + batch * num_steps + step, mask=step < num_steps, other=0)
    tl.store(lines_ptr + step, token, mask=step < num_steps)
    depth = tl.load(depths_ptr + batch * num_nodes + node, mask=node < num_nodes, other=0)
    runs = tl.load(valid_ptr + batch * num_nodes + node, mask=node < num_nodes, other=0) != 0
    emits = tl.load(emitted_ptr + batch * num_nodes + node, mask=node < num_nodes, other=0) != 0
    tl.store(lines_ptr + num_steps, tl.load(counts_ptr + batch))
    tl.store(lines_ptr + num_steps + 1, tl.max(tl.where(runs & emits, depth, 0), 0))
    tl.store(lines_ptr + num_steps + 2, tl.sum(runs.to(tl.int64), 0))
    tl.store(lines_ptr + num_steps + 3, tl.sum((runs & ~emits).to(tl.int64), 0))


@torch.library.custom_op("spectrain::round_log", mutates_args={"lines"})
def _launch_log(
    lines: Tensor,
    slot: Tensor,
    tokens: Tensor,
    counts: Tensor,
    depths: Tensor,
    valid: Tensor,
    emitted: Tensor,
) -> None:
    """Launch the kernel."""
    (batch, num_steps), num_nodes = tokens.shape, depths.shape[1]
    assert lines.is_contiguous() and lines.shape[1:] == (batch, num_steps + 4)
    with torch.cuda.device_of(lines):
        _log_kernel[(batch,)](
            lines,
            slot,
            tokens,
            counts,
            depths,
            valid,
            emitted,
            len(lines),
            num_steps,
            num_nodes,
            BLOCK_P=triton.next_power_of_2(num_steps),
            BLOCK_N=triton.next_power_of_2(num_nodes),
            num_warps=1,
        )


@_launch_log.register_fake
def _(*args: Any) -> None:
    return None


def round_log(
    lines: Tensor,
    slot: Tensor,
    tokens: Tensor,
    counts: Tensor,
    depths: Tensor,
    valid: Tensor,
    emitted: Tensor,
) -> None:
    """Do what `round_log_reference` does, in one launch where the kernel runs."""
    if runs_on(lines.device):
        _launch_log(
            lines, slot, *(x.contiguous() for x in (tokens, counts, depths, valid, emitted))
        )
    else:
        round_log_reference(lines, slot, tokens, counts, depths, valid, emitted)
