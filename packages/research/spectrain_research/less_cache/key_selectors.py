"""Key selectors: which tokens of a text a draft reads where it does not read all of them.

Shapes: B batch, T tokens, H key-value heads, G query heads of each, Q queries, D head size, S
selected slots, P pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

POOL_SIZE = 7  # tokens over which SnapKV averages votes
INF = float("inf")


class SelectionInput(NamedTuple):
    """The input of a selection for one layer."""

    keys: Tensor  # [B, T, H, D], arbitrary after shorter texts
    lengths: Tensor  # [B]
    queries: Tensor | None  # [B, H, G, Q, D] of the newest tokens, scaled

    @property
    def token_bytes(self) -> int:
        """Return the bytes of the keys of one token."""
        return self.keys[0, 0].numel() * self.keys.element_size()


class KeySelector(ABC):
    """Selects the same number of tokens in every layer, per head; heads that share keys share a
    selection.
    """

    num_queries = 0  # of the newest tokens
    max_extra = 0  # tokens beyond the budget that it may select
    is_ragged = False  # heads select different numbers of tokens

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def reset(self) -> None:
        """Prepare for new texts."""

    def count_selected(self, lengths: Tensor) -> Tensor:
        """Return [B], the number of tokens selected from texts of these lengths."""
        return lengths.clamp(max=self.budget)

    @abstractmethod
    def select_keys(self, layer: int, selection: SelectionInput, counts: Tensor) -> Tensor:
        """Return [B, H, S] token indices in each text, the selected ones first; S is the largest
        count.
        """

    def selection_bytes(self, layer: int, selection: SelectionInput) -> int:
        """Return the bytes that the selection reads, besides what it selects; called before the
        selection.
        """
        return 0


def most_recent(selection: SelectionInput, counts: Tensor, sinks: int = 0) -> Tensor:
    """Return [B, H, S], the most recent tokens of each text, with its first `sinks` tokens
    instead of the oldest of them.
    """
    slots = torch.arange(int(counts.max()), device=counts.device).expand(len(counts), -1)
    indices = torch.where(slots < sinks, slots, slots + (selection.lengths - counts)[:, None])
    return indices.clamp(max=selection.keys.shape[1] - 1)[:, None].expand(
        -1, selection.keys.shape[2], -1
    )


class StreamingLLMSelector(KeySelector):
    """Selects the first tokens, on which attention rests, and the most recent (StreamingLLM,
    Xiao et al., 2024).
    """

    def __init__(self, budget: int, sinks: int) -> None:
        super().__init__(budget)
        self.sinks = sinks

    def select_keys(self, layer: int, selection: SelectionInput, counts: Tensor) -> Tensor:
        return most_recent(selection, counts, self.sinks)


class SnapKVSelector(KeySelector):
    """Selects what the newest queries attend to most, and the tokens of these queries (SnapKV, Li
    et al., 2024, section 4). Votes are attention weights, summed over queries and over the heads
    that share keys, and averaged over neighbours."""

    def __init__(self, budget: int, num_queries: int) -> None:
        super().__init__(budget)
        self.num_queries = num_queries

    def select_keys(self, layer: int, selection: SelectionInput, counts: Tensor) -> Tensor:
        return self.score_tokens(selection).topk(int(counts.max()), dim=-1).indices

    def score_tokens(self, selection: SelectionInput) -> Tensor:
        """Return the votes [B, H, T], infinite for the observed tokens and minus infinity past
        the end of a text.
        """
        keys, lengths, queries = selection
        assert queries is not None
        indices = torch.arange(keys.shape[1], device=keys.device)
        num_queries = queries.shape[3]
        # [B, Q]
        query_positions = (
            lengths[:, None] - num_queries + torch.arange(num_queries, device=keys.device)
        )
        scores = queries.float() @ keys.float().permute(0, 2, 3, 1)[:, :, None]  # [B, H, G, Q, T]
        is_later = indices > query_positions[..., None]  # [B, Q, T]
        votes = self.count_votes(scores.masked_fill(is_later[:, None, None], -INF).softmax(-1))
        votes = F.avg_pool1d(votes, POOL_SIZE, 1, POOL_SIZE // 2)
        votes = votes.masked_fill((indices >= lengths[:, None] - num_queries)[:, None], INF)
        return votes.masked_fill((indices >= lengths[:, None])[:, None], -INF)

    def count_votes(self, weights: Tensor) -> Tensor:
        """Sum attention weights [B, H, G, Q, T] to votes [B, H, T]."""
        return weights.sum((2, 3))

    def selection_bytes(self, layer: int, selection: SelectionInput) -> int:
        return int(selection.lengths.sum()) * selection.token_bytes


class QuestSelector(KeySelector):
    """Selects pages of `page` tokens by an upper bound of a query's scores, sum_d max(q_d low_d,
    q_d high_d), over the smallest and largest keys of a page, summed over the heads that share
    them; of several queries the largest bound counts. The newest full page and the tokens after it
    are always selected (Quest, Tang et al., 2024, algorithm 1)."""

    num_queries = 1

    def __init__(self, budget: int, page: int) -> None:
        super().__init__(budget)
        self.page_size = page
        self.max_extra = page - 1
        # layer -> [2, B, P, H, D] of pages that are full in every text
        self.page_bounds: dict[int, Tensor] = {}

    def reset(self) -> None:
        self.page_bounds = {}

    def count_selected(self, lengths: Tensor) -> Tensor:
        return self._count_pages(lengths) * self.page_size + lengths % self.page_size

    def _count_pages(self, lengths: Tensor) -> Tensor:
        """Return [B], the number of pages that are read."""
        return (lengths // self.page_size).clamp(max=self.budget // self.page_size)

    def select_keys(self, layer: int, selection: SelectionInput, counts: Tensor) -> Tensor:
        num_full = selection.lengths // self.page_size
        num_pages = self._count_pages(selection.lengths)
        if not int(num_full.max()):
            return most_recent(selection, counts)
        assert selection.queries is not None
        low, high = self._update_bounds(layer, selection)
        queries = selection.queries.float()  # [B, H, G, Q, D]
        bounds = torch.einsum("bhgqd,bphd->bhqp", queries.clamp(min=0), high)
        bounds = (bounds + torch.einsum("bhgqd,bphd->bhqp", queries.clamp(max=0), low)).amax(2)
        page_index = torch.arange(low.shape[1], device=low.device)
        bounds = bounds.masked_fill((page_index == num_full[:, None] - 1)[:, None], INF)
        bounds = bounds.masked_fill((page_index >= num_full[:, None])[:, None], -INF)
        pages = bounds.topk(int(num_pages.max()), dim=-1).indices
        tokens = (
            pages[..., None] * self.page_size + torch.arange(self.page_size, device=low.device)
        ).flatten(-2)
        slots = torch.arange(int(counts.max()), device=low.device).expand(len(low), -1)
        # which of the tokens behind the last full page
        tail_offset = slots - (num_pages * self.page_size)[:, None]
        tail_indices = ((num_full * self.page_size)[:, None] + tail_offset).clamp(
            0, selection.keys.shape[1] - 1
        )
        return torch.where(
            (tail_offset < 0)[:, None],
            F.pad(tokens, (0, self.page_size))[..., : slots.shape[1]],
            tail_indices[:, None],
        )

    def _update_bounds(self, layer: int, selection: SelectionInput) -> tuple[Tensor, Tensor]:
        """Return [B, P, H, D], the smallest and largest keys of all pages that are full in some
        text.
        """
        num_bounded = self._num_bounded(layer)
        num_full = int(selection.lengths.max()) // self.page_size
        new_pages = (
            selection.keys[:, num_bounded * self.page_size : num_full * self.page_size]
            .unflatten(1, (-1, self.page_size))
            .float()
        )
        bounds = torch.stack([new_pages.amin(2), new_pages.amax(2)])
        bounds = torch.cat([self.page_bounds[layer], bounds], dim=2) if num_bounded else bounds
        self.page_bounds[layer] = bounds[:, :, : int(selection.lengths.min()) // self.page_size]
        return bounds[0], bounds[1]

    def _num_bounded(self, layer: int) -> int:
        return self.page_bounds[layer].shape[2] if layer in self.page_bounds else 0

    def selection_bytes(self, layer: int, selection: SelectionInput) -> int:
        num_full = selection.lengths // self.page_size
        new_bytes = (
            int((num_full - self._num_bounded(layer)).clamp(min=0).sum())
            * self.page_size
            * selection.token_bytes
        )
        return new_bytes + int(num_full.sum()) * 2 * selection.keys[0, 0].numel() * 4
