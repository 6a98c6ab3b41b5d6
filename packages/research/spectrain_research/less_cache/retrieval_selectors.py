"""Selectors that retrieve tokens for the newest query by small stand-ins of their keys: sign bits,
or centroids of clusters.

Shapes: B batch, T tokens, H key-value heads, G query heads of each, D head size, C clusters, S
selected slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .key_selectors import INF, KeySelector, SelectionInput

NUM_SINKS = 16  # first tokens that ClusterKV always reads
TOKENS_PER_CLUSTER = 80
CLUSTER_INTERVAL = 320  # tokens that are clustered together
CLUSTER_STEPS = 10  # iterations of k-means


def select_best(scores: Tensor, always: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Return the tokens [B, H, S] that `always` [B, T] marks and those with the best scores [B,
    H, T] inside each text.
    """
    scores = scores.masked_fill(always[:, None], INF)
    is_outside = torch.arange(scores.shape[-1], device=scores.device) >= lengths[:, None]
    return scores.masked_fill(is_outside[:, None], -INF).topk(int(counts.max()), dim=-1).indices


class SignSelector(KeySelector):
    """Selects single tokens by keys of one bit per channel (FIER, Wang et al., 2025).

    A channel of a group of `group` tokens has two levels, centre - scale and centre + scale, a
    quarter and three quarters of its range; a key's bit says which is nearer. The score of a token
    is the newest query times these levels, summed over the heads that share keys. The newest token
    is always selected.
    """

    num_queries = 1

    def __init__(self, budget: int, group: int) -> None:
        super().__init__(budget)
        self.group_size = group
        self.coarse_keys: dict[int, Tensor] = {}  # [B, tokens of full groups, H, D] by layer

    def reset(self) -> None:
        self.coarse_keys = {}

    def select_keys(self, layer: int, selection: SelectionInput, counts: Tensor) -> Tensor:
        keys, lengths, queries = selection
        assert queries is not None
        coarse = self._code_keys(layer, selection)
        query = queries[:, :, :, -1].float().sum(2)  # [B, H, D]: scores are linear in the query
        scores = torch.einsum(
            "bhd,bthd->bht", query, torch.cat([coarse, keys[:, coarse.shape[1] :].float()], dim=1)
        )
        newest = torch.arange(keys.shape[1], device=keys.device) == lengths[:, None] - 1
        return select_best(scores, newest, lengths, counts)

    def _code_keys(self, layer: int, selection: SelectionInput) -> Tensor:
        """Return the levels of all tokens whose group is full in every text."""
        first = self._num_coded(layer)
        size = self.group_size
        end = int(selection.lengths.min()) // size * size
        coded = self.coarse_keys.get(layer, selection.keys[:, :0].float())
        if end > first:
            coded = torch.cat(
                [coded, round_to_signs(selection.keys[:, first:end].float(), size)], dim=1
            )
            self.coarse_keys[layer] = coded
        return coded

    def _num_coded(self, layer: int) -> int:
        return self.coarse_keys[layer].shape[1] if layer in self.coarse_keys else 0

    def selection_bytes(self, layer: int, selection: SelectionInput) -> int:
        """Return the bytes of new keys, which are coded, and of one bit for every channel of the
        others, with their levels.
        """
        numbers = selection.keys[0, 0].numel()
        size = self.group_size
        num_coded = int(selection.lengths.min()) // size * size
        new = int((selection.lengths - self._num_coded(layer)).sum()) * selection.token_bytes
        return new + len(selection.lengths) * (
            num_coded * numbers // 8 + num_coded // size * numbers * 4
        )


def round_to_signs(keys: Tensor, size: int) -> Tensor:
    """Round keys [B, T, H, D] to two levels per channel and group of `size` tokens, which
    divides T.
    """
    groups = keys.unflatten(1, (-1, size))
    low = groups.amin(2, keepdim=True)
    high = groups.amax(2, keepdim=True)
    centre = (low + high) / 2
    scale = (high - low) / 4
    return torch.where(groups >= centre, centre + scale, centre - scale).flatten(1, 2)


