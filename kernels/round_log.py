"""A log of rounds that stays on the device until the host reads it.

Shapes: K lines, B batch, P tokens that a round may emit, N nodes of a tree. A line holds the
emitted tokens, their number, the depth of the tree, the nodes that the target ran, and those among
them that cannot be emitted. The kernel of round_commit.py writes it on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
