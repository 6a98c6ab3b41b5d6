"""Key selectors: which tokens of a text a draft reads, where it does not read all of them.

Shapes: B batch, T tokens, H key-value heads, G query heads of each, Q queries, D head size, S selected slots, P pages.
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
    """Selects the same number of tokens in every layer, per head; heads that share keys share a selection."""

    num_queries = 0  # of the newest tokens
    max_extra = 0  # tokens beyond the budget that it may select

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def reset(self) -> None:
        """Prepare for new texts."""

    def count_selected(self, lengths: Tensor) -> Tensor:
        """Return [B], the number of tokens selected from texts of these lengths."""
        return lengths.clamp(max=self.budget)

    @abstractmethod
    def select_keys(self, layer: int, seen: SelectionInput, counts: Tensor) -> Tensor:
        """Return [B, H, S] token indices in each text, the selected ones first; S is the largest count."""

    def selection_bytes(self, layer: int, seen: SelectionInput) -> int:
        """Return the bytes that the selection reads, besides what it selects; called before the selection."""
        return 0


def most_recent(seen: SelectionInput, counts: Tensor, sinks: int = 0) -> Tensor:
    """Return [B, H, S], the most recent tokens of each text, with its first `sinks` tokens instead of the oldest of them."""
    slots = torch.arange(int(counts.max()), device=counts.device).expand(len(counts), -1)
    places = torch.where(slots < sinks, slots, slots + (seen.lengths - counts)[:, None])
    return places.clamp(max=seen.keys.shape[1] - 1)[:, None].expand(-1, seen.keys.shape[2], -1)


class StreamingLLMSelector(KeySelector):
    """Selects the first tokens, on which attention rests, and the most recent (StreamingLLM, Xiao et al., 2024)."""

    def __init__(self, budget: int, sinks: int) -> None:
        super().__init__(budget)
        self.sinks = sinks

    def select_keys(self, layer: int, seen: SelectionInput, counts: Tensor) -> Tensor:
        return most_recent(seen, counts, self.sinks)


class SnapKVSelector(KeySelector):
    """Selects what the newest queries attend to most, and the tokens of these queries (SnapKV, Li et al., 2024, section 4).
    Votes are attention weights, summed over queries and over the heads that share keys, and averaged over neighbours."""

    def __init__(self, budget: int, num_queries: int) -> None:
        super().__init__(budget)
        self.num_queries = num_queries

    def select_keys(self, layer: int, seen: SelectionInput, counts: Tensor) -> Tensor:
        keys, lengths, queries = seen
        assert queries is not None
        places, asking = torch.arange(keys.shape[1], device=keys.device), queries.shape[3]
        own = lengths[:, None] - asking + torch.arange(asking, device=keys.device)  # [B, Q]
        scores = queries.float() @ keys.float().permute(0, 2, 3, 1)[:, :, None]  # [B, H, G, Q, T]
        later = places > own[..., None]  # [B, Q, T]
        votes = scores.masked_fill(later[:, None, None], -INF).softmax(-1).sum((2, 3))
        votes = F.avg_pool1d(votes, POOL_SIZE, 1, POOL_SIZE // 2)
        votes = votes.masked_fill((places >= lengths[:, None] - asking)[:, None], INF)
        votes = votes.masked_fill((places >= lengths[:, None])[:, None], -INF)
        return votes.topk(int(counts.max()), dim=-1).indices

    def selection_bytes(self, layer: int, seen: SelectionInput) -> int:
        return int(seen.lengths.sum()) * seen.token_bytes


class QuestSelector(KeySelector):
    """Selects pages of `page` tokens by an upper bound of the newest token's scores, sum_d max(q_d low_d, q_d high_d), over the
    smallest and largest keys of a page, summed over the heads that share them. The newest full page and the tokens after it are
    always selected (Quest, Tang et al., 2024, algorithm 1, run once for the drafts of several rounds)."""

    num_queries = 1

    def __init__(self, budget: int, page: int) -> None:
        super().__init__(budget)
        self.page_size, self.max_extra = page, page - 1
        self.page_bounds: dict[int, Tensor] = {}  # layer -> [2, B, P, H, D] of pages that are full in every text

    def reset(self) -> None:
        self.page_bounds = {}

    def count_selected(self, lengths: Tensor) -> Tensor:
        return self._count_pages(lengths) * self.page_size + lengths % self.page_size

    def _count_pages(self, lengths: Tensor) -> Tensor:
        """Return [B], the number of pages that are read."""
        return (lengths // self.page_size).clamp(max=self.budget // self.page_size)

    def select_keys(self, layer: int, seen: SelectionInput, counts: Tensor) -> Tensor:
        full, chosen = seen.lengths // self.page_size, self._count_pages(seen.lengths)
        if not int(full.max()):
            return most_recent(seen, counts)
        assert seen.queries is not None
        low, high = self._update_bounds(layer, seen)
        asking = seen.queries[:, :, :, -1].float()  # [B, H, G, D]
        most = torch.einsum("bhgd,bphd->bhp", asking.clamp(min=0), high)
        most = most + torch.einsum("bhgd,bphd->bhp", asking.clamp(max=0), low)
        number = torch.arange(low.shape[1], device=low.device)
        most = most.masked_fill((number == full[:, None] - 1)[:, None], INF)
        most = most.masked_fill((number >= full[:, None])[:, None], -INF)
        pages = most.topk(int(chosen.max()), dim=-1).indices
        tokens = (pages[..., None] * self.page_size + torch.arange(self.page_size, device=low.device)).flatten(-2)
        slots = torch.arange(int(counts.max()), device=low.device).expand(len(low), -1)
        behind = slots - (chosen * self.page_size)[:, None]  # which of the tokens behind the last full page
        ends = ((full * self.page_size)[:, None] + behind).clamp(0, seen.keys.shape[1] - 1)
        return torch.where((behind < 0)[:, None], F.pad(tokens, (0, self.page_size))[..., : slots.shape[1]], ends[:, None])

    def _update_bounds(self, layer: int, seen: SelectionInput) -> tuple[Tensor, Tensor]:
        """Return [B, P, H, D], the smallest and largest keys of all pages that are full in some text."""
        done, full = self._num_bounded(layer), int(seen.lengths.max()) // self.page_size
        new = seen.keys[:, done * self.page_size : full * self.page_size].unflatten(1, (-1, self.page_size)).float()
        found = torch.stack([new.amin(2), new.amax(2)])
        found = torch.cat([self.page_bounds[layer], found], dim=2) if done else found
        self.page_bounds[layer] = found[:, :, : int(seen.lengths.min()) // self.page_size]
        return found[0], found[1]

    def _num_bounded(self, layer: int) -> int:
        return self.page_bounds[layer].shape[2] if layer in self.page_bounds else 0

    def selection_bytes(self, layer: int, seen: SelectionInput) -> int:
        full = seen.lengths // self.page_size
        new = int((full - self._num_bounded(layer)).clamp(min=0).sum()) * self.page_size * seen.token_bytes
        return new + int(full.sum()) * 2 * seen.keys[0, 0].numel() * 4