class ClusterSelector(KeySelector):
    """Selects clusters of keys by their centroids (ClusterKV, Liu et al., 2024).

    Keys of a head are clustered by k-means on their directions, one cluster for TOKENS_PER_CLUSTER
    tokens, and new tokens among themselves whenever there are CLUSTER_INTERVAL of them. Clusters
    are taken by the newest query times their centroids until the budget is used; of the last one,
    the first tokens are. The first tokens of a text and those that are in no cluster yet are always
    selected.
    """

    num_queries = 1

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.max_extra = CLUSTER_INTERVAL + NUM_SINKS
        self.labels: dict[int, Tensor] = {}  # [B, H, T] cluster of each token, by layer
        self.centroids: dict[int, Tensor] = {}  # [B, H, C, D]

    def reset(self) -> None:
        self.labels = {}
        self.centroids = {}

    def count_selected(self, lengths: Tensor) -> Tensor:
        """Return the budget, and the tokens that are in no cluster once those that have come are
        clustered.
        """
        first = next((labels.shape[2] for labels in self.labels.values()), NUM_SINKS)
        end = int(lengths.min())
        num_clustered = end if end - first >= CLUSTER_INTERVAL else first
        return lengths.minimum(self.budget + NUM_SINKS + lengths - num_clustered).clamp(
            max=self.budget + self.max_extra
        )

    def select_keys(self, layer: int, selection: SelectionInput, counts: Tensor) -> Tensor:
        keys, lengths, queries = selection
        assert queries is not None
        labels, centroids = self._cluster(layer, selection)
        tokens = torch.arange(keys.shape[1], device=keys.device)
        scores = torch.full((len(keys), keys.shape[2], keys.shape[1]), -INF, device=keys.device)
        if labels is not None:
            query = queries[:, :, :, -1].float().sum(2)
            cluster_scores = torch.einsum("bhd,bhcd->bhc", query, centroids)
            rank = cluster_scores.argsort(-1, descending=True).argsort(-1).float()
            order = rank.gather(2, labels) + torch.arange(labels.shape[2], device=keys.device) / (
                1 + labels.shape[2]
            )
            scores[:, :, : labels.shape[2]] = -order
        num_clustered = 0 if labels is None else labels.shape[2]
        always = (tokens < NUM_SINKS) | (tokens >= num_clustered)
        return select_best(scores, always.expand(len(keys), -1), lengths, counts)

    def _cluster(self, layer: int, selection: SelectionInput) -> tuple[Tensor | None, Tensor]:
        """Cluster the tokens that have come since; return all labels and centroids, or no labels
        before there are any.
        """
        labels = self.labels.get(layer)
        first = NUM_SINKS if labels is None else labels.shape[2]
        end = int(selection.lengths.min())
        if end - first >= CLUSTER_INTERVAL:
            keys = selection.keys[:, first:end].float().transpose(1, 2)  # [B, H, T, D]
            new_labels, new_centroids = cluster_keys(
                keys, max(1, (end - first) // TOKENS_PER_CLUSTER)
            )
            if labels is None:
                labels = F.pad(new_labels, (NUM_SINKS, 0))
                self.centroids[layer] = new_centroids
            else:
                labels = torch.cat([labels, new_labels + self.centroids[layer].shape[2]], dim=2)
                self.centroids[layer] = torch.cat([self.centroids[layer], new_centroids], dim=2)
            self.labels[layer] = labels
        return labels, self.centroids.get(layer, selection.keys[:, :0])

    def selection_bytes(self, layer: int, selection: SelectionInput) -> int:
        """Return the bytes of keys that are clustered now, once for each iteration, and of the
        centroids.
        """
        first = self.labels[layer].shape[2] if layer in self.labels else NUM_SINKS
        new = int(selection.lengths.min()) - first
        passes = CLUSTER_STEPS if new >= CLUSTER_INTERVAL else 0
        centroids = self.centroids[layer].shape[2] if layer in self.centroids else 0
        centroids += max(1, new // TOKENS_PER_CLUSTER) if passes else 0
        return len(selection.lengths) * selection.token_bytes * (passes * max(new, 0) + centroids)


def cluster_keys(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Cluster keys [B, H, T, D] by direction; return the cluster [B, H, T] of each and the mean key
    [B, H, C, D] of each cluster. The first centroids are the first key and, one after another, the
    key that is least like all centroids so far."""
    directions = F.normalize(keys, dim=-1)
    centroids = directions[:, :, :1]
    while centroids.shape[2] < count:
        similarity = (directions @ centroids.transpose(2, 3)).amax(-1, keepdim=True)
        index = similarity.argmin(2, keepdim=True).expand(-1, -1, 1, keys.shape[3])
        centroids = torch.cat([centroids, directions.gather(2, index)], dim=2)
    for _ in range(CLUSTER_STEPS):
        labels = (directions @ centroids.transpose(2, 3)).argmax(-1)
        centroids = F.normalize(sum_clusters(directions, labels, count), dim=-1)
    labels = (directions @ centroids.transpose(2, 3)).argmax(-1)
    sizes = sum_clusters(torch.ones_like(keys[..., :1]), labels, count)
    return labels, sum_clusters(keys, labels, count) / sizes.clamp(min=1)


def sum_clusters(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """Sum values [B, H, T, D] over the tokens of each cluster, [B, H, C, D]."""
    sums = values.new_zeros(*values.shape[:2], count, values.shape[3])
    return sums.scatter_add(2, labels[..., None].expand_as(values), values)
