"""Groups of a batch's texts, each with a drafter of its own. Shapes: B batch, G texts of a
group, F nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from spectrain.drafters.context import Context
from spectrain.models.features import Features, Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.rollout import Rollout

from .arms import Stopwatch, select_layers


@dataclass(frozen=True)
class GroupPart:
    """The draft of one group in one round."""

    number: int  # of its drafter
    rows: Tensor  # [G] texts
    rollout: Rollout
    stopwatch: Stopwatch


def select_context(
    context: Context,
    rows: Tensor,
    parts: list[tuple[Features, Tensor]],
    layers: tuple[Layer, ...],
    num_drafts: int,
) -> Context:
    """Return what a drafter sees of some texts: the features `parts` of their tokens, with
    `layers`, are new to it.

    The target's cache stands there with its lengths alone, because such a drafter does not run the
    target.
    """
    cache = TreeCache(len(context.cache.layers), len(rows), context.cache.max_length, rows.device)
    cache.lengths = context.cache.lengths[rows]
    cache.longest = int(cache.lengths.max())
    selected = [
        (Features(part.tokens[rows], part.layers, part.hidden[rows]), counts[rows])
        for part, counts in parts
    ]
    features = selected[0][0] if len(selected) == 1 else Features.concat_prefixes(selected)
    return replace(
        context,
        cache=cache,
        tokens=context.tokens[rows],
        sequence_ids=context.sequence_ids[rows],
        new_features=select_layers(features, layers),
        num_new=torch.stack([counts for _, counts in selected]).sum(0),
        active=context.active[rows],
        tokens_left=context.tokens_left[rows],
        texts=[context.texts[row] for row in rows.tolist()],
        round=num_drafts,
        deferred=[],
        partial=None,
    )


class GroupedRollout(Rollout):
    """Drafts for every text with the rollout of its group; nothing is drafted in texts without one.

    Its depth is that of the drafter that drafts least deep.
    """

    def __init__(self, parts: Sequence[GroupPart], batch: int, vocab_size: int) -> None:
        self.parts, self.batch, self.vocab_size = parts, batch, vocab_size
        limits = [
            part.rollout.depth_limit for part in parts if part.rollout.depth_limit is not None
        ]
        self.depth_limit = min(limits, default=None)
        # [B] texts without a group
        self.is_idle = torch.ones(batch, dtype=torch.bool, device=parts[0].rows.device)
        self.is_idle[torch.cat([part.rows for part in parts])] = False
        self.is_complete = not self.is_idle.any()

    def start(self) -> Tensor:
        log_qs = []
        for part in self.parts:
            with part.stopwatch:
                log_qs.append(part.rollout.start())
        return self._join_rows(log_qs, 1)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        log_qs = []
        for part in self.parts:
            with part.stopwatch:
                log_qs.append(part.rollout.extend(tokens[part.rows], parents[part.rows]))
        return self._join_rows(log_qs, tokens.shape[1])

    def _join_rows(self, log_qs: list[Tensor], width: int) -> Tensor:
        """Return log q [B, F, V] over target ids of all texts, from that of every group [G, F,
        its vocabulary].
        """
        joined = log_qs[0].new_full((self.batch, width, self.vocab_size), float("-inf"))
        is_closed = torch.ones(joined.shape[:2], dtype=torch.bool, device=joined.device)
        for part, log_q in zip(self.parts, log_qs):
            ids = part.rollout.draft_ids
            columns = slice(log_q.shape[-1]) if ids is None else ids
            padded = joined.new_full((len(part.rows), width, self.vocab_size), float("-inf"))
            padded[:, :, columns] = log_q
            joined[part.rows] = padded
            is_closed[part.rows] = (
                False if part.rollout.stop_mask is None else part.rollout.stop_mask
            )
        is_open = self.is_complete and all(part.rollout.stop_mask is None for part in self.parts)
        self.stop_mask = None if is_open else is_closed
        # A text without a group has any distribution, because nothing is drafted there.
        return (
            joined
            if self.is_complete
            else joined.masked_fill(self.is_idle[:, None, None], -log(self.vocab_size))
        )
