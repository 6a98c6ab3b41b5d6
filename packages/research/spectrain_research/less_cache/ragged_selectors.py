"""Selectors that give each head a budget of its own: one threshold decides over the votes of all
heads and layers.

Shapes: B batch, T tokens, H key-value heads, G query heads of each, Q queries, S selected slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .key_selectors import SelectionInput, SnapKVSelector

# The largest budget of a head, in average budgets: caches have room for as many tokens.
LARGEST_SHARE = 4
# The share of its head's mean vote that DefensiveKV gives to a token without one.
PRIOR_SHARE = 0.5


class KVCompressSelector(SnapKVSelector):
    """SnapKV's votes with one threshold over all heads and layers, so that heads differ in budget
    (KV-Compress, Rehg, 2024).

    All heads of all layers together select `budget` tokens for each of them. The votes of every
    head have the same sum. A head takes at most LARGEST_SHARE budgets.
    """

    is_ragged = True

    def __init__(self, budget: int, num_queries: int) -> None:
        super().__init__(budget, num_queries)
        self.max_extra = (LARGEST_SHARE - 1) * budget
        self.votes: dict[int, Tensor] = {}  # [B, H, T] of this selection, by layer
        self.head_counts: dict[int, Tensor] = {}  # [B, H] selected tokens, by layer

    def plan_budgets(self, selections: Mapping[int, SelectionInput]) -> None:
        """Decide how many tokens each head of these layers selects."""
        self.head_counts = {}
        self.votes = {
            layer: self.score_tokens(selection) for layer, selection in selections.items()
        }
        if not selections:
            return
        lengths = next(iter(selections.values())).lengths
        widths = [votes.shape[1] for votes in self.votes.values()]
        every = torch.cat([*self.votes.values()], dim=1)  # [B, heads of all layers, T]
        total = lengths.clamp(max=self.budget) * sum(widths)
        order = every.flatten(1).sort(dim=1, descending=True, stable=True).indices
        is_best = torch.arange(order.shape[1], device=order.device) < total[:, None]
        selected = (
            torch.zeros_like(is_best).scatter(1, order, is_best).unflatten(1, every.shape[1:])
        )
        counts = selected.sum(-1).clamp(max=self.budget + self.max_extra)
        self.head_counts = dict(zip(self.votes, counts.split(widths, dim=1)))

    def count_selected(self, lengths: Tensor) -> Tensor:
        """Return the number of slots [B] that the head with most tokens takes."""
        if not self.head_counts:
            return super().count_selected(lengths)
        return torch.cat([*self.head_counts.values()], dim=1).amax(1)

    def select_keys(self, layer: int, selection: SelectionInput, counts: Tensor) -> Tensor:
        return self.votes[layer].topk(int(counts.max()), dim=-1).indices


class DefensiveKVSelector(KVCompressSelector):
    """Votes for the worst case (DefensiveKV, Feng et al., 2025): a token's vote is the most that
    any query of its heads gives.

    A mean forgets a token that one query needs. A token is also worth at least PRIOR_SHARE of its
    head's mean vote, since the observed queries do not show what later ones need. Votes are
    normalized and one threshold holds for all heads and layers (Layer-DefensiveKV).
    """

    def count_votes(self, weights: Tensor) -> Tensor:
        worst = weights.amax((2, 3))
        worst = worst.maximum(PRIOR_SHARE * worst.mean(-1, keepdim=True))
        return worst / worst.sum(-1, keepdim=True)


def mask_unselected(counts: Tensor, num_slots: Tensor, total: int) -> Tensor:
    """Mark the slots [B, H, total] that heads of these counts [B, H] read; those from
    `num_slots` [B] on hold later tokens.
    """
    slots = torch.arange(total, device=counts.device)
    return (slots < counts[..., None]) | (slots >= num_slots[:, None, None])
