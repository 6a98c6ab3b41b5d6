"""Codecs of keys and values: merged tokens, quantization that keeps outliers, and quantization of
rotated vectors.

A codec returns what attention would read from its codes, and counts the bytes of the codes. Shapes:
B batch, T tokens, H heads, N groups, G tokens of a group, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from math import erf, exp, pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantized_kv import Bits, quantize_groups


class KVCodec(ABC):
    """Codes full groups of tokens, one by one."""

    @abstractmethod
    def approximate(self, keys: Tensor, values: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, T, H, D] that attention reads; `group` divides T."""

    @abstractmethod
    def group_bytes(self, key_size: int, value_size: int, group: int, itemsize: int) -> float:
        """Return the bytes of one group of one head; uncoded numbers take `itemsize` bytes."""


class MergingCodec(KVCodec):
    """Merges similar tokens (Chelsea, Hu et al., 2025).

    In each group of a head, every token at an odd index is matched with the token at an even index
    whose key has the largest cosine with its own. The `share` of the group that is most similar is
    merged into the tokens that they match, which become means. Attention adds log(count) to the
    logit of a merged token; here every member of a cluster has its mean instead, which is the same.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def approximate(self, keys: Tensor, values: Tensor, group: int) -> tuple[Tensor, Tensor]:
        grouped = keys.unflatten(1, (-1, group)).transpose(2, 3)  # [B, N, H, G, D]
        clusters = match_tokens(grouped, int(self.share * group))  # [B, N, H, G]
        return tuple(average_clusters(part, clusters, group) for part in (keys, values))  # type: ignore[return-value]

    def group_bytes(self, key_size: int, value_size: int, group: int, itemsize: int) -> float:
        return (group - int(self.share * group)) * ((key_size + value_size) * itemsize + 1)


def match_tokens(keys: Tensor, count: int) -> Tensor:
    """Return the cluster [.., G] of each token of groups of keys [.., G, D]: its own index, or that
    of the even token into which it is merged. Of the odd tokens, the `count` most similar ones are
    merged."""
    group = keys.shape[-2]
    clusters = torch.arange(group, device=keys.device).expand(keys.shape[:-1]).clone()
    if not count:
        return clusters
    directions = F.normalize(keys.float(), dim=-1)
    # [.., G / 2]
    similarity, match = (directions[..., 1::2, :] @ directions[..., ::2, :].transpose(-1, -2)).max(
        -1
    )
    merged = torch.zeros_like(similarity, dtype=torch.bool).scatter(
        -1, similarity.topk(count, dim=-1).indices, True
    )
    clusters[..., 1::2] = torch.where(merged, 2 * match, clusters[..., 1::2])
    return clusters


def average_clusters(numbers: Tensor, clusters: Tensor, group: int) -> Tensor:
    """Replace each token of [B, T, H, D] by the mean of its cluster [B, N, H, G]."""
    grouped = numbers.unflatten(1, (-1, group)).transpose(2, 3)
    index = clusters[..., None].expand_as(grouped)
    means = torch.zeros_like(grouped).scatter_reduce(3, index, grouped, "mean", include_self=False)
    return means.gather(3, index).transpose(2, 3).flatten(1, 2)


class OutlierCodec(KVCodec):
    """KIVI's quantization, except for outlying tokens, which stay as they are (SinkQ).

    Of each head and group, the `count` tokens whose key norm differs most from the median norm are
    kept. Attention sinks are among them. The others are quantized without them, so that they do not
    widen the ranges.
    """

    def __init__(self, bits: Bits, count: int) -> None:
        self.bits, self.count = bits, count

    def approximate(self, keys: Tensor, values: Tensor, group: int) -> tuple[Tensor, Tensor]:
        grouped = keys.unflatten(1, (-1, group)).permute(0, 1, 3, 4, 2)  # [B, N, H, D, G]
        outlying = find_outliers(grouped.float().norm(dim=3), self.count)  # [B, N, H, G]
        others = ~outlying[..., None, :]
        mean = (grouped * others).sum(-1, keepdim=True) / others.sum(-1, keepdim=True).clamp(min=1)
        coded = quantize_groups(torch.where(others, grouped, mean), self.bits).dequantize(
            keys.dtype
        )
        coded_keys = torch.where(others, coded, grouped).permute(0, 1, 4, 2, 3).flatten(1, 2)
        is_outlier = outlying.transpose(2, 3).flatten(1, 2)[..., None]
        return coded_keys, torch.where(
            is_outlier, values, quantize_groups(values, self.bits).dequantize(values.dtype)
        )

    def group_bytes(self, key_size: int, value_size: int, group: int, itemsize: int) -> float:
        codes = group * (key_size + value_size) * self.bits / 8 + 4 * (key_size + group)
        return codes + self.count * ((key_size + value_size) * itemsize + 1)


def find_outliers(norms: Tensor, count: int) -> Tensor:
    """Mark the `count` norms of each group [.., G] that are farthest from the median."""
    distance = (norms - norms.median(-1, keepdim=True).values).abs()
    return torch.zeros_like(norms, dtype=torch.bool).scatter(
        -1, distance.topk(count, dim=-1).indices, True
    )


class RotatingCodec(KVCodec):
    """Quantizes randomly rotated vectors (TurboQuant, Zandieh et al., 2025), each token alone.

    A rotated unit vector has coordinates that are nearly normal with variance 1 / D, so the
    Lloyd-Max levels of the normal distribution serve all of them, and only the norm is stored.
    Values take `bits` bits. Keys take bits - 1 and one bit of the residual r: with sign(S r) for a
    normal S, sqrt(pi / 2) / D |r| S' sign(S r) makes inner products with queries unbiased.
    """

    def __init__(self, bits: int, seed: int = 0) -> None:
        self.bits, self.seed = bits, seed

    def approximate(self, keys: Tensor, values: Tensor, group: int) -> tuple[Tensor, Tensor]:
        return self.approximate_unbiased(keys), self.approximate_vectors(values, self.bits)

    def approximate_vectors(self, vectors: Tensor, bits: int) -> Tensor:
        """Return vectors [.., D] with the nearest levels in each rotated coordinate."""
        rotation = make_rotation(vectors.shape[-1], self.seed).to(vectors)
        norm = vectors.norm(dim=-1, keepdim=True).clamp(min=1e-20)
        levels = torch.tensor(normal_levels(1 << bits)).to(vectors) / sqrt(vectors.shape[-1])
        index = torch.bucketize((vectors / norm) @ rotation, (levels[1:] + levels[:-1]) / 2)
        return norm * (levels[index] @ rotation.T)

    def approximate_unbiased(self, vectors: Tensor) -> Tensor:
        """Return vectors [.., D] whose inner products are right on average over random S."""
        size = vectors.shape[-1]
        coarse = self.approximate_vectors(vectors, self.bits - 1)
        residual = vectors - coarse
        sketch = torch.randn(size, size, generator=torch.Generator().manual_seed(self.seed + 1)).to(
            vectors
        )
        signs = (residual @ sketch.T).sign()
        return coarse + sqrt(pi / 2) / size * residual.norm(dim=-1, keepdim=True) * (signs @ sketch)

    def group_bytes(self, key_size: int, value_size: int, group: int, itemsize: int) -> float:
        return group * ((key_size + value_size) * self.bits / 8 + 6)  # three norms of 16 bits


@cache
def make_rotation(size: int, seed: int) -> Tensor:
    """Make a random orthogonal matrix."""
    normal = torch.randn(
        size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    q, r = torch.linalg.qr(normal)
    rotation: Tensor = q * r.diagonal().sign()
    return rotation


@cache
def normal_levels(count: int) -> tuple[float, ...]:
    """Return the Lloyd-Max levels of the standard normal distribution, in ascending order."""
    levels = [-3 + 6 * (index + 0.5) / count for index in range(count)]
    for _ in range(300):
        edges = [-40.0, *((a + b) / 2 for a, b in zip(levels, levels[1:])), 40.0]
        cells = list(zip(edges, edges[1:]))
        levels = [
            (normal_density(low) - normal_density(high)) / normal_mass(low, high)
            for low, high in cells
        ]
    return tuple(levels)


def normal_density(x: float) -> float:
    return exp(-x * x / 2) / sqrt(2 * pi)


def normal_mass(low: float, high: float) -> float:
    return (erf(high / sqrt(2)) - erf(low / sqrt(2))) / 2
